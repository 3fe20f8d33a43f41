"""How long all-reduces of 2, 3, ... ranks take where the network is the limit: checks what ddp_tutorial.cost predicts.

    python -m ddp_tutorial.lab up --machines 4 --bandwidth 100
    for rank in 0 1 2 3; do
        python -m ddp_tutorial.lab exec $rank -- env RANK=$rank WORLD_SIZE=4 MASTER_ADDR=node0 MASTER_PORT=29500 \\
            python benchmarks/lab_all_reduce.py --json build/all_reduce.json &
    done; wait

Or under torchrun. Rank 0 prints, for each number of ranks (the first 2, the first 3, ...) and each number of bytes,
how long an all-reduce takes, and how many bytes its own process sends; with --json it writes
{"seconds": {ranks: {bytes: seconds}}, "sent": {ranks: {bytes: bytes}}}. "sent" is empty where nothing counts them.
"""

import argparse
import os
import statistics
import sys
import time
from itertools import pairwise

import torch
import torch.distributed as dist

from ddp_tutorial.arguments import output_file, positive_int, refuse
from ddp_tutorial.machines import bytes_sent
from ddp_tutorial.report import write_json

SIZES = [2**power for power in range(12, 25, 2)]  # 4 KiB to 16 MiB


def measure(size, group, repeats):
    """Seconds of an all-reduce of `size` bytes (the median), of the slowest rank; bytes this one sends, or None."""
    values = torch.ones(size // 4)
    # The first one finds the token buckets of a limited network full, and is faster than those after it.
    dist.all_reduce(values, group=group)
    before, moments = bytes_sent(), [time.perf_counter()]
    for _ in range(repeats):
        dist.all_reduce(values, group=group)
        moments.append(time.perf_counter())
    sent = None if before is None else (bytes_sent() - before) / repeats
    median = statistics.median(end - start for start, end in pairwise(moments))
    slowest = torch.tensor(median, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    return slowest.item(), sent


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=positive_int, nargs="+", default=SIZES, metavar="BYTES", help="multiples of 4")
    parser.add_argument("--repeats", type=positive_int, default=5)
    parser.add_argument("--json", type=output_file, metavar="FILE")
    args = parser.parse_args()
    if any(size % 4 for size in args.sizes):
        refuse("a float32 has 4 bytes: give --sizes that are multiples of 4")
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        refuse("start it with torchrun, or with the variables that --help shows")
    sys.stdout.reconfigure(line_buffering=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    result = {"seconds": {}, "sent": {}}
    for ranks in range(2, world_size + 1):
        group = dist.new_group(range(ranks))
        if rank < ranks:
            rows = {size: measure(size, group, args.repeats) for size in args.sizes}
            result["seconds"][ranks] = {size: seconds for size, (seconds, _) in rows.items()}
            result["sent"][ranks] = {size: sent for size, (_, sent) in rows.items() if sent is not None}
            for size, (seconds, sent) in rows.items() if rank == 0 else ():
                says = "" if sent is None else f", rank 0 sends {sent / size:.3f} times as many"
                print(f"{ranks} ranks, {size:>10,} bytes: {1000 * seconds:9.2f} ms{says}")
        dist.barrier()
    if rank == 0 and args.json:
        write_json(result, args.json)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
