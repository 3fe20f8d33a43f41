"""The preflight tells the truth, also where something is missing, and leaves no process behind."""

import hashlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import nbclient
import nbformat
import pytest
import torch

from ddp_tutorial import data, preflight

ROOT = Path(__file__).parents[1]

OFFLINE = """
import fcntl, runpy, socket, struct, sys
socket.sethostname("no-such-host")
up = struct.pack("16sh14x", b"lo", 0x41)  # interface lo: IFF_UP | IFF_RUNNING
fcntl.ioctl(socket.socket(), 0x8914, up)  # SIOCSIFFLAGS
sys.argv = ["ddp_tutorial"]
runpy.run_module("ddp_tutorial", run_name="__main__")
"""


def namespaces_allowed():
    unshare = shutil.which("unshare")
    return bool(unshare) and not subprocess.run([unshare, "-rnu", "true"], capture_output=True).returncode


def processes_of(group):
    """How many processes of a process group live (zombies do not)."""
    if Path("/proc/self/stat").exists():
        stats = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):  # it ended just now
                stats.append(path.read_text().rpartition(")")[2].split())
        return sum(int(stat[2]) == group and stat[0] != "Z" for stat in stats)
    listing = subprocess.check_output(["ps", "-A", "-o", "pgid=,stat="], text=True)
    return sum(line.split()[0] == str(group) and "Z" not in line for line in listing.splitlines())


def wait_until(true, seconds=20):
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.05)
    return true()


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Let a shell script stand for the processes of the all-reduce."""

    def fake(script):
        program = tmp_path / "python"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setattr(preflight.sys, "executable", str(program))

    return fake


ADDS_UP = "echo '[1, [3.0]]'; echo '[0, [3.0]]'"


def lines_of(capsys):
    return capsys.readouterr().out.splitlines()


# ------------------------------------------------------------------------------------------------- the whole program


def test_offline_with_an_unknown_host_name_it_is_ready():
    """Without the right to make namespaces the same run is done in this one."""
    offline = namespaces_allowed()
    command = [sys.executable, "-c", OFFLINE] if offline else [sys.executable, "-m", "ddp_tutorial"]
    run = subprocess.run(
        ["unshare", "-rnu"] * offline + command, cwd=ROOT, capture_output=True, text=True, timeout=180
    )
    lines = run.stdout.splitlines()
    assert run.returncode == 0 and lines[-1] == "ready: the series can run on this machine", run
    assert any(line.startswith("all-reduce  gloo, 2 processes: 1 + 2 = 3 on every rank") for line in lines)
    assert ("            export PET_LOCAL_ADDR=127.0.0.1" in lines) or not offline
    starts = [re.match(r"[a-z -]{11}(?= \S)", line) for line in lines[:-1] if line[0] != " "]
    assert all(starts) and len(starts) == 10
    assert run.stderr == ""


def test_a_wrong_sum_is_not_ready(tmp_path):
    """all_reduce does nothing in this run, so each rank keeps the number it brought."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'multiprocessing.spawn' in ' '.join(sys.orig_argv):\n"
        "    import torch.distributed\n"
        "    torch.distributed.all_reduce = lambda numbers: None\n"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "ddp_tutorial"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180)
    assert run.returncode == 1
    assert "all-reduce  gloo, 2 processes: rank 0 got [1.0], wanted [3.0]" in run.stdout
    assert run.stdout.splitlines()[-1].startswith("not ready: a gloo all-reduce between processes of this machine")


def test_unknown_arguments_end_with_status_2(capsys):
    with pytest.raises(SystemExit) as ended:
        preflight.main(["--fast"])
    assert ended.value.code == 2 and "unrecognized arguments: --fast" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------- what is missing


def test_it_is_ready_only_if_every_rank_has_the_sum(job, capsys, monkeypatch):
    monkeypatch.setattr(preflight, "gpus_with_nccl", lambda: 0)
    job(ADDS_UP)
    assert preflight.main([]) == 0
    assert lines_of(capsys)[-1] == "ready: the series can run on this machine"


