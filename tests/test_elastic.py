"""Script 08: killed and resumed equals never killed; whatever happens to the newest snapshot, the others survive.

The ranks are forked from a process that has imported PyTorch, as a launcher would start them but much quicker.
What torchrun itself does (signals, restarts, machines that join and leave) is tested in test_torchrun_elastic.py.
"""

import functools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from forked_ranks import LIMIT, Run
from hypothesis import given, settings
from hypothesis import strategies as st
from test_scripts import eventually
from torch.utils.data import DistributedSampler

from ddp_tutorial.paths import load_script


@functools.cache
def script_08():
    return load_script("08")


@pytest.fixture(autouse=True)
def log(tmp_path, monkeypatch):
    monkeypatch.setenv("RUN_LOG", str(tmp_path / "log.txt"))


def finished(world_size, folder, *options, **more):
    """Run to the end; the report."""
    path = folder / "report.json"
    statuses, log = Run(world_size, *options, "--json", path, "--checkpoint", folder / "weights.pt", **more).wait()
    assert statuses == [0] * world_size, log
    return json.loads(path.read_text())


def last_log():
    return Path(os.environ["RUN_LOG"]).read_text()


def weights(folder):
    return torch.load(folder / "weights.pt", weights_only=True)


SHORT = ["--limit", 600, "--batch-size", 20, "--epochs", 2]
EXACT = [*SHORT, "--norm", "none", "--dtype", "float64"]


# ------------------------------------------------------------------------------------------- the same to the last bit


class WithDropout(script_08().ConvNet):
    """Every rank draws random numbers of its own in every step."""

    def forward(self, images):
        return super().forward(torch.nn.functional.dropout(images, 0.1, self.training))


def with_dropout(script):
    script.ConvNet = WithDropout
    join = script.join_process_group

    def join_and_seed(args):
        rank, world_size, device = join(args)
        make_model = script.make_model

        def make_and_seed(*arguments):
            made = make_model(*arguments)
            torch.manual_seed(100 + rank)
            return made

        script.make_model = make_and_seed
        return rank, world_size, device

    script.join_process_group = join_and_seed


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_08_stopped_and_resumed_is_never_stopped(world_size, tmp_path):
    """In the middle of an epoch, with random numbers of each rank's own."""
    whole = finished(world_size, tmp_path, *SHORT, change=with_dropout)
    options = [*SHORT, "--snapshot", tmp_path / "snapshots", "--snapshot-every", 3]
    statuses, log = Run(world_size, *options, "--stop-after", 5, change=with_dropout).wait()
    assert statuses == [0] * world_size and "stopped after step 5 of" in log, log
    last = finished(world_size, tmp_path, *options, change=with_dropout)
    assert last["params_sha256"] == whole["params_sha256"]
    # (The losses of some steps are added up together, and after a stop these are others.)
    assert len(last["step_loss"]) == whole["steps"]
    assert last["step_loss"] == pytest.approx(whole["step_loss"], rel=1e-5)
    assert last["confusion"] == whole["confusion"]


def test_08_stopped_after_the_last_step_of_an_epoch(tmp_path):
    """Its evaluation and its checkpoint are still to come."""
    options = [*SHORT, "--snapshot", tmp_path / "snapshots", "--save-every", 1]
    checkpoint = ["--checkpoint", tmp_path / "weights.pt"]
    statuses, log = Run(2, *options, *checkpoint, "--stop-after", 15).wait()
    assert statuses == [0, 0] and "stopped after step 15 of 30" in log and not (tmp_path / "weights.pt").exists()
    _, log = Run(2, *options, *checkpoint, "--stop-after", 15).wait()
    assert "epoch 1/2: loss" in log and "stopped after step 30 of 30" in log
    first = weights(tmp_path)
    last = finished(2, tmp_path, *options)
    assert last["params_sha256"] == finished(2, tmp_path, *SHORT)["params_sha256"]
    assert not torch.equal(first["linear.weight"], weights(tmp_path)["linear.weight"])


def test_08_evaluation_needs_no_snapshot(three_snapshots, tmp_path):
    torch.save(script_08().ConvNet().state_dict(), tmp_path / "plain.pt")
    options = ["--limit", 100, "--evaluate", tmp_path / "plain.pt", "--snapshot", three_snapshots, "--lr", 0.3]
    statuses, log = Run(1, *options).wait()
    assert statuses == [0] and "resumed" not in log and "of 100 right" in log


def without_rebuilding(script):
    script.rebuild_buckets = lambda *_: None


