# %% About
"""Train as in step 02, with DistributedDataParallel taken apart and put together again by hand.

python scripts/06_ddp_by_hand.py                                     # four ways, then compared
python scripts/06_ddp_by_hand.py --stages overlap --epochs 3         # the finished one, by itself
python scripts/06_ddp_by_hand.py --stages overlap ddp --nproc 8 --device cuda
"""


# %% Imports
import contextlib
import gc
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.profiler import profile, record_function
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from ddp_tutorial.arguments import load_data, positive_float, positive_int, training_parser
from ddp_tutorial.device import backend_for, choose_device, set_threads
from ddp_tutorial.machines import bytes_sent, free_port
from ddp_tutorial.model import ConvNet, warm_up_then_decay
from ddp_tutorial.report import Speedometer, make_report, write_json
from ddp_tutorial.timeline import lanes_of


# %% Arguments
def parse_args():
    parser = training_parser(__doc__)
    add = parser.add_argument
    add("--nproc", type=positive_int, default=2, help="processes on this machine (2)")
    add("--stages", nargs="+", choices=list(STAGES), metavar="STAGE",
        default=["average", "buckets", "overlap", "ddp"], help=", ".join(STAGES))
    add("--bucket-kb", type=positive_float, default=64.0,
        help="a bucket is full at that many KiB (64)")
    add("--accumulate", type=positive_int, default=1, metavar="N", help="batches a step (1)")
    add("--no-sync", nargs="+", choices=["whole", "backward", "never"], default=["whole"],
        help="what no_sync covers in all but the last batch of a step: each is tried (whole)")
    add("--profile", action="store_true", help="record the first steps of each stage")
    return parser.parse_args()


# %% Process group
def join_process_group(args, rank):
    """Meet the other processes. Returns this one's device."""
    device = choose_device(args.device, args.nproc, say=print if rank == 0 else None)
    if device.type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(backend_for(device), rank=rank, world_size=args.nproc)
    return device


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
    train_set, test_set = load_data(args, say=None)
    sampler = DistributedSampler(train_set, world_size, rank, shuffle=True, seed=args.seed)
    train_batches = ShardBatches(sampler, args.batch_size)
    test_shard = range(rank, len(test_set), world_size)
    test_batches = BatchSampler(test_shard, batch_size=1000, drop_last=False)
    # batch_size=None: a sampler hands out whole batches, and the data set looks them up in one go.
    pin = device.type == "cuda"
    train_loader = DataLoader(train_set, batch_size=None, sampler=train_batches, pin_memory=pin)
    test_loader = DataLoader(test_set, batch_size=None, sampler=test_batches, pin_memory=pin)
    return train_loader, test_loader, sampler


# %% Alone
class Alone:
    """Stage 1: a wrapper like DDP, that does nothing. Each rank trains a model of its own."""

    def __init__(self, module, bucket_bytes):
        self.module = module
        self.synchronising = True

    def __call__(self, images):
        return self.module(images)

    @contextlib.contextmanager
    def no_sync(self):
        """In here, gradients add up on each rank and are not averaged."""
        self.synchronising = False
        try:
            yield
        finally:
            self.synchronising = True

    def finish(self):
        """To be called between the backward pass and the optimizer's step."""


