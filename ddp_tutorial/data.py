"""The images: MNIST from disk, else downloaded once, else printed digits. Always said in one line.

    python -m ddp_tutorial.data --data auto [--data-dir FOLDER]

prepares them ahead, for a workshop without a network, and tries a download even if one failed a moment ago.

The data folder (`--data-dir`, else the environment variable `DDP_TUTORIAL_DATA`, else `data/` in the series' folder)
holds `MNIST/raw/` with the four files of MNIST, as they are or packed (.gz). `DDP_TUTORIAL_MNIST_URL` names another
place to download them from: a teacher can serve a folder that holds the .gz files to a whole room with
`python -m http.server` and give out `DDP_TUTORIAL_MNIST_URL=http://ADDRESS:8000/`.
"""

import argparse
import contextlib
import gzip
import hashlib
import os
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path

import torch
from torch.utils.data import Dataset

from ddp_tutorial import digits
from ddp_tutorial.paths import project_root

CHOICES = ("auto", "mnist", "printed")
# The md5 of the unpacked files; that of a .gz file differs with the program that packed it.
MNIST_MD5 = {
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}
MEAN, STD = 0.1307, 0.3081  # of all training pixels of MNIST, from 0 to 1
SILENCE_LIMIT = 11  # seconds without a byte after which a download is ended
RETRY_AFTER = 3600  # seconds for which a failed download is not tried again


class DataError(Exception):
    """The data cannot be used; the message is one line that says what to do."""


class DownloadError(Exception):
    """Why MNIST could not be downloaded."""


class ImageSet(Dataset):
    """Images and labels in memory, handed out in whole batches.

    `images` is uint8 [n, 28, 28], `labels` int64 [n], `source` "mnist" or "printed". `image_set[indices]`, with a list
    or a tensor of any number of indices, gives float32 [batch, 1, 28, 28], normalised, and int64 [batch].
    """

    def __init__(self, images, labels, source):
        self.images, self.labels, self.source = images, labels, source

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, indices):
        indices = torch.as_tensor(indices, dtype=torch.int64)
        images = self.images.index_select(0, indices).unsqueeze(1).float()  # index_select: three times as fast as []
        return images.mul_(1 / (255 * STD)).sub_(MEAN / STD), self.labels.index_select(0, indices)


def load_datasets(data="auto", data_dir=None, limit=None, say=print):
    """The training and the test set, each an `ImageSet`: 60,000 and 10,000 images, or the first `limit` of them.

    `data`: "auto" takes MNIST from the data folder, else downloads it, else draws printed digits; "mnist" raises
    rather than draw; "printed" only draws. `say` is given the line about what is used; None for silence (ranks other
    than 0). Any number of processes may call this at once. Raises `DataError`.
    """
    return _load(data, data_dir, limit, say or (lambda line: None), retry=False)


def _load(data, data_dir, limit, say, retry):
    if data not in CHOICES:
        raise DataError(f"unknown data {data!r}: choose from {', '.join(CHOICES)}")
    if limit is not None and limit < 1:
        raise DataError(f"the limit must be at least 1 image, not {limit}")
    folder = Path(data_dir or os.environ.get("DDP_TUTORIAL_DATA") or project_root() / "data").expanduser()
    files, why = (None, "") if data == "printed" else _mnist(folder, say, retry)
    if files is None and data == "mnist":
        given = f" --data-dir {shlex.quote(str(data_dir))}" if data_dir else ""
        raise DataError(
            f"MNIST is not on this machine ({why}). Put {', '.join(MNIST_MD5)}, each as it is or with .gz, "
            f"into {folder / 'MNIST' / 'raw'}; or download now: python -m ddp_tutorial.data --data mnist{given}"
        )
    if files:
        source, name = "mnist", "MNIST"
    else:
        source, name = "printed", f"printed digits (no MNIST: {why})" if why else "printed digits"
        files = _printed(folder)
    train_images, train_labels, test_images, test_labels = files
    train_set = ImageSet(train_images[:limit], train_labels[:limit].long(), source)
    test_set = ImageSet(test_images[:limit], test_labels[:limit].long(), source)
    say(f"data: {name}, {len(train_set):,} training and {len(test_set):,} test images")
    return train_set, test_set


