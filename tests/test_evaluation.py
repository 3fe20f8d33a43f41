"""Script 07: evaluation is that of one process however the images are shared out, and batch norm over all ranks."""

import functools
import threading
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import BatchSampler

from ddp_tutorial.paths import load_script
from ddp_tutorial.ranks import run_on_ranks


@functools.cache  # loaded once a process
def script_07():
    return load_script("07")


class ThreadGroup:
    """A process group whose ranks are threads: as much of torch.distributed as `evaluate` needs."""

    def __init__(self, world_size):
        self.world_size, self.own = world_size, threading.local()
        self.barrier, self.tensors = threading.Barrier(world_size, timeout=20), [None] * world_size

    def _all(self, tensor):
        """Every rank's tensor, once all have come; they may change theirs when the next `_all` has returned."""
        self.tensors[self.own.rank] = tensor.clone()
        self.barrier.wait()
        found = list(self.tensors)
        self.barrier.wait()
        return found

    def all_reduce(self, tensor):
        tensor.copy_(torch.stack(self._all(tensor)).sum(dim=0))

    def broadcast(self, tensor, src):
        tensor.copy_(self._all(tensor)[src])

    def run(self, target):
        """What ``target(rank)`` returns on each rank. Raises what a rank raises."""
        results, errors = [None] * self.world_size, []

        def work(rank):
            self.own.rank = rank
            try:
                results[rank] = target(rank)
            except Exception as error:
                errors.append(error)
                self.barrier.abort()

        stand_ins = {"all_reduce": self.all_reduce, "broadcast": self.broadcast,
                     "get_rank": lambda: self.own.rank, "get_world_size": lambda: self.world_size}
        with mock.patch.multiple(dist, **stand_ins):
            threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.world_size)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if errors:
            raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
        return results


class Loader:
    """This rank's batches, as `make_loaders` makes them."""

    def __init__(self, images, labels, rank, world_size, batch_size):
        self.dataset = labels  # asked for its length only
        self.batches = [(images[batch], labels[batch])
                        for batch in BatchSampler(range(rank, len(labels), world_size), batch_size, drop_last=False)]

    def __iter__(self):
        return iter(self.batches)


one_at_a_time = threading.Lock()  # threads share the random numbers


def data_and_model(count):
    with one_at_a_time:
        torch.manual_seed(count)
        images, labels = torch.randn(count, 4, dtype=torch.float64), torch.randint(0, 10, (count,))
        model = nn.Sequential(nn.Linear(4, 10), nn.BatchNorm1d(10)).double()
    return images, labels, model


def expected(count):
    """The answer of one process that looks at everything at once."""
    images, labels, model = data_and_model(count)
    logits = model.eval()(images)
    said = logits.argmax(dim=1)
    confusion = [[((labels == true) & (said == guess)).sum().item() for guess in range(10)] for true in range(10)]
    loss = F.cross_entropy(logits, labels).item() if count else 0.0
    return confusion, (said == labels).sum().item() / max(1, count), loss, said


def on_rank(rank, world_size, count, batch_size):
    images, labels, model = data_and_model(count)
    with torch.no_grad():
        model[1].running_mean += rank * torch.arange(10)  # as after training: rank 0's are the ones that count
    return script_07().evaluate(model, Loader(images, labels, rank, world_size, batch_size), torch.device("cpu"))


def check(answers, count):
    confusion, accuracy, loss, said = expected(count)
    for results, predictions in answers:
        assert results["confusion"] == confusion
        assert results["test_samples"] == count
        assert results["test_accuracy"] == accuracy
        assert results["test_loss"] == pytest.approx(loss, abs=1e-12)
        assert predictions.tolist() == said.tolist()


@settings(deadline=None, max_examples=60, database=None)
@given(count=st.integers(0, 200), world_size=st.integers(1, 4), batch_size=st.integers(1, 17))
@example(count=0, world_size=3, batch_size=5)
@example(count=1, world_size=4, batch_size=1)
def test_07_evaluation_is_that_of_one_process(count, world_size, batch_size):
    check(ThreadGroup(world_size).run(lambda rank: on_rank(rank, world_size, count, batch_size)), count)


def on_real_rank(count, batch_size):
    results, predictions = on_rank(dist.get_rank(), dist.get_world_size(), count, batch_size)
    return results, predictions.tolist()


@pytest.mark.parametrize(("world_size", "count", "batch_size"), [(2, 101, 17), (3, 2, 4), (4, 1, 1)])
def test_07_evaluation_on_real_ranks(world_size, count, batch_size):
    answers = run_on_ranks(world_size, on_real_rank, count, batch_size)
    check([(results, torch.tensor(predictions)) for results, predictions in answers], count)


