"""``python -m ddp_tutorial``: can the series run on this machine?"""

from ddp_tutorial.preflight import main

if __name__ == "__main__":
    raise SystemExit(main())
