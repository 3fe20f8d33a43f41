"""The preflight, ``python -m ddp_tutorial``: what this machine has, and whether two processes can add up a number.

Also spawn_from_here(), which notebook 00 uses to show that a function defined in a cell cannot be spawned.
"""

import argparse
import json
import logging
import multiprocessing.connection
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import resource_tracker
from pathlib import Path

from ddp_tutorial.paths import project_root

TORCH_NEEDED = (2, 6)
SECONDS = 60  # limit of an all-reduce, start-up included
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
TERMINAL_LINES = ("export PET_LOCAL_ADDR=127.0.0.1", f"export GLOO_SOCKET_IFNAME={LOOPBACK}")


class NotReady(Exception):
    """A finding that keeps the series from running here: what was seen, and what to do about it."""

    def __init__(self, seen, remedy):
        super().__init__(seen)
        self.remedy = remedy


class Findings:
    """Prints a line for each finding, and a last one that begins ``ready:`` or ``not ready:``."""

    def __init__(self):
        self.remedies = []

    def report(self, name, step, *details):
        """Print what ``step(*details)`` returns. True unless it raised NotReady."""
        ready, seen = True, ""
        try:
            seen = step(*details)
        except NotReady as finding:
            ready, seen = False, str(finding)
            self.remedies.append(finding.remedy)
        except Exception as error:
            seen = f"cannot tell ({last_line(error)})"
        print(f"{name:<12}{seen}", flush=True)
        return ready

    def conclude(self, what):
        """Returns the exit status: 0 when everything was ready, else 1."""
        print(f"not ready: {'; '.join(self.remedies)}" if self.remedies else f"ready: {what}", flush=True)
        return 1 if self.remedies else 0


def main(arguments=None):
    """Say whether the series can run on this machine, or several machines can train together.

    Returns the exit status: 0 when they can, else 1.
    """
    parser = argparse.ArgumentParser(
        prog="python -m ddp_tutorial", description="Can the series run on this machine? With --rendezvous: can several"
        " train together? Run the same command on all of them at the same time.")
    parser.add_argument("--rendezvous", type=host_and_port, metavar="HOST:PORT",
                        help="where they meet: one of the machines, and a port that is free there")
    parser.add_argument("--nodes", type=int, default=2, help="how many machines (2)")
    parser.add_argument("--patience", type=float, default=60, metavar="SECONDS", help="to wait for the others (60)")
    args = parser.parse_args(arguments)
    if not 2 <= args.nodes <= 10_000 or not 1 <= args.patience <= 86_400:
        parser.error("--nodes is a number from 2 to 10,000, and --patience one from 1 to 86,400")
    if args.rendezvous:
        from ddp_tutorial.rendezvous import check_rendezvous

        try:
            return check_rendezvous(*args.rendezvous, args.nodes, args.patience)
        except KeyboardInterrupt:
            return 130
    findings = Findings()
    report, remedies = findings.report, findings.remedies

    # Started first, because most of its time goes into importing PyTorch, as most of ours does below.
    with AllReduce("gloo", 2) as gloo:
        report("python", python_facts)
        report("torch", torch_facts)
        report("torchvision", torchvision_facts)
        if not remedies:
            report("cpu", cpu_facts)
            report("gpus", gpu_facts)
            report("backends", backend_facts)
            report("data", data_facts)
        report("free port", port_facts)
        report("host name", host_name_facts)
        if not remedies:
            report("all-reduce", gloo.verdict)
    if not remedies and (gpus := gpus_with_nccl()):
        with AllReduce("nccl", gpus) as nccl:
            report("", nccl.verdict)
    return findings.conclude("the series can run on this machine")


