"""Script 08 under the real torchrun: signals, a killed worker, a killed launcher, machines that join and leave."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
from forked_ranks import OPTIONS, forked
from test_scripts import ROOT, TORCHRUN, eventually, finish, script, start

from ddp_tutorial.machines import free_port

TRAINING = [*OPTIONS, "--limit", 3000, "--batch-size", 25, "--epochs", 3, "--snapshot-every", 5]  # 180 steps
RECORD = ROOT / "docs" / "08_elastic.txt"


def running(folder):
    """The processes whose command line names `folder`, as {pid: rank or None}."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder) in (process / "cmdline").read_text():
                environment = (process / "environ").read_bytes().split(b"\0")
                ranks = [entry[5:].decode() for entry in environment if entry.startswith(b"RANK=")]
                found[int(process.name)] = int(ranks[0]) if ranks else None
        except OSError:
            continue
    return found


def environments(folder):
    """How torchrun describes to each worker who it is, sorted."""
    found = []
    for pid, rank in running(folder).items():
        if rank is not None:
            pairs = (entry.split("=", 1) for entry in Path(f"/proc/{pid}/environ").read_text().split("\0") if entry)
            names = ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
            environment = dict(pairs)
            found.append(" ".join(f"{name}={environment[name]}" for name in names))
    return sorted(found)


def snapshots(folder):
    return sorted(folder.glob("step-*.pt"))


def train(folder, *options, launcher=(*TORCHRUN, 2)):
    return start(*launcher, script("08"), *TRAINING, "--snapshot", folder, "--json", folder.parent / "report.json",
                 *options)


