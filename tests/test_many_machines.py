"""Script 09: who starts the ranks, a heartbeat that says who was lost, and machines without a disk in common.

The ranks are forked, as in test_elastic.py. Real launchers and real machines are in test_launchers.py.
"""

import os
import signal
import socket
import sys
import time

import pytest
import torch
import torch.distributed as dist
from forked_ranks import LIMIT, Run
from test_elastic import EXACT, eventually, finished, running
from test_scripts import finish, start

from ddp_tutorial.machines import free_port
from ddp_tutorial.paths import load_script
from ddp_tutorial.ranks import forking_context


@pytest.fixture(autouse=True)
def log(tmp_path, monkeypatch):
    monkeypatch.setenv("RUN_LOG", str(tmp_path / "log.txt"))


# ------------------------------------------------------------------------------------------------------- launchers

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "6", "OMPI_COMM_WORLD_LOCAL_RANK": "2",
          "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}
SRUN = {"SLURM_PROCID": "4", "SLURM_STEP_NUM_TASKS": "5", "SLURM_LOCALID": "0", "SLURM_NODEID": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2),1"}
MASTER = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}


def learned(monkeypatch, environment):
    """RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, after script 09 has looked at this environment."""
    for name in [*os.environ]:
        if name.startswith(("SLURM_", "OMPI_")) or name in [*TORCHRUN, *MASTER]:
            monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    try:
        load_script("09").learn_rank()
        return [int(os.environ[name]) for name in TORCHRUN]
    finally:
        for name in TORCHRUN:
            os.environ.pop(name, None)


@pytest.mark.parametrize("environment, wanted", [
    (TORCHRUN | MASTER, [3, 4, 1, 2]),
    (MPIRUN | MASTER, [5, 6, 2, 3]),
    (SRUN | MASTER, [4, 5, 0, 1]),
    (SRUN | MASTER | TORCHRUN, [3, 4, 1, 2]),
    (SRUN | MASTER | MPIRUN, [5, 6, 2, 3]),
], ids=["torchrun", "mpirun", "srun", "torchrun in a job of Slurm", "mpirun in a job of Slurm"])
def test_09_learns_its_rank(monkeypatch, environment, wanted):
    assert learned(monkeypatch, environment) == wanted


BATCH_STEP = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize("environment, said", [
    ({}, "no launcher has told this process its rank"),
    (MASTER, "no launcher has told this process its rank"),
    (BATCH_STEP | MASTER, "no launcher has told this process its rank"),
    (MPIRUN, "mpirun does not say where rank 0 is"),
    (SRUN | {"MASTER_ADDR": "node0"}, "srun does not say where rank 0 is"),
], ids=["nobody", "only where rank 0 is", "sbatch without srun", "mpirun", "srun"])
def test_09_no_rank_is_refused(monkeypatch, capsys, environment, said):
    with pytest.raises(SystemExit) as end:
        learned(monkeypatch, environment)
    err = capsys.readouterr().err
    assert end.value.code == 2 and said in err and err.count("\n") == 1


@pytest.mark.parametrize("text, counts", [("1", "1"), ("2(x3),1", "2221"), ("8(x2),4(x1),1", "8841"), ("junk", "")])
def test_09_tasks_of_nodes(text, counts):
    assert load_script("09").tasks_of_nodes(text) == {str(node): count for node, count in enumerate(counts)}


@pytest.mark.parametrize("environment", [
    TORCHRUN,
    TORCHRUN | MASTER | {"RANK": "abc"},
    TORCHRUN | MASTER | {"RANK": "4"},
    TORCHRUN | MASTER | {"LOCAL_RANK": "2"},
    TORCHRUN | MASTER | {"MASTER_PORT": "0"},
    TORCHRUN | MASTER | {"MASTER_PORT": "65536"},
    TORCHRUN | MASTER | {"MASTER_ADDR": ""},
    MASTER | {"OMPI_COMM_WORLD_RANK": "0"},
    MASTER | SRUN | {"SLURM_STEP_TASKS_PER_NODE": "junk"},
    MASTER | SRUN | {"SLURM_NODEID": "3"},
])
def test_09_variables_that_do_not_fit_are_refused(monkeypatch, capsys, environment):
    with pytest.raises(SystemExit) as end:
        learned(monkeypatch, environment)
    err = capsys.readouterr().err
    assert end.value.code == 2 and "the launcher's variables do not fit together (RANK=" in err
    assert err.count("\n") == 1


