# %% About
r"""Train a small ConvNet on MNIST with DistributedDataParallel in mixed precision.

torchrun --standalone --nproc-per-node 2 scripts/04_mixed_precision.py --amp bfloat16
torchrun --standalone --nproc-per-node gpu scripts/04_mixed_precision.py --amp float16
torchrun --nnodes 2 --node-rank 0 --nproc-per-node 8 --master-addr 10.0.0.1 \
    --master-port 29500 scripts/04_mixed_precision.py --amp bfloat16      # and --node-rank 1
"""


# %% Imports
import gc
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from ddp_tutorial.arguments import (
    load_data,
    output_file,
    positive_float,
    positive_int,
    refuse,
    training_parser,
)
from ddp_tutorial.device import backend_for, choose_device, set_threads
from ddp_tutorial.model import ConvNet, warm_up_then_decay
from ddp_tutorial.report import Speedometer, params_sha256, write_report


# %% Arguments
def parse_args():
    parser = training_parser(__doc__)
    add = parser.add_argument
    add("--snapshot", type=output_file, metavar="FILE", help="save here, and resume from here")
    add("--amp", choices=["off", "bfloat16", "float16"], default="off",
        help="compute in this format where it is safe (off)")
    add("--clip-norm", type=positive_float, metavar="NORM", help="shorten longer gradients to this")
    add("--kill-after", type=positive_int, metavar="EPOCH",
        help="rehearse a failure: the last rank is killed after this epoch, once")
    args = parser.parse_args()
    if not {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"} <= os.environ.keys():
        parser.error("start this script with torchrun, which gives every process its rank:"
                     " torchrun --standalone --nproc-per-node 2 scripts/04_mixed_precision.py")
    return args


# %% Process group
def restarts():
    """How often torchrun has started the workers again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def join_process_group(args):
    """Meet the other processes. Returns this one's rank, how many there are, and its device."""
    rank = int(os.environ["RANK"])
    local_rank = int(os.environ["LOCAL_RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])
    device = choose_device(args.device, local_world_size, say=print if rank == 0 else None)
    if device.type == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    # When torchrun starts the workers again, its store still holds the addresses of those that
    # failed. A prefix for each attempt keeps the new ones from calling them, and waiting for ever.
    store, _, _ = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(f"attempt {restarts()}", store)
    # Blocks until all of world_size processes have come.
    dist.init_process_group(backend_for(device), store=store, rank=rank, world_size=world_size)
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
    ddp_model = model
    if dist.get_world_size() > 1:  # alone, there is nothing to average
        ddp_model = DDP(model, device_ids=[device] if device.type == "cuda" else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up_then_decay(steps))
    # Without float16 there is nothing to scale, and a disabled scaler passes everything through.
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp == "float16")
    return model, ddp_model, optimizer, scheduler, scaler


# %% Train one epoch
def train_one_epoch(
    model, batches, global_counts, optimizer, scheduler, scaler, device, amp, clip_norm
):
    """One pass over the training set. Returns each step's loss, summed over its images: [steps].

    global_counts: for each step, the number of images that all ranks have together.
    amp: "off", "bfloat16" or "float16". clip_norm: longest gradient allowed, or None.
    """
    model.train()
    autocast = torch.autocast(
        device.type, getattr(torch, amp, None), enabled=amp != "off")
    loss_sums = []
    for (images, labels), global_count in zip(batches, global_counts):
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        with autocast:
            loss_sum = F.cross_entropy(model(images), labels, reduction="sum")
        # DDP adds up the ranks' gradients and divides by their number, world_size. Multiplied by
        # it, and divided by the global count, that is the gradient of the global batch's mean.
        loss = loss_sum * dist.get_world_size() / global_count
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if clip_norm:
            # The norm is that of the true gradients, so the scale has to come off first.
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        scaler.step(optimizer)
        scaler.update()
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
def save_atomically(state, path):
    """Write beside `path`, then rename: nobody ever finds half a file there."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        torch.save(state, temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)  # where the disk was full


def save_snapshot(path, args, epoch, model, optimizer, scheduler, scaler, loss_sums):
    """Save all that training needs to go on after `epoch` as if it had never stopped."""
    save_atomically({
        "made_for": training_options(args),
        "epoch": epoch,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "scaler": scaler.state_dict(),
        "rng": torch.get_rng_state(),
        "loss_sums": loss_sums,
    }, path)


def load_snapshot(path, args, rank, device, model, optimizer, scheduler, scaler):
    """Returns the number of epochs that are done, and their losses; (0, []) without a snapshot."""
    # Rank 0 reads and tells the others, so that all go on from the same epoch.
    snapshot = [read_snapshot(path, args) if rank == 0 else None]
    dist.broadcast_object_list(snapshot, src=0, device=device)
    snapshot = snapshot[0]
    if isinstance(snapshot, str):
        refuse(snapshot)
    if snapshot is None:
        return 0, []
    model.load_state_dict(snapshot["model"])
    optimizer.load_state_dict(snapshot["optimizer"])
    scheduler.load_state_dict(snapshot["scheduler"])
    scaler.load_state_dict(snapshot["scaler"])
    torch.set_rng_state(snapshot["rng"])
    return snapshot["epoch"], snapshot["loss_sums"]


def read_snapshot(path, args):
    """The snapshot at `path`, None if there is none, or a line that says why it is of no use."""
    if path is None or not path.exists():
        return None
    try:
        snapshot = torch.load(path, map_location="cpu", weights_only=True)
        made_for, epoch = snapshot["made_for"], snapshot["epoch"]
    except Exception as error:
        return f"{path} is not a snapshot of this script ({type(error).__name__}): move it away"
    wanted = training_options(args)
    if made_for != wanted:
        then = ", ".join(f"{name} {made_for.get(name)}" for name in wanted
                         if made_for.get(name) != wanted[name])
        return (f"{path} was made with other options ({then}):"
                " give the same, or another --snapshot")
    if epoch > args.epochs:
        return f"{path} has done {epoch} epochs: give --epochs {epoch} or more"
    return snapshot


def training_options(args):
    """What must be the same when a snapshot is loaded: the model, and the order of the images."""
    names = ("width", "norm", "dtype", "amp", "lr", "seed", "limit")
    options = {name: getattr(args, name) for name in names}
    return options | {"global batch": args.batch_size * dist.get_world_size()}


# %% Main
def train(args, device, rank, world_size):
    train_loader, test_loader, sampler = make_loaders(args, device, rank, world_size)
    model, ddp_model, optimizer, scheduler, scaler = make_model(
        args, device, args.epochs * len(train_loader))
    images = len(train_loader.dataset)
    global_batch_size = args.batch_size * world_size
    global_counts = [
        min(global_batch_size, images - first) for first in range(0, images, global_batch_size)]
    if rank == 0:
        print(f"global batch: {world_size} processes x {args.batch_size} = {global_batch_size}")
    speed = Speedometer(device, global_batch_size, show=rank == 0)
    start = time.perf_counter()
    done, loss_sums = load_snapshot(
        args.snapshot, args, rank, device, model, optimizer, scheduler, scaler)
    if rank == 0 and done:
        print(f"resumed after epoch {done}")
    if done >= args.epochs:
        accuracy, tested = evaluate(model, test_loader, device)
    for epoch in range(done, args.epochs):
        sampler.set_epoch(epoch)
        batches = speed.watch(train_loader, images, f"epoch {epoch + 1}")
        loss_sums.append(
            train_one_epoch(ddp_model, batches, global_counts, optimizer, scheduler, scaler,
                            device, args.amp, args.clip_norm))
        accuracy, tested = evaluate(model, test_loader, device)
        if rank == 0:
            loss = loss_sums[-1].sum().item() / images
            print(f"epoch {epoch + 1}/{args.epochs}: loss {loss:.4f},"
                  f" {accuracy:.2%} of {tested:,} right, {speed.images_per_second:,.0f} images/s")
            if args.checkpoint and (epoch + 1) % args.save_every == 0:
                save_atomically(model.state_dict(), args.checkpoint)
            if args.snapshot and (epoch + 1) % args.save_every == 0:
                save_snapshot(
                    args.snapshot, args, epoch + 1, model, optimizer, scheduler, scaler,
                    loss_sums)
        if epoch + 1 == args.kill_after and restarts() == 0:
            dist.barrier()
            if rank == world_size - 1:
                print(f"[rank {rank}] killed after epoch {epoch + 1}, on purpose")
                os.kill(os.getpid(), signal.SIGKILL)
    fingerprints = [None] * world_size
    dist.all_gather_object(fingerprints, params_sha256(model))
    if rank == 0:
        for number, fingerprint in enumerate(fingerprints):
            print(f"[rank {number}] weights {fingerprint[:12]}")
        write_report(
            args, model, train_loader.dataset, loss_sums, device=device, world_size=world_size,
            test_accuracy=accuracy, test_samples=tested, speed=speed, start=start,
            rank_params_sha256=fingerprints, amp=args.amp, loss_scale=scaler.get_scale())


@record
def main():
    sys.stdout.reconfigure(line_buffering=True, write_through=False)
    args = parse_args()
    rank, world_size, device = join_process_group(args)
    local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])
    set_threads(args.threads, local_world_size, say=print if rank == 0 else None)
    train(args, device, rank, world_size)
    leave_process_group()


if __name__ == "__main__":
    main()
