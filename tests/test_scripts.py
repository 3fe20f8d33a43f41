"""The scripts, run as a reader runs them: what they compute, what they refuse, and what they leave behind.

A test whose name has ``03_`` in it belongs to script 03: `make test NB=03` chooses by that.
"""

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from forked_ranks import OPTIONS, forked

from ddp_tutorial.device import ENDS_THREADS
from ddp_tutorial.machines import free_port
from ddp_tutorial.model import ConvNet
from ddp_tutorial.ranks import forking_context
from ddp_tutorial.report import params_sha256

ROOT = Path(__file__).parents[1]
KEYS = {
    "script", "data", "device", "backend", "world_size", "batch_size", "global_batch_size", "epochs", "steps",
    "train_loss", "test_accuracy", "test_samples", "seconds", "images_per_second", "params_sha256", "torch",
}  # fmt: skip
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
ENVIRONMENT = os.environ | {
    "PET_LOCAL_ADDR": "127.0.0.1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_WAIT_POLICY": "PASSIVE",
}  # fmt: skip


def start(*command, output=None, **environment):
    """Start a command at the repository's root. `01`, `02`… as its first word is that script.

    output: a file for what it prints, in place of pipes.
    """
    command = [str(word) for word in command]
    if re.fullmatch(r"\d\d", command[0]):
        command = [sys.executable, script(command[0]), *command[1:]]
    return subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT | environment, text=True, encoding="utf-8",
                            stdin=subprocess.DEVNULL, stdout=output or subprocess.PIPE,
                            stderr=subprocess.STDOUT if output else subprocess.PIPE,
                            start_new_session=True)


def finish(process, status=0, limit=100):
    """Its standard output and standard error, once it has ended with `status`."""
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"no end after {limit} s\n{out}\n{err}")
    assert process.returncode == status, f"exit status {process.returncode}\n{out}\n{err}"
    return out, err