@pytest.mark.parametrize(
    "script, seen",
    [
        ("echo '[0, [3.0]]'; echo '[1, [4.0]]'", "gloo, 2 processes: rank 1 got [4.0], wanted [3.0]"),
        ("echo '[0, [3.0]]'; echo '[1, [3.0, 5.0]]'", "gloo, 2 processes: rank 1 got [3.0, 5.0], wanted [3.0]"),
        ("echo '[0, [3.0]]'", "gloo, 2 processes: rank 1 got None, wanted [3.0]"),
        (
            "echo 'RuntimeError: no way'; echo 'OSError: out of\n  luck' >&2; exit 1",
            "gloo, 2 processes: OSError: out of",
        ),
        ("sleep 60", "gloo, 2 processes: no result within 1 s"),
    ],
)
def test_an_all_reduce_that_fails_is_told(script, seen, job, capsys, monkeypatch):
    monkeypatch.setattr(preflight, "SECONDS", 1)
    job(script)
    start = time.monotonic()
    assert preflight.main([]) == 1
    assert time.monotonic() - start < 20
    lines = lines_of(capsys)
    assert "all-reduce  " + seen in lines
    assert lines[-1].startswith("not ready: a gloo all-reduce between")


def test_a_rank_that_fails_does_not_keep_the_others_waiting(tmp_path, monkeypatch):
    """A module called torch stands for PyTorch: the first rank to import it fails, the other would wait."""
    (tmp_path / "torch.py").write_text(
        "import os, time\n"
        "try:\n"
        f"    os.mkdir({str(tmp_path / 'first')!r})\n"
        "except FileExistsError:\n"
        "    time.sleep(60)\n"
        "else:\n"
        "    raise RuntimeError('out of luck')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    start = time.monotonic()
    with preflight.AllReduce("gloo", 2) as reduction:
        with pytest.raises(preflight.NotReady, match="gloo, 2 processes: RuntimeError: out of luck"):
            reduction.verdict()
    assert time.monotonic() - start < 20
    # Killed they are, but the system takes a moment over it.
    assert wait_until(lambda: processes_of(reduction.job.pid) == 0, seconds=5)


def test_nccl_that_fails_is_not_ready_and_names_the_way_out(job, capsys, monkeypatch):
    monkeypatch.setattr(preflight, "gpus_with_nccl", lambda: 1)
    job("if [ $3 = gloo ]; then " + ADDS_UP + "; else echo '[0, [2.0]]'; fi")
    assert preflight.main([]) == 1
    lines = lines_of(capsys)
    assert lines[-2] == "            nccl, 1 process: rank 0 got [2.0], wanted [1.0]"
    assert lines[-1].endswith("export CUDA_VISIBLE_DEVICES=")


def test_torch_that_cannot_be_imported(job, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    job("exit 1")
    assert preflight.main([]) == 1
    lines = lines_of(capsys)
    assert lines[1].startswith("torch       cannot be imported (ModuleNotFoundError: import of torch halted")
    assert lines[-1] == "not ready: install PyTorch: run make setup"


def test_torch_that_is_too_old(monkeypatch):
    floor = ".".join(map(str, preflight.TORCH_NEEDED))
    assert f'"torch>={floor}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    monkeypatch.setattr(torch, "__version__", "2.5.1+cpu")
    with pytest.raises(preflight.NotReady, match="2.5.1.cpu, too old"):
        preflight.torch_facts()
    monkeypatch.setattr(torch, "__version__", "2.10.0a0+git")
    assert preflight.torch_facts() == "2.10.0a0+git"


def test_backends(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert preflight.backend_facts() == "gloo"
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    with pytest.raises(preflight.NotReady, match="no gloo"):
        preflight.backend_facts()


def test_data_is_looked_for_and_never_fetched(tmp_path, monkeypatch):
    monkeypatch.setenv("DDP_TUTORIAL_DATA", str(tmp_path))
    assert preflight.data_facts().startswith("no MNIST yet: the first run downloads it")
    assert list(tmp_path.iterdir()) == []
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    monkeypatch.setattr(data, "MNIST_MD5", {})
    labels = raw / "t10k-labels-idx1-ubyte"
    labels.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 2, 1]))
    monkeypatch.setitem(data.MNIST_MD5, labels.name, hashlib.md5(labels.read_bytes()).hexdigest())
    assert preflight.data_facts() == "MNIST is on this machine"
    labels.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 2]))
    with pytest.raises(preflight.NotReady, match="t10k-labels-idx1-ubyte is cut short"):
        preflight.data_facts()


