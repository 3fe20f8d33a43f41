"""Every check fails on the stub and on plausible mistakes, with a message, and passes on the right solution."""

import json
import time
from pathlib import Path

import pytest

from ddp_tutorial import checks

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"

STUBS = {
    "00_ranks": '''
def rank_of(node_rank, local_rank, processes_per_node):
    """The rank of process `local_rank` of node `node_rank`; each node has `processes_per_node`."""
''',
    "00_workers": '''
def workers(nodes, processes_per_node):
    """The list of (node_rank, local_rank, rank) of all processes, in the order of rank."""
''',
    "01_accuracy": '''
import torch


def accuracy(logits, labels):
    """Share of images whose highest logit is at their label, a float from 0 to 1.

    logits: [n, 10], labels: [n]. An empty batch has accuracy 0.0.
    """
''',
    "01_steps": '''
def steps_per_epoch(images, batch_size, drop_last=False):
    """How many batches an epoch has; the last, smaller one counts unless `drop_last`."""
''',
    "02_shards": '''
def shard_indices(count, world_size, rank):
    """The sample numbers of `rank` as a list: every `world_size`-th of 0 … count - 1, from `rank`.

    No sample is repeated: some ranks may have one fewer, or none.
    """
''',
    "02_average": '''
import torch


def average_gradients(gradients):
    """gradients[rank][k] is tensor k on that rank. Return the list of the means over ranks.

    The tensors that were passed in stay as they are.
    """
''',
    "03_resume": '''
def epochs_left(snapshot_epoch, epochs):
    """The range of epochs still to do, of 0 … epochs - 1, when a snapshot was written at the end
    of `snapshot_epoch`. None: there is no snapshot.
    """
''',
    "03_atomic_save": '''
import os

import torch


def save_atomically(state, path):
    """Save `state` with torch.save so that `path` (a pathlib.Path) holds the old file or the new
    one in full at every moment, whatever fails."""
''',
    "04_loss_scale": '''
import torch


def largest_safe_scale(gradients):
    """The largest power of two by which all gradients (a list of tensors, not all 0) can be
    multiplied without passing float16's largest number."""
''',
    "04_clip": '''
import torch


def clip_scaled(gradients, scale, max_norm):
    """Gradients (a list of tensors) of a loss that was multiplied by `scale`: return them unscaled,
    and then shrunk, if need be, so that their norm over all tensors together is `max_norm`."""
''',
    "05_all_reduce": '''
import torch
import torch.distributed as dist


def all_reduce(tensor):
    """Give every rank the sum of all ranks' tensors, in place, by dist.send and dist.recv."""
''',
    "05_broadcast": '''
import torch.distributed as dist


def broadcast(tensor):
    """Give every rank what rank 0 has, in place, by dist.send and dist.recv."""
''',
    "06_average": '''
import torch.distributed as dist


def average_gradients(model):
    """Give every gradient of `model` its mean over all ranks, on all ranks."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.reduce(parameter.grad, dst=0)
            parameter.grad / dist.get_world_size()
''',
    "06_step_seconds": '''
def step_seconds(ready, sizes, alpha, beta):
    """When the last bucket is through, in seconds since the backward pass began.

    ready[k]: when bucket k has all its gradients. sizes[k]: its bytes. The buckets' all-reduces run
    one after the other, in this order, and each takes alpha + beta * bytes.
    """
''',
    "07_accuracy": '''
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DistributedSampler


def accuracy(model, images, labels, batch_size):
    """Share of all images that the model gets right, from 0 to 1: the same number on every rank.

    All ranks have all images, [n, …], and labels, [n]; each looks at its share of them.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sampler = DistributedSampler(range(len(images)), world_size, rank, shuffle=False)
    shares = []
    for batch in BatchSampler(sampler, batch_size, drop_last=False):
        right = model(images[batch]).argmax(dim=1) == labels[batch]
        shares.append(right.float().mean())
    mean = torch.stack(shares).mean()
    dist.all_reduce(mean)
    return mean.item() / world_size
''',
    "07_local_loss": '''
import torch
import torch.distributed as dist


def local_loss(loss_sum, count):
    """What this rank calls backward() on, under DDP, so that the gradient is that of the mean over
    the samples of all ranks.

    loss_sum: the loss summed over this rank's samples, a tensor. count: how many they are, maybe 0.
    """
    return loss_sum / count
''',
    "08_resume": '''
import torch


def resume(snapshot, model, optimizer, scheduler):
    """Bring everything back to where it was. Returns (epoch, step): where the training goes on,
    where step counts the steps of this epoch that are done.

    snapshot: a dict with "epoch", "step", "model", "optimizer", "scheduler", and "rng", which is
    what torch.get_rng_state() gave.
    """
    model.load_state_dict(snapshot["model"])
    return snapshot["epoch"], 0
''',
    "08_share": '''
def share(order, global_batch, step, rank, world_size):
    """The samples of `rank` in global batch number `step` (from 0), a list: every world_size-th.

    order: all samples of the epoch, in the order in which one process would take them.
    """
''',
    "09_launch_lines": '''
def launch_lines(processes, address, port):
    """The commands that start scripts/09_many_machines.py on several machines, one command each,
    in the static form.

    processes: how many to start on each machine, a list.
    address, port: of machine 0, as the others reach it.
    """
    lines = []
    for count in processes:
        lines.append(
            f"torchrun --nnodes {len(processes)} --nproc-per-node {max(processes)}"
            f" --master-addr localhost scripts/09_many_machines.py --master-port {port}")
    return lines
''',
    "09_batch_file": '''
COMMANDS = """
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export MASTER_ADDR MASTER_PORT
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 \\
    python scripts/09_many_machines.py --snapshot "build/slurm-$SLURM_JOB_ID"
"""


def batch_file(nodes, gpus, cores, hours):
    """A batch file for `nodes` machines, each with so many GPUs and CPU cores: a task for each GPU.

    The tasks of a machine share out its cores evenly. The job may run for so many hours, written
    HH:00:00, and again when Slurm has put it back into the queue. 120 s before its time is over,
    the shell of the batch file gets the signal USR1. Options: --nodes, --ntasks-per-node,
    --gpus-per-node, --cpus-per-task, --time, --signal, --requeue.
    """
    header = f"""#!/bin/bash
# SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={nodes * gpus}
#SBATCH --time={hours}
"""
    return header + COMMANDS
''',
}

