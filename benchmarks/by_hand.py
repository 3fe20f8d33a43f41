"""Compare the stages of scripts/06_ddp_by_hand.py with DDP, and all-reduces of all sizes with each other.

    torchrun --standalone --nproc-per-node 2 benchmarks/by_hand.py [--rounds 7] [--json FILE]

What is compared takes turns, round by round, in the same processes; medians count.
"""

import argparse
import os
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from ddp_tutorial.arguments import output_file, positive_int
from ddp_tutorial.device import backend_for, choose_device
from ddp_tutorial.model import ConvNet
from ddp_tutorial.paths import load_script
from ddp_tutorial.report import write_json

ROOT = Path(__file__).parents[1]
SIZES = [2**power for power in (10, 12, 14, 16, 18, *range(20, 27))]  # 1 KiB to 64 MiB
BUCKETS = [1, 16, 64, 256, 1024]  # KiB


def deep_model():
    """200 small layers: 400 gradients, 0.85 MB of them."""
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(200)), nn.Linear(32, 10))


def stepper(wrapped_model, images):
    """A function that does one training step."""
    optimizer = torch.optim.SGD(wrapped_model.module.parameters(), lr=0.001)

    def step():
        wrapped_model(images).square().mean().backward()
        wrapped_model.finish()
        optimizer.step()
        optimizer.zero_grad()

    return step


def in_turns(actions, rounds, times_a_round):
    """Median seconds of each action, {name: seconds}, and those of each round, {name: [seconds]}.

    actions: {name: function}. The first round is a warm-up and does not count.
    """
    seconds = {name: [] for name in actions}
    for number in range(rounds + 1):
        names = list(actions) if number % 2 else list(reversed(actions))
        for name in names:
            dist.barrier()
            start = time.perf_counter()
            for _ in range(times_a_round):
                actions[name]()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds[name].append((time.perf_counter() - start) / times_a_round)
    rounds_of = {name: values[1:] for name, values in seconds.items()}
    return {name: statistics.median(values) for name, values in rounds_of.items()}, rounds_of


def ratio(rounds_of, first, second):
    """Median, smallest and largest ratio of two actions, round by round."""
    ratios = [one / other for one, other in zip(rounds_of[first], rounds_of[second], strict=True)]
    return statistics.median(ratios), min(ratios), max(ratios)


def there_and_back(tensor):
    if dist.get_rank() == 0:
        dist.send(tensor, 1)
        dist.recv(tensor, 1)
    elif dist.get_rank() == 1:
        dist.recv(tensor, 0)
        dist.send(tensor, 0)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=positive_int, default=7)
    parser.add_argument("--json", type=output_file, metavar="FILE")
    args = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)
    local_rank = int(os.environ["LOCAL_RANK"])
    device = choose_device("auto", int(os.environ["LOCAL_WORLD_SIZE"]), say=None)
    if device.type == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group(backend_for(device))
    say = print if dist.get_rank() == 0 else lambda _: None
    by_hand = load_script("06")
    stages = by_hand.STAGES

    images = torch.randn(100, 1, 28, 28, device=device)
    steps = {name: stepper(stages[name](ConvNet().to(device), 65536), images)
             for name in ("average", "buckets", "overlap", "ring", "ddp")}
    convnet, rounds_of = in_turns(steps, args.rounds, 3)
    say("ConvNet, batch 100: step of overlap to DDP's: {:.2f} (from {:.2f} to {:.2f})".format(
        *ratio(rounds_of, "overlap", "ddp")))

    rows = torch.randn(64, 32, device=device)
    steps = {name: stepper(stages[name](deep_model().to(device), 262144), rows)
             for name in ("alone", "average", "overlap", "ddp")}
    deep, rounds_of = in_turns(steps, args.rounds, 1)
    say("200 small layers: step of average to overlap's: {:.1f} (from {:.1f} to {:.1f})".format(
        *ratio(rounds_of, "average", "overlap")))
    say("200 small layers: step of overlap to DDP's: {:.2f} (from {:.2f} to {:.2f})".format(
        *ratio(rounds_of, "overlap", "ddp")))
    steps = {kib: stepper(stages["overlap"](deep_model().to(device), 1024 * kib), rows) for kib in BUCKETS}
    buckets, _ = in_turns(steps, args.rounds, 3)

    sizes = {"all_reduce": {}, "ring": {}, "there_and_back": {}, "all_reduce_range": {}}
    for size in SIZES:
        tensor = torch.zeros(size // 4, device=device)
        calls = {"all_reduce": dist.all_reduce, "ring": by_hand.ring_all_reduce, "there_and_back": there_and_back}
        medians, rounds_of = in_turns({name: partial(call, tensor) for name, call in calls.items()}, args.rounds, 3)
        for name, seconds in medians.items():
            sizes[name][size] = seconds
        sizes["all_reduce_range"][size] = [min(rounds_of["all_reduce"]), max(rounds_of["all_reduce"])]
    results = {"convnet": convnet, "deep": deep, "buckets": buckets, "sizes": sizes,
               "world_size": dist.get_world_size(), "backend": dist.get_backend()}
    if dist.get_rank() == 0 and args.json:
        write_json(results, args.json)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