def eventually(condition, seconds, what):
    """What `condition()` returns, as soon as that is true."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.01)
    return found


def run(*command, status=0, **environment):
    return finish(start(*command, **environment), status)


def script(number):
    (path,) = (ROOT / "scripts").glob(f"{number}_*.py")
    return str(path)


class Trained:
    """What a training left: the report, the weights, and what it printed.

    launcher: the command that starts it, or for ranks that are `forked` the script and their number.
    """

    def __init__(self, folder, launcher, *options):
        options += ("--json", folder / "report.json", "--checkpoint", folder / "weights.pt")
        if isinstance(launcher, tuple):
            self.out = forked(*launcher, *options)
        else:
            self.out, self.err = run(*launcher, *OPTIONS, *options)
        self.report = json.loads((folder / "report.json").read_text())
        self.weights = torch.load(folder / "weights.pt", weights_only=True)

    def furthest_from(self, other):
        assert self.weights.keys() == other.weights.keys() and len(self.weights) >= 6
        return max((self.weights[name] - other.weights[name]).abs().max().item() for name in self.weights)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """`trained(launcher, options…)`: a Trained, made once for the same words."""
    made = {}

    def get(launcher, *options):
        key = str((launcher, options))
        if key not in made:
            made[key] = Trained(tmp_path_factory.mktemp("trained"), launcher, *options)
        return made[key]

    return get


TWENTY_STEPS = ["--limit", 2000]
EXACT = [*TWENTY_STEPS, "--norm", "none", "--dtype", "float64"]


def torchrun(number, processes=2, *options):
    return [*TORCHRUN, processes, *options, script(number)]


def test_01_reports_what_it_did(trained):
    one = trained(["01"], *TWENTY_STEPS)
    report = one.report
    assert KEYS <= report.keys()
    assert (report["script"], report["data"], report["device"]) == ("01_single_device.py", "printed", "cpu")
    assert (report["world_size"], report["global_batch_size"], report["steps"]) == (1, 100, 20)
    assert len(report["step_loss"]) == 20 and len(report["train_loss"]) == 1
    assert sum(report["step_loss"]) / 20 == pytest.approx(report["train_loss"][0])
    assert report["step_loss"][0] == pytest.approx(2.4, abs=0.5), "a model that knows nothing is at log 10"
    assert report["step_loss"][-1] < 0.8 * report["step_loss"][0]
    assert report["test_samples"] == 2000
    assert 0 < report["images_per_second"] < 1e6
    model = ConvNet()
    model.load_state_dict(one.weights)
    assert params_sha256(model) == report["params_sha256"]
    assert f"{report['test_accuracy']:.2%} of 2,000 right" in one.out
    assert one.err == "", "no warnings"


def test_01_accuracy_is_that_of_the_checkpoint(trained):
    from ddp_tutorial.data import load_datasets

    one = trained(["01"], *TWENTY_STEPS)
    model = ConvNet()
    model.load_state_dict(one.weights)
    model.eval()
    _, test_set = load_datasets("printed", limit=2000, say=None)
    images, labels = test_set[range(2000)]
    with torch.no_grad():
        correct = (model(images).argmax(1) == labels).sum().item()
    assert correct / 2000 == pytest.approx(one.report["test_accuracy"], abs=0.0011)


def test_02_two_processes_of_50_are_one_of_100(trained):
    one = trained(("01", 1), *EXACT)
    two = trained(["02", "--init-method", f"tcp://127.0.0.1:{free_port()}"], *EXACT, "--batch-size", 50)
    assert two.report["global_batch_size"] == one.report["global_batch_size"] == 100
    assert one.furthest_from(two) <= 1e-12
    assert two.report["step_loss"] == pytest.approx(one.report["step_loss"], abs=1e-10)
    assert two.report["test_accuracy"] == one.report["test_accuracy"]
    assert two.report["test_samples"] == 2000
    assert len(two.report["rank_params_sha256"]) == 2 and len(set(two.report["rank_params_sha256"])) == 1
    assert two.out.count(two.report["params_sha256"][:12]) == 2
    assert not any(name.startswith("module.") for name in two.weights)
    assert two.err == "", "no warnings"


def test_03_shards_may_be_uneven_or_empty(trained):
    """In the second step rank 0 has one image, and the others none: still the gradient of the global mean."""
    options = ["--limit", 151, "--norm", "none", "--dtype", "float64"]
    one = trained(("01", 1), *options, "--batch-size", 150)
    three = trained(("03", 3), *options, "--batch-size", 50)
    assert three.report["steps"] == one.report["steps"] == 2
    assert one.furthest_from(three) <= 1e-12
    assert three.report["test_samples"] == 151
    assert three.report["test_accuracy"] == one.report["test_accuracy"]


def test_03_batch_norm_survives_an_empty_shard(trained):
    two = trained(("03", 2), "--limit", 101, "--batch-size", 50)
    assert two.report["steps"] == 2
    assert all(tensor.isfinite().all() for tensor in two.weights.values())


def test_02_two_machines_are_as_two_processes(tmp_path, trained):
    meeting = ["--master-port", free_port(), "--init-method", f"file://{tmp_path}/meet"]
    options = ["--data", "printed", "--device", "cpu", "--threads", 1, *TWENTY_STEPS, "--batch-size", 50]
    machine = ["02", "--nodes", 2, "--nproc", 1, *meeting, *options, "--node-rank"]
    first, second = start(*machine, 0, "--json", tmp_path / "0.json"), start(*machine, 1)
    finish(first)
    out, _ = finish(second)
    assert out == "", "only rank 0 speaks, on machine 0"
    report = json.loads((tmp_path / "0.json").read_text())
    assert report["params_sha256"] == trained(["02"], *TWENTY_STEPS, "--batch-size", 50).report["params_sha256"]


def test_02_unequal_machines_are_refused():
    machine = ["02", "--nodes", 2, "--data", "printed", "--master-port", free_port()]
    first = start(*machine, "--node-rank", 0, "--nproc", 1)
    second = start(*machine, "--node-rank", 1, "--nproc", 2)
    for process in (first, second):
        out, err = finish(process, status=2, limit=40)
        assert err.count("\n") == 1
        assert "machine 0 has --nproc 1, but machine 1 --nproc 2: give all of them the same" in err


def test_02_machines_with_other_options_are_refused():
    machine = ["02", "--nodes", 2, "--nproc", 1, "--data", "printed", "--master-port", free_port(), "--node-rank"]
    first, second = start(*machine, 0), start(*machine, 1, "--lr", 0.2)
    for process in (first, second):
        _, err = finish(process, status=2, limit=40)
        assert "machine 0 has --lr 0.05, but machine 1 --lr 0.2: give all of them the same" in err


def test_02_checkpoint_every_n_epochs(tmp_path):
    """Three epochs and --save-every 2: the file is that of epoch 2."""
    options = ["--data", "printed", "--device", "cpu", "--limit", 200, "--lr", 0.01]
    path = tmp_path / "weights.pt"
    options += ["--epochs", 3, "--save-every", 2, "--json", tmp_path / "3.json"]
    run("02", "--nproc", 1, *options, "--checkpoint", path)
    model = ConvNet()
    model.load_state_dict(torch.load(path, weights_only=True))
    assert model.block1[1].num_batches_tracked == 4  # two steps an epoch
    assert params_sha256(model) != json.loads((tmp_path / "3.json").read_text())["params_sha256"]
    assert list(tmp_path.iterdir()) and not list(tmp_path.glob("*.tmp"))


def test_02_a_failing_worker_ends_the_job(tmp_path):
    """The script of the notebook in which rank 1 divides by zero while rank 0 waits for it."""
    notebook = json.loads((ROOT / "notebooks/02_ddp_spawn.ipynb").read_text())
    (cell,) = (cell for cell in notebook["cells"] if cell["id"] == "part-failure")
    path = tmp_path / "failure.py"
    path.write_text("".join(cell["source"]).split("\n", 1)[1])
    began = time.monotonic()
    _, err = run(sys.executable, path, status=1)
    assert time.monotonic() - began < 60
    assert "Process 1 terminated" in err or "process 1 terminated" in err.lower()
    assert err.rstrip().endswith("ZeroDivisionError: division by zero")


def test_03_is_02_under_another_launcher(trained):
    spawned = trained(["02"], *TWENTY_STEPS, "--batch-size", 50)
    launched = trained(torchrun("03"), *TWENTY_STEPS, "--batch-size", 50)
    assert launched.report["params_sha256"] == spawned.report["params_sha256"]
    assert launched.report["step_loss"] == spawned.report["step_loss"]


def test_03_killed_and_resumed_is_never_killed(tmp_path, trained):
    """Started again by hand; that torchrun does it with --max-restarts is proven in notebook 03."""
    epochs = ["--limit", 600, "--epochs", 3]
    whole = trained(("01", 1), *epochs)
    path = tmp_path / "snapshot.pt"
    options = ["03", 1, *epochs, "--snapshot", path]
    out = forked(*options, "--kill-after", 2, status=-signal.SIGKILL)
    assert "[rank 0] killed after epoch 2, on purpose" in out
    snapshot = torch.load(path, weights_only=True)
    assert snapshot["epoch"] == 2
    assert len(snapshot["optimizer"]["state"]) == 10
    assert all((state["momentum_buffer"] != 0).any() for state in snapshot["optimizer"]["state"].values())
    out = forked(*options, "--json", tmp_path / "report.json")
    assert "resumed after epoch 2" in out and "epoch 3/3: loss" in out and "epoch 2/3" not in out
    resumed = json.loads((tmp_path / "report.json").read_text())
    assert resumed["params_sha256"] == whole.report["params_sha256"]
    assert resumed["step_loss"] == whole.report["step_loss"] and len(whole.report["step_loss"]) == 18
    # Another model's snapshot is refused, in one line, and stays as it is.
    before = path.read_bytes()
    out = forked(*options, "--width", 2, status=2)
    refusals = [line for line in out.splitlines() if line.startswith("03_torchrun.py: ")]
    assert len(refusals) == 1 and "was made with other options (width 1): give the same" in refusals[0]
    assert path.read_bytes() == before


def test_03_a_broken_snapshot_is_named(tmp_path):
    """By the worker; torchrun adds lines of its own, and ends with another status."""
    (tmp_path / "snapshot.pt").write_bytes(b"PK\x03\x04 not a snapshot")
    options = [*OPTIONS, "--limit", 100, "--snapshot", tmp_path / "snapshot.pt"]
    _, err = run(*torchrun("03", 1), *options, status=1)
    assert f"{tmp_path}/snapshot.pt is not a snapshot of this script" in err
    assert (tmp_path / "snapshot.pt").read_bytes() == b"PK\x03\x04 not a snapshot"


THREADS = """
import runpy, sys
from pathlib import Path
runpy.run_path(sys.argv.pop(1))["main"]()
print("left:", *sorted(path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")))
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="only Linux names the threads of a process")
@pytest.mark.skipif(not ENDS_THREADS, reason="this PyTorch could hang where it ends them: see device.py")
def test_03_no_thread_of_the_group_is_left():
    """One that frees a message while Python ends would abort the process."""
    out, _ = run(sys.executable, "-c", THREADS, script("03"), *OPTIONS, "--limit", 100,
                 RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1",
                 MASTER_PORT=str(free_port()), GLOO_SOCKET_IFNAME="lo")
    (threads,) = re.findall("^left: (.*)$", out, re.M)
    assert threads.startswith("python") and "gloo" not in threads and "tcpstore" not in threads


def join_as_a_worker(rank, attempt, port, seconds_late):
    """What a worker of torchrun does to join, in a process that starts for it alone."""
    import runpy
    from argparse import Namespace

    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(attempt), "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    join = runpy.run_path(script("03"))["join_process_group"]
    time.sleep(seconds_late)
    join(Namespace(device="cpu"))
    torch.distributed.barrier()
    os._exit(0)


def test_03_a_restarted_worker_does_not_call_the_dead(monkeypatch):
    """torchrun's store outlives its workers, and holds the addresses of the last attempt's. Rank 0 comes first.

    Which of two ranks calls the other depends on their port numbers: it takes several attempts to see it go wrong.
    """
    from datetime import timedelta

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    context = forking_context()
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60),
                                       wait_for_workers=False)
    for attempt in range(7):
        workers = [context.Process(target=join_as_a_worker, args=(rank, attempt, store.port, rank))
                   for rank in (0, 1)]
        for worker in workers:
            worker.start()
        try:
            for worker in workers:
                worker.join(30)
            assert [worker.exitcode for worker in workers] == [0, 0], f"attempt {attempt}"
        finally:
            for worker in workers:
                worker.kill()


