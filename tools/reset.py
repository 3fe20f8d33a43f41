"""Bring back scripts/ and notebooks/ as committed. What you changed or added there goes to build/mine-TIME/ first.

Only the standard library, so that it works before `make setup`.
"""

import shutil
import subprocess
import sys
import time
from pathlib import Path

FOLDERS = ["scripts", "notebooks"]


def git(root, *arguments):
    """A git command's output; raises `CalledProcessError`, or `FileNotFoundError` without git."""
    return subprocess.run(["git", "-C", str(root), *arguments], check=True, capture_output=True, text=True).stdout


def names(text):
    return [name for name in text.split("\0") if name]


def reset(root):
    """Save, then restore. Returns the folder with the reader's edits, or None if there were none."""
    changed = names(git(root, "diff", "--name-only", "--no-renames", "-z", "HEAD", "--", *FOLDERS))
    added = names(git(root, "ls-files", "--others", "--exclude-standard", "-z", "--", *FOLDERS))
    if not changed and not added:
        return None
    mine = root / "build" / time.strftime("mine-%Y-%m-%d-%H.%M.%S")
    mine.mkdir(parents=True)
    for name in changed + added:
        if (root / name).exists():  # else deleted: nothing to save
            (mine / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, mine / name)
    committed = set(names(git(root, "ls-tree", "-r", "--name-only", "-z", "HEAD", "--", *FOLDERS)))
    git(root, "reset", "--quiet", "HEAD", "--", *FOLDERS)
    if committed:
        git(root, "checkout", "--quiet", "HEAD", "--", *sorted({name.split("/")[0] for name in committed}))
    for name in set(changed + added) - committed:
        (root / name).unlink(missing_ok=True)
    return mine


def main():
    root = Path(__file__).resolve().parent.parent
    try:
        top = Path(git(root, "rev-parse", "--show-toplevel").rstrip("\n")).resolve()
        mine = reset(root) if top == root else None
    except FileNotFoundError:
        return refuse("git is not installed")
    except subprocess.CalledProcessError as error:
        return refuse(error.stderr.strip())
    if top != root:
        return refuse(f"this folder is part of {top}")
    if mine is None:
        print("reset: nothing to do, scripts/ and notebooks/ are as committed")
    else:
        saved = sorted(str(path.relative_to(mine)) for path in mine.rglob("*") if path.is_file())
        print(f"reset: scripts/ and notebooks/ are as committed. Your files are in {mine.relative_to(root)}/")
        print("".join(f"  {name}\n" for name in saved), end="")
    return 0


def refuse(reason):
    print(f"reset: works only in a git clone of the series ({reason})", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
