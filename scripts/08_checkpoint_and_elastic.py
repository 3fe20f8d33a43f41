# %% About
r"""Train with DDP so that a kill costs the steps since the last snapshot, and nothing else.

torchrun --standalone --nproc-per-node 2 scripts/08_checkpoint_and_elastic.py --snapshot build/run
torchrun --standalone --nproc-per-node gpu --max-restarts 3 \
    scripts/08_checkpoint_and_elastic.py --snapshot build/run --snapshot-every 500
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 1:2 --max-restarts 3 --nproc-per-node 8 \
    --rdzv-backend c10d --rdzv-endpoint 10.0.0.1:29500 --rdzv-id elastic \
    --rdzv-conf last_call_timeout=2 \
    scripts/08_checkpoint_and_elastic.py --snapshot /shared/run

Run the same command again to go on. SIGTERM, SIGHUP and Ctrl-C: all ranks stop after the same step,
with a snapshot. Those that got the signal exit with status 0 (though torchrun exits with 1), those
that stopped because another rank got it with 75, so that their torchrun may start them again, and
rank 0 with 1 where that snapshot could not be written.
A second signal, more than a second later, ends a process at once, with 128 + the signal's number.
"""


# %% Imports
import gc
import os
import random
import signal
import socket
import sys
import threading
import time
import zipfile
from datetime import timedelta
from itertools import islice

import torch
import torch.distributed as dist
import torch.nn.functional as F
from filelock import FileLock, Timeout
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from ddp_tutorial.arguments import (
    input_file,
    load_data,
    output_file,
    output_folder,
    positive_float,
    positive_int,
    refuse,
    training_parser,
)
from ddp_tutorial.device import backend_for, choose_device, set_threads
from ddp_tutorial.model import NORMS, ConvNet, warm_up_then_decay
from ddp_tutorial.report import Speedometer, params_sha256, write_report