SOLUTIONS = {
    "00_ranks": "    return node_rank * processes_per_node + local_rank",
    "00_workers": """
    pairs = [(node, local) for node in range(nodes) for local in range(processes_per_node)]
    return [(node, local, rank) for rank, (node, local) in enumerate(pairs)]
""",
    "01_accuracy": """
    correct = (logits.argmax(dim=1) == labels).sum().item()
    return correct / len(labels) if len(labels) else 0.0
""",
    "01_steps": "    return images // batch_size if drop_last else -(-images // batch_size)",
    "02_shards": "    return list(range(rank, count, world_size))",
    "02_average": "    return [torch.stack(tensors).mean(dim=0) for tensors in zip(*gradients)]",
    "03_resume": "    return range(0 if snapshot_epoch is None else snapshot_epoch + 1, epochs)",
    "03_atomic_save": """
    temporary = path.with_name(path.name + ".tmp")
    torch.save(state, temporary)
    os.replace(temporary, path)
""",
    "04_loss_scale": """
    largest = max(gradient.abs().max().item() for gradient in gradients)
    scale = 1.0
    while scale * largest > torch.finfo(torch.float16).max:
        scale /= 2
    while 2 * scale * largest <= torch.finfo(torch.float16).max:
        scale *= 2
    return scale
""",
    "04_clip": """
    gradients = [gradient / scale for gradient in gradients]
    norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    return [gradient * min(1.0, max_norm / norm.item()) for gradient in gradients]
""",
    "05_all_reduce": """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        other = torch.empty_like(tensor)
        for source in range(1, world_size):
            dist.recv(other, src=source)
            tensor += other
        for target in range(1, world_size):
            dist.send(tensor, dst=target)
    else:
        dist.send(tensor, dst=0)
        dist.recv(tensor, src=0)
""",
    "05_broadcast": """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    having = 1  # ranks 0 to having - 1 have it; each gives it to one more, so this doubles
    while having < world_size:
        if rank < having and rank + having < world_size:
            dist.send(tensor, dst=rank + having)
        elif having <= rank < 2 * having:
            dist.recv(tensor, src=rank - having)
        having *= 2
""",
    # The stub's function is wrong, so this one takes its place.
    "06_average": """

def average_gradients(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
""",
    "06_step_seconds": """
    free = 0.0
    for moment, size in zip(ready, sizes):
        free = max(free, moment) + alpha + beta * size
    return free
""",
    "07_accuracy": """

def accuracy(model, images, labels, batch_size):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    counts = torch.zeros(2, dtype=torch.int64)
    for batch in BatchSampler(range(rank, len(images), world_size), batch_size, drop_last=False):
        right = model(images[batch]).argmax(dim=1) == labels[batch]
        counts += torch.tensor([right.sum().item(), len(batch)])
    dist.all_reduce(counts)
    return counts[0].item() / counts[1].item()
""",
    "07_local_loss": """

def local_loss(loss_sum, count):
    count = torch.tensor(count)
    dist.all_reduce(count)
    return loss_sum * dist.get_world_size() / count
""",
    "08_resume": """

def resume(snapshot, model, optimizer, scheduler):
    model.load_state_dict(snapshot["model"])
    optimizer.load_state_dict(snapshot["optimizer"])
    scheduler.load_state_dict(snapshot["scheduler"])
    torch.set_rng_state(snapshot["rng"])
    return snapshot["epoch"], snapshot["step"]
""",
    "08_share": "    return order[step * global_batch : (step + 1) * global_batch][rank::world_size]",
    "09_launch_lines": """

def launch_lines(processes, address, port):
    lines = []
    for machine, count in enumerate(processes):
        lines.append(
            f"torchrun --nnodes {len(processes)} --node-rank {machine} --nproc-per-node {count}"
            f" --master-addr {address} --master-port {port} scripts/09_many_machines.py")
    return lines
""",
    "09_batch_file": """

def batch_file(nodes, gpus, cores, hours):
    header = f\"\"\"#!/bin/bash
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={gpus}
#SBATCH --gpus-per-node={gpus}
#SBATCH --cpus-per-task={cores // gpus}
#SBATCH --time={hours:02}:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
\"\"\"
    return header + COMMANDS
""",
}