# --- Reading


def _md5(content):
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def _read_idx(path, md5):
    """An IDX file (big-endian header, then uint8), plain or .gz, as a tensor of its shape. DataError if it is bad."""

    def wrong(what):
        return DataError(f"{path} {what}. Delete it, or put a good copy in its place.")

    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except EOFError:
        raise wrong("is cut short") from None
    except (gzip.BadGzipFile, zlib.error):
        raise wrong("is not a whole .gz file") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    dimensions = 3 if "images" in path.name else 1
    start = 4 + 4 * dimensions
    if content[:4] != bytes([0, 0, 8, dimensions]) or len(content) < start:
        raise wrong(f"does not begin like an IDX file of {dimensions} dimension{'s' * (dimensions > 1)}")
    shape = struct.unpack(f">{dimensions}I", content[4:start])
    size = start + torch.Size(shape).numel()
    if len(content) != size:
        raise wrong(f"is {'cut short' if len(content) < size else 'too long'}: {len(content):,} of {size:,} bytes")
    if _md5(content) != md5:
        raise wrong("does not hold what it should (its md5 is another)")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=start).view(shape)


def _read_files(raw, known):
    """The four tensors of the files in `known` (name: md5) that lie in the folder `raw`; None if one is missing."""
    paths = [next((p for p in (raw / name, raw / f"{name}.gz") if p.is_file()), None) for name in known]
    if None in paths:
        return None
    return [_read_idx(path, md5) for path, md5 in zip(paths, known.values())]


# --- Writing: in one process at a time, first beside the place and then by renaming


def _writable(folder):
    """`folder` if files can be written there, else a folder for this user's caches; None if there is nowhere."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "ddp_tutorial")
    for place in (folder, cache, Path(tempfile.gettempdir(), f"ddp_tutorial-{os.getuid()}")):
        with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: there is no home
            place = place.expanduser()
            place.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=place).close()
            open(place / ".lock", "a").close()  # which may be another user's
            return place
    return None


@contextlib.contextmanager
def _alone_in(place):
    """Waits until no other process writes in `place`, and gives a folder in it that vanishes afterwards."""
    from filelock import FileLock

    with FileLock(place / ".lock"):  # released by the system when a process dies
        for leftover in place.glob("incomplete-*"):  # of a process that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix="incomplete-", dir=place, ignore_cleanup_errors=True) as incomplete:
            yield Path(incomplete)


def _mnist(folder, say, retry):
    """MNIST's four tensors from disk, else from the network; or None, and why not."""
    files = _read_files(folder / "MNIST" / "raw", MNIST_MD5)
    if files:
        return files, ""
    place = _writable(folder)
    if place is None:
        return None, "there is no folder to download it to"
    raw = place / "MNIST" / "raw"
    files = _read_files(raw, MNIST_MD5)
    if files:
        return files, ""
    mirror = os.environ.get("DDP_TUTORIAL_MNIST_URL", "")
    failure = place / "download-failed.txt"
    with _alone_in(place) as incomplete:
        files = _read_files(raw, MNIST_MD5)  # another process may have downloaded them while this one waited
        if files:
            return files, ""
        if failure.is_file() and not retry:
            age = time.time() - failure.stat().st_mtime
            failed_mirror, _, why = failure.read_text().partition("\n")
            if 0 <= age < RETRY_AFTER and failed_mirror == mirror:
                return None, f"its download failed {age / 60:.0f} min ago ({why})"
        say("data: MNIST is not on this machine yet, downloading it (11 MB)")
        try:
            _download(incomplete, mirror, raw)
            files = _read_files(raw, MNIST_MD5)
        except (DownloadError, OSError) as error:
            with contextlib.suppress(OSError):
                failure.write_text(f"{mirror}\n{error}")
            return None, f"its download failed ({error})"
        failure.unlink(missing_ok=True)
        return files, ""