# %% Same start
def broadcast_together(tensors):
    """Give every rank what rank 0 has, in one message for all tensors of the same type."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        same = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = flatten(same)
        dist.broadcast(flat, src=0)
        unflatten(flat, same)


def flatten(tensors):
    """All their numbers in one row, copied: [sum of their sizes]."""
    return torch.cat([tensor.flatten() for tensor in tensors])


def unflatten(flat, tensors):
    """Copy the numbers back to where `flatten` found them."""
    for tensor, numbers in zip(tensors, flat.split([tensor.numel() for tensor in tensors])):
        tensor.copy_(numbers.view_as(tensor))


class SameStart(Alone):
    """Stage 2: all ranks start with the weights of rank 0."""

    def __init__(self, module, bucket_bytes):
        super().__init__(module, bucket_bytes)
        with torch.no_grad():
            broadcast_together(list(module.state_dict().values()))
        self.buffers_are_due = True

    def __call__(self, images):
        # Batch norm keeps running statistics in buffers. Like DDP, take rank 0's once a step.
        buffers = list(self.module.buffers())
        if self.module.training and self.buffers_are_due and buffers:
            with torch.no_grad():
                broadcast_together(buffers)
        self.buffers_are_due = self.synchronising
        return self.module(images)


# %% Average
class Average(SameStart):
    """Stage 3: after the backward pass, an all-reduce for every gradient."""

    def __init__(self, module, bucket_bytes):
        super().__init__(module, bucket_bytes)
        self.parameters = [p for p in module.parameters() if p.requires_grad]

    def finish(self):
        if self.synchronising:
            self.check_that_all_have_gradients()
            self.average_gradients()

    def check_that_all_have_gradients(self):
        without = [name for name, parameter in self.module.named_parameters()
                   if parameter.requires_grad and parameter.grad is None]
        if without:
            raise RuntimeError(f"[rank {dist.get_rank()}] no gradient for {', '.join(without)}: use"
                               " all parameters in the loss, or set requires_grad=False for these")

    def average_gradients(self):
        for parameter in reversed(self.parameters):
            self.average([parameter.grad])

    def average(self, gradients):
        flat = flatten(gradients) / dist.get_world_size()
        self.all_reduce(flat)
        unflatten(flat, gradients)

    def all_reduce(self, flat):
        dist.all_reduce(flat)


# %% Buckets
class Buckets(Average):
    """Stage 4: fewer, larger messages. Gradients travel together, in buckets of at least
    `bucket_bytes` (the last may be smaller)."""

    def __init__(self, module, bucket_bytes):
        super().__init__(module, bucket_bytes)
        self.buckets = [[]]
        # From the end of the model, because the backward pass gets there first.
        for parameter in reversed(self.parameters):
            if sum(other.nbytes for other in self.buckets[-1]) >= bucket_bytes:
                self.buckets.append([])
            self.buckets[-1].append(parameter)

    def average_gradients(self):
        for bucket in self.buckets:
            self.average([parameter.grad for parameter in bucket])


# %% Overlap
class Overlap(Buckets):
    """Stage 5: a bucket's all-reduce starts as soon as its last gradient is there, while the
    backward pass goes on with the layers before."""

    def __init__(self, module, bucket_bytes):
        super().__init__(module, bucket_bytes)
        self.bucket_of = {p: number for number, bucket in enumerate(self.buckets) for p in bucket}
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self.gradient_is_there)
        self.start_over()

    def start_over(self):
        self.missing = [len(bucket) for bucket in self.buckets]
        self.started = []

    def gradient_is_there(self, parameter):
        if not self.synchronising:
            return
        self.missing[self.bucket_of[parameter]] -= 1
        # Buckets go in the same order on every rank, whichever is full first: the first all-reduce
        # of one rank meets the first of the others.
        for bucket in self.buckets[len(self.started):]:
            if self.missing[len(self.started)] > 0:
                break
            gradients = [parameter.grad for parameter in bucket]
            flat = flatten(gradients) / dist.get_world_size()
            self.started.append((dist.all_reduce(flat, async_op=True), flat, gradients))

    def average_gradients(self):
        for work, flat, gradients in self.started:
            work.wait()
            unflatten(flat, gradients)
        self.start_over()


# %% Ring
def ring_all_reduce(tensor):
    """Add up the tensors of all ranks, in place. Every rank sends 2 (N - 1) / N of its size.

    tensor: contiguous (its numbers lie in memory without gaps, in order), of any shape and type,
    the same on every rank. Raises ValueError where it is not contiguous.
    Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, 2009.
    """
    if not tensor.is_contiguous():
        raise ValueError("ring_all_reduce needs a contiguous tensor: pass tensor.contiguous()")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    chunks = tensor.view(-1).tensor_split(world_size)
    received = torch.empty_like(chunks[0])  # the first is the longest
    # Reduce-scatter: in each step a chunk goes to the right, and what comes from the left is
    # added. After N - 1 steps, rank r has the whole sum of chunk r + 1.
    for step in range(world_size - 1):
        mine, other = chunks[(rank - step) % world_size], chunks[(rank - step - 1) % world_size]
        to_the_right(mine, received[: len(other)])
        other += received[: len(other)]
    # All-gather: the sums go round, as they are. So all ranks end up with the same bits.
    for step in range(world_size - 1):
        mine, other = chunks[(rank - step + 1) % world_size], chunks[(rank - step) % world_size]
        to_the_right(mine, other)


def to_the_right(outgoing, incoming):
    """Send to the next rank and receive from the one before, both at once."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    messages = [(dist.isend, outgoing, (rank + 1) % world_size),
                (dist.irecv, incoming, (rank - 1) % world_size)]
    # A chunk may be empty, when there are fewer numbers than ranks.
    messages = [dist.P2POp(*message) for message in messages if len(message[1])]
    for work in dist.batch_isend_irecv(messages) if messages else []:
        work.wait()