# Plausible mistakes, each with a part of the line that answers it.
MISTAKES = [
    ("00_ranks", "    return node_rank + local_rank", "rank_of(1, 0, 4) gave 1, wanted 4"),
    ("00_ranks", "    return local_rank * processes_per_node + node_rank", "rank_of(0, 3, 4) gave 12, wanted 3"),
    ("00_ranks", "    return local_rank", "rank_of(1, 0, 4) gave 0, wanted 4"),
    (
        "00_workers",
        "    return [(n, p, n + p) for n in range(nodes) for p in range(processes_per_node)]",
        "workers(2, 2) gave [(0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 2)], wanted",
    ),
    (
        "00_workers",
        "    return [(n, p, n * processes_per_node + p) for p in range(processes_per_node) for n in range(nodes)]",
        "workers(2, 2) gave [(0, 0, 0), (1, 0, 2), (0, 1, 1), (1, 1, 3)], wanted",
    ),
    ("01_accuracy", "    return (logits.argmax(1) == labels).sum().item()", "gave 8, wanted 1.0"),
    (
        "01_accuracy",
        "    return (logits.argmax(1) == labels).float().mean().item()",
        "empty batch gave nan, wanted 0.0",
    ),
    ("01_accuracy", "    return (logits.argmax(1) == labels).sum().item() / len(labels)", "raised ZeroDivisionError"),
    ("01_accuracy", "    return (logits.argmax(0) == labels).float().mean().item()", "raised RuntimeError"),
    ("01_accuracy", "    return (logits.argmax(1) == labels).float().mean()", "gave tensor(1.0), wanted 1.0"),
    ("01_steps", "    return images // batch_size", "steps_per_epoch(60000, 64) gave 937, wanted 938"),
    ("01_steps", "    return images // batch_size + (not drop_last)", "(60000, 100) gave 601, wanted 600"),
    ("01_steps", "    return images / batch_size", "steps_per_epoch(60000, 100) gave 600.0, wanted 600"),
    ("01_steps", "    return -(-images // batch_size)", "steps_per_epoch(60000, 64, True) gave 938, wanted 937"),
    (
        "02_shards",
        "    size = count // world_size; return list(range(rank * size, (rank + 1) * size))",
        "gave [3, 4, 5]",
    ),
    (
        "02_shards",
        "    return [(rank + k * world_size) % count for k in range(-(-count // world_size))]",
        "gave [1, 4, 7, 0]",
    ),
    (
        "02_shards",
        "    return list(range(rank, count - count % world_size, world_size))",
        "(10, 3, 0) gave [0, 3, 6]",
    ),
    ("02_average", "    return [sum(tensors) for tensors in zip(*gradients)]", "gave [tensor([4.0, 8.0])"),
    ("02_average", "    return [sum(tensors) / 2 for tensors in zip(*gradients)]", "wanted [tensor([-2.0])]"),
    ("02_average", "    return [torch.stack(tensors).mean() for tensors in zip(*gradients)]", "gave [tensor(3.0)"),
    (
        "02_average",
        """
    for other in gradients[1:]:
        for total, gradient in zip(gradients[0], other):
            total += gradient
    return [total / len(gradients) for total in gradients[0]]
""",
        "reading the input again after the call gave",
    ),
    (
        "03_resume",
        "    return range(snapshot_epoch or 0, epochs)",
        "epochs_left(0, 3) gave range(0, 3), wanted range(1, 3)",
    ),
    (
        "03_resume",
        "    return range(snapshot_epoch + 1 if snapshot_epoch else 0, epochs)",
        "epochs_left(0, 3) gave range(0, 3), wanted range(1, 3)",
    ),
    ("03_resume", "    return range(snapshot_epoch + 1, epochs)", "epochs_left(None, 3) raised TypeError"),
    ("03_atomic_save", "    torch.save(state, path)", "fails half-way gave a broken file, wanted epoch 1"),
    (
        "03_atomic_save",
        """
    import shutil
    temporary = path.with_name("temporary")
    torch.save(state, temporary)
    shutil.copyfile(temporary, path)
    temporary.unlink()
""",
        "reading on in the old file, opened before a save,",
    ),
    (
        "03_atomic_save",
        """
    temporary = path.with_name("temporary")
    torch.save(state, temporary)
    path.unlink(missing_ok=True)
    os.rename(temporary, path)
""",
        "the last step of a save gave another way, wanted a rename within the folder, over the old file",
    ),
    (
        "03_atomic_save",
        """
    import tempfile
    temporary = os.path.join(tempfile.mkdtemp(dir=path.parent.parent), "temporary")
    torch.save(state, temporary)
    os.replace(temporary, path)
""",
        "the last step of a save gave another way",
    ),
    (
        "03_atomic_save",
        """
    import shutil
    torch.save(state, path.with_name("temporary"))
    shutil.copyfile(path.with_name("temporary"), path)
""",
        "listing the folder after two saves gave snapshot.pt, temporary, wanted snapshot.pt",
    ),
    ("04_loss_scale", "    return 65536.0", "largest_safe_scale([tensor([1.0])]) gave 65536.0, wanted 32768.0"),
    (
        "04_loss_scale",
        "    return 2.0 ** int(torch.tensor(65504 / max(g.max().item() for g in gradients)).log2().floor())",
        "tensor([[0.002, -0.005]])]) gave 16777216.0, wanted 8388608.0",
    ),
    (
        "04_loss_scale",
        "    return 65504 / max(g.abs().max().item() for g in gradients)",
        "gave 65504.0, wanted 32768.0",
    ),
    (
        "04_loss_scale",
        """
    scale = 1.0
    while 2 * scale * max(g.abs().max().item() for g in gradients) <= 65504:
        scale *= 2
    return scale
""",
        "largest_safe_scale([tensor([100000.0])]) gave 1.0, wanted 0.5",
    ),
    (
        "04_loss_scale",
        """
    scale = 2.0**30
    while scale * max(g.abs().max().item() for g in gradients) >= 65504:
        scale /= 2
    return scale
""",
        "gave 32768.0, wanted 65536.0",
    ),
    (
        "04_clip",
        """
    norm = torch.cat([g.flatten() for g in gradients]).norm().item()
    return [g * min(1.0, max_norm / norm) / scale for g in gradients]
""",
        "wanted [tensor([0.6, 0.0]), tensor([[0.8]])]",
    ),
    (
        "04_clip",
        "    return [g / scale * min(1.0, max_norm / (g / scale).norm().item()) for g in gradients]",
        "gave [tensor([1.0, 0.0]), tensor([[1.0]])], wanted [tensor([0.6, 0.0])",
    ),
    (
        "04_clip",
        """
    norm = torch.cat([g.flatten() / scale for g in gradients]).norm()
    return [g / scale * max_norm / norm for g in gradients]
""",
        "wanted [tensor([3.0, 0.0]), tensor([[4.0]])]",
    ),
    ("05_all_reduce", "    dist.all_reduce(tensor)", "dist.all_reduce is not for this exercise"),
    (
        "05_all_reduce",
        "    if dist.get_rank() == 0:\n        dist.recv(tensor, src=1)",
        "failed: rank 0 waited in vain for another rank (line 9)",
    ),
    (
        "05_all_reduce",
        SOLUTIONS["05_all_reduce"].replace("tensor += other", "tensor = tensor + other"),
        "gave [[1.0, 2.0, 3.0], [11.0, 22.0, 33.0]], wanted",
    ),
    (
        "05_broadcast",
        """
    if dist.get_rank() == 0:
        for other in range(1, dist.get_world_size()):
            dist.send(tensor, other)
    else:
        dist.recv(tensor, 0)
""",
        "the rounds of broadcast on 4 ranks gave 3, wanted 2",
    ),
    ("05_broadcast", "    dist.broadcast(tensor, 0)", "dist.broadcast is not for this exercise"),
    ("05_broadcast", "    1 / (dist.get_rank() != 1)", "failed: rank 1 raised ZeroDivisionError: division by zero"),
    ("06_average", SOLUTIONS["06_average"].replace("parameter.grad /=", "parameter.grad /"), "gave [[[12.0, 12.0"),
    ("06_average", SOLUTIONS["06_average"].replace("parameter.grad is not None", "True"), "'NoneType'"),
    (
        "06_average",
        SOLUTIONS["06_average"].replace("            dist", "            if dist.get_rank() == 0: dist"),
        "waited in vain",
    ),
    ("06_step_seconds", "    return ready[-1] + alpha + beta * sizes[-1]", "0.01) gave 2.2, wanted 4.0"),
    ("06_step_seconds", "    return ready[0] + sum(alpha + beta * size for size in sizes)", "wanted 2.25"),
    (
        "07_accuracy",
        SOLUTIONS["07_accuracy"].replace(
            "range(rank, len(images), world_size)",
            "DistributedSampler(range(len(images)), world_size, rank, shuffle=False)",
        ),
        "accuracy of 7 images on 2 ranks, batches of 3, gave [0.5, 0.5], wanted [0.428571, 0.428571]",
    ),
    (
        "07_accuracy",
        SOLUTIONS["07_accuracy"].replace("    dist.all_reduce(counts)\n", ""),
        "gave [0.5, 0.333333], wanted [0.428571, 0.428571]",
    ),
    (
        "07_accuracy",
        """

def accuracy(model, images, labels, batch_size):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    own = slice(rank, None, world_size)
    share = (model(images[own]).argmax(dim=1) == labels[own]).float().mean()
    dist.all_reduce(share)
    return share.item() / world_size
""",
        "gave [0.416667, 0.416667], wanted [0.428571, 0.428571]",
    ),
    (
        "07_accuracy",
        "\n\ndef accuracy(model, images, labels, batch_size):\n"
        "    return (model(images).argmax(dim=1) == labels).sum().item() / len(labels)\n",
        "looked at for the accuracy of 12 images on 2 ranks, batches of 3, gave 24, wanted 12",
    ),
    (
        "07_local_loss",
        "\n\ndef local_loss(loss_sum, count):\n    return loss_sum",
        "gave [1.0, 1.0], wanted [0.25, 0.25]",
    ),
    (
        "07_local_loss",
        SOLUTIONS["07_local_loss"].replace(" * dist.get_world_size()", ""),
        "gave [0.125, 0.125], wanted [0.25, 0.25]",
    ),
    (
        "08_resume",
        SOLUTIONS["08_resume"].replace('    torch.set_rng_state(snapshot["rng"])\n', ""),
        "looking at the next random numbers after resume gave others, wanted those of the snapshot",
    ),
    (
        "08_resume",
        SOLUTIONS["08_resume"].replace('snapshot["step"]', 'snapshot["step"] + 1'),
        "resume, from a snapshot of epoch 0 and step 3, gave (0, 4), wanted (0, 3)",
    ),
    (
        "08_resume",
        SOLUTIONS["08_resume"].replace('    scheduler.load_state_dict(snapshot["scheduler"])\n', ""),
        "killed after step 3 and resumed, gave weights",
    ),
    (
        "08_resume",
        SOLUTIONS["08_resume"].replace('    optimizer.load_state_dict(snapshot["optimizer"])\n', ""),
        "a training of 10 steps, killed after step 3 and resumed, gave weights that are off by",
    ),
    ("08_share", "    return order[rank::world_size][step * global_batch :]", "gave [5, 1, 4], wanted [5, 1]"),
    (
        "08_share",
        "    size = global_batch // world_size\n    return order[step * global_batch + rank * size :][:size]",
        "gave [5, 3], wanted [5, 1]",
    ),
    ("09_launch_lines", STUBS["09_launch_lines"].replace("localhost", "{address}"),
     "each line's --node-rank, as torchrun reads launch_lines([1, 1], 'node0', 29500), gave [0, 0], wanted [0, 1]"),
    ("09_launch_lines", SOLUTIONS["09_launch_lines"].replace("{count}", "{max(processes)}"),
     "--nproc-per-node, as torchrun reads launch_lines([2, 1], 'gpu-1', 23456), gave [2, 2], wanted [2, 1]"),
    ("09_launch_lines", SOLUTIONS["09_launch_lines"].replace("{address}", "localhost"), "wanted [node0, node0]"),
    ("09_launch_lines", SOLUTIONS["09_launch_lines"].replace("--node-rank", "--noderank"), "torchrun refuses it: "),
    ("09_launch_lines", SOLUTIONS["09_launch_lines"].replace("torchrun ", "python "), "it does not begin"),
    ("09_batch_file", SOLUTIONS["09_batch_file"].replace("#SBATCH --nodes", "# SBATCH --nodes"), "the linter, of"),
    ("09_batch_file", SOLUTIONS["09_batch_file"].replace("{cores // gpus}", "{cores}"),
     "--cpus-per-task, as Slurm reads batch_file(2, 8, 64, 4), gave 64, wanted 8"),
    ("09_launch_lines", SOLUTIONS["09_launch_lines"].replace("{port} scr", "{port} --standalone scr"),
     "each line's --standalone, as torchrun reads launch_lines([1, 1], 'node0', 29500), gave [True, True]"),
    ("09_launch_lines", SOLUTIONS["09_launch_lines"].replace("machines.py", "machines.py --master-port 5"),
     "what follows the script, as torchrun reads launch_lines([1, 1], 'node0', 29500), gave [[--master-port, 5]"),
    ("09_batch_file", SOLUTIONS["09_batch_file"].replace("+ COMMANDS", ""), "whether srun starts the script in batch"),
    ("09_batch_file", SOLUTIONS["09_batch_file"].replace("--requeue", "--requeue\n#SBATCH --array=0-9"),
     "--array, as Slurm reads batch_file(2, 8, 64, 4), gave 0-9, wanted none"),
    ("09_batch_file", SOLUTIONS["09_batch_file"].replace("B:USR1", "USR1"), "gave USR1@120, wanted B:USR1@120"),
]


