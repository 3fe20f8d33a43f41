"""Run a function on several Gloo ranks of this machine, for exercises and tests; notebooks show the long way.

The processes are forked from one that has imported PyTorch already, so that a run costs a fraction of a second.
"""

import multiprocessing
import multiprocessing.connection
import os
import tempfile
import time
import traceback
from datetime import timedelta


class RankFailed(Exception):
    """A rank that raised, ended or did not end in time.

    rank: its number. frames: ``(file name, line number)`` of the traceback of what it raised, outermost first.
    """

    def __init__(self, rank, text, frames=()):
        super().__init__(f"rank {rank} {text}")
        self.rank, self.frames = rank, frames


def forking_context():
    """A multiprocessing context whose processes are forked from one that has imported PyTorch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ddp_tutorial.preload"])
    return context


def run_on_ranks(world_size, target, *arguments, seconds=20.0):
    """Call ``target(*arguments)`` in `world_size` processes that have joined one process group.

    target: a function at the top level of a module, as it is sent by name. It may use one CPU thread.
    seconds: how long a rank may wait for another, and all of them together once they have joined.

    Returns what each rank returned, in rank order; it must be picklable. Raises RankFailed for the first rank that
    fails. No process is left, whatever happens.
    """
    context = forking_context()
    with tempfile.TemporaryDirectory() as folder:
        ranks, pipes = [], []
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                work = (rank, world_size, f"file://{folder}/meet", seconds, target, arguments, theirs)
                process = context.Process(target=_work, args=work, daemon=True)
                process.start()
                theirs.close()
                ranks.append(process)
                pipes.append(ours)
            _results(pipes, 60)  # that they have joined; the first time, PyTorch is imported
            return _results(pipes, seconds + 2)
        finally:
            for process in ranks:
                process.kill()
                process.join()


def _results(pipes, seconds):
    """What each rank sends next, in rank order."""
    deadline = time.monotonic() + seconds
    results, missing = {}, dict(enumerate(pipes))
    while missing:
        ready = multiprocessing.connection.wait(list(missing.values()), max(0, deadline - time.monotonic()))
        if not ready:
            raise RankFailed(min(missing), "did not end in time")
        for rank in [rank for rank, pipe in missing.items() if pipe in ready]:
            try:
                succeeded, results[rank] = missing.pop(rank).recv()
            except EOFError:
                raise RankFailed(rank, "ended without a result") from None
            if not succeeded:
                raise RankFailed(rank, *results[rank])
    return [results[rank] for rank in range(len(pipes))]


def _work(rank, world_size, meeting_point, seconds, target, arguments, pipe):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if os.path.exists("/sys/class/net/lo") else "lo0")
    dist.init_process_group("gloo", init_method=meeting_point, rank=rank, world_size=world_size,
                            timeout=timedelta(seconds=seconds))
    pipe.send((True, "joined"))
    try:
        answer = (True, target(*arguments))
    except BaseException as error:  # also SystemExit
        frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
        answer = (False, (f"raised {type(error).__name__}: {error}", frames))
    pipe.send(answer)
    # Others may still wait for a message of ours: were we gone, they would fail for that. The caller ends all.
    pipe.poll(None)
    os._exit(0)
