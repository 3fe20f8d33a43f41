"""The data: found, downloaded once, drawn; never half, never wrong, never without a word."""

import ast
import contextlib
import gzip
import hashlib
import http.server
import importlib.util
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch

from ddp_tutorial import data, digits, download

NAMES = list(data.MNIST_MD5)
CLOSED = "http://127.0.0.1:9/"  # no server listens there: a download fails at once


def idx(array):
    """The bytes of an IDX file."""
    return struct.pack(f">I{array.dim()}I", 2048 + array.dim(), *array.shape) + array.numpy().tobytes()


def small_files():
    random = torch.Generator().manual_seed(0)
    arrays = [torch.randint(high, shape, generator=random, dtype=torch.uint8) for high, shape in
              [(256, (300, 28, 28)), (10, (300,)), (256, (100, 28, 28)), (10, (100,))]]  # fmt: skip
    return {name: idx(array) for name, array in zip(NAMES, arrays)}


FILES = small_files()
MD5 = {name: hashlib.md5(content).hexdigest() for name, content in FILES.items()}


@pytest.fixture(autouse=True)
def small_mnist(monkeypatch, tmp_path):
    """A small set of files in place of MNIST's, no network, and a home of our own."""
    monkeypatch.setattr(data, "MNIST_MD5", MD5)
    monkeypatch.setenv("DDP_TUTORIAL_MNIST_URL", CLOSED)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("DDP_TUTORIAL_DATA", raising=False)


@pytest.fixture(scope="module")
def sixty_digits():
    return digits.printed_digits((40, 20))


@pytest.fixture
def few_digits(monkeypatch, sixty_digits):
    """Has 40 + 20 digits drawn in place of 70,000; the list returned gets an entry for every time they are."""
    calls = []
    monkeypatch.setattr(digits, "printed_digits", lambda: calls.append(1) or sixty_digits)
    return calls


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """The whole set of printed digits, drawn as a reader's first run draws it."""
    folder = tmp_path_factory.mktemp("printed")
    return data.load_datasets("printed", folder, say=None), folder


def put(folder, names=NAMES, packed=()):
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for name in names:
        if name in packed:
            (raw / f"{name}.gz").write_bytes(gzip.compress(FILES[name]))
        else:
            (raw / name).write_bytes(FILES[name])
    return raw


def load(folder, choice="auto", **options):
    lines = []
    sets = data.load_datasets(choice, folder, say=lines.append, **options)
    return *sets, lines


def is_small_mnist(train_set, test_set):
    """Whether the sets hold what FILES holds, to the byte."""
    arrays = (train_set.images, train_set.labels, test_set.images, test_set.labels)
    return train_set.source == "mnist" and [idx(a.to(torch.uint8)) for a in arrays] == list(FILES.values())


# --- Reading


@pytest.mark.parametrize("packed", [[], NAMES, NAMES[:1] + NAMES[3:]], ids=["plain", "gz", "mixed"])
@pytest.mark.parametrize("choice", ["auto", "mnist"])
def test_files_on_disk_are_read(tmp_path, choice, packed):
    put(tmp_path, packed=packed)
    train_set, test_set, lines = load(tmp_path, choice)
    assert is_small_mnist(train_set, test_set)
    assert lines == ["data: MNIST, 300 training and 100 test images"]
    assert [path.name for path in tmp_path.iterdir()] == ["MNIST"]  # no lock, no copy


def test_unpacked_is_preferred(tmp_path):
    raw = put(tmp_path)
    (raw / f"{NAMES[0]}.gz").write_bytes(b"not a gz file")
    assert is_small_mnist(*load(tmp_path)[:2])


def test_packed_again_is_still_the_same(tmp_path):
    raw = put(tmp_path, packed=NAMES)
    before = (raw / f"{NAMES[0]}.gz").read_bytes()
    (raw / f"{NAMES[0]}.gz").write_bytes(gzip.compress(FILES[NAMES[0]], compresslevel=1, mtime=1))
    assert (raw / f"{NAMES[0]}.gz").read_bytes() != before
    assert is_small_mnist(*load(tmp_path)[:2])