def test_gpus_are_counted_by_name(monkeypatch):
    names = ["H200", "H200", "T4"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", names.__getitem__)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert preflight.gpu_facts() == "2 × H200, 1 × T4"


def test_a_step_that_breaks_is_a_line_and_the_rest_goes_on(job, capsys, monkeypatch):
    monkeypatch.setattr(preflight, "gpus_with_nccl", lambda: 0)
    monkeypatch.setattr(preflight, "gpu_facts", lambda: 1 / 0)
    job(ADDS_UP)
    assert preflight.main([]) == 0
    assert "gpus        cannot tell (ZeroDivisionError: division by zero)" in lines_of(capsys)


# --------------------------------------------------------------------------------------------------------- host name


def unknown(*_):
    raise socket.gaierror(-3, "Temporary failure in name resolution")


def test_an_unknown_host_name_brings_the_two_lines(monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    first, *exports = preflight.host_name_facts().splitlines()
    assert first.startswith("does not resolve (gaierror: [Errno -3] Temporary failure in name resolution); before")
    interface = "lo0" if sys.platform == "darwin" else "lo"
    assert [line.strip() for line in exports] == [
        "export PET_LOCAL_ADDR=127.0.0.1",
        f"export GLOO_SOCKET_IFNAME={interface}",
    ]


def test_a_resolver_that_never_answers_costs_the_limit(monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: time.sleep(5))
    before = set(threading.enumerate())
    start = time.monotonic()
    assert preflight.host_name_facts(limit=0.2).startswith("did not resolve within 0.2 s; before you use torchrun")
    assert time.monotonic() - start < 4
    assert [thread.daemon for thread in set(threading.enumerate()) - before] == [True]  # it keeps nobody from ending


@pytest.mark.parametrize("seconds, told", [(1.5, "resolves in 1.50 s"), (2.5, "resolves only after 2.5 s; before")])
def test_a_slow_resolver(seconds, told, monkeypatch):
    clock = iter([0.0, seconds])
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [])
    monkeypatch.setattr(preflight.time, "monotonic", lambda: next(clock))
    assert preflight.host_name_facts().startswith(told)


def test_the_port_is_free():
    with socket.socket() as server:
        server.bind(("127.0.0.1", preflight.port_facts()))
        server.listen()


# --------------------------------------------------------------------------------------------------------- leftovers


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_it(number):
    parent = (
        "from ddp_tutorial.preflight import AllReduce\n"
        "import time\n"
        "with AllReduce('gloo', 2) as reduction:\n"
        "    print(reduction.job.pid, flush=True)\n"
        "    time.sleep(60)\n"
    )
    command = [sys.executable, "-c", parent]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as program:
        group = int(program.stdout.readline())
        # The first process, multiprocessing's resource tracker, and the two ranks.
        assert wait_until(lambda: processes_of(group) == 4)
        program.send_signal(number)
        program.wait(20)
    assert wait_until(lambda: processes_of(group) == 0)


# ------------------------------------------------------------------------------------------------------------- spawn


def test_a_worker_of_a_cell_cannot_be_spawned_and_one_of_a_file_can(tmp_path):
    (tmp_path / "some_file.py").write_text("def worker(rank):\n    assert rank in (0, 1)\n")
    cells = [
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\nimport os; before = os.fstat(2)",
        "from ddp_tutorial.preflight import spawn_from_here\n\n"
        "def worker(rank):\n    print(rank)\n\nspawn_from_here(worker)",
        "import some_file\nprint(spawn_from_here(some_file.worker), os.path.samestat(before, os.fstat(2)))",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, kernel_name="python3", timeout=180, resources=resources).execute()
    [failed], [passed] = [cell.outputs for cell in notebook.cells[1:]]
    message = failed.data["text/plain"]
    assert re.match("""["']AttributeError: Can't get attribute 'worker' on <module '__main__'""", message), message
    assert passed.text == "None True\n"  # and standard error is where it was


def test_a_function_that_cannot_be_sent_or_that_raises(monkeypatch):
    from torch import multiprocessing as mp

    assert re.match(r"\w+Error: Can't (pickle|get local)", preflight.spawn_from_here(lambda rank: None))

    def raises(*_, **__):
        raise mp.ProcessRaisedException("\n\n-- Process 0 terminated --\nTraceback\nValueError: boom\n", 0, 1)

    monkeypatch.setattr(mp, "spawn", raises)
    assert preflight.spawn_from_here(abs) == "ValueError: boom"


def test_last_line():
    assert preflight.last_line("Traceback\n  File x\nValueError: boom\nnote: see there\n\n") == "ValueError: boom"
    assert preflight.last_line("killed\n\n") == "killed"
    assert preflight.last_line(" ") == "no message"
    assert preflight.last_line(ValueError("gone")) == "ValueError: gone"