def test_09_each_attempt_has_names_of_its_own_where_torchruns_keep_the_store(monkeypatch):
    """Else they may not: torchruns can have counted the restarts differently."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    for number in ("08", "09"):
        for shared, wanted in (("True", 2), ("False", 0)):
            monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", shared)
            assert load_script(number).attempt() == wanted


# ------------------------------------------------------------------------------------------------------- heartbeat

LONG = ["--limit", 3000, "--batch-size", 10, "--epochs", 9, "--heartbeat-timeout", 4, "--snapshot-every", 5]


def stopped_ranks(tmp_path, stopped):
    """Freeze these of three ranks, as if their machine had vanished: what the others said, and after how long."""
    run = running(3, tmp_path / "snapshots", *LONG, number="09")
    for rank in stopped:
        run.kill(rank, signal.SIGSTOP)
    begin = time.monotonic()
    others = [process for rank, process in enumerate(run.ranks) if rank not in stopped]
    for process in others:
        process.join(LIMIT)
    took = time.monotonic() - begin
    statuses = [process.exitcode for process in others]
    for rank in stopped:
        run.kill(rank)
    run.wait()
    return statuses, run.log.read_text(), took


def test_09_a_lost_rank_is_named_by_all_others(tmp_path):
    statuses, log, took = stopped_ranks(tmp_path, [1])
    assert statuses == [1, 1] and 4 < took < 20
    for rank in (0, 2):
        assert f"[rank {rank}] lost rank 1 on {os.uname().nodename}: not heard of for 4 s" in log
    assert "Traceback" not in log


def test_09_all_lost_ranks_are_named(tmp_path):
    statuses, log, _ = stopped_ranks(tmp_path, [1, 2])
    node = os.uname().nodename
    assert statuses == [1] and f"[rank 0] lost rank 1 on {node}, rank 2 on {node}: not heard of for 4 s" in log


def test_09_a_lost_store_is_named(tmp_path):
    """Rank 0 keeps the store here: the others cannot ask anybody whom they have lost."""
    statuses, log, took = stopped_ranks(tmp_path, [0])
    assert statuses == [1, 1] and took < 25
    assert "[rank 1] lost the store on 127.0.0.1: not heard of for 9 s" in log


def test_09_a_slow_rank_is_not_lost(tmp_path):
    """One that is busy for longer than the heartbeat's patience, in the middle of the training."""
    report = finished(2, tmp_path, *EXACT, "--heartbeat-timeout", 3, change=busy, number="09")
    assert report["world_size"] == 2 and report["steps"] == 30


def test_09_ranks_that_have_left_are_not_lost(tmp_path):
    """Rank 0 is still busy with its report when the others have ended."""
    report = finished(3, tmp_path, *EXACT, "--heartbeat-timeout", 3, change=slow_report, number="09")
    assert report["world_size"] == 3


def slow_report(script):
    write = script.write_report

    def slowly(*arguments, **options):
        time.sleep(7)
        write(*arguments, **options)

    script.write_report = slowly


def test_09_a_job_that_stood_still_goes_on(tmp_path):
    """Suspended by the cluster, or with its whole computer: nobody was lost."""
    run = running(2, tmp_path / "snapshots", "--limit", 1000, "--batch-size", 5, "--epochs", 3, "--snapshot-every", 5,
                  "--heartbeat-timeout", 3, number="09")
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for rank in (0, 1):
            run.kill(rank, number)
        time.sleep(12 if number == signal.SIGSTOP else 0)
    statuses, log = run.wait()
    assert statuses == [0, 0], log