# How many cases a right solution passes: one that stopped early would show here.
CASES = {
    "05_all_reduce": 3,
    "05_broadcast": 8,
    "06_average": 3,
    "06_step_seconds": 5,
    "07_accuracy": 8,
    "07_local_loss": 4,
    "08_resume": 7,
    "08_share": 6,
    "09_launch_lines": 33,
    "09_batch_file": 30,
    "00_ranks": 6,
    "00_workers": 4,
    "01_accuracy": 5,
    "01_steps": 6,
    "02_shards": 6,
    "02_average": 4,
    "03_resume": 5,
    "03_atomic_save": 7,
    "04_loss_scale": 5,
    "04_clip": 4,
}


@pytest.fixture
def judge(tmp_path):
    """The verdict on a text, without the child process that check() adds (several seconds with PyTorch)."""

    def run(stem, text):
        path = tmp_path / f"{stem}.py"
        path.write_text(text, encoding="utf-8")
        function, cases, _ = checks.EXERCISES[stem]
        return checks._judge(path, function, cases)

    return run


@pytest.fixture
def check(tmp_path, capsys):
    """What check() prints about a text."""

    def run(stem, text):
        path = tmp_path / f"{stem}.py"
        path.write_text(text, encoding="utf-8")
        assert checks.check(path) is None
        return capsys.readouterr().out

    return run