def host_and_port(text):
    """``HOST:PORT`` as a pair, for `add_argument(type=...)`."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise argparse.ArgumentTypeError(f"{text} is not HOST:PORT, such as node0:29500")
    return host.strip("[]"), int(port)


def python_facts():
    return f"{platform.python_version()} on {platform.system()} ({platform.machine()})"


def torch_facts():
    try:
        import torch
    except Exception as error:  # a broken installation raises OSError as well as ImportError
        raise NotReady(f"cannot be imported ({last_line(error)})", "install PyTorch: run make setup") from None
    if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < TORCH_NEEDED:
        needed = ".".join(map(str, TORCH_NEEDED))
        raise NotReady(f"{torch.__version__}, too old", f"install PyTorch {needed} or later: run make setup")
    return torch.__version__


def torchvision_facts():
    try:
        return version("torchvision")  # not imported: that takes two seconds, and only the download needs it
    except PackageNotFoundError:
        return "not installed; without it MNIST cannot be downloaded"


def cpu_facts():
    import torch

    from ddp_tutorial.device import count, usable_cores

    return f"{count(usable_cores(), 'core')}, PyTorch uses {count(torch.get_num_threads(), 'thread')} in one process"


def gpu_facts():
    import torch

    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        names.append("Apple MPS (for one process only)")
    return ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names)) or "none: the CPU does it all"


def backend_facts():
    import torch.distributed as dist

    known = {"gloo": "is_gloo_available", "nccl": "is_nccl_available", "mpi": "is_mpi_available"}
    there = [name for name, ask in known.items() if dist.is_available() and getattr(dist, ask)()]
    if "gloo" not in there:
        raise NotReady("no gloo", "install a PyTorch with torch.distributed and Gloo: run make setup")
    return ", ".join(there)


def gpus_with_nccl():
    import torch

    return torch.cuda.device_count() if torch.distributed.is_nccl_available() else 0


def data_facts():
    from ddp_tutorial import data

    folder = Path(os.environ.get("DDP_TUTORIAL_DATA") or project_root() / "data").expanduser()
    try:
        if data._read_files(folder / "MNIST" / "raw", data.MNIST_MD5):
            return "MNIST is on this machine"
    except data.DataError as error:
        raise NotReady(str(error), "mend the data; see the line above") from None
    return "no MNIST yet: the first run downloads it (11 MB); without a network it draws printed digits"


def port_facts():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def host_name_facts(limit=5.0):
    def ask():
        start = time.monotonic()
        socket.getaddrinfo(socket.gethostname(), None)
        socket.getfqdn()  # torchrun asks for it too
        return time.monotonic() - start

    try:
        took = in_time(limit, ask)
        if took is not None and took <= 2:
            return f"resolves in {took:.2f} s"
        seen = f"did not resolve within {limit:g} s" if took is None else f"resolves only after {took:.1f} s"
    except Exception as error:
        seen = f"does not resolve ({last_line(error)})"
    before = "; before you use torchrun in a terminal:"
    return "\n".join([seen + before, *(" " * 12 + line for line in TERMINAL_LINES)])


def in_time(limit, function):
    """What `function()` returns, None where it is not done within `limit` seconds. Raises what it raises."""
    outcome = Future()

    def run():
        try:
            outcome.set_result(function())
        except Exception as error:
            outcome.set_exception(error)

    # A thread that can be left behind: a resolver that waits for a distant server cannot be interrupted.
    threading.Thread(target=run, daemon=True).start()
    wait([outcome], limit)
    return outcome.result() if outcome.done() else None


# ------------------------------------------------------------------------------------------------------ an all-reduce


class AllReduce:
    """An all-reduce between processes of their own, started at once; none of them outlives the ``with`` block.

    backend: "gloo" (CPU) or "nccl" (one GPU for each process).
    """

    def __init__(self, backend, processes):
        self.what = f"{backend}, {processes} process{'es' if processes > 1 else ''}"
        self.backend = backend
        self.ranks = range(processes)
        self.start = time.monotonic()
        # The job ends itself when its standard input does, so it cannot outlive us even if we are killed.
        lifeline, self.lifeline = os.pipe()
        self.job = subprocess.Popen(
            [sys.executable, "-m", "ddp_tutorial.preflight", backend, str(processes)],
            cwd=Path(__file__).parents[1],
            env={"GLOO_SOCKET_IFNAME": LOOPBACK, "NCCL_SOCKET_IFNAME": LOOPBACK, **os.environ},
            stdin=lifeline,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            text=True,
            errors="replace",
        )
        os.close(lifeline)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.close(self.lifeline)
        with suppress(ProcessLookupError):
            os.killpg(self.job.pid, signal.SIGKILL)
        self.job.communicate()

    def verdict(self):
        """One line that says every rank's sum is right, or NotReady."""
        remedy = f"a {self.backend} all-reduce between processes of this machine must work; see the line above"
        if self.backend == "nccl":
            remedy += ", or hide the GPUs: export CUDA_VISIBLE_DEVICES="
        try:
            output, errors = self.job.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            raise NotReady(f"{self.what}: no result within {SECONDS} s", remedy) from None
        if self.job.returncode:
            raise NotReady(f"{self.what}: {last_line(errors)}", remedy)
        sums = {rank: found for rank, found in map(json.loads, output.splitlines())}
        wanted = [float(sum(rank + 1 for rank in self.ranks))]
        for rank in self.ranks:
            if sums.get(rank) != wanted:
                raise NotReady(f"{self.what}: rank {rank} got {sums.get(rank)}, wanted {wanted}", remedy)
        took = time.monotonic() - self.start
        addition = " + ".join(str(rank + 1) for rank in self.ranks)
        return f"{self.what}: {addition} = {wanted[0]:g} on every rank, {took:.1f} s with start-up"