BAD = {
    "cut short": (".", lambda content: content[:1000], "is cut short: 1,000 of 235,216 bytes"),
    "too long": (".", lambda content: content + b"x", "is too long: 235,217 of 235,216 bytes"),
    "empty": (".", lambda content: b"", "does not begin like an IDX file of 3 dimensions"),
    "labels for images": (".", lambda content: FILES[NAMES[1]], "does not begin like an IDX file of 3 dimensions"),
    "header cut": (".", lambda content: content[:9], "does not begin like an IDX file of 3 dimensions"),
    "one bit": (".", lambda content: content[:-1] + bytes([content[-1] ^ 1]), "its md5 is another"),
    "gz cut short": (".gz", lambda content: gzip.compress(content)[:1000], "is cut short"),
    "gz of half": (".gz", lambda content: gzip.compress(content[:1000]), "is cut short: 1,000 of 235,216 bytes"),
    "gz changed": (".gz", lambda content: gzip.compress(content)[:-8] + bytes(8), "is not a whole .gz file"),
    "no gz": (".gz", lambda content: b"<html>Please log in</html>", "is not a whole .gz file"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("choice", ["auto", "mnist"])
def test_a_bad_file_is_named_and_left_alone(tmp_path, choice, case):
    ending, spoil, complaint = BAD[case]
    raw = put(tmp_path)
    (raw / NAMES[0]).unlink()
    bad = raw / (NAMES[0] + ending.strip(".") if ending == "." else NAMES[0] + ending)
    bad.write_bytes(spoil(FILES[NAMES[0]]))
    with pytest.raises(data.DataError) as error:
        load(tmp_path, choice)
    message = str(error.value)
    assert message.startswith(f"{bad} ") and complaint in message and "Delete it, or put a good copy" in message
    assert "\n" not in message
    assert bad.exists() and not list(tmp_path.glob("printed*"))


def test_an_unreadable_file_is_named(tmp_path, monkeypatch):
    raw = put(tmp_path)

    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(data.DataError, match=f"{raw / NAMES[0]} cannot be read: Permission denied"):
        load(tmp_path)


def test_missing_mnist_says_what_to_put_where(tmp_path):
    put(tmp_path, NAMES[:3])
    with pytest.raises(data.DataError) as error:
        load(tmp_path, "mnist")
    message = str(error.value)
    for part in (*NAMES, str(tmp_path / "MNIST" / "raw"), "Connection refused", ".gz"):
        assert part in message
    assert message.endswith(f"python -m ddp_tutorial.data --data mnist --data-dir {tmp_path}")
    assert "\n" not in message


def test_where_the_folder_is(tmp_path, monkeypatch):
    for name in ("given", "variable", "root/data"):
        put(tmp_path / name)
    monkeypatch.setattr(data, "project_root", lambda: tmp_path / "root")
    seen, read = [], Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: seen.append(path.parents[2]) or read(path))
    load(None)
    monkeypatch.setenv("DDP_TUTORIAL_DATA", str(tmp_path / "variable"))
    load(None)
    load(str(tmp_path / "given"))
    assert seen[::4] == [tmp_path / "root/data", tmp_path / "variable", tmp_path / "given"]


def test_bad_arguments_are_refused(tmp_path):
    with pytest.raises(data.DataError, match="choose from auto, mnist, printed"):
        load(tmp_path, "cifar")
    with pytest.raises(data.DataError, match="at least 1 image, not 0"):
        load(tmp_path, limit=0)


# --- Batches


def test_batches(tmp_path):
    put(tmp_path)
    train_set = load(tmp_path)[0]
    images, labels = train_set[[5, 3, 5]]
    assert images.shape == (3, 1, 28, 28) and images.dtype == torch.float32
    assert labels.shape == (3,) and labels.dtype == torch.int64
    wanted = (train_set.images[[5, 3, 5]].double() / 255 - 0.1307) / 0.3081
    torch.testing.assert_close(images[:, 0].double(), wanted, rtol=0, atol=1e-6)
    assert labels.tolist() == train_set.labels[[5, 3, 5]].tolist()
    for same in (torch.tensor([5, 3, 5]), torch.tensor([5, 3, 5], dtype=torch.int32)):
        assert torch.equal(train_set[same][0], images)
    empty_images, empty_labels = train_set[[]]
    assert empty_images.shape == (0, 1, 28, 28) and empty_images.dtype == torch.float32
    assert empty_labels.shape == (0,) and empty_labels.dtype == torch.int64


def test_a_batch_is_a_copy(tmp_path):
    put(tmp_path)
    train_set = load(tmp_path)[0]
    before = train_set.images.clone()
    train_set[[0, 1]][0].zero_()
    assert torch.equal(train_set.images, before)


@pytest.mark.parametrize("limit, sizes", [(None, (300, 100)), (150, (150, 100)), (1, (1, 1)), (999, (300, 100))])
def test_limit(tmp_path, limit, sizes):
    put(tmp_path)
    train_set, test_set, lines = load(tmp_path, limit=limit)
    assert (len(train_set), len(test_set)) == sizes == (len(train_set.images), len(test_set.images))
    assert lines == [f"data: MNIST, {sizes[0]} training and {sizes[1]} test images"]
    assert idx(train_set.images)[16:] == FILES[NAMES[0]][16 : 16 + 784 * sizes[0]]


# --- Downloading


class Mirror(http.server.ThreadingHTTPServer):
    """Serves FILES, packed, on this machine. `behaviour`: "serve", "hang" (never answers), or "stall" (half of the
    first file, and no more)."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.behaviour, self.requests, self.stalled, self.over = "serve", [], threading.Event(), threading.Event()
        self.url = f"http://127.0.0.1:{self.server_address[1]}/"
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def handle_error(self, request, client_address):
        pass  # a client that was killed


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        mirror, name = self.server, self.path[1:]
        mirror.requests.append(name)
        if mirror.behaviour == "hang":
            mirror.over.wait(30)
            return
        content = gzip.compress(FILES[name.removesuffix(".gz")])
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if mirror.behaviour == "stall" and name.startswith("train-images"):
            self.wfile.write(content[: len(content) // 2])
            self.wfile.flush()
            mirror.stalled.set()
            mirror.over.wait(30)
            return
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def mirror(monkeypatch):
    server = Mirror()
    monkeypatch.setenv("DDP_TUTORIAL_MNIST_URL", server.url.removesuffix("/"))  # as many would write it
    yield server
    server.over.set()
    server.shutdown()
    server.server_close()


def start(folder):
    """Another process that loads the data."""
    code = (
        "import sys; from ddp_tutorial import data; data.MNIST_MD5 = eval(sys.argv[1]);"
        "train_set, _ = data.load_datasets('auto', sys.argv[2]); print(train_set.source, len(train_set));"
        "print([name for name in ('torch', 'torchvision', 'matplotlib') if name in sys.modules])"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code, repr(MD5), folder], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def only_whole_files(folder):
    """Whether the data folder holds the four files and no trace of how they came."""
    left = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return left == {".lock", *(f"MNIST/raw/{name}" for name in NAMES)} and not list(folder.glob("incomplete-*"))


def test_two_processes_download_once_and_import_neither_torchvision_nor_matplotlib(tmp_path, mirror):
    processes = [start(tmp_path) for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0].splitlines() for process in processes]
    for lines in outputs:
        assert lines[-3:] == ["data: MNIST, 300 training and 100 test images", "mnist 300", "['torch']"]
    downloads = [lines for lines in outputs if "downloading it (11 MB)" in lines[0]]
    assert len(downloads) == 1
    # torchvision asks for each file twice: to follow redirections, then to read it.
    assert 1 <= mirror.requests.count(f"{NAMES[0]}.gz") <= 2
    assert set(mirror.requests) == {f"{name}.gz" for name in NAMES}
    assert only_whole_files(tmp_path)
    assert is_small_mnist(*load(tmp_path)[:2])


def processes_that_name(text):
    listing = subprocess.run(["ps", "-ww", "-eo", "pid=,args="], capture_output=True, text=True).stdout.splitlines()
    return [line for line in listing if str(text) in line]


QUICK_TORCHVISION = """
import pathlib, urllib.request
class MNIST:
    resources = [(f"{name}.gz", "md5") for name in %r]
    def __init__(self, folder, download):
        import gzip, shutil
        raw = pathlib.Path(folder, "MNIST", "raw")
        raw.mkdir(parents=True)
        for name, _ in self.resources:
            with urllib.request.urlopen(self.mirrors[0] + name) as answer, open(raw / name, "wb", 0) as file:
                while piece := answer.read(1000):
                    file.write(piece)
            (raw / name).with_suffix("").write_bytes(gzip.decompress((raw / name).read_bytes()))
"""


def test_kill_9_in_mid_download_leaves_nothing_and_a_peer_goes_on(tmp_path, tmp_path_factory, mirror, monkeypatch):
    quick = tmp_path_factory.mktemp("quick")  # the real torchvision takes seconds to import
    (quick / "torchvision").mkdir()
    (quick / "torchvision" / "__init__.py").touch()
    (quick / "torchvision" / "datasets.py").write_text(QUICK_TORCHVISION % NAMES)
    monkeypatch.setenv("PYTHONPATH", str(quick))
    mirror.behaviour = "stall"
    victim = start(tmp_path)
    assert mirror.stalled.wait(60)
    peer = start(tmp_path)
    time.sleep(0.3)
    downloader = f"ddp_tutorial.download {tmp_path}/incomplete-"
    (orphan,) = processes_that_name(downloader)
    mirror.behaviour = "serve"
    victim.kill()
    victim.communicate()
    deadline = time.monotonic() + 5  # sooner than it would give up by itself
    while orphan in processes_that_name(downloader):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert not [path for path in (tmp_path / "MNIST").rglob("*") if path.is_file()]
    output = peer.communicate(timeout=60)[0]
    assert output.splitlines()[-2] == "mnist 300", output
    assert only_whole_files(tmp_path)
    assert processes_that_name(downloader) == []


def test_a_mirror_that_never_answers_costs_seconds_and_is_remembered(tmp_path, mirror, few_digits, monkeypatch):
    mirror.behaviour = "hang"
    monkeypatch.setattr(sys, "argv", ["data", "--data", "auto", "--data-dir", str(tmp_path)])
    begin = time.monotonic()
    train_set, _, lines = load(tmp_path)
    assert time.monotonic() - begin < 15
    assert train_set.source == "printed"
    assert lines[-1] == (
        "data: printed digits (no MNIST: its download failed (no answer within 4 s)), 40 training and 20 test images"
    )
    assert mirror.requests == [f"{NAMES[3]}.gz"]
    # Not tried again for a while ...
    lines = load(tmp_path)[2]
    assert lines == [
        "data: printed digits (no MNIST: its download failed 0 min ago (no answer within 4 s)), "
        "40 training and 20 test images"
    ]
    with pytest.raises(data.DataError, match="its download failed 0 min ago"):
        load(tmp_path, "mnist")
    assert len(mirror.requests) == 1


def test_the_longest_silence():
    """Without an answer from any mirror a download ends, and so it does when one that answered falls silent."""
    assert download.ANSWER_LIMIT + data.SILENCE_LIMIT <= 15
    assert download.SOCKET_LIMIT < data.SILENCE_LIMIT  # so that the second mirror gets its turn


def test_the_mirror_that_answers_goes_first(mirror):
    silent = Mirror()
    silent.behaviour = "hang"
    begin = time.monotonic()
    assert download.fastest_first([silent.url, mirror.url]) == [mirror.url, silent.url]
    assert time.monotonic() - begin < download.ANSWER_LIMIT
    assert download.fastest_first([CLOSED, mirror.url]) == [mirror.url, CLOSED]
    with pytest.raises(OSError, match="Connection refused"):
        download.fastest_first([CLOSED, CLOSED])
    silent.over.set()
    silent.shutdown()
    silent.server_close()


def test_the_mirrors_are_torchvisions():
    package = Path(importlib.util.find_spec("torchvision").origin).parent  # read, because importing it takes seconds
    source = (package / "datasets" / "mnist.py").read_text()
    mirrors = re.search(r"mirrors = (\[.*?\])", source, re.DOTALL)[1]
    assert sorted(download.MIRRORS) == sorted(ast.literal_eval(mirrors))  # an older one asks them in another order


@pytest.fixture
def downloader(monkeypatch, tmp_path_factory):
    """Puts a few lines of Python in place of the process that downloads: `good` holds good files, `folder` is to."""
    good, popen = put(tmp_path_factory.mktemp("good")), subprocess.Popen

    def replace(code):
        setup = f"import pathlib, shutil, sys, time; folder = pathlib.Path(sys.argv[1]); good = {str(good)!r}\n"

        def start(command, **options):
            replace.started += 1
            return popen([sys.executable, "-c", setup + code, command[3]], **options)

        monkeypatch.setattr(data.subprocess, "Popen", start)

    replace.started = 0
    return replace


GOOD = "raw = folder / 'MNIST/raw'; shutil.copytree(good, raw)\n"


def test_silence_ends_a_download_but_slowness_does_not(tmp_path, downloader, monkeypatch):
    monkeypatch.setattr(data, "SILENCE_LIMIT", 1)
    slow = "for n in range(8): (folder / str(n)).write_text('x'); time.sleep(.25)\n"
    downloader(slow + GOOD)
    assert load(tmp_path / "slow")[0].source == "mnist"

    downloader(slow + "time.sleep(60)")
    begin = time.monotonic()
    with pytest.raises(data.DataError, match="nothing arrived for 1 s"):
        load(tmp_path / "stuck", "mnist")
    assert 2.5 < time.monotonic() - begin < 10
    assert not list((tmp_path / "stuck").glob("incomplete-*"))


WRONG = {
    "another set": ("(raw / 'train-images-idx3-ubyte').write_bytes(b'x' * 99)", "what arrived is not MNIST"),
    "a file too few": ("(raw / 'train-images-idx3-ubyte').unlink()", "files are missing in what arrived"),
    "failure": ("print('first'); print('no such host'); sys.exit(1)", "no such host"),
    "crash": ("raise SystemExit(1)", "it ended without a word"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_arrives_is_checked_before_it_is_kept(tmp_path, downloader, few_digits, case):
    code, why = WRONG[case]
    downloader(GOOD + code)
    train_set, _, lines = load(tmp_path)
    assert train_set.source == "printed" and why in lines[-1]
    assert not (tmp_path / "MNIST").exists() and not list(tmp_path.glob("incomplete-*"))


def test_a_download_keeps_the_files_that_are_there(tmp_path, downloader):
    downloader(GOOD)
    raw = put(tmp_path, NAMES[:2], packed=NAMES[:1])
    assert is_small_mnist(*load(tmp_path)[:2])
    assert sorted(path.name for path in raw.iterdir()) == sorted([f"{NAMES[0]}.gz", *NAMES[1:]])


def test_when_a_failed_download_is_tried_again(tmp_path, downloader, few_digits, monkeypatch):
    def tries(**options):
        before = downloader.started
        source = data._load("auto", tmp_path, None, lambda line: None, **{"retry": False, **options})[0].source
        return downloader.started - before, source

    downloader("sys.exit(1)")
    assert tries() == (1, "printed")
    assert tries() == (0, "printed")
    assert tries(retry=True) == (1, "printed")
    assert tries() == (0, "printed")
    monkeypatch.setenv("DDP_TUTORIAL_MNIST_URL", "http://127.0.0.1:10/")  # another place to download from
    assert tries() == (1, "printed")
    long_ago = time.time() - data.RETRY_AFTER - 1
    os.utime(tmp_path / "download-failed.txt", (long_ago, long_ago))
    downloader(GOOD)
    assert tries() == (1, "mnist")
    assert not (tmp_path / "download-failed.txt").exists()


# --- Folders that cannot be written


@pytest.fixture
def as_nobody():
    """For a moment, gives up the right to write everywhere that root has; makes a folder that all can read."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)

    @contextlib.contextmanager
    def nobody():
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        if root := os.geteuid() == 0:
            os.seteuid(65534)
        try:
            with pytest.raises(PermissionError):  # or the test would prove nothing
                (folder / "try").touch()
            yield
        finally:
            if root:
                os.seteuid(0)

    yield folder, nobody
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755)
    shutil.rmtree(folder)