class Ring(Buckets):
    """Stage 6: buckets, with an all-reduce of our own."""

    def all_reduce(self, flat):
        ring_all_reduce(flat)


# %% Compress
class RealDDP(DDP):
    """The real one, made and called like the stages above."""

    def __init__(self, module, bucket_bytes):
        on_gpu = next(module.parameters()).is_cuda
        device_ids = [torch.cuda.current_device()] if on_gpu else None
        super().__init__(module, device_ids=device_ids, bucket_cap_mb=bucket_bytes / 2**20)

    def finish(self):
        """DDP has already done it when the backward pass returns."""


def compress(dtype, bucket):
    """A communication hook: DDP calls it for every bucket, in place of its own all-reduce.
    It returns a *future*, the promise of a tensor that will be there later."""
    flat = bucket.buffer()  # the bucket's gradients, in one row
    small = (flat / dist.get_world_size()).to(dtype)
    future = dist.all_reduce(small, async_op=True).get_future()
    return future.then(lambda _: flat.copy_(small))  # `small` then holds the sum


def ddp_that_compresses(dtype):
    def make(module, bucket_bytes):
        ddp_model = RealDDP(module, bucket_bytes)
        ddp_model.register_comm_hook(dtype, compress)
        return ddp_model

    return make


def ddp_with_power_sgd(module, bucket_bytes):
    """PyTorch's own: sends two thin matrices, whose product is close to the gradient."""
    # One bucket only: with several, their hooks could block each other in Gloo's two threads.
    ddp_model = RealDDP(module, 2**30)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=10)
    ddp_model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return ddp_model


STAGES = {
    "alone": Alone, "same_start": SameStart, "average": Average, "buckets": Buckets,
    "overlap": Overlap, "ring": Ring, "ddp": RealDDP,
    "float16": ddp_that_compresses(torch.float16), "bfloat16": ddp_that_compresses(torch.bfloat16),
    "power_sgd": ddp_with_power_sgd,
}


# %% Model
def make_model(args, stage, device, rank, steps):
    # A seed for each rank: with the same one, dropout would drop the same places everywhere. But
    # the weights differ now, too.
    torch.manual_seed(args.seed + rank)
    model = ConvNet(width=args.width, norm=args.norm).to(device, getattr(torch, args.dtype))
    wrapped_model = STAGES[stage](model, 1024 * args.bucket_kb)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up_then_decay(steps))
    return model, wrapped_model, optimizer, scheduler