def report(folder):
    return json.loads((folder.parent / "report.json").read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The weights of a training that nobody disturbs."""
    folder = tmp_path_factory.mktemp("whole") / "snapshots"
    forked("08", 2, *TRAINING, "--json", folder.parent / "report.json")
    return report(folder)["params_sha256"]


def test_08_torchrun_told_to_stop(tmp_path, whole):
    folder = tmp_path / "snapshots"
    process = train(folder)
    eventually(lambda: len(snapshots(folder)) > 1, 60, "snapshots")
    begin = time.monotonic()
    process.send_signal(signal.SIGTERM)
    out, _ = finish(process, status=1, limit=20)
    assert time.monotonic() - begin < 15
    step = int(re.search(r"stopped after step (\d+) of 180, kept in", out)[1])
    assert snapshots(folder)[-1].name == f"step-{step:09}.pt"
    assert running(folder) == {}
    out, _ = finish(train(folder))
    assert f"resumed after step {step} of 180" in out
    assert report(folder)["params_sha256"] == whole


def test_08_a_killed_worker_is_started_again(tmp_path, whole):
    folder = tmp_path / "snapshots"
    process = train(folder, launcher=(*TORCHRUN, 2, "--max-restarts", 1))
    eventually(lambda: len(snapshots(folder)) > 1, 60, "snapshots")
    (victim,) = (pid for pid, rank in running(folder).items() if rank == 0)
    os.kill(victim, signal.SIGKILL)
    finish(process)
    assert (report(folder)["params_sha256"], report(folder)["restarts"]) == (whole, 1)


def test_08_a_killed_launcher_leaves_no_workers(tmp_path, whole):
    """Its workers notice, and stop with a snapshot; who starts the training again meanwhile, waits for them."""
    folder = tmp_path / "snapshots"
    process = train(folder)
    eventually(lambda: len(snapshots(folder)) > 1, 60, "snapshots")
    process.kill()
    process.wait()
    again = train(folder)
    out, _ = finish(again)
    assert "resumed after step" in out
    assert report(folder)["params_sha256"] == whole
    assert running(folder) == {}


def test_08_a_launcher_killed_before_the_first_snapshot_leaves_no_workers(tmp_path):
    folder = tmp_path / "snapshots"
    with open(tmp_path / "said.txt", "w") as said:
        process = start(*TORCHRUN, 2, script("08"), *TRAINING, "--snapshot", folder, output=said)
    # Rank 0 says so when all ranks have met; one that still imported PyTorch could not tell that its parent is new.
    eventually(lambda: "data: " in (tmp_path / "said.txt").read_text(), 60, "workers")
    process.kill()
    process.wait()
    eventually(lambda: running(folder) == {}, 30, "the end of all workers")


def test_08_a_machine_joins_and_leaves(tmp_path):
    """Two agents stand for two machines. The second comes late, and leaves before the end: no step is lost."""
    folder = tmp_path / "snapshots"
    agent = [*TORCHRUN[:-2], "--nnodes", "1:2", "--nproc-per-node", 1, "--max-restarts", 3, "--rdzv-backend", "c10d",
             "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "elastic",
             "--rdzv-conf", "last_call_timeout=2"]
    command = [*agent, script("08"), *OPTIONS, "--limit", 6000, "--batch-size", 50, "--epochs", 8,
               "--snapshot", folder, "--snapshot-every", 40]
    environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    logs = {name: tmp_path / f"{name}.txt" for name in ("first", "second")}
    begin, timeline = time.monotonic(), []

    def note(event, environment=()):
        timeline.append(f"{time.monotonic() - begin:5.1f} s  {event}")
        timeline.extend(f"         {line}" for line in environment)

    def lines(pattern):
        """What rank 0 said, on whichever machine it was: [(machine, line)]."""
        return [(name, line) for name, log in logs.items() for line in log.read_text().split("\n")
                if re.search(pattern, line)]

    def said(pattern, count, seconds=60):
        return eventually(lambda: len(lines(pattern)) >= count and lines(pattern), seconds, f"{pattern} {count} times")

    def launch(name, *options):
        output = open(logs[name], "w")
        return start(*command, *options, output=output, **environment)

    first = launch("first", "--json", tmp_path / "first.json")
    logs["second"].touch()
    said("global batch: 1 processes x 50 = 50", 1)
    eventually(lambda: snapshots(folder), 60, "a snapshot")
    assert environments(folder) == ["RANK=0 WORLD_SIZE=1 TORCHELASTIC_RESTART_COUNT=0"]
    note("the first machine trains alone", environments(folder))
    second = launch("second", "--json", tmp_path / "second.json")
    note("the second machine comes")
    said("global batch: 50 as in the snapshot, on 2 processes", 1)
    both = [f"RANK={rank} WORLD_SIZE=2 TORCHELASTIC_RESTART_COUNT=0" for rank in (0, 1)]
    assert environments(folder) == both
    note("both train, with the same global batch", both)
    before = len(snapshots(folder)) and snapshots(folder)[-1]
    eventually(lambda: snapshots(folder)[-1] != before, 30, "a snapshot of both")
    second.send_signal(signal.SIGTERM)
    note("the second machine is told to stop (SIGTERM)")
    said(r"global batch: (1 processes|50 as in the snapshot, on 1)", 2)
    last = ["RANK=0 WORLD_SIZE=1 TORCHELASTIC_RESTART_COUNT=1"]
    assert environments(folder) == last, "a machine that leaves costs a restart, one that comes costs none"
    note("the first machine trains alone again", last)
    assert finish(second, status=1, limit=60)
    finish(first, limit=100)
    note("the first machine has finished the training")

    made = json.loads(next(path for path in (tmp_path / "first.json", tmp_path / "second.json") if path.exists())
                      .read_text())
    assert made["world_size"] == 1 and made["steps"] == len(made["step_loss"]) == 960
    assert made["test_accuracy"] > 0.9
    assert made["restarts"] == 1
    assert len(lines("global batch: ")) == 3, "three rounds, each with one rank 0"
    assert not lines("in use by another training")
    resumed = [int(re.search(r"after step (\d+)", line)[1]) for _, line in lines("^resumed after step")]
    stopped = [int(re.search(r"after step (\d+)", line)[1]) for _, line in lines("stopped after step")]
    assert sorted(resumed) == sorted(stopped) and len(resumed) == 2, "each round goes on where the last one stopped"
    text = "\n".join([*timeline, "", f"steps after which the training moved: {sorted(resumed)},"
                      f" of {made['steps']}",
                      f"losses on record: {len(made['step_loss'])}; restarts counted: {made['restarts']}"]) + "\n"
    (ROOT / "build").mkdir(exist_ok=True)
    (ROOT / "build" / "08_elastic.txt").write_text(text)  # which notebook 08 shows, from docs/
    events = [line.split(" s  ")[-1] for line in timeline]
    assert [line.split(" s  ")[-1] for line in RECORD.read_text().splitlines()[: len(events)]] == events