def test_08_three_ranks_need_their_buckets_rebuilt(tmp_path):
    """What the lesson says: else rounding differs from the first resumed step on."""
    whole = finished(3, tmp_path, *SHORT)
    kept = weights(tmp_path)
    options = [*SHORT, "--snapshot", tmp_path / "snapshots"]
    Run(3, *options, "--stop-after", 5).wait()
    last = finished(3, tmp_path, *options, change=without_rebuilding)
    assert last["params_sha256"] != whole["params_sha256"]
    assert max((kept[name] - value).abs().max().item() for name, value in weights(tmp_path).items()) < 1e-3


# ------------------------------------------------------------------------------------------------ other world sizes


@pytest.mark.parametrize("before, after", [(2, 1), (1, 2), (2, 3)])
def test_08_another_number_of_ranks_goes_on_with_the_same_global_batches(before, after, tmp_path):
    global_batch = 40
    exact = [*EXACT, "--batch-size", global_batch // before]
    whole = finished(before, tmp_path, *exact)
    kept = weights(tmp_path)
    options = [*exact, "--snapshot", tmp_path / "snapshots"]
    Run(before, *options, "--stop-after", 7).wait()
    last = finished(after, tmp_path, *options)
    assert last["world_size"] == after and last["global_batch_size"] == whole["global_batch_size"] == global_batch
    assert max((kept[name] - value).abs().max().item() for name, value in weights(tmp_path).items()) <= 1e-12
    assert last["step_loss"] == pytest.approx(whole["step_loss"], abs=1e-10) and len(last["step_loss"]) == 30
    if after * (global_batch // before) != global_batch:
        assert f"global batch: 40 as in the snapshot, on {after} processes, not" in last_log()


@settings(deadline=None, max_examples=60, database=None)
@given(images=st.integers(1, 60), global_batch=st.integers(1, 17), before=st.integers(1, 4), after=st.integers(1, 4),
       stop=st.integers(0, 60), epoch=st.integers(0, 2))
def test_08_every_sample_is_seen_once_whatever_happens(images, global_batch, before, after, stop, epoch):
    sampler = DistributedSampler(range(images), 1, 0, shuffle=True, seed=3)
    sampler.set_epoch(epoch)

    def batches(world_size, first):
        found = []
        for rank in range(world_size):
            part = script_08().GlobalBatches(sampler, global_batch, rank, world_size)
            part.first = first
            assert len(list(part)) == len(part)
            found.append(list(part))
        return [[sample for rank in found for sample in rank[step]] for step in range(len(found[0]))]

    whole = [sorted(batch) for batch in batches(1, 0)]
    stop = min(stop, len(whole))
    seen = batches(before, 0)[:stop] + batches(after, stop)
    assert [sorted(batch) for batch in seen] == whole
    assert sorted(sample for batch in seen for sample in batch) == list(range(images))


# ------------------------------------------------------------------------------------------------- signals and kills


def running(world_size, folder, *options, snapshots=1, **more):
    """A Run that has written at least so many snapshots."""
    run = Run(world_size, *options, "--snapshot", folder, **more)

    def written():
        assert any(process.is_alive() for process in run.ranks), run.log.read_text()
        return len(list(folder.glob("step-*.pt"))) >= snapshots

    eventually(written, LIMIT, f"{snapshots} snapshots")
    return run


LONGER = ["--limit", 800, "--batch-size", 10, "--epochs", 3, "--snapshot-every", 4]


@functools.cache
def undisturbed(world_size, *options):
    with tempfile.TemporaryDirectory() as folder:
        return finished(world_size, Path(folder), *options)


@pytest.mark.parametrize("number, ranks", [(signal.SIGTERM, [1]), (signal.SIGINT, [0, 1])], ids=["one", "all"])
def test_08_a_signal_stops_all_ranks_after_the_same_step(number, ranks, tmp_path):
    run = running(2, tmp_path / "snapshots", *LONGER)
    start = time.monotonic()
    for rank in ranks:
        run.kill(rank, number)
        run.kill(rank, number)  # at once: the same signal, passed on twice
    statuses, log = run.wait()
    assert statuses == [0 if rank in ranks else 75 for rank in (0, 1)] and time.monotonic() - start < 10, log
    step = int(re.search(r"stopped after step (\d+) of 120, kept in ", log)[1])
    newest = max((tmp_path / "snapshots").glob("step-*.pt"))
    assert newest.name == f"step-{step:09}.pt"
    last = finished(2, tmp_path, *LONGER, "--snapshot", tmp_path / "snapshots")
    assert last["params_sha256"] == undisturbed(2, *LONGER)["params_sha256"]


def test_08_a_second_signal_ends_a_process_that_waits_in_vain(tmp_path):
    run = running(2, tmp_path, *LONGER)
    run.kill(1, signal.SIGSTOP)
    time.sleep(0.5)
    run.kill(0, signal.SIGTERM)
    time.sleep(1.2)
    assert run.ranks[0].exitcode is None, "rank 0 waits for rank 1"
    run.kill(0, signal.SIGTERM)
    run.ranks[0].join(3)
    assert run.ranks[0].exitcode == 128 + signal.SIGTERM
    run.kill(1)
    run.wait()


def test_08_kills_at_random_moments_lose_nothing(tmp_path, pytestconfig):
    """`make soak` asks for 100 kills."""
    kills = pytestconfig.getoption("--kills")
    seed = random.randrange(10**6)
    print(f"seed {seed}")  # shown when the test fails
    chance = random.Random(seed)
    done = 0
    while done < kills:
        world_size = chance.choice([2, 2, 3, 4])
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        options = [*LONGER, "--snapshot", folder / "snapshots"]
        for _ in range(min(chance.choice([1, 2]), kills - done)):
            run = Run(world_size, *options)
            time.sleep(chance.uniform(0.3, 2.5))
            victims = chance.choice([[0], [world_size - 1], range(world_size)])
            for rank in victims:
                with suppress(ProcessLookupError):  # it may have finished
                    run.kill(rank)
                    done += rank == victims[0]
            run.end()
            run.wait()
        last = finished(world_size, folder, *options)
        assert last["params_sha256"] == undisturbed(world_size, *LONGER)["params_sha256"], f"seed {seed}"
        assert not list((folder / "snapshots").glob("*.tmp"))


def slow_to_write(script):
    """The third snapshot takes a minute to get to the disk."""
    really, count = os.fsync, iter(range(1, 100))
    script.os.fsync = lambda handle: time.sleep(60) if next(count) == 3 else really(handle)


def test_08_killed_while_it_writes(tmp_path):
    folder = tmp_path / "snapshots"
    run = running(2, folder, *LONGER, snapshots=2, change=slow_to_write)
    eventually(lambda: list(folder.glob("step-*.tmp")), 20, "a snapshot that is being written")
    run.kill(0)
    run.wait()
    assert len(list(folder.glob("step-*.tmp"))) == 1
    last = finished(2, tmp_path, *LONGER, "--snapshot", folder)
    assert "resumed after step 8 of 120" in last_log()
    assert last["params_sha256"] == undisturbed(2, *LONGER)["params_sha256"]
    assert not list(folder.glob("*.tmp"))


@pytest.mark.skipif(os.getuid() != 0, reason="mounting a small disk needs root")
def test_08_a_full_disk_costs_no_old_snapshot(tmp_path):
    folder = tmp_path / "snapshots"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=800k", "tmpfs", folder], check=True)
    try:
        (folder / "other").write_bytes(bytes(400_000))  # leaves room for one snapshot, and not for a second
        options = [*LONGER, "--snapshot", folder]
        statuses, log = Run(2, *options, "--stop-after", 11).wait()
        assert statuses == [1, 0], log
        assert log.count("no snapshot after step") == 2 and f"see to {folder}" in log
        assert "stopped after step 11 of 120, but the newest snapshot is of step 4" in log
        assert "No space left on device" in log
        assert [path.name for path in folder.glob("step-*")] == ["step-000000004.pt"]
        (folder / "other").unlink()
        last = finished(2, tmp_path, *options, "--keep", 1)
        assert "resumed after step 4 of 120" in last_log()
        assert last["params_sha256"] == undisturbed(2, *LONGER)["params_sha256"]
    finally:
        subprocess.run(["umount", folder], check=True)


# ------------------------------------------------------------------------------------------ snapshots that are no good


@pytest.fixture(scope="module")
def three_snapshots(tmp_path_factory):
    """A folder with snapshots of steps 4, 8 and 11."""
    folder = tmp_path_factory.mktemp("three")
    os.environ["RUN_LOG"] = str(folder / "log.txt")
    Run(1, *LONGER, "--snapshot", folder / "snapshots", "--stop-after", 11).wait()
    return folder / "snapshots"


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-1000])


