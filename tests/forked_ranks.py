"""Run a script on ranks that are forked from a process that has imported PyTorch.

They find what a launcher would have told them in their environment, and begin within a fraction of a second.
"""

import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from ddp_tutorial.machines import free_port
from ddp_tutorial.paths import load_script
from ddp_tutorial.ranks import forking_context

OPTIONS = ["--data", "printed", "--device", "cpu", "--threads", "1"]
LIMIT = 40  # seconds for one run


def rank_main(rank, world_size, port, options, log, change, number):
    """What a launcher does for each rank."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank),
                      LOCAL_WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
                      TORCHELASTIC_RESTART_COUNT="0", CUDA_VISIBLE_DEVICES="", DDP_TUTORIAL_CORES="1")
    script = load_script(number)
    sys.argv = [Path(script.__file__).name, *map(str, options)]
    if change:
        change(script)
    script.main()


class Run:
    """A run of a script on some ranks.

    log: the file for what they print; by default the environment's RUN_LOG.
    change: called with the loaded script before its main, in each rank.
    """

    def __init__(self, world_size, *options, number="08", change=None, log=None):
        context = forking_context()
        self.log = Path(log or os.environ["RUN_LOG"])
        self.log.write_text("")
        port = free_port()
        work = (world_size, port, [*OPTIONS, *options], str(self.log), change, number)
        self.ranks = [context.Process(target=rank_main, args=(rank, *work), daemon=True)
                      for rank in range(world_size)]
        for process in self.ranks:
            process.start()

    def kill(self, rank, number=signal.SIGKILL):
        os.kill(self.ranks[rank].pid, number)

    def end(self):
        """What a launcher does when a rank has failed."""
        for process in self.ranks:
            process.terminate()
        for process in self.ranks:
            process.join(1)
            process.kill()

    def wait(self, seconds=LIMIT):
        """The exit statuses, once all have ended, and what they printed."""
        deadline = time.monotonic() + seconds
        try:
            for process in self.ranks:
                process.join(max(0, deadline - time.monotonic()))
            assert all(process.exitcode is not None for process in self.ranks), f"no end: {self.log.read_text()}"
        finally:
            for process in self.ranks:
                process.kill()
        return [process.exitcode for process in self.ranks], self.log.read_text()


def forked(number, world_size, *options, status=0):
    """What script `number` prints on ranks that no launcher starts: where the launcher is not what a test is about."""
    with tempfile.NamedTemporaryFile() as log:
        statuses, out = Run(world_size, *options, number=number, log=log.name).wait(100)
    assert statuses == [status] * world_size, out
    return out