def test_04_off_is_01(trained):
    """One process under DDP, without mixed precision, is the plain loop, to the last bit."""
    plain = trained(["01"], *TWENTY_STEPS)
    off = trained(("04", 1), *TWENTY_STEPS)
    assert off.report["params_sha256"] == plain.report["params_sha256"]


def test_04_bfloat16_learns_the_same(trained):
    mixed = trained(("04", 1), *TWENTY_STEPS, "--amp", "bfloat16")
    sixteen_bits_learn_the_same(trained(["01"], *TWENTY_STEPS), mixed)


def sixteen_bits_learn_the_same(plain, mixed):
    assert mixed.report["params_sha256"] != plain.report["params_sha256"], "it did compute in another format"
    assert mixed.report["train_loss"][0] == pytest.approx(plain.report["train_loss"][0], rel=0.03)
    assert mixed.report["test_accuracy"] == pytest.approx(plain.report["test_accuracy"], abs=0.03)
    assert {tensor.dtype for tensor in mixed.weights.values()} == {torch.float32, torch.int64}


def test_04_float16_learns_the_same_clips_and_keeps_its_scale(tmp_path, trained):
    """A scale that is far too high is halved until it fits; the snapshot has it, and the next run begins with it."""
    path = tmp_path / "snapshot.pt"
    options = ["--limit", 1000, "--amp", "float16", "--snapshot", path]
    mixed = Trained(tmp_path, ("04", 1), *options)
    sixteen_bits_learn_the_same(trained(("01", 1), "--limit", 1000), mixed)
    snapshot = torch.load(path, weights_only=True)
    assert mixed.report["loss_scale"] == snapshot["scaler"]["scale"] == 65536.0
    snapshot["scaler"]["scale"] = 2.0**24
    torch.save(snapshot, path)
    again = Trained(tmp_path, ("04", 1), *options, "--epochs", 2, "--clip-norm", 1e-6)
    assert 1 <= again.report["loss_scale"] < 2.0**24
    moved = max((again.weights[name] - tensor).abs().max().item() for name, tensor in mixed.weights.items()
                if name.endswith(("weight", "bias")))
    assert moved > 0