def empty(path):
    path.write_bytes(b"")


def one_bit_wrong(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def foreign(path):
    torch.save({"epoch": 3}, path)


def of_another_model(path):
    snapshot = torch.load(path, weights_only=True)
    snapshot["options"]["width"] = 7
    torch.save(snapshot, path)


def of_other_data(path):
    snapshot = torch.load(path, weights_only=True)
    snapshot["options"]["data"] = "mnist"
    torch.save(snapshot, path)


def without_a_part(path):
    snapshot = torch.load(path, weights_only=True)
    del snapshot["scaler"]
    torch.save(snapshot, path)


DAMAGES = {cut_short: "damaged: BadZipFile", empty: "damaged: BadZipFile", one_bit_wrong: "damaged",
           foreign: "of another script", of_another_model: "made with width 7; give the same",
           of_other_data: "made with data mnist; give the same", without_a_part: "without scaler"}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_08_a_bad_snapshot_is_named_and_the_one_before_used(damage, three_snapshots, tmp_path):
    folder = tmp_path / "snapshots"
    shutil.copytree(three_snapshots, folder)
    newest = folder / "step-000000011.pt"
    script, options = script_08(), torch.load(newest, weights_only=True)["options"]
    damage(newest)
    snapshot = script.newest_snapshot(folder, options)
    assert (snapshot["steps"], snapshot["epoch"], snapshot["step"]) == (8, 0, 8)
    before = newest.read_bytes()
    refusal = script.newest_snapshot(folder, options, fallback=False)
    assert refusal.startswith(f"{newest} cannot be used ({DAMAGES[damage]}")
    assert refusal.endswith(": move it away, or leave out --no-fallback")
    for path in folder.glob("step-*.pt"):
        damage(path) if path != newest else None
    assert script.newest_snapshot(folder, options).endswith(", nor can an older one: give another --snapshot")
    assert newest.read_bytes() == before, "a refused snapshot stays as it was"


def test_08_the_last_good_one_is_not_deleted_for_damaged_ones(three_snapshots, tmp_path):
    folder = tmp_path / "snapshots"
    shutil.copytree(three_snapshots, folder)
    empty(folder / "step-000000008.pt")
    empty(folder / "step-000000011.pt")
    script_08().save_snapshot(folder, 2, {"steps": 6})
    assert [path.name[-6:-3] for path in sorted(folder.glob("step-*"))] == ["004", "006", "008", "011"]
    script_08().save_snapshot(folder, 1, {"steps": 12})
    assert [path.name[-6:-3] for path in sorted(folder.glob("step-*"))] == ["012"]


def test_08_all_ranks_refuse_in_one_line(three_snapshots, tmp_path):
    folder = tmp_path / "snapshots"
    shutil.copytree(three_snapshots, folder)
    statuses, log = Run(2, *LONGER, "--lr", 0.01, "--snapshot", folder).wait()
    assert statuses == [2, 2]
    assert "step-000000011.pt cannot be used (made with lr 0.05; give the same), nor can an older one" in log
    assert "Traceback" not in log


def impatient(script):
    script.LOCK_PATIENCE = 0.2


def test_08_two_trainings_do_not_share_a_folder(tmp_path):
    first = running(1, tmp_path / "snapshots", *LONGER, "--epochs", 99)
    statuses, log = Run(1, *LONGER, "--snapshot", tmp_path / "snapshots", change=impatient).wait()
    assert statuses == [2] and "is in use by another training: give another --snapshot" in log
    first.kill(0, signal.SIGTERM)
    statuses, _ = first.wait()
    assert statuses == [0], "the first one goes on until it is told to stop"


def test_08_what_a_snapshot_holds_and_how_many_stay(tmp_path):
    options = [*SHORT, "--amp", "bfloat16", "--snapshot", tmp_path / "snapshots", "--snapshot-every", 5, "--keep", 2]
    finished(2, tmp_path, *options)
    paths = sorted((tmp_path / "snapshots").glob("step-*"))
    assert [path.name for path in paths] == ["step-000000025.pt", "step-000000030.pt"]
    snapshot = torch.load(paths[0], weights_only=True)
    assert {"options", "torch", "global_batch_size", "loss_sums", "rng", "steps", "epoch", "step", "model",
            "optimizer", "scheduler", "scaler"} == snapshot.keys()
    assert len(snapshot["rng"]) == 2 and snapshot["rng"][0].keys() == {"python", "torch"}
    assert (snapshot["epoch"], snapshot["step"], snapshot["steps"]) == (1, 10, 25)
    assert len(snapshot["loss_sums"]) == 25 and snapshot["global_batch_size"] == 40
    # Nothing is left to do: the same command evaluates, and says the same again.
    (tmp_path / "weights.pt").unlink()
    again = finished(2, tmp_path, *options)
    assert weights(tmp_path).keys() == script_08().ConvNet().state_dict().keys()
    assert len(again["step_loss"]) == 30 and again["test_samples"] == 600
