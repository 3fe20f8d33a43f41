"""Which device a process trains on, and with how many CPU threads."""

import ctypes
import os
import sys
from pathlib import Path

import torch

from ddp_tutorial.arguments import refuse

ENDS_THREADS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 9)  # see below

if torch.distributed.is_available() and ENDS_THREADS:
    # Its functions have the process group that exists when it is imported as a default argument. The first optimizer
    # imports it: then they would keep the group, destroy_process_group would end none of its threads, and one of these
    # that still freed a message while Python ended would abort the process. Older releases hold Python's lock while
    # they wait for the threads (pytorch/pytorch#154976), and one that frees a message needs it: they would hang.
    import torch.distributed.nn  # noqa: F401


def choose_device(name="auto", local_processes=1, say=print):
    """The kind of device for each of `local_processes` processes on this machine.

    Args:
        name: "auto", "cpu", "cuda" or "mps".
        local_processes: processes on this machine; each needs a GPU of its own.
        say: called with the line that tells the choice; None for silence.

    Returns:
        `torch.device`, without a GPU's number: that is the process's local rank.

    Where the wish cannot be met, one line says what can be done, and the process ends with exit status 2.
    """
    gpus = torch.cuda.device_count()
    if name == "cuda" and gpus < local_processes:
        ways_out = [f"--nproc {gpus}" if local_processes > 1 and gpus else "", "--device cpu"]
        ways_out = " or ".join(way for way in ways_out if way)
        refuse(f"--device cuda needs a GPU for each of {local_processes} processes, found {gpus}: use {ways_out}")
    if name == "mps" and local_processes > 1:
        refuse(f"--device mps serves one process, not {local_processes}: use --device cpu")
    if name == "mps" and not torch.backends.mps.is_available():
        refuse("--device mps needs an Apple GPU, and there is none: use --device cpu")

    why = ""
    if name == "auto":
        name = "cuda" if gpus >= local_processes else "cpu"
        if name == "cpu":
            why = f" ({gpus or 'no'} GPU{'s' if gpus > 1 else ''} for {count(local_processes, 'process')})"
    device = torch.device(name)
    if say:
        say(f"device: {name}{why}" + (f", backend {backend_for(device)}" if local_processes > 1 else ""))
    return device


def backend_for(device):
    """The communication backend for tensors on `device`: "nccl" between NVIDIA GPUs, else "gloo"."""
    return "nccl" if device.type == "cuda" else "gloo"


def usable_cores():
    """CPU cores that this process may run on; `%%launch` divides them among the commands it runs together."""
    share = os.environ.get("DDP_TUTORIAL_CORES")
    if share:
        if not share.isascii() or not share.isdigit() or int(share) < 1:
            refuse(f"DDP_TUTORIAL_CORES={share} is not a whole number of at least 1: unset it")
        return int(share)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def set_threads(threads=None, local_processes=1, say=print):
    """Let PyTorch use `threads` CPU threads in this process, and return how many that is.

    Without `threads`: what the user set in OMP_NUM_THREADS, else this machine's cores divided by its processes. The
    number changes the order of summation, and so the last digits of every result: it must not depend on the launcher.
    Memory that a step frees is kept for the next one: see `keep_freed_memory`.
    """
    keep_freed_memory()
    threads = threads or _users_omp_threads() or max(1, usable_cores() // local_processes)
    torch.set_num_threads(threads)
    if say:
        say(f"threads: {threads} in {'each of ' if local_processes > 1 else ''}{count(local_processes, 'process')}")
    return threads


def keep_freed_memory():
    """Let the C library keep freed memory for this process; by itself it hands large blocks back to the kernel.

    Every training step on a CPU allocates the same tensors again. Coming fresh from the kernel, they cost a page fault
    for every 4 KiB, which is thousands a step. No result changes; the process stays as large as it ever was.

    Source: mallopt(3). Does nothing where the C library is not glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt:
        m_trim_threshold, m_mmap_max = -1, -4  # from malloc.h
        mallopt(m_mmap_max, 0)
        mallopt(m_trim_threshold, -1)


def cpu_features():
    """The names of this CPU's instruction sets, as Linux lists them; empty on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return {name for line in lines if line.startswith(("flags", "Features")) for name in line.split(":")[1].split()}


def count(number, noun):
    """`1 process`, `2 processes`, `3 nodes`."""
    plural = "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def _users_omp_threads():
    value = os.environ.get("OMP_NUM_THREADS", "")
    if "DDP_TUTORIAL_CORES" in os.environ:
        return None  # then %launch has set the other, too
    if value == "1" and "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("LOCAL_WORLD_SIZE", "1") != "1":
        # torchrun sets 1 by itself. What the user had set is in the environment that torchrun was started with.
        try:
            started_with = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
        except OSError:
            return None
        if not any(entry.startswith(b"OMP_NUM_THREADS=") for entry in started_with):
            return None
    return int(value) if value.isascii() and value.isdigit() and int(value) > 0 else None