# %% Arguments
def parse_args():
    parser = training_parser(__doc__, norms=[*NORMS, "sync", "frozen"])
    add = parser.add_argument
    add("--snapshot", type=output_folder, metavar="DIR",
        help="keep snapshots in this folder, and resume from the newest")
    add("--snapshot-every", type=positive_int, default=100, metavar="STEPS",
        help="steps between snapshots (100)")
    add("--keep", type=positive_int, default=3, metavar="K", help="keep the newest K snapshots (3)")
    add("--no-fallback", action="store_true",
        help="refuse to go on from an older snapshot where the newest is damaged")
    add("--stop-after", type=positive_int, metavar="STEPS",
        help="stop when this run has done so many steps, as if it had been told to by SIGTERM")
    add("--amp", choices=["off", "bfloat16", "float16"], default="off",
        help="compute in this format where it is safe (off)")
    add("--clip-norm", type=positive_float, metavar="NORM", help="shorten longer gradients to this")
    add("--kill-after", type=positive_int, metavar="STEP",
        help="rehearse a failure: the last rank is killed after this step, once")
    add("--evaluate", type=input_file, metavar="CHECKPOINT",
        help="do not train: evaluate these weights")
    add("--predictions", type=output_file, metavar="FILE",
        help="save what the model says about each test image, a tensor [images]")
    args = parser.parse_args()
    if not {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"} <= os.environ.keys():
        parser.error("start this script with torchrun, which gives every process its rank:"
                     " torchrun --standalone --nproc-per-node 2"
                     " scripts/08_checkpoint_and_elastic.py")
    return args


# %% Process group
def restarts():
    """How often torchrun has started the workers again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def attempt():
    """A number that all ranks of this attempt share, for the names of what they put into the store.

    torchruns may have counted differently how often they have restarted. Where each attempt has a
    store of its own, a count is not needed; else the store still holds what the last one put there.
    """
    return restarts() if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0


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
    # A worker whose launcher has died meanwhile shall not wait half an hour for its store.
    store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(minutes=5)))
    store = dist.PrefixStore(f"attempt {attempt()}", store)
    # Blocks until all of world_size processes have come.
    dist.init_process_group(backend_for(device), store=store, rank=rank, world_size=world_size)
    return rank, world_size, device


def leave_process_group():
    """Call it after success only: when one rank fails, leaving would make the others fail before
    anybody has seen whose failure it was."""
    # The DDP wrapper must go first: its threads would outlive the group, and abort the exit.
    gc.collect()
    dist.destroy_process_group()


# %% Stop requests
STOPPED_BY_ANOTHER_RANK = 75  # sysexits.h: a temporary failure, try again


class StopRequest:
    """SIGTERM, SIGHUP, Ctrl-C, or the death of the launcher ask for a stop; all ranks agree on the
    step. Make one at the very start, and call `begin` when the ranks have met."""

    def __init__(self):
        self.launcher, self.asked_at = os.getppid(), None
        self.has_begun, self.group, self.work = False, None, None
        # A signal's Python handler runs when the main thread gets around to it, which may be never
        # while that waits for another rank. So a thread listens where the signal is noted down.
        self.listener, self.noted = socket.socketpair()
        self.listener.settimeout(1)
        threading.Thread(target=self.listen, daemon=True).start()

    def begin(self):
        self.noted.setblocking(False)
        signal.set_wakeup_fd(self.noted.fileno())
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        # On the CPU, so that asking does not make the CPU wait for the GPU in every step.
        self.group = dist.new_group(backend="gloo")
        self.has_begun = True

    def listen(self):
        while True:
            try:
                number = self.listener.recv(1)[0]
            except TimeoutError:
                if os.getppid() != self.launcher:
                    if not self.has_begun:
                        os._exit(1)  # nobody would end this process, and there is nothing to keep
                    self.asked_at = self.asked_at or time.monotonic()
                continue
            if self.asked_at is None:
                self.asked_at = time.monotonic()
            elif time.monotonic() - self.asked_at > 1:  # launchers may pass one signal on twice
                os._exit(128 + number)

    def agreed(self):
        """Call it on every rank after every step. True on all of them after the same step.

        What is asked in one step is answered in the next: nobody waits for the answer.
        """
        stop = self.last_answer()
        self.answer = torch.tensor([int(self.asked_at is not None)])
        self.work = dist.all_reduce(
            self.answer, dist.ReduceOp.MAX, group=self.group, async_op=True)
        return stop

    def reached_this_rank(self):
        """Whether this rank was asked; launchers ask one after the other, so wait a moment."""
        deadline = time.monotonic() + 1
        while self.asked_at is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.asked_at is not None

    def last_answer(self):
        if self.work is None:
            return False
        self.work.wait()
        self.work = None
        return self.answer.item() > 0

    def end(self):
        """Call it before the ranks part: the thread must not hold on to the group."""
        self.last_answer()
        self.group = None


# %% Data
class GlobalBatches:
    """This rank's part of every global batch: a list of sample numbers a step.

    The global batches do not depend on the number of ranks: a rank takes every world_size-th image
    of each. So another number of ranks can go on after any step. Shards may differ by one image,
    or be empty; but every rank gets the same number of lists.
    """

    def __init__(self, sampler, global_batch_size, rank, world_size):
        self.sampler, self.global_batch_size = sampler, global_batch_size
        self.rank, self.world_size = rank, world_size
        self.steps = -(-len(sampler) // global_batch_size)  # rounded up
        self.first = 0  # steps of this epoch that are done already

    def __len__(self):
        return self.steps - self.first

    def __iter__(self):
        order = list(self.sampler)
        for step in range(self.first, self.steps):
            start = step * self.global_batch_size
            yield order[start : start + self.global_batch_size][self.rank :: self.world_size]


def make_loaders(args, train_set, test_set, device, rank, world_size, global_batch_size):
    # As for one process: the order of all samples. GlobalBatches shares it out.
    sampler = DistributedSampler(train_set, 1, 0, shuffle=True, seed=args.seed)
    train_batches = GlobalBatches(sampler, global_batch_size, rank, world_size)
    test_shard = range(rank, len(test_set), world_size)
    test_batches = BatchSampler(test_shard, batch_size=1000, drop_last=False)
    # batch_size=None: a sampler hands out whole batches, and the data set looks them up in one go.
    # Each time it begins, a loader draws a random number, and a resumed epoch begins twice. With a
    # generator of their own, the loaders leave the random numbers of the training alone.
    options = {"batch_size": None, "pin_memory": device.type == "cuda"}
    train_loader = DataLoader(
        train_set, sampler=train_batches, generator=torch.Generator(), **options)
    test_loader = DataLoader(
        test_set, sampler=test_batches, generator=torch.Generator(), **options)
    return train_loader, test_loader, train_batches


# %% Norm layers
class NormaliseOverRanks(torch.autograd.Function):
    """Batch norm's arithmetic in training, over the images of all ranks together."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        """x: this rank's [batch, channels, height, width], where batch may be 0."""
        own_count = x.new_tensor([x.numel() / x.shape[1]])
        sums = torch.cat([x.sum(dim=(0, 2, 3)), own_count])
        dist.all_reduce(sums)
        mean, count = sums[:-1] / sums[-1], sums[-1]
        centred = x - mean[:, None, None]
        squares = centred.square().sum(dim=(0, 2, 3))
        # Not in the same message: the mean of squares less the square of the mean rounds badly.
        dist.all_reduce(squares)
        variance = squares / count
        inverse_std = (variance + eps).rsqrt()
        normalised = centred * inverse_std[:, None, None]
        ctx.save_for_backward(normalised, weight * inverse_std, count)
        ctx.mark_non_differentiable(mean, variance, count)
        return normalised * weight[:, None, None] + bias[:, None, None], mean, variance, count

    @staticmethod
    def backward(ctx, grad, *_):
        normalised, slope, count = ctx.saved_tensors
        # Through mean and variance, each image moves the results of all ranks' images.
        own_sums = torch.stack([grad.sum(dim=(0, 2, 3)), (grad * normalised).sum(dim=(0, 2, 3))])
        sums = own_sums.clone()
        dist.all_reduce(sums)
        by_mean, by_variance = sums[:, :, None, None] / count
        grad_x = slope[:, None, None] * (grad - by_mean - normalised * by_variance)
        # Weight and bias are parameters like all others: DDP averages their gradients.
        return grad_x, own_sums[1], own_sums[0], None


class SyncBatchNormByHand(nn.BatchNorm2d):
    """What torch.nn.SyncBatchNorm does between GPUs, on any device."""

    def forward(self, x):
        if not self.training:
            return super().forward(x)
        result, mean, variance, count = NormaliseOverRanks.apply(
            x.to(self.weight.dtype), self.weight, self.bias, self.eps)
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * count / (count - 1), self.momentum)
            self.num_batches_tracked += 1
        return result.to(x.dtype)


class FrozenBatchNorm(nn.BatchNorm2d):
    """Batch norm whose statistics were measured once, and stay."""

    def train(self, mode=True):
        return super().train(False)


@torch.no_grad()
def measure_statistics(model, batches, device, count=10):
    """Give the frozen layers of `model` the mean of the statistics of the first batches."""
    layers = [layer for layer in model.modules() if isinstance(layer, FrozenBatchNorm)]
    for layer in layers:
        layer.training, layer.momentum = True, None  # None: the plain mean over all batches
    for images, _ in islice(batches, count):
        model(images.to(device))
    for layer in layers:
        layer.training = False


def norm_for(name, device):
    """The layer that `--norm` asks for, as ConvNet takes it: a name, or a class."""
    sync = nn.SyncBatchNorm if device.type == "cuda" else SyncBatchNormByHand
    return {"sync": sync, "frozen": FrozenBatchNorm}.get(name, name)


# %% Model
def make_model(args, device, steps):
    torch.manual_seed(args.seed)
    norm = norm_for(args.norm, device)
    model = ConvNet(width=args.width, norm=norm).to(device, getattr(torch, args.dtype))
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
    """Train on `batches`. Yields after each step: its loss, summed over this rank's images.

    global_counts: for each step, the number of images that all ranks have together.
    amp: "off", "bfloat16" or "float16". clip_norm: longest gradient allowed, or None.
    """
    model.train()
    autocast = torch.autocast(
        device.type, getattr(torch, amp, None), enabled=amp != "off")
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
        yield loss_sum.detach()


# %% Evaluate
@torch.no_grad()
def evaluate(model, test_loader, device):
    """Look at the test set on all ranks, each image once. Every rank gets the whole answer.

    model: the plain one, not the DDP wrapper, which would wait for the other ranks in every batch.
    test_loader: every world_size-th image, from this rank's number on; maybe none.

    Returns the results as a dict for the report ("confusion" counts the images of digit i that
    were taken for digit j), and the predictions in the order of the data set: int64 [images].
    """
    # Batch norm keeps running statistics, each rank those of its own shard: all take rank 0's.
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    model.eval()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    loss_sum = torch.zeros(1, dtype=torch.float64, device=device)
    confusion = torch.zeros(100, dtype=torch.int64, device=device)
    predictions = torch.zeros(len(test_loader.dataset), dtype=torch.int64, device=device)
    done = 0
    for images, labels in test_loader:
        logits, labels = model(images.to(device)), labels.to(device)
        said = logits.argmax(dim=1)
        loss_sum += F.cross_entropy(logits, labels, reduction="sum")
        confusion += torch.bincount(10 * labels + said, minlength=100)
        predictions[rank::world_size][done : done + len(said)] = said
        done += len(said)
    # Sums and counts add up to the right answer. Means would not: the shards differ in size. And
    # where another rank has its predictions, this one has zeros, so that they add up as well.
    for total in (loss_sum, confusion, predictions):
        dist.all_reduce(total)
    confusion = confusion.view(10, 10)
    tested = confusion.sum().item()
    return {
        "test_loss": loss_sum.item() / max(tested, 1),
        "test_accuracy": confusion.trace().item() / max(tested, 1),
        "test_samples": tested,
        "confusion": confusion.tolist(),
    }, predictions


def worst_digit(confusion):
    """The digit that was read wrongly most often, in words."""
    shares = [(row[digit] / sum(row), digit) for digit, row in enumerate(confusion) if sum(row)]
    share, digit = min(shares)
    return f"digit {digit}, {share:.1%} of {sum(confusion[digit]):,}"


# %% Save
def save_atomically(state, path):
    """Write beside `path`, then rename: nobody ever finds half a file there."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        torch.save(state, temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)  # where the disk was full


def load_weights(path, model):
    """Load a checkpoint, as --checkpoint writes it; what is none for this model is refused."""
    try:
        model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:
        refuse(f"{path} holds no weights for this model ({type(error).__name__}):"
               " give a file that --checkpoint wrote, and --width and --norm as they were then")


# %% Snapshots
LOCK_PATIENCE = 20  # seconds
SNAPSHOT_KEYS = {"options", "global_batch_size", "loss_sums", "rng", "steps", "model", "optimizer",
                 "scheduler", "scaler"}


class Progress:
    """How far the training is."""

    def __init__(self, epochs, steps_per_epoch, device):
        self.total, self.steps_per_epoch = epochs * steps_per_epoch, steps_per_epoch
        self.steps = 0  # done, of the whole training
        self.steps_before = 0  # of those, the steps that other runs have done
        self.kept = 0  # the step of the newest snapshot that this run knows of
        self.loss_sums = torch.zeros(0, device=device)  # of all ranks together, a number a step
        self.own_loss_sums = []  # of this rank, the steps since then

    # When all steps of an epoch are done, its evaluation is not: it is still the same epoch.
    epoch = property(lambda self: max(0, self.steps - 1) // self.steps_per_epoch)
    step = property(lambda self: self.steps - self.epoch * self.steps_per_epoch)

    def add(self, loss_sum):
        self.steps += 1
        self.own_loss_sums.append(loss_sum)

    def gather_losses(self):
        """Call it on all ranks. Returns the loss of each step so far, summed over its images."""
        if self.own_loss_sums:
            new = torch.stack(self.own_loss_sums)
            dist.all_reduce(new)
            self.loss_sums = torch.cat([self.loss_sums.to(new.dtype), new])
            self.own_loss_sums = []
        return self.loss_sums


def snapshots_in(folder):
    """The paths of all snapshots, the oldest first."""
    return sorted(folder.glob("step-" + 9 * "[0-9]" + ".pt"))


def save_snapshot(folder, keep, state):
    """Make `state` a snapshot in `folder`. Of those before it, keep - 1 stay."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{state['steps']:09}.pt"
    temporary = folder / f"{path.name}.tmp"
    try:
        with open(temporary, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())  # on the disk before it gets its name, in case the power fails
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    # Only of those before it: what is newer may be damaged, and then this one is the last good one.
    older = [other for other in snapshots_in(folder) if other < path]
    for other in older[: max(0, len(older) - (keep - 1))]:
        other.unlink()


def find_snapshot(args, options, rank, device):
    """The snapshot to go on from, the same on every rank, or None; and a lock to hold meanwhile.

    Rank 0 looks and tells the others: they may not see its disk, or not see the same moment.
    """
    found, lock = None, None
    if rank == 0 and args.snapshot and not args.evaluate:
        # Two trainings in one folder would go on from each other's snapshots.
        lock = FileLock(args.snapshot / ".lock")
        try:
            lock.acquire(timeout=LOCK_PATIENCE)  # the last run may still be ending
            found = newest_snapshot(args.snapshot, options, fallback=not args.no_fallback)
        except Timeout:
            found = f"{args.snapshot} is in use by another training: give another --snapshot"
    found = [found]
    dist.broadcast_object_list(found, src=0, device=device)
    if isinstance(found[0], str):
        refuse(found[0])
    return found[0], lock


def newest_snapshot(folder, options, fallback=True):
    """The newest usable snapshot, None where there is none at all, or a line that says why not."""
    for leftover in folder.glob("step-*.tmp"):  # of a process that was killed as it wrote
        leftover.unlink()
    problems = []
    for path in reversed(snapshots_in(folder)):
        try:
            return read_snapshot(path, options)
        except Exception as error:
            why = error if isinstance(error, ValueError) else f"damaged: {type(error).__name__}"
            problems.append(f"{path} cannot be used ({why})")
        if not fallback:
            return f"{problems[0]}: move it away, or leave out --no-fallback"
        print(f"{problems[-1]}: looking for an older one")
    return f"{problems[0]}, nor can an older one: give another --snapshot" if problems else None


def read_snapshot(path, options):
    """The snapshot at `path`. Raises an exception that says what is wrong with it."""
    # torch.load would not notice a wrong bit in a weight; the archive has checksums.
    with zipfile.ZipFile(path) as archive:
        if archive.testzip():
            raise ValueError("damaged")
    snapshot = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(snapshot, dict) or "options" not in snapshot:
        raise ValueError("of another script")
    missing = SNAPSHOT_KEYS - snapshot.keys()
    if missing:
        raise ValueError(f"without {', '.join(sorted(missing))}")
    then = snapshot["options"]
    other = ", ".join(f"{name} {then.get(name)}" for name in options
                      if then.get(name) != options[name])
    if other:
        raise ValueError(f"made with {other}; give the same")
    return snapshot


def training_options(args, train_set):
    """What must be the same when a snapshot is loaded: the model, the data, the training."""
    names = ("width", "norm", "dtype", "amp", "clip_norm", "epochs", "lr", "seed")
    options = {name: getattr(args, name) for name in names}
    return options | {"data": train_set.source, "images": len(train_set)}


def rng_state(device):
    """The state of all random numbers of this rank."""
    state = {"python": random.getstate(), "torch": torch.get_rng_state()}
    return state | ({"cuda": torch.cuda.get_rng_state()} if device.type == "cuda" else {})


def take_snapshot(args, options, device, progress, global_batch_size, parts):
    """Call it on all ranks: what they know only together goes to rank 0, which writes it."""
    loss_sums = progress.gather_losses()
    states = [None] * dist.get_world_size()
    dist.all_gather_object(states, rng_state(device))
    if dist.get_rank() != 0:
        return
    state = {
        "options": options, "torch": str(torch.__version__),
        "global_batch_size": global_batch_size, "loss_sums": loss_sums, "rng": states,
        "steps": progress.steps, "epoch": progress.epoch, "step": progress.step,
    }
    try:
        save_snapshot(args.snapshot, args.keep, state | {
            name: part.state_dict() for name, part in parts.items()})
        progress.kept = progress.steps
    except (OSError, RuntimeError) as error:
        # The training goes on: there may be room when the next one is due.
        reason = getattr(error.__context__, "strerror", None) or error
        print(f"no snapshot after step {progress.steps}, the older ones stay ({reason}):"
              f" see to {args.snapshot}", file=sys.stderr)


def resume(snapshot, device, progress, parts, ddp_model):
    """Bring everything back to where it was when `snapshot` was taken."""
    rebuild_buckets(ddp_model, device)
    for name, part in parts.items():
        part.load_state_dict(snapshot[name])  # copies to the device where the part is
    progress.steps = progress.steps_before = progress.kept = snapshot["steps"]
    progress.loss_sums = snapshot["loss_sums"].to(device)
    rank, states = dist.get_rank(), snapshot["rng"]
    if rank < len(states):  # a rank that was not there before keeps its own random numbers
        random.setstate(states[rank]["python"])
        torch.set_rng_state(states[rank]["torch"])
        if device.type == "cuda" and "cuda" in states[rank]:
            torch.cuda.set_rng_state(states[rank]["cuda"])
    if rank == 0:
        print(f"resumed after step {progress.steps} of {progress.total}")


def rebuild_buckets(ddp_model, device):
    """Two backward passes, of which nothing is kept but what DDP learns from the first.

    DDP sorts its buckets anew when it has seen in which order gradients come. Among three ranks
    and more the place of a gradient in its bucket decides in which order the ranks add it up, and
    so the last bit. A training that was not interrupted has done this long ago.
    """
    for _ in range(2):
        ddp_model(torch.zeros(2, 1, 28, 28, device=device)).sum().backward()
    ddp_model.zero_grad()


# %% Main
def train(args, stop_request, device, rank, world_size):
    train_set, test_set = load_data(args, say=print if rank == 0 else None)
    options = training_options(args, train_set)
    # The lock is held as long as the variable lives.
    snapshot, lock = find_snapshot(args, options, rank, device)
    global_batch_size = args.batch_size * world_size
    if snapshot:
        global_batch_size = snapshot["global_batch_size"]
    train_loader, test_loader, train_batches = make_loaders(
        args, train_set, test_set, device, rank, world_size, global_batch_size)
    model, ddp_model, optimizer, scheduler, scaler = make_model(
        args, device, args.epochs * train_batches.steps)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    images = len(train_loader.dataset)
    global_counts = [
        min(global_batch_size, images - first) for first in range(0, images, global_batch_size)]
    if rank == 0 and global_batch_size == args.batch_size * world_size:
        print(f"global batch: {world_size} processes x {args.batch_size} = {global_batch_size}")
    elif rank == 0:
        print(f"global batch: {global_batch_size} as in the snapshot, on {world_size} processes,"
              f" not {args.batch_size} on each")
    speed = Speedometer(device, global_batch_size, show=rank == 0)
    start = time.perf_counter()
    if args.norm == "frozen" and rank == 0:
        # These are buffers: DDP sends rank 0's to all ranks before the first forward pass.
        measure_statistics(model, train_loader, device)
    if args.evaluate:
        load_weights(args.evaluate, model)
        args.epochs = 0
    progress = Progress(args.epochs, train_batches.steps, device)
    if snapshot:
        resume(snapshot, device, progress, parts, ddp_model)
    stopped, results = False, None
    for epoch in range(progress.epoch, args.epochs):
        train_batches.sampler.set_epoch(epoch)
        train_batches.first = progress.steps - epoch * train_batches.steps
        left = images - min(images, train_batches.first * global_batch_size)
        batches = speed.watch(train_loader, left, f"epoch {epoch + 1}")
        counts = global_counts[train_batches.first :]
        for loss_sum in train_one_epoch(
                ddp_model, batches, counts, optimizer, scheduler, scaler, device, args.amp,
                args.clip_norm):
            progress.add(loss_sum)
            due_to_stop = progress.steps - progress.steps_before == args.stop_after
            stopped = stop_request.agreed() or due_to_stop
            due = progress.steps % args.snapshot_every == 0 or progress.steps == progress.total
            if args.snapshot and (stopped or due):
                take_snapshot(args, options, device, progress, global_batch_size, parts)
            if progress.steps == args.kill_after and restarts() == 0 and rank == world_size - 1:
                print(f"[rank {rank}] killed after step {progress.steps}, on purpose")
                os.kill(os.getpid(), signal.SIGKILL)
            if stopped:
                batches.close()  # and with it the progress bar
                break
        if stopped:
            break
        loss_sums = progress.gather_losses()
        results, predictions = evaluate(model, test_loader, device)
        if rank == 0:
            loss = loss_sums[-train_batches.steps :].sum().item() / images
            print(f"epoch {epoch + 1}/{args.epochs}: loss {loss:.4f},"
                  f" {results['test_accuracy']:.2%} of {results['test_samples']:,} right,"
                  f" {speed.images_per_second:,.0f} images/s")
            if args.checkpoint and (epoch + 1) % args.save_every == 0:
                save_atomically(model.state_dict(), args.checkpoint)
    stop_request.end()
    if stopped:
        status = 0 if due_to_stop or stop_request.reached_this_rank() else STOPPED_BY_ANOTHER_RANK
        where = f"stopped after step {progress.steps} of {progress.total}"
        if rank == 0 and not args.snapshot:
            print(f"{where}, and nothing is kept: give --snapshot to go on later")
        elif rank == 0 and progress.kept == progress.steps:
            print(f"{where}, kept in {args.snapshot}: run the same command again to go on")
        elif rank == 0:
            print(f"{where}, but the newest snapshot is of step {progress.kept}", file=sys.stderr)
            status = 1
        return status
    if results is None:
        results, predictions = evaluate(model, test_loader, device)
    fingerprints = [None] * world_size
    dist.all_gather_object(fingerprints, params_sha256(model))
    if rank == 0:
        for number, fingerprint in enumerate(fingerprints):
            print(f"[rank {number}] weights {fingerprint[:12]}")
        print(f"test: loss {results['test_loss']:.4f}, {results['test_accuracy']:.2%} of"
              f" {results['test_samples']:,} right; the worst: {worst_digit(results['confusion'])}")
        if args.predictions:
            save_atomically(predictions.cpu(), args.predictions)
        loss_sums = progress.gather_losses().split(train_batches.steps) if args.epochs else []
        write_report(
            args, model, train_loader.dataset, loss_sums, device=device, world_size=world_size,
            speed=speed, start=start, rank_params_sha256=fingerprints, amp=args.amp,
            loss_scale=scaler.get_scale(), norm=args.norm, global_batch_size=global_batch_size,
            restarts=restarts(), resumed_after=progress.steps_before, **results)
    return 0


@record
def main():
    sys.stdout.reconfigure(line_buffering=True, write_through=False)
    stop_request = StopRequest()
    args = parse_args()
    rank, world_size, device = join_process_group(args)
    stop_request.begin()
    local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])
    set_threads(args.threads, local_world_size, say=print if rank == 0 else None)
    status = train(args, stop_request, device, rank, world_size)
    leave_process_group()
    sys.exit(status)


if __name__ == "__main__":
    main()