def test_07_the_worst_digit_is_named():
    confusion = [[0] * 10 for _ in range(10)]
    confusion[3][3], confusion[3][5], confusion[7][7] = 9, 1, 50
    assert script_07().worst_digit(confusion) == "digit 3, 90.0% of 10"


# ---------------------------------------------------------------------------------------- batch norm over all ranks


def three_steps(norm, images, factors, local_slice):
    """Every result of three training steps, as lists; weight and bias gradients summed over all ranks."""
    found = {}
    for step in range(3):
        x = images[step][local_slice].clone().requires_grad_()
        y = norm(x)
        norm.zero_grad()
        (y * factors[step][local_slice]).sum().backward()
        found[f"outputs {step}"], found[f"input gradients {step}"] = y.tolist(), x.grad.tolist()
        for name, parameter in norm.named_parameters():
            gradient = parameter.grad.clone()
            if dist.is_initialized():
                dist.all_reduce(gradient)
            found[f"{name} gradient {step}"] = gradient.tolist()
    found |= {name: buffer.tolist() for name, buffer in norm.named_buffers()}
    norm.eval()
    found["outputs in eval"] = norm(images[0][local_slice]).tolist()
    return found


def sync_data(count):
    torch.manual_seed(7)
    images, factors = torch.randn(2, 3, count, 5, 3, 4, dtype=torch.float64)
    return 3 * images + 100, factors  # a mean far from 0: a variance by squares would lose digits


def make_norm(kind):
    norm = kind(5).double()
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 2, 5))
        norm.bias.copy_(torch.linspace(-1, 1, 5))
    return norm


def shard(counts, rank):
    return slice(sum(counts[:rank]), sum(counts[: rank + 1]))


def sync_on_rank(counts):
    norm = make_norm(script_07().SyncBatchNormByHand)
    return three_steps(norm, *sync_data(sum(counts)), shard(counts, dist.get_rank()))


@pytest.mark.parametrize("counts", [[4, 4], [5, 3], [1, 6, 2], [3, 0]], ids=str)
def test_07_sync_batch_norm_is_batch_norm_on_all_images(counts):
    whole = three_steps(make_norm(nn.BatchNorm2d), *sync_data(sum(counts)), slice(None))
    for rank, found in enumerate(run_on_ranks(len(counts), sync_on_rank, counts)):
        assert found.keys() == whole.keys() and len(found) == 3 * 4 + 3 + 1
        for name, value in found.items():
            per_image = name.startswith(("outputs", "input"))
            wanted = torch.tensor(whole[name])[shard(counts, rank)] if per_image else torch.tensor(whole[name])
            value = torch.tensor(value, dtype=wanted.dtype).reshape(wanted.shape)
            assert torch.allclose(value.double(), wanted.double(), rtol=0, atol=1e-10), name


def sync_model_on_rank():
    """A step of a ConvNet in bfloat16 autocast: are weights and statistics the same on all ranks?"""
    torch.manual_seed(0)
    lesson = script_07()
    model = lesson.ConvNet(norm=lesson.norm_for("sync", torch.device("cpu")))
    ddp_model = DDP(model)
    torch.manual_seed(dist.get_rank())
    with torch.autocast("cpu", torch.bfloat16):
        loss = ddp_model(torch.randn(3 + dist.get_rank(), 1, 28, 28)).sum()
    loss.backward()
    return [tensor.tolist() for tensor in (model.block1[1].running_var, model.block2[1].weight.grad)]


def test_07_sync_batch_norm_keeps_ranks_together_in_16_bits():
    first, second = run_on_ranks(2, sync_model_on_rank)
    assert first == second
    assert all(value != 1.0 for value in first[0])


def test_07_frozen_statistics_are_measured_once():
    lesson = script_07()
    torch.manual_seed(0)
    batches = [(torch.randn(6, 1, 28, 28) * 3 + 1, None) for _ in range(3)]
    model = lesson.ConvNet(norm=lesson.norm_for("frozen", torch.device("cpu")))
    lesson.measure_statistics(model, batches, torch.device("cpu"), count=2)
    norm = model.block1[1]
    outputs = [model.block1[0](images) for images, _ in batches[:2]]
    wanted = torch.stack([output.mean(dim=(0, 2, 3)) for output in outputs]).mean(dim=0)
    assert torch.allclose(norm.running_mean, wanted, atol=1e-5)
    before = norm.running_mean.clone(), norm.running_var.clone()
    model.train()
    images = batches[2][0].requires_grad_()
    model(images).sum().backward()
    assert torch.equal(norm.running_mean, before[0]) and torch.equal(norm.running_var, before[1])
    assert norm.weight.grad.abs().sum() > 0 and not norm.training and model.block1.training