def test_07_two_processes_with_synchronised_batch_norm_are_one(trained):
    """Batch norm over all ranks, in a whole training under DDP: as one process with the global batch."""
    options = ["--limit", 1010, "--dtype", "float64"]  # the last global batch has 10 images
    one = trained(("01", 1), *options)
    two = trained(("07", 2), *options, "--norm", "sync", "--batch-size", 50)
    assert two.report["global_batch_size"] == 100 and two.report["steps"] == 11
    assert one.furthest_from(two) <= 1e-10
    assert two.report["test_accuracy"] == one.report["test_accuracy"]
    assert sum(map(sum, two.report["confusion"])) == two.report["test_samples"] == 1010
    assert f"{two.report['test_accuracy']:.2%} of 1,010 right; the worst: digit" in two.out


def test_07_weights_of_another_model_are_refused(tmp_path):
    path = tmp_path / "weights.pt"
    torch.save(ConvNet(width=2).state_dict(), path)
    out = forked("07", 1, "--limit", 100, "--evaluate", path, status=2)
    assert f"{path} holds no weights for this model (RuntimeError): give a file that --checkpoint wrote" in out


def words(*numbers):
    return [float(number) for number in numbers]


def test_05_three_ranks_play_everything(tmp_path):
    path = tmp_path / "x.json"
    out, err = run("05", "all", "--nproc", 3, "--init-method", f"file://{tmp_path}/meet", "--json", path)
    assert err == "", "no warnings"
    found = json.loads(path.read_text())
    befores = {name: [before for before, _ in rows] for name, rows in found.items() if isinstance(rows, list)}
    afters = {name: [after for _, after in rows] for name, rows in found.items() if isinstance(rows, list)}
    assert befores["broadcast"] == [words(10, 11, 12, 13), words(20, 21, 22, 23), words(40, 41, 42, 43)]
    assert afters["broadcast"] == afters["send and recv"] == afters["isend and irecv"] == [words(10, 11, 12, 13)] * 3
    assert afters["ring"] == [words(40, 41, 42, 43), words(10, 11, 12, 13), words(20, 21, 22, 23)]
    assert afters["scatter"] == [words(10, 11), words(12, 13), words(14, 15)]
    assert afters["gather"] == [words(10, 11, 20, 21, 40, 41), [], []]
    assert afters["all_gather"] == [words(10, 11, 20, 21, 40, 41)] * 3
    assert afters["reduce"] == [words(70, 73, 76, 79), [], []]
    assert afters["all_reduce"] == afters["all_reduce SUM"] == [words(70, 73, 76, 79)] * 3
    assert afters["all_to_all"] == [words(10, 20, 40), words(11, 21, 41), words(12, 22, 42)]
    assert afters["all_reduce PRODUCT"] == [words(8000, 9471, 11088, 12857)] * 3
    assert afters["all_reduce MIN"] == [words(10, 11, 12, 13)] * 3
    assert afters["all_reduce MAX"] == [words(40, 41, 42, 43)] * 3
    assert afters["all_reduce in the group [0, 2]"] == [words(50, 52, 54, 56), words(20, 21, 22, 23)] + [
        words(50, 52, 54, 56)]
    if tuple(map(int, torch.__version__.split(".")[:2])) > (2, 6):  # what Gloo learnt later
        assert afters["reduce_scatter"] == [words(70, 73), words(76, 79), words(82, 85)]
        for averages in afters["all_reduce AVG"]:
            assert averages == pytest.approx([70 / 3, 73 / 3, 76 / 3, 79 / 3])
    assert all(0 < seconds < 5 for seconds in found["ping_pong"].values()) and len(found["ping_pong"]) == 8
    if sys.platform == "linux":
        assert found["traffic"]["all_reduce"] == pytest.approx([4 / 3] * 3, rel=0.01)
        assert found["traffic"]["scatter"] == pytest.approx([2 / 3, 0, 0], abs=0.01)
        assert found["traffic"]["all_gather"] == pytest.approx([2 / 3] * 3, rel=0.01)
    lines = out.splitlines()
    assert [line for line in lines if "groups:" in line] == [
        "[rank 0] groups: here I am rank 0, in the group 0",
        "[rank 1] groups: here I am rank 1, in the group -1",
        "[rank 2] groups: here I am rank 2, in the group 1",
    ]
    assert [line[-5:] for line in lines if "] barrier:" in line] == [" True", " True", "False"]
    assert sum("was sent 1 1 1 1, has received" in line for line in lines) == 1
    assert not any(line.startswith("gloo can do broadcast: no") for line in lines)


