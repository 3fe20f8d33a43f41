"""What snapshots and stop requests cost script 08, as a share of its training time.

    torchrun --standalone --nproc-per-node 2 benchmarks/snapshots.py [--limit 20000] [options of script 08]

Prints, on rank 0, the seconds of training and those spent in each of the two.
"""

import sys
import tempfile
import time
from pathlib import Path

from ddp_tutorial.paths import load_script
from ddp_tutorial.report import read_report

script = load_script("08")
spent = {"snapshots": 0.0, "stop requests": 0.0}


def timed(name, function):
    """`function`, which adds the seconds that it takes to ``spent[name]``."""

    def call(*arguments):
        start = time.perf_counter()
        try:
            return function(*arguments)
        finally:
            spent[name] += time.perf_counter() - start

    return call


def main():
    script.take_snapshot = timed("snapshots", script.take_snapshot)
    script.StopRequest.agreed = timed("stop requests", script.StopRequest.agreed)
    with tempfile.TemporaryDirectory() as folder:  # each rank's own; rank 0's is the one that is used
        report = Path(folder, "report.json")
        sys.argv += ["--snapshot", f"{folder}/snapshots", "--snapshot-every", "100", "--json", str(report)]
        try:
            script.main()
        except SystemExit as end:
            if end.code:
                raise
        if report.exists():
            made = read_report(report)
            seconds = made["global_batch_size"] * made["steps"] / made["images_per_second"]
            print(f"shares {spent['snapshots'] / seconds:.5f} {spent['stop requests'] / seconds:.5f}")


if __name__ == "__main__":
    main()
