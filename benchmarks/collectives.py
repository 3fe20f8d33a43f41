"""Where a training step of two processes spends its time: started by speed.py under torchrun."""

import statistics
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_tutorial.model import ConvNet

STEPS = 300
TRAINING_STEPS = 100
BATCH_SIZE = 100


def median_ms(operation):
    times = []
    for _ in range(STEPS):
        dist.barrier()
        start = time.perf_counter()
        operation()
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times)


def training_ms(wrap):
    """Milliseconds of each training step of a wrapped model, on this rank: [steps]."""
    model = wrap(ConvNet())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images, labels = torch.randn(BATCH_SIZE, 1, 28, 28), torch.randint(10, (BATCH_SIZE,))
    times = []
    dist.barrier()
    for _ in range(TRAINING_STEPS):
        start = time.perf_counter()
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        times.append(1000 * (time.perf_counter() - start))
    return torch.tensor(times[10:])


def on_all_ranks(values):
    """The values of every rank: [ranks, n]."""
    everybody = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, values)
    return torch.stack(everybody)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = ConvNet()
    gradients = torch.zeros(sum(parameter.numel() for parameter in model.parameters()))
    buffers = torch.zeros(sum(buffer.numel() for buffer in model.buffers()))
    reduce = median_ms(lambda: dist.all_reduce(gradients))
    broadcast = median_ms(lambda: dist.broadcast(buffers, 0))
    apart, together = [], []
    for _ in range(5):  # in turns
        apart.append(on_all_ranks(training_ms(lambda model: model)))
        together.append(on_all_ranks(training_ms(DDP)))
    apart, together = torch.cat(apart, dim=1), torch.cat(together, dim=1)
    if dist.get_rank() == 0:
        print(f"a step of two processes side by side, batch {BATCH_SIZE}: {apart.mean():.1f} ms without communication,"
              f" {together.mean():.1f} ms with DDP")
        print(f"  of which {apart.amax(dim=0).mean() - apart.mean():.1f} ms if in each step both wait for the slower,"
              f" {reduce:.2f} ms all-reduce of {gradients.numel():,} gradients alone,"
              f" {broadcast:.2f} ms broadcast of {buffers.numel()} buffer values alone")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