def test_every_exercise_has_a_stub_a_solution_and_two_mistakes():
    assert set(STUBS) == set(SOLUTIONS) == set(CASES) == set(checks.EXERCISES)
    stems = [stem for stem, _, _ in MISTAKES]
    assert min(stems.count(stem) for stem in STUBS) >= 2


STUBS_GIVE = {
    "09_launch_lines": "each line's --node-rank, as torchrun reads launch_lines([1, 1], 'node0', 29500), gave [0, 0]",
    "09_batch_file": "the linter, of batch_file(2, 8, 64, 4), gave [line 2: ",
    "08_resume": "resume, from a snapshot of epoch 0 and step 3, gave (0, 0), wanted (0, 3)",
    "03_atomic_save": "gave no file, wanted 0",
    "05_all_reduce": "and so on, gave [[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]], wanted [[11.0, 22.0, 33.0], [11.0",
    "05_broadcast": "broadcast on 2 ranks gave [[10.0, 11.0, 12.0], [20.0, 21.0, 22.0]], wanted",
    "07_accuracy": "accuracy of 7 images on 2 ranks, batches of 3, gave [0.666667, 0.666667], wanted [0.428571",
    "07_local_loss": "where the ranks have [5, 3] samples, gave [0.2, 0.333333], wanted [0.25, 0.25]",
    "06_average": "with gradients of 0, 12 … and of 0, 24 …, gave [[[12.0, 12.0], [24.0]]",
}


