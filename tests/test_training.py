"""The small parts that the scripts share: threads, device, speed, model, learning rate."""

import os
import platform
import subprocess
import sys

import pytest
import torch

from ddp_tutorial import device, report
from ddp_tutorial.model import ConvNet, warm_up_then_decay


@pytest.fixture
def cores(monkeypatch):
    monkeypatch.setattr(device, "usable_cores", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    for name in ("OMP_NUM_THREADS", "LOCAL_WORLD_SIZE", "DDP_TUTORIAL_CORES"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("asked", "omp", "processes", "wanted"), [
    (None, None, 1, 8), (None, None, 2, 4), (None, None, 3, 2), (None, None, 16, 1),
    (3, None, 2, 3), (None, "5", 2, 5), (3, "5", 2, 3), (None, "many", 2, 4),
])  # fmt: skip
def test_threads(asked, omp, processes, wanted, cores, monkeypatch):
    if omp:
        monkeypatch.setenv("OMP_NUM_THREADS", omp)
    lines = []
    assert device.set_threads(asked, processes, say=lines.append) == wanted
    assert lines[0].startswith(f"threads: {wanted} in ")


def test_threads_under_launch_are_those_of_a_terminal(monkeypatch):
    """%launch sets OMP_NUM_THREADS before it can know how many processes a script starts: that is no wish."""
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    monkeypatch.setenv("DDP_TUTORIAL_CORES", "8")
    assert device.set_threads(None, 2, say=None) == 4
    monkeypatch.setenv("DDP_TUTORIAL_CORES", "2")
    assert device.set_threads(None, 1, say=None) == 2


def test_one_thread_set_by_the_user_of_srun_counts(monkeypatch):
    """srun sets nothing itself, and its parent's environment says nothing of the user's."""
    monkeypatch.setattr("ddp_tutorial.device.usable_cores", lambda: 8)
    for name, value in {"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert device.set_threads(None, 2, say=None) == 1


@pytest.mark.parametrize(("users", "wanted"), [({}, 4), ({"OMP_NUM_THREADS": "1"}, 1)])
def test_threads_set_by_torchrun_do_not_count_as_the_users(users, wanted):
    """torchrun sets OMP_NUM_THREADS=1 for its workers. What counts is what it was started with itself."""
    if not os.path.exists("/proc/self/environ"):
        pytest.skip("only Linux shows the environment that a process was started with")
    worker = ("import ddp_tutorial.device as d; d.usable_cores = lambda: 8; "
              "print(d.set_threads(None, 2, say=None))")
    agent = ("import os, subprocess, sys; "
             "os.environ.update(OMP_NUM_THREADS='1', LOCAL_WORLD_SIZE='2', TORCHELASTIC_RUN_ID='x'); "
             f"subprocess.run([sys.executable, '-c', {worker!r}], check=True)")
    clean = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run([sys.executable, "-c", agent], env=clean | users, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(wanted)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
@pytest.mark.parametrize("kept", [True, False])
def test_a_step_gets_the_memory_that_the_last_one_freed(kept):
    """In a process of its own: PyTorch's threads and other tests have page faults, too."""
    code = ("import resource, torch; from ddp_tutorial.device import set_threads\n"
            f"if {kept}: set_threads(1, say=None)\n"
            "faults = []\n"
            "for _ in range(40):\n"
            "    torch.ones(10_000_000)\n"  # 40 MB, which glibc gives back at once
            "    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)\n"
            "print(faults[-1] - faults[20])")  # the first few tensors find no hole large enough
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # With transparent huge pages there are fewer than one for every 4 KiB, but still some.
    assert (int(done.stdout) < 5) == kept, f"{done.stdout.strip()} page faults in 19 steps"


@pytest.mark.parametrize(("gpus", "processes", "wanted", "line"), [
    (0, 1, "cpu", "device: cpu (no GPU for 1 process)"),
    (0, 2, "cpu", "device: cpu (no GPU for 2 processes), backend gloo"),
    (1, 2, "cpu", "device: cpu (1 GPU for 2 processes), backend gloo"),
    (1, 1, "cuda", "device: cuda"),
    (2, 2, "cuda", "device: cuda, backend nccl"),
])  # fmt: skip
def test_auto_is_a_gpu_for_each_process_or_the_cpu(gpus, processes, wanted, line, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    lines = []
    assert device.choose_device("auto", processes, say=lines.append).type == wanted
    assert lines == [line]


def test_speed_leaves_out_the_warm_up(monkeypatch):
    """Ten slow steps of 3 s, then 20 steps of 1 s: only these are measured."""
    clock = [0.0]
    monkeypatch.setattr(report.time, "perf_counter", lambda: clock[0])
    speed = report.Speedometer(torch.device("cpu"), global_batch_size=100, show=False)
    for step, _ in enumerate(speed.watch(range(30), images=2950, label="")):
        clock[0] += 3 if step < 10 else 1
    assert speed.images_per_second == pytest.approx((2950 - 1000) / 20)
    # Between epochs the clock stands still, and the next epoch needs no warm-up.
    clock[0] += 1000
    for _ in speed.watch(range(30), images=2950, label=""):
        clock[0] += 1
    assert speed.images_per_second == pytest.approx((2950 - 1000 + 2950) / 50)


def test_model_is_the_articles_network():
    """Pool before ReLU computes the articles' function, and its gradients, on the same weights."""
    nn = torch.nn
    torch.manual_seed(3)
    ours = ConvNet().double()
    theirs = nn.Sequential(
        nn.Conv2d(1, 16, 5, 1, 2), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2, 2),
        nn.Conv2d(16, 32, 5, 1, 2), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2, 2),
        nn.Flatten(), nn.Linear(7 * 7 * 32, 10)).double()  # fmt: skip
    for mine, other in zip(ours.parameters(), theirs.parameters()):
        other.data.copy_(mine.data)
    images = torch.randn(5, 1, 28, 28, dtype=torch.float64)
    for model in (ours, theirs):
        torch.nn.functional.cross_entropy(model(images), torch.arange(5)).backward()
    torch.testing.assert_close(ours(images), theirs(images))
    for mine, other in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(mine.grad, other.grad)
    assert sum(parameter.numel() for parameter in ours.parameters()) == 29034


@pytest.mark.parametrize("norm", ["batch", "group", "none"])
@pytest.mark.parametrize("width", [1, 3])
def test_width_and_norm(width, norm):
    model = ConvNet(width, norm)
    assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
    assert model.block2[0].weight.shape == (32 * width, 16 * width, 5, 5)
    assert ("running_mean" in " ".join(model.state_dict())) == (norm == "batch")


def test_learning_rate_rises_then_falls_to_zero():
    factor = warm_up_then_decay(1000)
    rates = [factor(step) for step in range(1000)]
    assert max(rates) == rates[199] == rates[200] == 1
    assert rates[0] == pytest.approx(1 / 200) and rates[-1] == pytest.approx(1 / 800)
    assert all(0 < rate <= 1 for rate in rates)
    assert factor(1000) == factor(1001) == 0
    for steps in (1, 2, 3, 20):
        assert all(0 < warm_up_then_decay(steps)(step) <= (step + 1) / 60 for step in range(steps))


def test_import_stays_light():
    """Neither torchvision nor Matplotlib, and for the magics not even torch, until they are needed."""
    code = ("import sys, ddp_tutorial; assert 'torch' not in sys.modules; "
            "from ddp_tutorial import arguments, data, device, machines, report; "
            "print([name for name in ('torchvision', 'matplotlib', 'IPython') if name in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.fixture
def some_report(tmp_path):
    """Arguments of write_report for a training of two steps, all but the losses and the fingerprints."""
    from types import SimpleNamespace

    args = SimpleNamespace(json=tmp_path / "report.json", batch_size=2, epochs=1, lr=0.5)

    class Images(list):
        source = "mnist"

    images = Images(range(4))
    speed = SimpleNamespace(images_per_second=1.0)
    details = {"device": torch.device("cpu"), "world_size": 1, "test_accuracy": 0.5, "test_samples": 4, "speed": speed,
               "start": 0.0}
    return args, images, details


@pytest.mark.parametrize(("losses", "fingerprints", "refusal"), [
    ([1.0, float("nan")], ["a", "a"], "the loss is no number any more: train with a smaller --lr than 0.5"),
    ([1.0, float("inf")], ["a", "a"], "the loss is no number any more"),
    ([1.0, 2.0], ["a", "b"], "the ranks ended with different weights: give all machines the same options"),
    ([1.0, 2.0], ["a", "a"], None),
])  # fmt: skip
def test_a_training_that_went_wrong_is_no_success(losses, fingerprints, refusal, some_report, capsys):
    args, images, details = some_report
    more = {**details, "rank_params_sha256": fingerprints}
    call = [args, ConvNet(), images, [torch.tensor(losses)]]
    if refusal is None:
        report.write_report(*call, **more)
        assert report.read_report(args.json)["train_loss"] == [0.75]
    else:
        with pytest.raises(SystemExit) as end:
            report.write_report(*call, **more)
        assert end.value.code == 2 and refusal in capsys.readouterr().err and not args.json.exists()
    assert not list(args.json.parent.glob("*.tmp"))


def test_a_missing_report_is_said_in_one_line(tmp_path):
    with pytest.raises(report.ReportMissing, match="there is no report x.json so far: run the cell that launches"):
        report.read_report(tmp_path / "x.json")
