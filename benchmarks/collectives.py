"""How long the collectives of one training step take by themselves: started by speed.py under torchrun."""

import statistics
import time

import torch
import torch.distributed as dist

from ddp_tutorial.model import ConvNet

STEPS = 300


def median_ms(operation):
    times = []
    for _ in range(STEPS):
        dist.barrier()
        start = time.perf_counter()
        operation()
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = ConvNet()
    gradients = torch.zeros(sum(parameter.numel() for parameter in model.parameters()))
    buffers = torch.zeros(sum(buffer.numel() for buffer in model.buffers()))
    reduce = median_ms(lambda: dist.all_reduce(gradients))
    broadcast = median_ms(lambda: dist.broadcast(buffers, 0))
    if dist.get_rank() == 0:
        print("a step's collectives alone, 2 processes:"
              f" all-reduce of {gradients.numel():,} gradients {reduce:.2f} ms,"
              f" broadcast of {buffers.numel()} buffer values {broadcast:.2f} ms")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