@pytest.mark.parametrize("packed", [[], NAMES], ids=["plain", "gz"])
def test_read_only_folder_with_mnist(as_nobody, packed):
    folder, nobody = as_nobody
    put(folder, packed=packed)
    with nobody():
        assert is_small_mnist(*load(folder)[:2])


def test_read_only_folder_without_mnist_uses_the_cache(as_nobody, few_digits, monkeypatch):
    folder, nobody = as_nobody
    cache = Path(tempfile.mkdtemp())
    cache.chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    with nobody():
        for _ in range(2):
            assert load(folder, "printed")[0].source == "printed"
    assert few_digits == [1]  # drawn once, then read
    assert list(folder.iterdir()) == []
    assert [path.name for path in (cache / "ddp_tutorial").glob("printed*")] == [f"printed-v{digits.VERSION}"]
    shutil.rmtree(cache)


def test_read_only_folder_with_printed_digits(as_nobody, few_digits):
    folder, nobody = as_nobody
    load(folder, "printed")
    with nobody():
        load(folder, "printed")
    assert few_digits == [1]


def test_nowhere_to_write(tmp_path, few_digits, monkeypatch):
    (tmp_path / "file").touch()
    nowhere = tmp_path / "file" / "folder"
    monkeypatch.setenv("XDG_CACHE_HOME", str(nowhere))
    monkeypatch.setattr(tempfile, "tempdir", str(nowhere))
    train_set, _, lines = load(nowhere)
    assert train_set.source == "printed" and len(train_set) == 40
    assert "there is no folder to download it to" in lines[0] and len(lines) == 1