@pytest.mark.parametrize("stem", STUBS)
def test_a_stub_is_told_what_is_wanted(stem, judge):
    got = STUBS_GIVE.get(stem, "gave None, wanted ")
    said = judge(stem, STUBS[stem])
    assert said.startswith("not yet: ") and got in said


@pytest.mark.parametrize("stem", SOLUTIONS)
def test_a_solution_passes(stem, judge):
    assert judge(stem, STUBS[stem] + SOLUTIONS[stem]) == f"passed: {CASES[stem]} cases"


@pytest.mark.parametrize("stem, old, new", [
    ("09_launch_lines", "torchrun ", "OMP_NUM_THREADS=1 python -m torch.distributed.run "),
    ("09_batch_file", "B:USR1", "B:SIGUSR1"),
    ("09_batch_file", "{hours:02}", "{hours}"),
])
def test_another_spelling_passes(stem, old, new, judge):
    assert old in SOLUTIONS[stem]
    assert judge(stem, STUBS[stem] + SOLUTIONS[stem].replace(old, new)) == f"passed: {CASES[stem]} cases"


@pytest.mark.parametrize("stem, body, expected", MISTAKES)
def test_a_mistake_is_answered(stem, body, expected, judge):
    said = judge(stem, STUBS[stem] + body)
    assert said.startswith("not yet: ") and "\n" not in said
    assert expected in said


