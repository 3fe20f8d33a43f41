"""Script 06: the ring, and each stage against DistributedDataParallel, on real ranks."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_tutorial.machines import bytes_sent
from ddp_tutorial.paths import load_script
from ddp_tutorial.ranks import RankFailed, run_on_ranks

STAGES = ["average", "buckets", "overlap", "ring"]


@functools.cache  # loaded once a process
def by_hand():
    return load_script("06")


# ----------------------------------------------------------------------------------------------------------- the ring


def rings(lengths, dtypes):
    """For each length and type: this rank's result and the sum by dist.all_reduce, as lists."""
    found = {}
    for dtype in dtypes:
        for length in lengths:
            torch.manual_seed(100 * dist.get_rank() + 7)
            mine = torch.randint(-1000, 1000, (length,)).to(dtype)
            if dtype.is_floating_point:
                mine = mine / 7
            wanted = mine.clone()
            if length:
                dist.all_reduce(wanted)
            by_hand().ring_all_reduce(mine)
            found[str(dtype), length] = mine.tolist(), wanted.tolist()
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_06_ring_adds_up(world_size):
    lengths = sorted({0, 1, world_size - 1, world_size, world_size + 1, 1_000_003})
    dtypes = [torch.float32, torch.float64, torch.int64]
    by_rank = run_on_ranks(world_size, rings, lengths, dtypes, seconds=60)
    assert len(by_rank[0]) == len(lengths) * len(dtypes)
    for case, (first, wanted) in by_rank[0].items():
        assert len(first) == case[1]
        for other in by_rank:
            assert other[case][0] == first, f"{case}: all ranks have the same bits"
        precision = {"torch.float32": 1e-6, "torch.float64": 1e-14, "torch.int64": 0}[case[0]]
        scale = max(map(abs, wanted), default=0)
        difference = (torch.tensor(first, dtype=torch.float64) - torch.tensor(wanted, dtype=torch.float64)).abs()
        assert difference.max().item() <= precision * scale if len(first) else True, case


def ring_of_other_shapes():
    matrix = torch.full((3, 4), float(dist.get_rank()))
    by_hand().ring_all_reduce(matrix)
    try:
        by_hand().ring_all_reduce(matrix.t())
    except ValueError as error:
        return matrix.tolist(), str(error)


def test_06_ring_takes_any_shape_but_refuses_gaps():
    for matrix, refusal in run_on_ranks(3, ring_of_other_shapes):
        assert matrix == [[3.0] * 4] * 3
        assert refusal == "ring_all_reduce needs a contiguous tensor: pass tensor.contiguous()"


def ring_traffic():
    tensor = torch.ones(1_200_000)
    before = bytes_sent()
    by_hand().ring_all_reduce(tensor)
    return (bytes_sent() - before) / tensor.nbytes if before is not None else None


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_06_ring_sends_no_more_than_it_must(world_size):
    shares = run_on_ranks(world_size, ring_traffic)
    if None in shares:
        pytest.skip("this system does not count what a process sends")
    assert shares == pytest.approx([2 * (world_size - 1) / world_size] * world_size, rel=0.01)


# --------------------------------------------------------------------------------------------------------- the stages


class Small(nn.Module):
    """Layers of several sizes; batch norm has buffers."""

    def __init__(self, norm, unused=False):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 50), nn.BatchNorm1d(50) if norm else nn.Identity(), nn.Tanh(),
                                    nn.Linear(50, 20), nn.Tanh(), nn.Linear(20, 3))  # fmt: skip
        self.unused = nn.Linear(3, 3) if unused else None

    def forward(self, rows):
        return self.layers(rows)


