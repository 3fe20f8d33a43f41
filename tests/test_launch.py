"""`%launch` and `%%launch`: what they show, and that nothing they started outlives them."""

import io
import os
import re
import signal
import sys
import textwrap
import threading
import time
import uuid
from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from jupyter_client import KernelManager
from traitlets.config import Config

from ddp_tutorial import launch as launching
from ddp_tutorial import supervisor
from ddp_tutorial.launch import LaunchError, LaunchInterrupted, launch

ROOT = Path(launching.__file__).resolve().parents[1]
PATIENCE = 60.0  # seconds until a wait is a failure; nothing below takes nearly that long

# What torchrun does, without torch: workers in sessions of their own, one of them deaf to SIGTERM.
LAUNCHER = """
    import os, pathlib, signal, subprocess, sys, time
    token, what = sys.argv[1:3]
    if what == "worker":
        if sys.argv[3] == "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        pathlib.Path(f"{token}.{sys.argv[3]}").touch()
        time.sleep(300)
    kinds = {"plain": None, "deaf": None, "nameless": {}}  # and their environments
    if what == "kill-supervisor":
        del kinds["nameless"]  # nobody is left who knows it
    for kind, env in kinds.items():
        subprocess.Popen([sys.executable, __file__, token, "worker", kind], start_new_session=True, env=env)
    while not all(os.path.exists(f"{token}.{kind}") for kind in kinds):
        time.sleep(0.01)
    print("ready", flush=True)
    if what == "crash":
        1 / 0
    elif what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "kill-supervisor":
        os.kill(os.getppid(), signal.SIGKILL)
    if what != "end":
        time.sleep(300)
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    for folder in ("ddp_tutorial", "scripts", "notebooks"):
        (tmp_path / folder).mkdir()
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "scripts/launcher.py").write_text(textwrap.dedent(LAUNCHER))
    for name in ("OMP_WAIT_POLICY", "OMP_NUM_THREADS", "DDP_TUTORIAL_CORES", "PET_LOCAL_ADDR",
                  "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "MASTER_ADDR",
                 "PYTHONUNBUFFERED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path / "notebooks")
    return tmp_path


@pytest.fixture
def token(tmp_path):
    """A word on the command line of each process of a test, by which they are found, whatever else they did."""
    token = str(tmp_path / f"token-{uuid.uuid4().hex}")
    yield token
    for pid in processes_with(token):
        os.kill(pid, signal.SIGKILL)


def processes_with(token):
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if token.encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            pass
    return found


def wait_until(condition, what):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"still waiting until {what}"
        time.sleep(0.01)


def python(code):
    return f"python -c {launching.shlex.quote(textwrap.dedent(code))}"


def log_of(project):
    (log,) = (project / "build/logs").glob("*.log")
    return log.read_text()


needs_proc = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes in /proc")


# ------------------------------------------------------------------------------------------------- nothing stays


@needs_proc
@pytest.mark.parametrize("what, error", [
    ("crash", "exit status 1: ZeroDivisionError: division by zero"),
    ("killed", "killed by SIGKILL: ready"),  # as by `kill -9` of torchrun
    ("end", None),  # it leaves its workers behind
])
def test_nothing_stays_when_the_command_ends(project, token, what, error, capsys):
    if error:
        with pytest.raises(LaunchError, match=re.escape(error)):
            launch(f"python scripts/launcher.py {token} {what}")
    else:
        launch(f"python scripts/launcher.py {token} {what}")
    assert processes_with(token) == []
    assert "ready\n" in capsys.readouterr().out


@needs_proc
def test_nothing_stays_at_the_deadline(project, token, capsys):
    began = time.monotonic()
    with pytest.raises(LaunchError, match="no end within 2 s, so everything was ended"):
        launch(f"--deadline 2 python scripts/launcher.py {token} wait")
    assert processes_with(token) == []
    assert time.monotonic() - began < 15


def test_what_a_command_says_while_it_is_ended_is_for_the_log(project, capsys):
    with pytest.raises(LaunchError, match="no end within 3 s"):
        launch("--deadline 3 " + python("""
            import signal, sys, time
            signal.signal(signal.SIGTERM, lambda *_: sys.exit("noise"))
            print("before", flush=True)
            time.sleep(300)
        """))
    assert capsys.readouterr().out.endswith("\nbefore\n")
    assert log_of(project) == "before\nnoise\n"


def test_processes_are_found_without_proc(tmp_path, monkeypatch):
    (tmp_path / "ps").write_text(textwrap.dedent("""\
        #!/bin/sh
        echo "  10     1 Ss   supervisor"
        echo "  11    10 S    python x.py HOME=/x DDP_TUTORIAL_LAUNCH=abc"
        echo "  12    11 S    helper without environment"
        echo "  13    12 Z    (dead)"
        echo "  14     1 S    python y.py DDP_TUTORIAL_LAUNCH=abc A=1"
        echo "  15     1 S    python y.py DDP_TUTORIAL_LAUNCH=abd A=1"
        echo "  $$ $PPID R    ps"
    """))
    (tmp_path / "ps").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(supervisor, "LINUX", False)
    assert supervisor.family("abc") == {11, 14}
    assert supervisor.family("abc", 10) == {11, 12, 14}
    assert supervisor.family("abc", os.getpid()) == {11, 14}  # not ps itself


@needs_proc
@pytest.mark.parametrize("times", [1, 3])
def test_nothing_stays_after_interrupts(project, token, times, capsys):
    def interrupt():
        wait_until(lambda: os.path.exists(f"{token}.nameless"), "the workers run")
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(LaunchInterrupted):
        launch(f"python scripts/launcher.py {token} wait")
    assert processes_with(token) == []
    thread.join()
    assert capsys.readouterr().out.endswith("interrupted: everything that this launch had started was ended\n")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@needs_proc
def test_nothing_stays_when_the_supervisor_is_killed(project, token):
    with pytest.raises(LaunchError, match="the supervising process was killed"):
        launch(f"python scripts/launcher.py {token} kill-supervisor")
    assert processes_with(token) == []


class Kernel:
    """A real kernel with the extension loaded, on which a launch is running."""

    def __init__(self, project, token):
        self.manager = KernelManager(kernel_name="python3")
        self.manager.kernel_spec.argv[0] = sys.executable
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self.manager.start_kernel(cwd=str(project / "notebooks"), env={**os.environ, "PYTHONPATH": path})
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)
        self.request = self.client.execute(f"%load_ext ddp_tutorial\n%launch python scripts/launcher.py {token} wait")
        self.output = []
        self.collect(until=lambda: "ready\n" in "".join(self.output))

    def collect(self, until):
        end = time.monotonic() + PATIENCE
        while not until():
            assert time.monotonic() < end, self.output
            message = self.client.get_iopub_msg(timeout=PATIENCE)
            if message["parent_header"].get("msg_id") == self.request:
                content = message["content"]
                self.output.append(content.get("text") or "".join(content.get("traceback", [])))
                if content.get("execution_state") == "idle":
                    return

    def close(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@needs_proc
@pytest.mark.parametrize("how", ["interrupt", "three interrupts", "restart", "kill -9"])
def test_nothing_stays_of_a_kernel(project, token, how):
    kernel = Kernel(project, token)
    try:
        assert len(processes_with(token)) == 4
        began = time.monotonic()
        if "interrupt" in how:
            for _ in range(3 if "three" in how else 1):
                kernel.manager.interrupt_kernel()
            kernel.collect(until=lambda: False)
            shown = "".join(kernel.output)
            assert "interrupted: everything that this launch had started was ended\n" in shown
            assert shown.endswith("LaunchInterrupted: the launch was interrupted")  # one line, no stack
            assert processes_with(token) == []
        elif how == "restart":
            kernel.manager.restart_kernel(now=True)
        else:
            os.kill(kernel.manager.provisioner.pid, signal.SIGKILL)
        wait_until(lambda: not processes_with(token), "every process has ended")
        assert time.monotonic() - began < 15
    finally:
        kernel.close()


# -------------------------------------------------------------------------------------------------- what is shown


class Watcher(io.StringIO):
    """A standard output that creates a file once it shows a certain text."""

    def __init__(self, text, file):
        super().__init__()
        self.text, self.file = text, file

    def flush(self):
        if self.text in self.getvalue():
            self.file.touch()


@pytest.mark.parametrize("printed, shown", [("first\\n", "first\n"), ("50 %", "50 %"), ("10 %\\r20 %", "10 %\r20 %")])
def test_output_streams_while_the_command_runs(project, monkeypatch, printed, shown):
    watcher = Watcher(shown, project / "seen")
    monkeypatch.setattr(sys, "stdout", watcher)
    launch(python(f"""
        import os, time
        print("{printed}", end="", flush=True)
        end = time.monotonic() + {PATIENCE}
        while not os.path.exists("seen"):
            assert time.monotonic() < end, "it was not shown"
            time.sleep(0.01)
        print("the end")
    """))
    assert watcher.getvalue().endswith(f"\n{shown}the end\n")


def test_the_command_is_shown_as_typed_and_both_streams_with_it(project, capsys):
    command = """A_B='x  y' python -c 'import os; os.write(2, os.environ["A_B"].encode()); print(" out")'"""
    launch(f"  {command}  ")
    assert capsys.readouterr().out == f"$ {command}\nx  y out\n"


def test_bytes_that_are_no_text_do_no_harm(project, capsys):
    launch(python(r"import os; os.write(1, b'a\xff\r\nb\xc3')"))
    assert capsys.readouterr().out.endswith("a\ufffd\r\nb\ufffd\n")  # a newline closes an open last line


def test_standard_input_is_empty_and_the_folder_is_the_root(project, capsys):
    launch("python -c 'import os, sys; print([sys.stdin.read(), os.getcwd()])'")
    assert capsys.readouterr().out.endswith("\n['', '.']\n")


def test_what_differs_from_run_to_run_is_replaced(project, capsys, monkeypatch):
    monkeypatch.setattr(launching.tempfile, "gettempdir", lambda: "/elsewhere")  # tests run in the real one
    home, tmp = Path.home(), "/elsewhere"
    (project / "scripts/say.py").write_text(textwrap.dedent(f"""
        import os, sys, threading
        print(__file__, os.path.abspath("scripts/x.py"), os.getcwd())
        print("{home}/x {tmp}/y {tmp}/tmpab12_xyz/z", os.__file__)
        print(threading.__file__ and "pid: 123 (pid=45) PID 6789 rapid 7")
        print("[W1129 22:44:42.123456789 ProcessGroupGloo.cpp:514] Warning: x")
        print("[W1129 22:44:42.1 socket.cpp:207] [c10d] The hostname of the client socket cannot be retrieved. err=-3")
        print("W1129 22:44:42.123000 4242 torch/run.py:766] y")
        print("  time      : 2026-11-29_22:44:42")
        print("  host      : some.laptop.example")
        print("../scripts/x.py ./y", os.getcwd() + "/", os.getcwd() + "2", "x" + os.getcwd())
        print("<x at 0x7f00deadbeef> took 1.5 s at step 12")
    """))
    launch("python scripts/say.py")
    assert capsys.readouterr().out.splitlines() == [
        "$ python scripts/say.py",
        "scripts/say.py scripts/x.py .",
        "~/x <tmp>/y <tmp>/tmp.../z <python>/os.py",
        "pid: <pid> (pid=<pid>) PID <pid> rapid 7",
        "[W ProcessGroupGloo.cpp:514] Warning: x",
        "W torch/run.py:766] y",
        "  time      : <time>",
        "  host      : <host>",
        f"../scripts/x.py ./y ./ {project}2 x{project}",
        "<x at 0x...> took 1.5 s at step 12",
    ]
    assert str(project / "scripts/x.py") in log_of(project)  # the log has it as it was


def test_at_most_a_thousand_lines_are_shown_and_the_log_has_all(project, capsys):
    launch(python("for i in range(100_000): print('line', i)"))
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 1001
    assert shown[999] == "line 998"
    assert re.fullmatch(r"\(this is long: the rest is in build/logs/python-[\w-]+\.log\)", shown[1000])
    log = log_of(project).splitlines()
    assert len(log) == 100_000
    assert log[-1] == "line 99999"


def test_a_thousand_lines_are_no_reason_for_a_note(project, capsys):
    launch("python -c 'for i in range(999): print(i)'")
    assert capsys.readouterr().out.splitlines()[-1] == "998"


def test_a_line_without_end_is_bounded_too(project, capsys):
    launch("python -c 'print(1_000_000 * \"x\")'")
    assert 200_000 <= len(capsys.readouterr().out) < 300_000


def test_the_newest_logs_are_kept(project, capsys, monkeypatch):
    monkeypatch.setattr(launching, "KEPT_LOGS", 3)
    for number in range(5):
        launch(f"python -c 'print({number})'")
    texts = sorted(log.read_text() for log in (project / "build/logs").glob("*.log"))
    assert texts == ["2\n", "3\n", "4\n"]


# ------------------------------------------------------------------------------------------------- success, failure


def test_a_failure_that_is_expected_is_none(project, capsys):
    launch("--expect-failure python -c 'import sys; sys.exit(3)'")
    assert capsys.readouterr().out.endswith("\nfailed, as expected: exit status 3\n")
    launch("--expect-failure --deadline=0.2 python -c 'import time; time.sleep(99)'")
    assert "failed, as expected: no end within 0.2 s" in capsys.readouterr().out
    with pytest.raises(LaunchError, match="expected to fail, but it succeeded"):
        launch("--expect-failure python -c 'print(1)'")


def test_a_message_for_the_reader_is_repeated_in_the_error(project):
    with pytest.raises(LaunchError, match="^exit status 2: 02.py: error: --epochs must be above 0$"):
        launch("python -c 'import sys; print(\"02.py: error: --epochs must be above 0\"); sys.exit(2)'")


TORCHRUN_SUMMARY = """\
[rank0]: Traceback (most recent call last):
[rank0]:   File "x.py", line 2, in main
[rank0]:     work.wait()
[rank0]: RuntimeError: [../pair.cc:561] Connection closed by peer [127.0.0.1]:14237.
[rank1]: Traceback (most recent call last):
[rank1]:   File "x.py", line 1, in main
[rank1]: KeyError: 'a'
[rank1]:
[rank1]: During handling of the above exception, another exception occurred:

[rank1]: Traceback (most recent call last):
[rank1]:   File "x.py", line 3, in main
[rank1]: my.errors.ShapeError: two
[rank1]:   lines
E failed (exitcode: 1) local_rank: 1 (pid: 12) of binary: python
Traceback (most recent call last):
  File "torchrun", line 8, in <module>
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
Root Cause (first observed failure):
[0]:
  rank      : 0 (local_rank: 0)
  exitcode  : -9 (pid: 12)
  traceback : Traceback (most recent call last):
    File "x.py", line 2, in main
  ValueError: this is a copy
"""


def findings(text):
    found = launching._Findings()
    for line in text.splitlines():
        found.take(1, line)
    return found


def test_the_culprit_is_found_among_its_victims():
    found = findings(TORCHRUN_SUMMARY)
    assert found.reason(1) == "ShapeError: two (rank 1)"
    assert found.first().lines == [
        "Traceback (most recent call last):", '  File "x.py", line 1, in main', "KeyError: 'a'",
        "", "During handling of the above exception, another exception occurred:", "",
        "Traceback (most recent call last):", '  File "x.py", line 3, in main', "my.errors.ShapeError: two", "  lines",
    ]
    assert found.lines_since(found.first()) == 11


@pytest.mark.parametrize("text, reason", [
    (TORCHRUN_SUMMARY + "[rank0]: Traceback (most recent call last):\n[rank0]:   File\n[rank0]: OSError: again\n",
     "OSError: again (rank 0)"),  # torchrun restarted the workers: the last attempt counts
    ("Root Cause (first observed failure):\n[0]:\n  rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 1)\n",
     "rank 1: killed by SIGKILL"),
    ("Traceback (most recent call last):\n  File\ntorch.multiprocessing.spawn.ProcessRaisedException: \n\n"
     "-- Process 2 terminated with the following error:\nTraceback (most recent call last):\n  File\nE_1: x\n\n",
     "E_1: x (rank 2)"),
    ("Traceback (most recent call last):\n  File\nProcessExitedException: process 1 terminated with signal SIGKILL\n",
     "ProcessExitedException: process 1 terminated with signal SIGKILL"),
    ("02.py: error: no such device\nbye\n", "02.py: error: no such device"),
    ("one\ntwo\n\n", "two"),
    ("", ""),
])
def test_the_reason_is_the_best_that_there_is(text, reason):
    assert findings(text).reason(1) == reason


def test_a_command_that_refuses_is_blamed_for_its_own_words():
    found = findings("")
    found.take(2, "09_many_machines.py: [rank 1] lost the store")
    assert found.reason(1) == "09_many_machines.py: [rank 1] lost the store", "else what made it fail"
    found.take(1, "09_many_machines.py: [rank 0] lost rank 1")
    assert found.reason(1) == "09_many_machines.py: [rank 0] lost rank 1"
    assert found.reason(2) == "09_many_machines.py: [rank 1] lost the store"


@pytest.mark.parametrize("before, after", [(0, 2000), (2000, 0), (0, 11)])
def test_a_buried_traceback_is_shown_last(project, capsys, before, after):
    (project / "scripts/buried.py").write_text(textwrap.dedent(f"""
        import sys, traceback
        print("noise\\n" * {before})
        try:
            [][7]
        except IndexError:
            print(*("[rank3]: " + line for line in traceback.format_exc().splitlines()), sep="\\n")
        print("noise\\n" * {after})
        sys.exit(5)
    """))
    with pytest.raises(LaunchError, match=r"^exit status 5: IndexError: list index out of range \(rank 3\)$"):
        launch("python scripts/buried.py")
    lines = capsys.readouterr().out.splitlines()
    if before + after > 1000:
        assert lines[1000].startswith("(this is long: ")
    traceback = [line.removeprefix("[rank3]: ") for line in log_of(project).splitlines() if line.startswith("[rank3]")]
    traceback = [line.replace(f"{project}/", "") for line in traceback]
    assert traceback[-1] == "IndexError: list index out of range"
    assert lines[-6:] == ["", "The first failure's own traceback, rank 3:", *traceback][-6:]


def test_a_real_torchrun_of_two_ranks(project, capsys):
    (project / "scripts/two.py").write_text(textwrap.dedent("""
        import os, sys
        import torch, torch.distributed as dist
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
        dist.init_process_group("gloo")
        total = torch.tensor(dist.get_rank() + 1)
        dist.all_reduce(total)
        print(f"[rank {dist.get_rank()}] {total} {os.environ['PET_LOCAL_ADDR']}")
        dist.barrier()
        if dist.get_rank() == 1:
            raise ValueError("on purpose")
        dist.barrier()
    """))
    with pytest.raises(LaunchError, match=r"^exit status 1: ValueError: on purpose \(rank 1\)$"):
        launch("torchrun --standalone --nproc-per-node 2 scripts/two.py")
    out = capsys.readouterr().out
    assert "[rank 0] 3 127.0.0.1\n" in out and "[rank 1] 3 127.0.0.1\n" in out
    assert out.endswith('    raise ValueError("on purpose")\nValueError: on purpose\n')
    assert not re.search(rf"{re.escape(str(project))}|{re.escape(sys.prefix)}|pid: \d", out)


# ---------------------------------------------------------------------------------------------------- several at once


def test_commands_of_one_cell_run_together_with_prefixes(project, capsys):
    (project / "scripts/meet.py").write_text(textwrap.dedent(f"""
        import os, sys, time
        mine, other = sys.argv[1:]
        open(mine, "w").close()
        end = time.monotonic() + {PATIENCE}
        while not os.path.exists(other):
            assert time.monotonic() < end, "the other does not run"
            time.sleep(0.01)
        print(mine, flush=True)
        print("50 %", end="\\r")
        print("met")
    """))
    launch("", "# two users\npython scripts/meet.py \\\n  a b\n\n  python scripts/meet.py b a\n")
    lines = capsys.readouterr().out.split("\n")
    assert lines[:2] == ["[1] $ python scripts/meet.py a b", "[2] $ python scripts/meet.py b a"]
    assert sorted(lines[2:]) == ["", "[1] 50 %\r[1] met", "[1] a", "[2] 50 %\r[2] met", "[2] b"]


@needs_proc
def test_the_first_failure_ends_all(project, token, capsys):
    began = time.monotonic()
    (project / "scripts/fail.py").write_text(textwrap.dedent(f"""
        import os, sys, time
        while not os.path.exists("{token}.nameless"):
            time.sleep(0.01)
        sys.exit("bad luck")
    """))
    with pytest.raises(LaunchError, match="^command 2: exit status 1: bad luck$"):
        launch("", f"python scripts/launcher.py {token} wait\npython scripts/fail.py\n")
    assert processes_with(token) == []
    assert time.monotonic() - began < 30


# ------------------------------------------------------------------------------------------------- the environment


SHOW = """
import os
names = "OMP_WAIT_POLICY DDP_TUTORIAL_CORES OMP_NUM_THREADS PET_LOCAL_ADDR "
names += "GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME PYTHONUNBUFFERED FORCE_COLOR MPLBACKEND"
print(*(os.environ.get(name, "-") for name in names.split()))
"""


@pytest.mark.parametrize("command, shown", [
    ("python scripts/show.py", "PASSIVE 8 8 127.0.0.1 LO LO - - -"),
    ("python scripts/show.py --nproc 3", "PASSIVE 8 2 127.0.0.1 LO LO - - -"),
    ("python scripts/show.py --nproc_per_node=2", "PASSIVE 8 4 127.0.0.1 LO LO - - -"),
    ("python scripts/show.py --nproc-per-node 20", "PASSIVE 8 1 127.0.0.1 LO LO - - -"),
    ("python scripts/show.py --nproc-per-node gpu", "PASSIVE 8 1 127.0.0.1 LO LO - - -"),
    ("OMP_NUM_THREADS=5 python scripts/show.py --nproc 2", "PASSIVE - 5 127.0.0.1 LO LO - - -"),
    ("GLOO_SOCKET_IFNAME=eth7 PET_LOCAL_ADDR=::1 python scripts/show.py", "PASSIVE 8 8 ::1 eth7 LO - - -"),
    ("python scripts/show.py --master-addr 10.0.0.5", "PASSIVE 8 8 - - - - - -"),
    ("python scripts/show.py --master_addr=127.0.0.1", "PASSIVE 8 8 127.0.0.1 LO LO - - -"),
    ("python scripts/show.py --rdzv-endpoint=localhost:29400", "PASSIVE 8 8 127.0.0.1 LO LO - - -"),
    ("python scripts/show.py --rdzv_endpoint node1:29400", "PASSIVE 8 8 - - - - - -"),
    ("python scripts/show.py --init-method tcp://node1:29400", "PASSIVE 8 8 - - - - - -"),
    ("python scripts/show.py --init-method file:///tmp/x", "PASSIVE 8 8 127.0.0.1 LO LO - - -"),
    ("MASTER_ADDR=node1 python scripts/show.py", "PASSIVE 8 8 - - - - - -"),
])
def test_what_a_command_finds_in_its_environment(project, capsys, monkeypatch, command, shown):
    (project / "scripts/show.py").write_text(SHOW)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as Jupyter does
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    launch(command)
    loopback = "lo" if sys.platform.startswith("linux") else "lo0"
    assert capsys.readouterr().out.splitlines()[-1] == shown.replace("LO", loopback)


def test_threads_are_shared_by_all_commands_and_the_readers_own_choice_stays(project, capsys, monkeypatch):
    (project / "scripts/show.py").write_text(SHOW)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    launch("", "python scripts/show.py --nproc 2\npython scripts/show.py --nproc 2")
    assert re.findall(r"^\[\d\] PASSIVE (\d+ \d+)", capsys.readouterr().out, re.MULTILINE) == ["4 2", "4 2"]
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("PET_LOCAL_ADDR", "127.0.0.9")
    launch("python scripts/show.py --nproc 2")
    assert capsys.readouterr().out.splitlines()[-1].startswith("PASSIVE - 7 127.0.0.9 ")


def test_programs_are_those_of_the_kernels_own_environment(project, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    launch("python3 -c 'import os, sys; print(sys.executable, os.environ[\"PATH\"])'")
    assert capsys.readouterr().out.endswith("\n<bin>/" + Path(sys.executable).name + " <bin>:/usr/bin:/bin\n")
    here = Path(sys.executable).parent
    assert launching._with_program(["torchrun", "-h"]) == [str(here / "torchrun"), "-h"]
    monkeypatch.setattr(sys, "executable", "/nowhere/bin/python")
    assert launching._with_program(["torchrun"]) == ["/nowhere/bin/python", "-m", "torch.distributed.run"]


# ------------------------------------------------------------------------------------------------------- the magics


@pytest.fixture
def shell(project):
    config = Config()
    config.HistoryManager.enabled = False
    shell = InteractiveShell(config=config)
    shell.run_line_magic("load_ext", "ddp_tutorial")
    return shell


def run(shell, source):
    with capture_output() as captured:
        result = shell.run_cell(source)
    return captured.stdout, captured.stderr, result.error_before_exec or result.error_in_exec


def test_only_names_in_braces_that_exist_are_filled_in(shell):
    shell.user_ns.update(port=1234, words="a b", HOME="wrong")
    show = "python -c 'import sys; print(sys.argv[1:])'"
    out, _, error = run(shell, f"%launch {show} {{port}} {{words}} {{no}} $HOME $port {{1}} ~ *")
    assert error is None
    assert out.splitlines() == [
        f"$ {show} 1234 a b {{no}} $HOME $port {{1}} ~ *",  # as it was typed, but for what was filled in
        "['1234', 'a', 'b', '{no}', '$HOME', '$port', '{1}', '~', '*']",
    ]
    out, _, error = run(shell, f"%launch {show} {{port}} $HOME {{port!r}}")  # which IPython would expand
    assert out.endswith("\n['1234', '$HOME', '{port!r}']\n")
    out, _, error = run(shell, "%%launch --deadline {port}\npython -c 'print({port})'")
    assert (out, error) == ("$ python -c 'print(1234)'\n1234\n", None)


@pytest.mark.parametrize("source, reason", [
    ("%launch", "no command"),
    ("%%launch", "no command"),
    ("%%launch\n\n# nothing\n", "no command"),
    ("%%launch --expect-failure", "no command"),
    ("%%launch python x.py\npython y.py", "stand below its first line"),
    ("%launch python x.py | tee log", 'no shell here to understand "|"'),
    ("%%launch\ncd scripts && python x.py", 'no shell here to understand "&&"'),
    ("%launch python 'x.py", "no closing quotation in: python 'x.py"),
    ("%launch A=1", "no command after the variables"),
    ("%launch --deadline soon python x.py", 'a number of seconds above 0, not "soon"'),
    ("%launch --deadline 0 python x.py", 'a number of seconds above 0, not "0"'),
    ("%launch --dead python x.py", "no option --dead"),
    ("%launch trchrun x.py", "there is no program trchrun"),
    ("%launch scripts/x.sh", "there is no program scripts/x.sh"),
])
def test_refused_in_one_line_and_never_as_usage_error(shell, project, source, reason):
    out, err, error = run(shell, source)
    assert isinstance(error, LaunchError)
    assert reason in str(error)
    assert out.splitlines() == ["%launch: refused, nothing was started", f"LaunchError: {error}"]
    assert "UsageError" not in err
    assert not (project / "build").exists()


def test_a_failure_is_one_line_below_the_output(shell):
    out, _, error = run(shell, "%launch python -c 1/0")
    assert isinstance(error, LaunchError)
    assert out.splitlines() == [
        "$ python -c 1/0",
        "Traceback (most recent call last):",
        '  File "<string>", line 1, in <module>',
        "ZeroDivisionError: division by zero",
        "LaunchError: exit status 1: ZeroDivisionError: division by zero",
    ]


def test_a_program_that_cannot_be_started_says_why(shell, project):
    (project / "scripts/x.sh").write_text("not a program")
    (project / "scripts/x.sh").chmod(0o755)
    _, _, error = run(shell, "%launch scripts/x.sh")
    assert "exit status 127" in str(error) and "Exec format error" in str(error)