def run_all_reduce(backend, processes):
    """The job's first process: end with the parent, and start one process a rank. It needs no PyTorch itself."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    port = port_facts()
    spawn = multiprocessing.get_context("spawn")
    ranks = [spawn.Process(target=_add_up, args=(rank, backend, processes, port)) for rank in range(processes)]
    for process in ranks:
        process.start()
    while True:
        # First who runs, then who has failed: one that fails in between is still waited for, and found next time.
        running = [process.sentinel for process in ranks if process.exitcode is None]
        if any(process.exitcode for process in ranks):
            os.killpg(0, signal.SIGKILL)  # else the others wait for the one that failed
        if not running:
            break
        multiprocessing.connection.wait(running)


def _end_with_parent():
    os.read(0, 1)  # returns when the other end of the pipe is closed
    os.killpg(0, signal.SIGKILL)


def _add_up(rank, backend, processes, port):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    meeting_point = f"tcp://127.0.0.1:{port}"
    patience = timedelta(seconds=SECONDS / 2)
    dist.init_process_group(backend, init_method=meeting_point, rank=rank, world_size=processes, timeout=patience)
    try:
        numbers = torch.full((1000,), rank + 1.0, device=device)
        dist.all_reduce(numbers)
        # One write, so that the lines of two ranks do not mix.
        os.write(1, (json.dumps([rank, numbers.unique().tolist()]) + "\n").encode())
    finally:
        dist.destroy_process_group()


# ------------------------------------------------------------------------------------------------------- a spawn


def spawn_from_here(function):
    """Try to run ``function(rank)`` in two processes, by torch.multiprocessing.spawn, from wherever this is called.

    Returns None when both end well, else the line that says what went wrong in the first that failed.
    """
    import torch.multiprocessing as mp

    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # not "Terminating process 1234"
    resource_tracker.ensure_running()  # it would otherwise start below and keep our temporary file as its stderr
    with tempfile.TemporaryFile("w+", errors="replace") as said, stderr_into(said):
        job = None
        try:
            job = mp.spawn(function, nprocs=2, join=False)
            deadline = time.monotonic() + SECONDS
            while not job.join(timeout=max(0, deadline - time.monotonic())):
                if time.monotonic() > deadline:
                    return f"no end within {SECONDS} s"
        except mp.ProcessExitedException as error:
            said.seek(0)
            return last_line(said.read() or error)
        except Exception as error:  # raised by the function itself, or before any process started
            return last_line(error)
        finally:
            for process in job.processes if job else []:
                process.kill()
                process.join()
    return None


@contextmanager
def stderr_into(file):
    """Children inherit file descriptor 2, whatever sys.stderr is: in a notebook it is no file at all."""
    sys.stderr.flush()
    saved = os.dup(2)
    os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


def last_line(problem):
    """Of an exception or of what a process said: the last line that names an error, else the last not blank."""
    if isinstance(problem, BaseException):
        problem = f"{type(problem).__name__}: {problem}"
    lines = [line.strip() for line in problem.splitlines() if line.strip()] or ["no message"]
    return ([line for line in lines if re.match(r"[\w.]+(Error|Exception)\b", line)] or lines)[-1]


if __name__ == "__main__":
    run_all_reduce(sys.argv[1], int(sys.argv[2]))
