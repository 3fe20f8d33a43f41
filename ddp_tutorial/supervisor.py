"""Runs commands for `ddp_tutorial.launch` and sees to it that nothing which they started outlives them.

This file is run as a process of its own, in a session of its own, so that an interrupt of the notebook's kernel does
not reach it. Its standard input is the kernel's lifeline: the first line says what to run (JSON), and its end, for
whatever reason, means that the kernel stopped the launch or is dead. Its standard output tells the kernel what
happened, one JSON object a line. The commands write to pipes that the kernel made.

torchrun puts its workers into sessions of their own, so that killing a process group misses them. On Linux this
process is a "subreaper": orphans below it become its children, and none can get away. Every process also carries a
mark in its environment, by which it can be found when this process itself was killed, or where there is no subreaper.
"""

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time

MARK = "DDP_TUTORIAL_LAUNCH"
GRACE = 2.0  # seconds for a command to end its own workers
WIND_DOWN = 0.5  # seconds for helpers, such as multiprocessing's resource tracker, to notice and end
SET_PDEATHSIG, SET_CHILD_SUBREAPER = 1, 36  # from <linux/prctl.h>
LINUX = sys.platform.startswith("linux")


def family(mark, ancestor=None):
    """The ids of live processes that carry `mark` in their environment or descend from the process `ancestor`."""
    parents, found = {}, set()
    for pid, parent, marked in live_processes(f"{MARK}={mark}"):
        parents[pid] = parent
        if marked:
            found.add(pid)
    for pid in parents:
        above = parents[pid]
        while above in parents and above != ancestor:
            above = parents[above]
        if above == ancestor:
            found.add(pid)
    return found - {os.getpid()}


def kill_family(mark, ancestor=None, patience=5.0):
    """Kill them until none is left, or `patience` seconds have passed; returns those that are left."""
    end = time.monotonic() + patience
    while pids := family(mark, ancestor):
        for pid in pids:
            _send(pid, signal.SIGKILL)
        if time.monotonic() > end:
            break
        _reap()
        time.sleep(0.02)
    return pids


def live_processes(entry):
    """Yields (process id, its parent's, whether `entry`, NAME=value, is in its environment) for all that live."""
    return _linux_processes(entry) if LINUX else _other_processes(entry)


def _linux_processes(entry):
    wanted = f"{entry}\0".encode()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
            if state in b"ZX":  # dead, only not waited for yet
                continue
        except OSError:  # it has ended meanwhile
            continue
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                marked = wanted in file.read() + b"\0"
        except OSError:  # somebody else's
            marked = False
        yield int(pid), int(parent), marked


def _other_processes(entry):
    ps = subprocess.Popen(["ps", "-axEww", "-o", "pid=,ppid=,stat=,command="], stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    for line in ps.communicate()[0].decode(errors="replace").splitlines():
        fields = line.split(None, 3)  # with -E, the command is followed by its environment
        if len(fields) == 4 and not fields[2].startswith("Z") and int(fields[0]) != ps.pid:
            yield int(fields[0]), int(fields[1]), entry in fields[3].split()


def _send(pid, number):
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def _reap():
    """Collect ended children as ``{pid: status}``; a status below zero is minus the signal that killed it."""
    ended = {}
    try:
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended[pid] = os.waitstatus_to_exitcode(status)
    except ChildProcessError:
        pass
    return ended


def _has_children():
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return False
    return True


def _prctl(option, value):
    if LINUX:
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _tell(**event):
    try:
        os.write(1, json.dumps(event).encode() + b"\n")
    except OSError:  # the kernel is dead; the work here goes on
        pass


def _start(command, mark):
    def before_exec():
        _prctl(SET_PDEATHSIG, signal.SIGTERM)  # in case this process is killed: torchrun then ends its workers
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have had it ignored

    try:
        return subprocess.Popen(
            command["argv"], cwd=command["cwd"], env={**os.environ, **command["env"], MARK: mark},
            stdin=subprocess.DEVNULL, stdout=command["output"], stderr=subprocess.STDOUT,
            start_new_session=True, preexec_fn=before_exec,
        )
    finally:
        os.close(command["output"])


def main():
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which the commands would inherit
    _prctl(SET_CHILD_SUBREAPER, 1)

    first_line = b""
    while not first_line.endswith(b"\n"):
        first_line += os.read(0, 1) or sys.exit("no command arrived")
    order = json.loads(first_line)
    mark, deadline = order["mark"], time.monotonic() + order["deadline"]

    roots, going = {}, True
    started = []  # kept: a Popen object that is thrown away collects its process's exit status
    for index, command in enumerate(order["commands"]):
        try:
            started.append(_start(command, mark))
            roots[started[-1].pid] = index
        except (OSError, subprocess.SubprocessError) as error:
            _tell(event="exit", index=index, status=127, error=str(error))
            going = False

    while going and roots and not stopped:
        readable, _, _ = select.select([0], [], [], 0.05)
        if readable and not os.read(0, 1):
            break
        for pid, status in _reap().items():
            if pid in roots:
                _tell(event="exit", index=roots.pop(pid), status=status)
                going = going and status == 0
        if going and roots and time.monotonic() > deadline:
            _tell(event="deadline")
            going = False

    for pid in roots:
        _send(pid, signal.SIGTERM)
    end = time.monotonic() + GRACE
    while roots and time.monotonic() < end:
        for pid in _reap():
            roots.pop(pid, None)
        time.sleep(0.02)
    end = time.monotonic() + WIND_DOWN
    while family(mark, os.getpid()) and time.monotonic() < end:
        _reap()
        time.sleep(0.02)
    while kill_family(mark, os.getpid()) or _has_children():
        pass
    _tell(event="done")


if __name__ == "__main__":
    main()