# %% Train one epoch
def train_one_epoch(
        model, batches, global_counts, optimizer, scheduler, device, accumulate, no_sync):
    """One pass over the training set. Returns each batch's loss, summed over its images: [batches].

    accumulate: batches a step. no_sync: what it covers in all but the last of them.
    global_counts: for each batch, the number of images that the whole step has, all ranks and all
    its batches together.
    """
    model.module.train()
    loss_sums = []
    for number, ((images, labels), global_count) in enumerate(zip(batches, global_counts), 1):
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        last = number % accumulate == 0 or number == len(global_counts)
        with contextlib.ExitStack() as until_backward_is_done:
            if not last and no_sync == "whole":
                until_backward_is_done.enter_context(model.no_sync())
            with record_function("forward"):
                loss_sum = F.cross_entropy(model(images), labels, reduction="sum")
                loss = loss_sum * dist.get_world_size() / global_count
            if not last and no_sync == "backward":
                until_backward_is_done.enter_context(model.no_sync())
            with record_function("backward"):
                loss.backward()
        if last or no_sync == "never":
            with record_function("finish"):
                model.finish()
        if last:
            with record_function("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
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
def train(args, stage, no_sync, device, rank, world_size):
    """Train a model wrapped in `stage`. Returns its weights in one row, and what happened."""
    train_loader, test_loader, sampler = make_loaders(args, device, rank, world_size)
    batches_per_epoch = len(train_loader)
    steps = args.epochs * -(-batches_per_epoch // args.accumulate)
    model, wrapped_model, optimizer, scheduler = make_model(args, stage, device, rank, steps)
    images = len(train_loader.dataset)
    global_batch_size = args.batch_size * world_size
    images_a_step = global_batch_size * args.accumulate
    # For each batch, the images of its step: all alike, but for the batches of the last step.
    global_counts = [
        min(images_a_step, images - batch // args.accumulate * images_a_step)
        for batch in range(batches_per_epoch)]
    speed = Speedometer(device, global_batch_size, show=False)
    start = time.perf_counter()
    loss_sums = []
    dist.barrier()
    sent = bytes_sent()
    with profile() if args.profile else contextlib.nullcontext() as profiler:
        for epoch in range(args.epochs):
            sampler.set_epoch(epoch)
            batches = speed.watch(train_loader, images, f"epoch {epoch + 1}")
            loss_sums.append(train_one_epoch(
                wrapped_model, batches, global_counts, optimizer, scheduler, device,
                args.accumulate, no_sync))
    sent = None if sent is None else (bytes_sent() - sent) / steps
    weights = flatten([parameter.detach() for parameter in model.parameters()])
    everybodys_weights = [torch.empty_like(weights) for _ in range(world_size)]
    dist.all_gather(everybodys_weights, weights)
    ranks_differ_by = max((weights - other).abs().max().item() for other in everybodys_weights)
    accuracy, tested = evaluate(model, test_loader, device)
    lanes = [None] * world_size
    dist.all_gather_object(lanes, lanes_of(profiler) if args.profile else None)
    name = stage if len(args.no_sync) == 1 else f"{stage}, {no_sync}"
    report = make_report(
        args, model, train_loader.dataset, loss_sums, device=device, world_size=world_size,
        test_accuracy=accuracy, test_samples=tested, speed=speed, start=start,
        stage=name, steps=steps, ms_per_batch=1000 * global_batch_size / speed.images_per_second,
        bytes_per_step=sent, ranks_differ_by=ranks_differ_by, lanes=lanes)
    if rank == 0:
        print_line(report)
        if args.checkpoint:
            save_checkpoint(model, args.checkpoint)
    return weights, report


def worker(rank, args):
    """What every process runs."""
    sys.stdout.reconfigure(line_buffering=True, write_through=False)
    device = join_process_group(args, rank)
    set_threads(args.threads, args.nproc, say=print if rank == 0 else None)
    load_data(args, say=print if rank == 0 else None)
    weights, reports = {}, {}
    for stage in args.stages:
        for no_sync in args.no_sync:
            trained, report = train(args, stage, no_sync, device, rank, args.nproc)
            weights[report["stage"]], reports[report["stage"]] = trained, report
    ddp = next((name for name in weights if name.startswith("ddp")), None)
    for name in weights if ddp else []:
        difference = (weights[name] - weights[ddp]).abs().max().item()
        reports[name]["differs_from_ddp_by"] = difference
        if rank == 0:
            print(f"{name} differs from {ddp} by {difference:.1e}")
    if rank == 0 and args.json:
        write_json(reports, args.json)
    leave_process_group()


def print_line(report):
    sent = report["bytes_per_step"]
    print(f"{report['stage']:17} {report['ms_per_batch']:6.1f} ms a batch,",
          f"{sent / 1000:6.1f} kB sent a step," if sent else "",
          f"ranks differ by {report['ranks_differ_by']:.1e}, {report['test_accuracy']:.2%} right")


def main():
    args = parse_args()
    # What would fail in every worker is refused here, before there are any.
    choose_device(args.device, args.nproc, say=None)
    load_data(args, say=None)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler talks a lot
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(free_port())
    mp.spawn(worker, args=(args,), nprocs=args.nproc)


if __name__ == "__main__":
    main()