def test_05_the_missing_rank_is_named():
    out, _ = run("05", "missing", "--nproc", 3)
    assert "Ranks 2 failed to pass monitoredBarrier in 2000 ms" in out


def test_05_a_mismatch_is_explained():
    out, _ = run("05", "mismatch", "--timeout", 20, TORCH_DISTRIBUTED_DEBUG="DETAIL")
    assert "Detected mismatch between collectives on ranks" in out and "BROADCAST" in out and "ALLREDUCE" in out


def test_05_patience_ends_and_so_does_the_job():
    began = time.monotonic()
    _, err = run("05", "hello", "--late", 30, "--timeout", 2, status=1)
    assert time.monotonic() - began < 25
    assert "Process 0 terminated" in err and ("timeout" in err.lower() or "timed out" in err.lower())


def test_06_trains_as_02_does(tmp_path, trained):
    """The same data and steps, but a start of its own; the accuracy is that of the weights it saved."""
    options = ["--data", "printed", "--device", "cpu", "--limit", 1990, "--batch-size", 50, "--norm", "none"]
    options += ["--json", tmp_path / "x.json", "--checkpoint", tmp_path / "x.pt"]
    run("06", "--stages", "overlap", "ddp", *options)
    reports = json.loads((tmp_path / "x.json").read_text())
    for report in reports.values():
        assert KEYS <= report.keys()
        assert (report["steps"], report["test_samples"], report["world_size"]) == (20, 1990, 2)
        assert report["differs_from_ddp_by"] == report["ranks_differ_by"] == 0
        assert report["step_loss"][-1] < 0.95 * report["step_loss"][0]
    model = ConvNet(norm="none")
    model.load_state_dict(torch.load(tmp_path / "x.pt", weights_only=True))
    assert params_sha256(model) == reports["ddp"]["params_sha256"] == reports["overlap"]["params_sha256"]