def _download(incomplete, mirror, raw):
    """Downloads into `incomplete`, checks, and moves the files that are missing into `raw`. Raises DownloadError."""
    log = incomplete / "log.txt"
    package = str(Path(__file__).resolve().parents[1])
    with open(log, "wb") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", "ddp_tutorial.download", str(incomplete), *filter(None, [mirror])],
            stdin=subprocess.PIPE,  # closes when this process dies, which ends the child
            stdout=output,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))},
        )
    try:
        received, since = -1, time.monotonic()
        while child.poll() is None:
            time.sleep(0.05)
            now = sum(path.stat().st_size for path in incomplete.rglob("*") if path.exists())
            if now != received:
                received, since = now, time.monotonic()
            elif time.monotonic() - since > SILENCE_LIMIT:
                raise DownloadError(f"nothing arrived for {SILENCE_LIMIT} s")
    finally:
        child.kill()
        child.wait()
        child.stdin.close()
    if child.returncode:
        raise DownloadError((log.read_text().splitlines() or ["it ended without a word"])[-1])
    try:
        if _read_files(incomplete / "MNIST" / "raw", MNIST_MD5) is None:
            raise DownloadError("files are missing in what arrived")
    except DataError as error:
        raise DownloadError(f"what arrived is not MNIST: {str(error).split(' ', 1)[1]}") from None
    raw.mkdir(parents=True, exist_ok=True)
    for name in MNIST_MD5:
        if not (raw / f"{name}.gz").is_file():
            os.replace(incomplete / "MNIST" / "raw" / name, raw / name)


# --- Printed digits


def _printed(folder):
    """The four tensors of the printed digits, drawn on first use and then read from disk."""
    name = f"printed-v{digits.VERSION}"
    files = _read_printed(folder / name)
    if files:
        return files
    place = _writable(folder)
    if place is None:
        return _draw()[0]
    with _alone_in(place) as incomplete:
        files = _read_printed(place / name)
        if files is None:
            files, contents = _draw()
            with contextlib.suppress(OSError):  # a full disk: they are in memory all the same
                raw = incomplete / name / "MNIST" / "raw"
                raw.mkdir(parents=True)
                for file, content in contents.items():
                    (raw / file).write_bytes(content)
                (raw / "md5sums").write_text("".join(f"{_md5(c)}  {file}\n" for file, c in contents.items()))
                shutil.rmtree(place / name, ignore_errors=True)  # of no use, or it would have been read
                os.rename(incomplete / name, place / name)
        return files


def _read_printed(folder):
    """The four tensors, or None if they are not all there and whole."""
    raw = folder / "MNIST" / "raw"
    with contextlib.suppress(OSError, ValueError, DataError):
        sums = {name: md5 for md5, name in map(str.split, (raw / "md5sums").read_text().splitlines())}
        return _read_files(raw, {name: sums.get(name) for name in MNIST_MD5})
    return None


def _draw():
    """The printed digits, as four tensors and as the bytes of the four files."""
    arrays = [array for images_and_labels in digits.printed_digits() for array in images_and_labels]
    contents = {
        name: struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()
        for name, array in zip(MNIST_MD5, arrays)
    }
    return [torch.from_numpy(array) for array in arrays], contents


def main():
    parser = argparse.ArgumentParser(prog="python -m ddp_tutorial.data", description="Prepares the data ahead.")
    parser.add_argument("--data", choices=CHOICES, default="auto")
    parser.add_argument("--data-dir", metavar="FOLDER")
    arguments = parser.parse_args()
    try:
        _load(arguments.data, arguments.data_dir, None, lambda line: print(line, flush=True), retry=True)
    except DataError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