def only_a_heart(rank, port, log):
    """A rank of two that does nothing but beat. Rank 0 keeps the store."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 2)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False) if rank == 0 else None
    heartbeat = load_script("09").Heartbeat(rank, 2, patience=3)
    heartbeat.beating.join(LIMIT)
    del store


def start_heart(rank, port, log):
    process = forking_context().Process(target=only_a_heart, args=(rank, port, str(log)), daemon=True)
    process.start()
    return process


def test_09_who_stood_still_has_patience_again(tmp_path):
    """It asks before rank 0 has gone on, and hears what it has heard before: that is not being lost."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    beats = dist.PrefixStore("heartbeat 0", store)
    beats.set("name 0", "rank 0 on node0")
    beats.set("beat 0", "7")
    rank1 = start_heart(1, store.port, tmp_path / "log.txt")
    eventually(lambda: int(beats.get("beat 1")) >= 2, LIMIT, "rank 1 has heard of rank 0")
    os.kill(rank1.pid, signal.SIGSTOP)
    time.sleep(5)
    os.kill(rank1.pid, signal.SIGCONT)
    begin = time.monotonic()
    rank1.join(LIMIT)
    assert 3 <= time.monotonic() - begin < 10 and rank1.exitcode == 1
    assert "[rank 1] lost rank 0 on node0: not heard of for 3 s" in (tmp_path / "log.txt").read_text()


def test_09_who_stood_still_with_a_question_gets_the_answer(tmp_path):
    """The store stands still first, then who asks it; and goes on after it."""
    port = free_port()
    ranks = [start_heart(rank, port, tmp_path / "log.txt") for rank in (0, 1)]
    beats = dist.PrefixStore("heartbeat 0", dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False))
    eventually(lambda: int(beats.get("beat 1")) >= 2, LIMIT, "both are beating")
    for rank, number in ((0, signal.SIGSTOP), (1, signal.SIGSTOP), (1, signal.SIGCONT), (0, signal.SIGCONT)):
        os.kill(ranks[rank].pid, number)
        time.sleep(5 if (rank, number) == (1, signal.SIGSTOP) else 1.5)
    before = int(beats.get("beat 1"))
    eventually(lambda: int(beats.get("beat 1")) > before + 5, 15, "rank 1 beats again")
    assert [process.is_alive() for process in ranks] == [True, True], (tmp_path / "log.txt").read_text()
    for process in ranks:
        process.kill()


def busy(script):
    evaluate = script.evaluate

    def slowly(*arguments):
        if script.dist.get_rank() == 1:
            time.sleep(7)
        return evaluate(*arguments)

    script.evaluate = slowly


# ----------------------------------------------------------------------------------------------- no disk in common


def own_machine(script):
    """Each rank is on a machine of its own, whose disk the others do not see."""
    rank = os.environ["RANK"]
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    parse = script.parse_args

    def parse_args():
        args = parse()
        args.snapshot = args.snapshot / f"disk {rank}"
        args.snapshot.mkdir(exist_ok=True)
        return args

    script.parse_args = parse_args


def with_disks(folder, *options):
    return finished(2, folder, *EXACT, "--snapshot", folder, "--snapshot-every", 10, *options, change=own_machine,
                    number="09")


def steps_on(disk):
    return [int(path.stem.removeprefix("step-")) for path in sorted(disk.glob("step-*.pt"))]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The report of a training that nobody disturbs."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RUN_LOG", str(folder / "log.txt"))
        return finished(2, folder, *EXACT, number="09")


@pytest.mark.parametrize("changed_places", [False, True])
def test_09_goes_on_from_the_disk_that_has_the_newest_snapshot(tmp_path, whole, changed_places):
    folder = tmp_path / "parted"
    run = Run(2, *EXACT, "--snapshot", folder, "--snapshot-every", 10, "--stop-after", 25, change=own_machine,
              number="09")
    assert run.wait()[0] == [0, 0]
    disks = folder / "disk 0", folder / "disk 1"
    assert [steps_on(disk) for disk in disks] == [[10, 20, 25], []]
    if changed_places:  # and the other one has an older snapshot
        disks[0].rename(folder / "moved")
        disks[1].rename(disks[0])
        (folder / "moved").rename(disks[1])
        (disks[1] / "step-000000010.pt").rename(disks[0] / "step-000000010.pt")
    report = with_disks(folder)
    assert report["resumed_after"] == 25
    assert report["params_sha256"] == whole["params_sha256"]
    assert report["step_loss"] == whole["step_loss"]
    assert ("rank 1's machine has the newest snapshot" in run.log.read_text()) == changed_places


