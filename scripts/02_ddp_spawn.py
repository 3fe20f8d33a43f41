# %% About
r"""Train a small ConvNet on MNIST with DistributedDataParallel: mp.spawn starts the processes.

python scripts/02_ddp_spawn.py                              # two processes, on GPUs or CPU
python scripts/02_ddp_spawn.py --nproc 8 --device cuda      # a machine with eight GPUs
python scripts/02_ddp_spawn.py --nodes 2 --node-rank 0 --nproc 8 \
    --master-addr 10.0.0.1 --master-port 29500              # and --node-rank 1 on the other machine
"""


# %% Imports
import gc
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from ddp_tutorial.arguments import (
    init_method,
    load_data,
    non_negative_int,
    port_number,
    positive_int,
    training_parser,
)
from ddp_tutorial.device import backend_for, choose_device, set_threads
from ddp_tutorial.machines import check_machines_agree, check_port, check_tcp, free_port
from ddp_tutorial.model import ConvNet, warm_up_then_decay
from ddp_tutorial.report import Speedometer, params_sha256, write_report


# %% Arguments
def parse_args():
    parser = training_parser(__doc__)
    add = parser.add_argument
    add("--nproc", type=positive_int, default=2, help="processes on this machine (2)")
    add("--nodes", type=positive_int, default=1, help="machines (1)")
    add("--node-rank", type=non_negative_int, default=0, help="number of this machine, from 0")
    add("--master-addr", default="127.0.0.1", help="address of machine 0 (127.0.0.1)")
    add("--master-port", type=port_number, help="port on machine 0 (any free one)")
    add("--init-method", type=init_method, default="env://",
        help="env://, tcp://HOST:PORT or file:///PATH (env://)")
    args = parser.parse_args()
    if args.node_rank >= args.nodes:
        parser.error(f"--node-rank {args.node_rank} does not exist among --nodes {args.nodes}:"
                     " count from 0")
    if args.nodes > 1 and not args.master_port:
        parser.error("several machines need one --master-port that all are given")
    return args


# %% Process group
def join_process_group(args, local_rank):
    """Meet the other processes. Returns this one's rank, how many there are, and its device."""
    rank = args.node_rank * args.nproc + local_rank
    world_size = args.nodes * args.nproc
    device = choose_device(args.device, args.nproc, say=print if rank == 0 else None)
    if device.type == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    # Blocks until all of world_size processes have come.
    dist.init_process_group(
        backend_for(device), init_method=args.init_method, rank=rank, world_size=world_size)
    return rank, world_size, device


def leave_process_group():
    """Call it after success only: when one rank fails, leaving would make the others fail before
    anybody has seen whose failure it was."""
    # The DDP wrapper must go first: its threads would outlive the group, and abort the exit.
    gc.collect()
    dist.destroy_process_group()


