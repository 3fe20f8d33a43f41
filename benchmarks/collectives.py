"""Where a training step of two processes spends its time: started by speed.py under torchrun, with a core for each."""

import os
import time
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_tutorial.device import set_threads
from ddp_tutorial.model import ConvNet

COLLECTIVES = 300
ROUNDS = 20
WARM_UP = 3


def schedule(policy):
    """Give all threads of this process a scheduling policy. What it does to Gloo's is told in on_core.py."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setscheduler(int(thread), policy, os.sched_param(0))


def all_reduce_times(values):
    """Milliseconds of each of many all-reduces of a tensor: [COLLECTIVES]."""
    times = torch.empty(COLLECTIVES)
    for number in range(COLLECTIVES):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(values)
        times[number] = 1000 * (time.perf_counter() - start)
    return times


def training_step(wrap, batch_size):
    """A function that does one training step of a wrapped model."""
    model = wrap(ConvNet())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images, labels = torch.randn(batch_size, 1, 28, 28), torch.randint(10, (batch_size,))

    def step():
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def step_times(batch_size):
    """Milliseconds of each step of both ranks, several ways in turns: a dictionary of [ranks, steps]."""
    alone = training_step(lambda model: model, batch_size)
    ddp = training_step(DDP, batch_size)
    without_buffers = training_step(lambda model: DDP(model, broadcast_buffers=False), batch_size)
    ways = {
        "without communication": (alone, os.SCHED_BATCH),
        "with DDP": (ddp, os.SCHED_BATCH),
        "with DDP, buffers not broadcast before the forward pass": (without_buffers, os.SCHED_BATCH),
        "with DDP, not as a batch job": (ddp, os.SCHED_OTHER),
    }
    times = {name: [] for name in ways}
    for number in range(WARM_UP + ROUNDS):
        for name, (step, policy) in ways.items():
            schedule(policy)
            dist.barrier()
            for _ in range(1000 // batch_size):
                start = time.perf_counter()
                step()
                if number >= WARM_UP:
                    times[name].append(1000 * (time.perf_counter() - start))
    return {name: on_all_ranks(torch.tensor(values)) for name, values in times.items()}


def on_all_ranks(values):
    """The values of every rank: [ranks, n]."""
    everybody = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, values)
    return torch.stack(everybody)


def main():
    warnings.filterwarnings("ignore", message=".*broadcast_buffers.*")  # its name is about to change
    set_threads(1, say=None)
    dist.init_process_group("gloo")
    say = print if dist.get_rank() == 0 else lambda line: None
    for batch_size in (100, 400):
        say(f"a step of two processes side by side, batch {batch_size}:")
        for name, times in step_times(batch_size).items():
            say(f"  {times.mean():6.1f} ms {name}")
            if name == "without communication":
                say(f"  {times.amax(dim=0).mean():6.1f} ms if after each step both waited for the slower")
    gradients = torch.zeros(sum(parameter.numel() for parameter in ConvNet().parameters()))
    say(f"an all-reduce of {len(gradients):,} gradients alone:")
    for name, policy in (("as a batch job", os.SCHED_BATCH), ("as usual", os.SCHED_OTHER)):
        schedule(policy)
        times = all_reduce_times(gradients)
        say(f"  {times.median():6.2f} ms {name}, and one in ten over {times.quantile(0.9):.2f} ms")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