REFUSED = [
    ("--epochs -1", "argument --epochs: -1 is not a whole number of at least 1"),
    ("--batch-size 0", "argument --batch-size: 0 is not a whole number of at least 1"),
    ("--lr nan", "argument --lr: nan is not a number above 0"),
    ("--seed x", "argument --seed: x is not a whole number of at least 0"),
    ("--epoch 3", "unrecognized arguments: --epoch 3"),
    ("--norm layer", "argument --norm: invalid choice: 'layer'"),
    ("--json", "argument --json: expected one argument"),
    ("--json README.md/x.json", "cannot write README.md/x.json"),
    ("--checkpoint scripts", "cannot write scripts (it is a folder)"),
    ("--checkpoint /dev/null", "cannot write /dev/null (it is no ordinary file)"),
    ("--checkpoint ~nobody-of-that-name/x.pt", "cannot write ~nobody-of-that-name/x.pt"),
    ("--json {tmp}/x --checkpoint {tmp}/y/../x", "--json and --checkpoint name the same {tmp}/x: give each its own"),
    ("--seed 99999999999999999999", "argument --seed: 99999999999999999999 is too large"),
    ("--threads 5000", "argument --threads: 5000 is not a whole number from 1 to 1,024"),
    ("--data-dir README.md", "argument --data-dir: 'README.md' is no folder"),
    ("--device cuda", "needs a GPU for each of"),
    ("--data mnist --data-dir {tmp}", "MNIST"),
]
REFUSED_BY = {
    "02": [
        ("--master-port 70000", "argument --master-port: 70000 is not a whole number from 1 to 65,535"),
        ("--master-addr nosuch.host.invalid", "cannot listen on nosuch.host.invalid:0"),
        ("--init-method tcp://127.0.0.1:{taken}", "cannot listen on 127.0.0.1:{taken}"),
        ("--nodes 2 --node-rank 2 --master-port 1", "--node-rank 2 does not exist among --nodes 2"),
        ("--nodes 2", "need one --master-port"),
        ("--master-port {taken}", "cannot listen on 127.0.0.1:{taken}"),
        ("--nodes 2 --master-port {taken}", "cannot listen on 127.0.0.1:{taken}: give this machine's own address"),
        ("--nproc 0", "argument --nproc: 0 is not a whole number of at least 1"),
        ("--device mps", "--device mps serves one process, not 2"),
    ],
    "03": [("", "start this script with torchrun")],
    "05": [
        ("", "the following arguments are required: DEMO"),
        ("dance", "argument DEMO: invalid choice: 'dance'"),
        ("ring --nproc 1", "--nproc 1: nobody to talk to, use 2 or more"),
        ("ring --timeout 0", "argument --timeout: 0 is not a number above 0"),
        ("ring --device cuda", "needs a GPU for each of 2 processes, found 0"),
        ("ring --json scripts", "cannot write scripts (it is a folder)"),
    ],
    "06": [
        ("--stages ring dance", "argument --stages: invalid choice: 'dance'"),
        ("--bucket-kb 0", "argument --bucket-kb: 0 is not a number above 0"),
        ("--accumulate 0", "argument --accumulate: 0 is not a whole number of at least 1"),
        ("--no-sync sometimes", "argument --no-sync: invalid choice: 'sometimes'"),
        ("--device cuda", "needs a GPU for each of 2 processes, found 0"),
    ],
    "07": [
        ("--norm layer", "argument --norm: invalid choice: 'layer'"),
        ("--evaluate {tmp}/none.pt", "argument --evaluate: cannot read {tmp}/none.pt"),
        ("--json {tmp}/x --predictions {tmp}/x", "--json and --predictions name the same {tmp}/x"),
        ("", "start this script with torchrun"),
    ],
    "08": [
        ("--snapshot README.md", "argument --snapshot: cannot write into README.md"),
        ("--keep 0", "argument --keep: 0 is not a whole number of at least 1"),
        ("--snapshot-every 0", "argument --snapshot-every: 0 is not a whole number of at least 1"),
    ],
    "04": [
        ("--amp int8", "argument --amp: invalid choice: 'int8'"),
        ("--clip-norm 0", "argument --clip-norm: 0 is not a number above 0"),
    ],
}