# %% Data
class ShardBatches:
    """This rank's part of every global batch: a list of sample numbers a step.

    DistributedSampler repeats a few samples to make all shards equally long. The repeats are
    left out here, so the last list may be one shorter than another rank's, or empty. But
    every rank gets the same number of lists: one that stopped early would leave the others waiting.
    """

    def __init__(self, sampler, batch_size):
        self.sampler = sampler
        self.batch_size = batch_size

    def __len__(self):
        return -(-len(self.sampler) // self.batch_size)  # rounded up

    def __iter__(self):
        sampler = self.sampler
        own = len(range(sampler.rank, len(sampler.dataset), sampler.num_replicas))
        shard = list(sampler)[:own]
        for step in range(len(self)):
            yield shard[step * self.batch_size : (step + 1) * self.batch_size]


def make_loaders(args, device, rank, world_size):
    train_set, test_set = load_data(args, say=print if rank == 0 else None)
    sampler = DistributedSampler(train_set, world_size, rank, shuffle=True, seed=args.seed)
    train_batches = ShardBatches(sampler, args.batch_size)
    test_shard = range(rank, len(test_set), world_size)
    test_batches = BatchSampler(test_shard, batch_size=1000, drop_last=False)
    # batch_size=None: a sampler hands out whole batches, and the data set looks them up in one go.
    pin = device.type == "cuda"
    train_loader = DataLoader(train_set, batch_size=None, sampler=train_batches, pin_memory=pin)
    test_loader = DataLoader(test_set, batch_size=None, sampler=test_batches, pin_memory=pin)
    return train_loader, test_loader, sampler


# %% Model
def make_model(args, device, steps):
    torch.manual_seed(args.seed)
    model = ConvNet(width=args.width, norm=args.norm).to(device, getattr(torch, args.dtype))
    # Copies rank 0's weights to all ranks now, and averages the gradients in every backward pass.
    ddp_model = DDP(model, device_ids=[device] if device.type == "cuda" else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up_then_decay(steps))
    return model, ddp_model, optimizer, scheduler


# %% Train one epoch
def train_one_epoch(model, batches, global_counts, optimizer, scheduler, device):
    """One pass over the training set. Returns each step's loss, summed over its images: [steps].

    global_counts: for each step, the number of images that all ranks have together.
    """
    model.train()
    loss_sums = []
    for (images, labels), global_count in zip(batches, global_counts):
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        loss_sum = F.cross_entropy(model(images), labels, reduction="sum")
        # DDP adds up the ranks' gradients and divides by their number, world_size. Multiplied by
        # it, and divided by the global count, that is the gradient of the global batch's mean.
        loss = loss_sum * dist.get_world_size() / global_count
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        loss_sums.append(loss_sum.detach())
    loss_sums = torch.stack(loss_sums)
    dist.all_reduce(loss_sums)
    return loss_sums


# %% Evaluate
@torch.no_grad()
def evaluate(model, test_loader, device):
    """Returns the share of test images that the model gets right, and how many there were.

    model: the plain one, not the DDP wrapper, which would wait for the other ranks in every batch.
    """
    # Batch norm keeps running statistics, each rank those of its own shard: all take rank 0's.
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    model.eval()
    counts = torch.zeros(2, dtype=torch.int64, device=device)
    for images, labels in test_loader:
        predictions = model(images.to(device)).argmax(dim=1)
        correct = (predictions == labels.to(device)).sum()
        counts += torch.stack([correct, torch.tensor(len(labels), device=device)])
    dist.all_reduce(counts)
    correct, total = counts.tolist()
    return correct / total, total


# %% Save
def save_checkpoint(model, path):
    """Write the weights beside `path`, then rename: nobody ever finds half a file there."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        torch.save(model.state_dict(), temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)  # where the disk was full


# %% Main
def train(args, device, rank, world_size):
    train_loader, test_loader, sampler = make_loaders(args, device, rank, world_size)
    model, ddp_model, optimizer, scheduler = make_model(
        args, device, args.epochs * len(train_loader))
    images = len(train_loader.dataset)
    global_batch_size = args.batch_size * world_size
    global_counts = [
        min(global_batch_size, images - first) for first in range(0, images, global_batch_size)]
    if rank == 0:
        print(f"global batch: {world_size} processes x {args.batch_size} = {global_batch_size}")
    speed = Speedometer(device, global_batch_size, show=rank == 0)
    start = time.perf_counter()
    loss_sums = []
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        batches = speed.watch(train_loader, images, f"epoch {epoch + 1}")
        loss_sums.append(
            train_one_epoch(ddp_model, batches, global_counts, optimizer, scheduler, device))
        accuracy, tested = evaluate(model, test_loader, device)
        if rank == 0:
            loss = loss_sums[-1].sum().item() / images
            print(f"epoch {epoch + 1}/{args.epochs}: loss {loss:.4f},"
                  f" {accuracy:.2%} of {tested:,} right, {speed.images_per_second:,.0f} images/s")
            if args.checkpoint and (epoch + 1) % args.save_every == 0:
                save_checkpoint(model, args.checkpoint)
    fingerprints = [None] * world_size
    dist.all_gather_object(fingerprints, params_sha256(model))
    if rank == 0:
        for number, fingerprint in enumerate(fingerprints):
            print(f"[rank {number}] weights {fingerprint[:12]}")
        write_report(
            args, model, train_loader.dataset, loss_sums, device=device, world_size=world_size,
            test_accuracy=accuracy, test_samples=tested, speed=speed, start=start,
            rank_params_sha256=fingerprints)


def worker(local_rank, args):
    """What every process runs. mp.spawn passes its number on this machine, the local rank."""
    sys.stdout.reconfigure(line_buffering=True, write_through=False)
    rank, world_size, device = join_process_group(args, local_rank)
    set_threads(args.threads, args.nproc, say=print if rank == 0 else None)
    train(args, device, rank, world_size)
    leave_process_group()


def main():
    args = parse_args()
    # What would fail in every worker is refused here, before there are any.
    choose_device(args.device, args.nproc, say=None)
    load_data(args, say=None)
    if args.nodes > 1:
        check_machines_agree(
            args.nodes, args.node_rank, args.nproc, args.master_addr, args.master_port, vars(args))
    elif args.init_method.startswith("tcp://"):
        check_tcp(args.init_method)
    else:
        check_port(args.master_addr, args.master_port or 0)
    os.environ["MASTER_ADDR"] = args.master_addr
    os.environ["MASTER_PORT"] = str(args.master_port or free_port())
    mp.spawn(worker, args=(args,), nprocs=args.nproc)


if __name__ == "__main__":
    main()