def notebook_files(folder):
    """{stem: text} of the exercise files that the %%part cells of a folder's notebooks write."""
    texts = {}
    for notebook in folder.glob("*.ipynb"):
        for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
            first, _, body = "".join(cell["source"]).partition("\n")
            if first.startswith("%%part build/exercises/"):
                stem = Path(first.split()[1]).stem
                texts[stem] = texts.get(stem, "") + body + "\n"
    return texts


def test_the_notebooks_stubs_fail_and_their_solutions_pass(judge):
    stubs, solutions = notebook_files(NOTEBOOKS), notebook_files(NOTEBOOKS / "solutions")
    assert set(stubs) == set(solutions) == set(checks.EXERCISES)
    for stem in stubs:
        assert judge(stem, stubs[stem]).startswith("not yet: "), stem
        assert judge(stem, solutions[stem]) == f"passed: {CASES[stem]} cases"


# ------------------------------------------------------------------------------------------- the whole way, in a child


def test_check_prints_one_line_for_stub_and_solution(check):
    assert check("02_shards", STUBS["02_shards"]) == "not yet: shard_indices(10, 3, 1) gave None, wanted [1, 4, 7]\n"
    assert check("02_shards", STUBS["02_shards"] + SOLUTIONS["02_shards"]) == "passed: 6 cases\n"
    assert check("01_accuracy", STUBS["01_accuracy"] + SOLUTIONS["01_accuracy"]) == "passed: 5 cases\n"


