# %% About
"""Start a few processes that find each other, say hello and add up a number.

python scripts/00_start_here.py                 # two processes
python scripts/00_start_here.py --nproc 4
"""


# %% Imports
import argparse

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ddp_tutorial.machines import free_port


# %% Arguments
def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nproc", type=int, default=2, choices=range(1, 9), help="processes")
    return parser.parse_args()


# %% Main
def say_hello(rank, world_size, port):
    """What every process runs. mp.spawn passes the rank, which is all that tells them apart."""
    meeting_point = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=meeting_point, rank=rank, world_size=world_size)
    number = torch.tensor(rank + 1)
    dist.all_reduce(number)
    lines = [None] * world_size
    line = f"[rank {rank}] hello! I brought {rank + 1}, the sum is {number}"
    dist.all_gather_object(lines, line)
    if rank == 0:
        print(*lines, sep="\n")
    dist.destroy_process_group()


def main():
    args = parse_args()
    mp.spawn(say_hello, args=(args.nproc, free_port()), nprocs=args.nproc)


if __name__ == "__main__":
    main()
