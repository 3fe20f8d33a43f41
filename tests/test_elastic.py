"""Script 08: killed and resumed equals never killed; whatever happens to the newest snapshot, the others survive.

The ranks are forked from a process that has imported PyTorch, as a launcher would start them but much quicker.
What torchrun itself does (signals, restarts, machines that join and leave) is tested in test_torchrun_elastic.py.
"""

import functools
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from ddp_tutorial.machines import free_port
from ddp_tutorial.paths import load_script

OPTIONS = ["--data", "printed", "--device", "cpu", "--threads", "1"]
LIMIT = 40  # seconds for one run


@functools.cache
def script_08():
    return load_script("08")


def rank_main(rank, world_size, port, options, log, change):
    """What a launcher does for each rank."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank),
                      LOCAL_WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
                      TORCHELASTIC_RESTART_COUNT="0", CUDA_VISIBLE_DEVICES="", DDP_TUTORIAL_CORES="1")
    sys.argv = ["08_checkpoint_and_elastic.py", *map(str, options)]
    script = load_script("08")
    if change:
        change(script)
    script.main()


class Run:
    """A run of script 08 on some ranks."""

    def __init__(self, world_size, *options, change=None):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed", "torch._dynamo"])
        self.log = Path(os.environ["RUN_LOG"])
        self.log.unlink(missing_ok=True)
        port = free_port()
        work = (world_size, port, [*OPTIONS, *options], str(self.log), change)
        self.ranks = [context.Process(target=rank_main, args=(rank, *work), daemon=True)
                      for rank in range(world_size)]
        for process in self.ranks:
            process.start()

    def kill(self, rank, number=signal.SIGKILL):
        os.kill(self.ranks[rank].pid, number)

    def wait(self):
        """The exit statuses, once all have ended, and what they printed."""
        deadline = time.monotonic() + LIMIT
        try:
            for process in self.ranks:
                process.join(max(0, deadline - time.monotonic()))
            assert all(process.exitcode is not None for process in self.ranks), f"no end: {self.log.read_text()}"
        finally:
            for process in self.ranks:
                process.kill()
        return [process.exitcode for process in self.ranks], self.log.read_text()


@pytest.fixture(autouse=True)
def log(tmp_path, monkeypatch):
    monkeypatch.setenv("RUN_LOG", str(tmp_path / "log.txt"))


def finished(world_size, folder, *options, **more):
    """Run to the end; the report."""
    path = folder / "report.json"
    statuses, log = Run(world_size, *options, "--json", path, "--checkpoint", folder / "weights.pt", **more).wait()
    assert statuses == [0] * world_size, log
    return json.loads(path.read_text())


def weights(folder):
    return torch.load(folder / "weights.pt", weights_only=True)


SHORT = ["--limit", 600, "--batch-size", 20, "--epochs", 2]