def test_paths_are_relative_to_the_series_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(checks, "project_root", lambda: tmp_path)
    (tmp_path / "build").mkdir()
    (tmp_path / "build/03_resume.py").write_text(STUBS["03_resume"] + SOLUTIONS["03_resume"], encoding="utf-8")
    checks.check("build/03_resume.py")
    assert capsys.readouterr().out == "passed: 5 cases\n"


def test_prints_of_the_reader_come_first_and_are_cut(check):
    loud = "def rank_of(*_):\n    print('looking ✓')\n"
    assert check("00_ranks", loud) == "looking ✓\nnot yet: rank_of(0, 0, 4) gave None, wanted 0\n"
    louder = "def rank_of(*_):\n    for _ in range(100_000):\n        print('x' * 99)\n"
    assert 2000 <= len(check("00_ranks", louder)) < 2300


def test_an_endless_loop_ends(check, monkeypatch, tmp_path):
    # The limit is the child's own: a changed copy of the number reaches it through sitecustomize.
    (tmp_path / "sitecustomize.py").write_text(
        "import signal\nalarm = signal.alarm\nsignal.alarm = lambda seconds: alarm(seconds and 1)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    start = time.monotonic()
    assert check("00_ranks", "while True:\n    pass\n").startswith("not yet: no answer within 20 s")
    assert time.monotonic() - start < 15


@pytest.mark.parametrize(
    "text, expected",
    [
        ("import os\n\ndef rank_of(*_):\n    os._exit(0)\n", "00_ranks.py ended its process (exit status 0)"),
        ("import os\n\ndef rank_of(*_):\n    os.abort()\n", "00_ranks.py ended its process (exit status -6)"),
        ("raise SystemExit(3)\n", "00_ranks.py raised SystemExit: 3 (line 1)"),
    ],
)
def test_a_file_that_ends_its_process(text, expected, check):
    assert check("00_ranks", text).startswith(f"not yet: {expected}")


@pytest.mark.parametrize(
    "text, expected",
    [
        ("def rank_of(a, b, c):\n    return a +\n", "not yet: 00_ranks.py line 2: invalid syntax"),
        ("\nimport no_such_module\n", "raised ModuleNotFoundError: No module named 'no_such_module' (line 2)"),
        ("rank = 3\n", "not yet: 00_ranks.py defines no function rank_of"),
        ("def rank_of(a, b):\n    return a\n", "rank_of(0, 0, 4) raised TypeError"),
        ("def rank_of(a, b, c):\n    return 1 / 0\n", "raised ZeroDivisionError: division by zero (line 2)"),
        (
            "class Odd:\n    def __repr__(self):\n        1 / 0\n\n\ndef rank_of(*_):\n    return Odd()\n",
            "raised ZeroDivisionError: division by zero (line 3)",
        ),
    ],
)
def test_broken_files_get_one_line(text, expected, judge):
    said = judge("00_ranks", text)
    assert expected in said and "\n" not in said


def test_unknown_exercises_and_missing_files_are_named(capsys, tmp_path):
    checks.check(tmp_path / "02_shard.py")
    assert "there is no exercise 02_shard; there are 00_ranks, 00_workers" in capsys.readouterr().out
    checks.check(tmp_path / "02_shards.py")
    assert capsys.readouterr().out.startswith("not yet: there is no file 02_shards.py so far; run the cell")


@pytest.mark.parametrize("got, wanted", [(True, 1), (1.0, 1), ([1], [1, 2]), (None, []), ("1", 1), (0.5001, 0.5)])
def test_same_is_not_too_kind(got, wanted):
    assert not checks.same(got, wanted)
    assert checks.same(wanted, wanted)