def trained(stage, dtype, steps, norm=False, accumulate=1, rows=10):
    """This rank's parameters and buffers after some steps of `stage`, in one list; the data is the same each time.

    Ranks have different starts and different numbers of rows; the last rank's last batch is empty without batch norm.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    model = Small(norm).to(dtype)
    wrapped = by_hand().STAGES[stage](model, 2000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9 if steps > 1 else 0)
    data = torch.Generator().manual_seed(1)
    for step in range(steps):
        for part in range(accumulate):
            inputs = torch.randn(world_size * rows, 6, generator=data, dtype=torch.float64).to(dtype)
            targets = torch.randn(world_size * rows, 3, generator=data, dtype=torch.float64).to(dtype)
            mine = slice(rank, None, world_size)
            if not norm and step == steps - 1 and rank == world_size - 1:
                mine = slice(0, 0)
            if part < accumulate - 1:
                with wrapped.no_sync():
                    loss = (wrapped(inputs[mine]) - targets[mine]).square().sum() * world_size / 100
                    loss.backward()
            else:
                loss = (wrapped(inputs[mine]) - targets[mine]).square().sum() * world_size / 100
                loss.backward()
                wrapped.finish()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([tensor.double().flatten() for tensor in model.state_dict().values()]).tolist()


def all_stages(*arguments):
    return {stage: trained(stage, *arguments) for stage in [*STAGES, "ddp"]}


def furthest(one, other):
    assert len(one) == len(other) > 1000
    return (torch.tensor(one, dtype=torch.float64) - torch.tensor(other, dtype=torch.float64)).abs().max().item()


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "batch norm"])
def test_06_on_two_ranks_a_stage_is_ddp_to_the_last_bit(norm):
    for dtype in (torch.float32, torch.float64):
        by_rank = run_on_ranks(2, all_stages, dtype, 20, norm)
        for stage in STAGES:
            assert [found[stage] for found in by_rank] == [found["ddp"] for found in by_rank], (stage, dtype)
        if not norm:
            assert by_rank[0]["ddp"] == by_rank[1]["ddp"]


@pytest.mark.parametrize("world_size", [3, 4])
def test_06_on_any_number_of_ranks_a_stage_is_ddp(world_size):
    by_rank = run_on_ranks(world_size, all_stages, torch.float64, 20)
    once = run_on_ranks(world_size, all_stages, torch.float32, 1)
    for stage in STAGES:
        for found, after_one_step in zip(by_rank, once):
            assert found[stage] == by_rank[0][stage], "all ranks have the same bits"
            assert furthest(found[stage], found["ddp"]) <= 1e-12
            assert furthest(after_one_step[stage], after_one_step["ddp"]) <= 1e-6


def test_06_accumulated_gradients_are_ddps():
    by_rank = run_on_ranks(2, all_stages, torch.float64, 5, True, 3)
    for stage in STAGES:
        assert [found[stage] for found in by_rank] == [found["ddp"] for found in by_rank], stage


def two_starts():
    found = {}
    for stage in ("alone", "same_start"):
        torch.manual_seed(dist.get_rank())
        model = Small(True)
        by_hand().STAGES[stage](model, 2000)
        found[stage] = torch.cat([tensor.flatten() for tensor in model.state_dict().values()]).tolist()
    return found


def test_06_the_start_is_rank_0s():
    first, second = run_on_ranks(2, two_starts)
    assert first["alone"] != second["alone"]
    assert first["alone"] == first["same_start"] == second["same_start"]


def messages_a_step(stage, bucket_bytes, accumulate, cover):
    """The all-reduces of one step, as the profiler saw them."""
    module = by_hand()
    model = Small(False)
    wrapped = module.STAGES[stage](model, bucket_bytes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    wrapped(torch.ones(2, 6)).sum().backward()  # DDP makes its buckets in the first backward pass
    wrapped.finish()
    optimizer.zero_grad()
    batches = [(torch.ones(2, 6), torch.zeros(2, dtype=torch.int64))] * accumulate
    with torch.profiler.profile() as profiler:
        module.train_one_epoch(wrapped, batches, [accumulate * 4] * accumulate, optimizer, scheduler,
                               torch.device("cpu"), accumulate, cover)
    names = [event.name for event in profiler.events() if event.name.startswith("gloo:")]
    return names.count("gloo:all_reduce") - 1  # the last adds up the losses


@pytest.mark.parametrize(("stage", "bucket_bytes", "accumulate", "cover", "messages"), [
    ("average", 2000, 1, "whole", 6),
    ("buckets", 2000, 1, "whole", 2),
    ("buckets", 1, 1, "whole", 6),
    ("buckets", 10**6, 1, "whole", 1),
    ("overlap", 2000, 1, "whole", 2),
    ("overlap", 2000, 4, "whole", 2),
    ("overlap", 2000, 4, "never", 8),
    ("ddp", 2000, 4, "whole", 2),
    ("ddp", 2000, 4, "backward", 8),
    ("ddp", 2000, 4, "never", 8),
])  # fmt: skip
def test_06_messages_of_a_step(stage, bucket_bytes, accumulate, cover, messages):
    assert run_on_ranks(2, messages_a_step, stage, bucket_bytes, accumulate, cover) == [messages] * 2


def with_an_unused_layer(stage):
    wrapped = by_hand().STAGES[stage](Small(False, unused=True), 2000)
    wrapped(torch.ones(2, 6)).sum().backward()
    wrapped.finish()


@pytest.mark.parametrize("stage", ["average", "overlap"])
def test_06_an_unused_parameter_is_named(stage):
    with pytest.raises(RankFailed, match=r"no gradient for unused\.weight, unused\.bias: use all parameters"):
        run_on_ranks(2, with_an_unused_layer, stage, seconds=5)


def with_a_frozen_layer(stage):
    model = Small(False, unused=True)
    for parameter in model.unused.parameters():
        parameter.requires_grad_(False)
    wrapped = by_hand().STAGES[stage](model, 2000)
    wrapped(torch.full((2, 6), 1.0 + dist.get_rank())).sum().backward()
    wrapped.finish()
    return [parameter.grad.tolist() for parameter in model.layers.parameters()]


def test_06_a_frozen_parameter_is_left_out():
    first, second = run_on_ranks(2, with_a_frozen_layer, "overlap")
    assert first == second and len(first) == 6


def compressed(dtype):
    wrapped = by_hand().STAGES[dtype](Small(False), 2000)
    wrapped(torch.full((2, 6), 1.0 + dist.get_rank())).sum().backward()
    rounded = getattr(torch, dtype)
    return [(parameter.grad.tolist(), torch.equal(parameter.grad, parameter.grad.to(rounded).float()))
            for parameter in wrapped.module.parameters()]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_06_compressed_gradients_have_sixteen_bits(dtype):
    first, second = run_on_ranks(2, compressed, dtype)
    assert first == second and len(first) == 6
    assert all(fits for _, fits in first)


# -------------------------------------------------------------------------------------------- running on ranks, itself


def fails_on(rank):
    if dist.get_rank() == rank:
        raise KeyError("lost")
    dist.barrier()


def ends_on(rank):
    if dist.get_rank() == rank:
        import os

        os._exit(3)
    dist.barrier()


def test_a_failing_rank_is_named():
    with pytest.raises(RankFailed, match="rank 1 raised KeyError: 'lost'") as failure:
        run_on_ranks(3, fails_on, 1)
    assert failure.value.rank == 1 and failure.value.frames[-1][0] == __file__


def test_a_rank_that_ends_is_not_waited_for():
    with pytest.raises(RankFailed):
        run_on_ranks(2, ends_on, 0, seconds=20)