@pytest.mark.parametrize(
    ("number", "options", "line"),
    [(number, *case) for number in ("01", "02") for case in REFUSED]
    + [(number, *case) for number, cases in REFUSED_BY.items() for case in cases],
    ids=lambda value: value if re.fullmatch(r"\d\d", value) else value[:30] + "_",
)
def test_refuses_in_one_line(number, options, line, tmp_path, monkeypatch, capfd):
    """Run in this process, for speed: it must end before it starts any other."""
    import socket

    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    # Nothing answers there, at once: no test waits for a download.
    monkeypatch.setenv("DDP_TUTORIAL_MNIST_URL", f"http://127.0.0.1:{free_port()}/")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("torch.multiprocessing.spawn", lambda *_, **__: pytest.fail("processes were started"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        words = {"tmp": tmp_path, "taken": taken.getsockname()[1]}
        monkeypatch.setattr("sys.argv", [script(number), *options.format(**words).split()])
        with pytest.raises(SystemExit) as refusal:
            runpy.run_path(script(number), run_name="__main__")
    out, err = capfd.readouterr()
    assert refusal.value.code == 2
    assert line.format(**words) in err
    assert err.count("\n") == 1 and err.startswith(f"{Path(script(number)).name}: ")


def test_02_a_gpu_for_each_process_or_a_way_out(monkeypatch, capfd):
    """With one GPU for two processes, --device cuda names both ways out, before any process is started."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.multiprocessing.spawn", lambda *_, **__: pytest.fail("processes were started"))
    monkeypatch.setattr("sys.argv", [script("02"), "--device", "cuda"])
    with pytest.raises(SystemExit):
        runpy.run_path(script("02"), run_name="__main__")
    assert capfd.readouterr().err == (
        "02_ddp_spawn.py: --device cuda needs a GPU for each of 2 processes, found 1: use --nproc 1 or --device cpu\n")


OFFLINE = """
import sys, time
from ddp_tutorial.launch import launch
began = time.monotonic()
launch(sys.argv[1])
print("seconds:", time.monotonic() - began)
"""


@pytest.mark.parametrize("command", [
    "python scripts/02_ddp_spawn.py --data printed --limit 200",
    "torchrun --standalone --nproc-per-node 2 scripts/03_torchrun.py --data printed --limit 200",
], ids=["02_spawn", "03_torchrun"])
def test_offline_with_an_unknown_host_name(command):
    """In a network namespace with nothing but loopback, on a host whose name nobody knows."""
    inside = ["unshare", "--net", "--uts", "--map-root-user", "sh", "-c"]
    prepare = "ip link set lo up && hostname no-such-host-as-this && exec \"$@\""
    possible = subprocess.run([*inside, prepare, "sh", "true"], capture_output=True, text=True)
    if possible.returncode:
        pytest.skip(f"no network namespaces here: {possible.stderr.strip()}")
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "PET_LOCAL_ADDR"}
    began = time.monotonic()
    finished = subprocess.run([*inside, prepare, "sh", sys.executable, "-c", OFFLINE, command], cwd=ROOT,
                              env=environment, capture_output=True, text=True, timeout=110)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert finished.stdout.count("weights") == 2
    assert time.monotonic() - began < 60, "a name that nobody knows must not be waited for"