# --- Printed digits


def test_printed_digits_are_kept_and_checked(tmp_path, few_digits):
    first = load(tmp_path, "printed")
    assert first[2] == ["data: printed digits, 40 training and 20 test images"]
    raw = tmp_path / f"printed-v{digits.VERSION}" / "MNIST" / "raw"
    assert sorted(path.name for path in raw.iterdir()) == sorted([*NAMES, "md5sums"])
    assert (raw / NAMES[0]).read_bytes()[:16] == struct.pack(">4I", 2051, 40, 28, 28)
    assert torch.equal(load(tmp_path, "printed")[0].images, first[0].images) and few_digits == [1]

    def cut(path):
        path.write_bytes(path.read_bytes()[:50])

    def flip(path):
        path.write_bytes(path.read_bytes()[:-1] + b"x")

    for damage in (cut, flip, Path.unlink, lambda path: (raw / "md5sums").unlink(), lambda path: cut(raw / "md5sums")):
        few_digits.clear()
        damage(raw / NAMES[0])
        for _ in range(2):
            train_set, _, lines = load(tmp_path, "printed")
            assert torch.equal(train_set.images, first[0].images) and lines == first[2]
        assert few_digits == [1]


def test_a_full_disk_does_not_stop_printed_digits(tmp_path, few_digits, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    assert len(load(tmp_path, "printed")[0]) == 40
    assert not list(tmp_path.glob("incomplete-*")) and not list(tmp_path.glob("printed*"))


def test_a_folder_locked_by_another_user_is_left_to_them(tmp_path, few_digits):
    (tmp_path / ".lock").mkdir()  # cannot be opened for writing, even by root
    load(tmp_path, "printed")
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == [".lock"]
    assert (tmp_path / "cache" / "ddp_tutorial" / f"printed-v{digits.VERSION}").is_dir()


def test_leftovers_of_the_killed_are_removed(tmp_path, few_digits):
    (tmp_path / "incomplete-abc" / "MNIST").mkdir(parents=True)
    load(tmp_path, "printed")
    assert not list(tmp_path.glob("incomplete-*"))


def test_drawn_once_by_many(tmp_path, few_digits):
    results = []
    threads = [threading.Thread(target=lambda: results.append(load(tmp_path, "printed"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4 and few_digits == [1]


def test_printed_digits_to_the_byte(printed):
    (train_set, test_set), folder = printed
    parts = (train_set.images, train_set.labels.byte(), test_set.images, test_set.labels.byte())
    sha256 = hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()
    # Changed on purpose? Raise digits.VERSION too.
    assert sha256 == "d53a9572c9191a993eeaf5cef4be652461dfa791f74851f62bf7205c91e2b70f"
    raw = folder / f"printed-v{digits.VERSION}" / "MNIST" / "raw"
    assert [(raw / name).stat().st_size for name in NAMES] == [47_040_016, 60_008, 7_840_016, 10_008]


def test_another_seed_draws_other_digits():
    ((images, labels),) = digits.printed_digits((50,), seed=0)
    ((same, _),) = digits.printed_digits((50,), seed=0)
    ((other, _),) = digits.printed_digits((50,), seed=1)
    assert (images == same).all() and (images != other).any()
    assert images.shape == (50, 28, 28) and sorted(labels) == sorted([*range(10)] * 5)


def test_every_printed_digit_is_whole_and_plain_to_see(printed):
    for image_set, count in zip(printed[0], (60_000, 10_000)):
        images = image_set.images
        assert images.shape == (count, 28, 28)
        frame = torch.ones(28, 28, dtype=torch.bool)
        frame[2:-2, 2:-2] = False
        assert images[:, frame].max() == 0
        ink = images.view(count, -1)
        assert (ink > 64).sum(1).min() >= 8  # of 784 pixels; half of the images have more than 80
        assert ink.sum(1, dtype=torch.int64).min() >= 5 * 255
        rows, columns = (images > 0).any(2).sum(1), (images > 0).any(1).sum(1)
        assert rows.min() >= 6 and columns.min() >= 3 and torch.maximum(rows, columns).min() >= 10
        # Near enough to MNIST's mean of 0.13 and standard deviation of 0.31 for one normalisation to serve both.
        pixels = images.float() / 255
        assert 0.07 < pixels.mean() < 0.19 and 0.2 < pixels.std() < 0.42


def test_printed_labels_are_balanced_and_shuffled(printed):
    train_set, test_set = printed[0]
    assert train_set.labels.bincount().tolist() == [6000] * 10
    assert test_set.labels.bincount().tolist() == [1000] * 10
    assert train_set.labels[:600].bincount().min() > 30
    assert not torch.equal(train_set.labels[:10_000], test_set.labels)


def test_no_test_image_was_trained_on(printed):
    train_set, test_set = printed[0]
    seen = {image.numpy().tobytes() for image in train_set.images}
    assert len(seen) == 60_000
    assert not any(image.numpy().tobytes() in seen for image in test_set.images)


def test_digits_of_all_fonts_are_glyphs_of_their_own():
    """Fonts without digits give an empty or the same picture ten times, symbol fonts one far from the others'."""
    glyphs = torch.from_numpy(digits.glyph_images()).float() / 255
    assert glyphs.shape == (10, len(digits.FONTS) * digits.WEIGHTS, digits.CANVAS**2)
    area = glyphs.sum(2)  # in dots; 80 is the height of a digit
    assert 80 * 4 < area.min() and area.max() < 80 * 80
    mean = glyphs.mean(1)
    closest = torch.cdist(glyphs.flatten(0, 1), mean).argmin(1).view(10, -1)
    right = (closest == torch.arange(10)[:, None]).float()
    assert right.mean() > 0.8 and right.mean(1).min() > 0.5


# --- The command


def run_main(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["data", *map(str, arguments)])
    status = 0
    try:
        data.main()
    except SystemExit as exit:
        status = exit.code
    return status, *capsys.readouterr()


def test_command(tmp_path, monkeypatch, capsys, downloader, few_digits):
    downloader("sys.exit(1)")
    why = "no MNIST: its download failed (it ended without a word)"
    line = f"data: printed digits ({why}), 40 training and 20 test images"
    for _ in range(2):  # tried anew each time
        status, out, err = run_main(monkeypatch, capsys, "--data-dir", tmp_path)
        assert (status, out.splitlines()[-1], err) == (0, line, "")
    assert downloader.started == 2
    status, out, err = run_main(monkeypatch, capsys, "--data", "mnist", "--data-dir", tmp_path)
    assert status == 2 and err.startswith("MNIST is not on this machine") and err.count("\n") == 1
    put(tmp_path)
    assert run_main(monkeypatch, capsys, "--data", "mnist", "--data-dir", tmp_path) == (
        0,
        "data: MNIST, 300 training and 100 test images\n",
        "",
    )