@pytest.mark.parametrize("moved, damaged, wanted", [
    ([25], "disk 1/step-000000025.pt", 20), ([20, 25], "disk 0/step-000000010.pt", 25),
], ids=["the newest is damaged", "rank 0's is damaged"])
def test_09_a_damaged_snapshot_on_one_disk_is_passed_over(tmp_path, whole, moved, damaged, wanted):
    run = Run(2, *EXACT, "--snapshot", tmp_path, "--snapshot-every", 10, "--stop-after", 25, change=own_machine,
              number="09")
    assert run.wait()[0] == [0, 0]
    for step in moved:
        (tmp_path / "disk 0" / f"step-{step:09}.pt").rename(tmp_path / "disk 1" / f"step-{step:09}.pt")
    with open(tmp_path / damaged, "r+b") as file:
        file.truncate(1000)
    refused = Run(2, *EXACT, "--snapshot", tmp_path, "--no-fallback", change=own_machine, number="09")
    assert refused.wait()[0] == [2, 2]
    report = with_disks(tmp_path)
    assert (report["resumed_after"], report["params_sha256"]) == (wanted, whole["params_sha256"])


def test_09_a_refusal_on_one_disk_is_all_ranks(tmp_path):
    """The other machine's only snapshot is damaged: nobody goes on from another step than anybody else."""
    (tmp_path / "disk 1").mkdir()
    (tmp_path / "disk 1" / "step-000000010.pt").write_bytes(b"damaged")
    run = Run(2, *EXACT, "--snapshot", tmp_path, change=own_machine, number="09")
    statuses, log = run.wait()
    assert statuses == [2, 2] and log.count("(damaged: BadZipFile), nor can an older one: give another") == 2


# --------------------------------------------------------------------------------------------------- other options


def other_learning_rate(script):
    if os.environ["RANK"] == "1":
        sys.argv += ["--lr", "0.1"]


def other_data(script):
    """As on a machine that could not download what the others have."""
    load = script.load_data

    def load_data(*arguments, **options):
        train_set, test_set = load(*arguments, **options)
        train_set.source = "mnist"
        return train_set, test_set

    if os.environ["RANK"] == "1":
        script.load_data = load_data


def only_rank_0_takes_snapshots(script):
    if os.environ["RANK"] == "0":
        sys.argv += ["--snapshot", "build/09_refused"]


def other_torch(script):
    if os.environ["RANK"] == "2":
        script.torch.__version__ = "2.6.0"


@pytest.mark.parametrize("change, said", [
    (other_learning_rate, "rank 0 has --lr 0.05, but rank 1 --lr 0.1: give all of them the same"),
    (only_rank_0_takes_snapshots,
     "rank 0 has --snapshot given, but rank 1 --snapshot not given: give all of them the same"),
    (other_data, "rank 0 has printed digits, 600 and 600 images, but rank 1 MNIST, 600 and 600 images: give all"
                 " machines the same data"),
    (other_torch, f"rank 0 has PyTorch {torch.__version__}, but rank 2 PyTorch 2.6.0: give all of them the same"),
], ids=["options", "snapshots", "data", "version"])
def test_09_ranks_that_differ_are_refused_by_all(tmp_path, change, said):
    statuses, log = Run(3, *EXACT, change=change, number="09").wait()
    assert statuses == [2, 2, 2] and log.count(said) == 3


@pytest.mark.parametrize("rank, said", [
    (0, "another program uses port {port} on this machine: choose another MASTER_PORT"),
    (1, "not all 2 ranks came to 127.0.0.1:{port} within 1 s: to find out why, run python -m ddp_tutorial"),
])
def test_09_a_port_that_something_else_uses(rank, said):
    with socket.create_server(("127.0.0.1", 0)) as server:  # which never answers
        port = server.getsockname()[1]
        process = start("09", "--join-timeout", 1, RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK="0",
                        LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        _, err = finish(process, status=2, limit=40)
    assert err.count("\n") == 1 and said.format(port=port) in err


def nobody_else(script):
    if os.environ["RANK"] == "1":
        os._exit(0)


def test_09_a_rank_that_never_comes(tmp_path):
    begin = time.monotonic()
    statuses, log = Run(3, *EXACT, "--join-timeout", 5, change=nobody_else, number="09").wait()
    assert statuses == [2, 0, 2] and time.monotonic() - begin < 30
    assert log.count("not all 3 ranks came ") == 2
    assert "find out why, run python -m ddp_tutorial --rendezvous 127.0.0.1:" in log, "rank 0 may know no more"
