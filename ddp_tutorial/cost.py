"""What messages cost, and what data-parallel training costs on many GPUs: a model, which knows only what is said here.

The alpha-beta model of a message: a fixed time alpha, and a time beta for each byte. From it the time of an
all-reduce, from that how much of it a backward pass hides, and from that the efficiency of a training on many GPUs:

    convnet = convnet_training()
    ring = scaling(convnet, INFINIBAND, ring_all_reduce)        # {GPUs: efficiency}
    often = scaling(replace(convnet, accumulate=8), INFINIBAND, ring_all_reduce)

Not in the model: data loading, stragglers (the slowest GPU holds up all others, and the more there are the slower it
is), other traffic on the network, kernels that get less efficient as batches get smaller, and switches that add up
numbers themselves (NVLink SHARP). All but the last make a real training scale worse.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch.utils.flop_counter import FlopCounterMode

from ddp_tutorial.model import ConvNet

GPU_COUNTS = tuple(2**power for power in range(13))  # 1 to 4096


def fit_cost_model(seconds):
    """The line that fits the times of messages best: ``(alpha, beta)``, with ``seconds = alpha + beta * bytes``.

    seconds: dict from bytes to seconds, two sizes or more. Each time counts by its relative error, so that large
    messages do not decide alone. Source of the model: Hockney, The communication challenge for MPP, 1994.
    """
    times = torch.tensor(list(seconds.values()), dtype=torch.float64)
    sizes = torch.tensor([int(size) for size in seconds], dtype=torch.float64)
    # alpha / time + beta * size / time should be 1 for each; in megabytes, so that both unknowns are alike in size.
    rows = torch.stack([1 / times, sizes / 1e6 / times], dim=1)
    alpha, beta = torch.linalg.lstsq(rows, torch.ones(len(times), 1, dtype=torch.float64)).solution.flatten().tolist()
    return alpha, beta / 1e6


# ------------------------------------------------------------------------------------------------------------ networks


@dataclass(frozen=True)
class Link:
    """What a message between two GPUs takes: ``latency + bytes / bandwidth`` seconds.

    latency: seconds (alpha). bandwidth: bytes per second (1 / beta) that a GPU sends, while it receives as many.
    """

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Cluster:
    """Nodes of some GPUs each: the link of a GPU to others of its node, and its share of the links between nodes."""

    inside: Link
    between: Link
    gpus_per_node: int = 8


# Bandwidth: NVIDIA's data sheet of the H100: NVLink 900 GB/s, which counts both directions. Latency: what NCCL itself
# reckons with for each step of a ring or tree when messages are large (src/graph/tuning.cc, hwLat, protocol Simple:
# NVLink 3.4 us, network 14 us). For messages of a few kilobytes it has a protocol of lower latency: there the model is
# too pessimistic.
NVLINK = Link(3.4e-6, 450e9)
# One NDR adapter of 400 Gbit/s for each GPU: NVIDIA's data sheet of the DGX H100.
INFINIBAND = Cluster(NVLINK, Link(14e-6, 400e9 / 8))
# One Ethernet adapter of so many Gbit/s for the 8 GPUs of a node. The latency of TCP is an assumption.
ETHERNET_100, ETHERNET_25, ETHERNET_10 = (Cluster(NVLINK, Link(50e-6, gbit * 1e9 / 8 / 8)) for gbit in (100, 25, 10))


def ring_all_reduce(size, ranks, link):
    """Seconds of an all-reduce in a ring: 2 (N - 1) alpha + 2 (N - 1) / N size / bandwidth. No algorithm sends less.

    size: bytes. Sources: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, 2009; Thakur, Rabenseifner and
    Gropp, Optimization of collective communication operations in MPICH, 2005. Half of it is a reduce-scatter, half an
    all-gather.
    """
    return 2 * (ranks - 1) * (link.latency + size / ranks / link.bandwidth)


def tree_all_reduce(size, ranks, link):
    """Seconds of an all-reduce in two binary trees at once: 2 log2(N) alpha + 2 size / bandwidth.

    Every rank is a leaf of one tree and an inner node of the other, each tree carries half of the bytes up and down.
    size: bytes. Sources: Sanders, Speck and Träff, Two-tree algorithms for full bandwidth broadcast, reduction and
    scan, 2009; NCCL has them since 2.4. The pipeline's own start is left out: bytes count as if they all flowed at
    once.
    """
    return 2 * math.ceil(math.log2(ranks)) * link.latency + (2 * size / link.bandwidth if ranks > 1 else 0)


def all_reduce_seconds(size, gpus, cluster, all_reduce=ring_all_reduce):
    """Seconds of an all-reduce of `size` bytes over all GPUs: inside the nodes, and between them.

    A reduce-scatter in a ring inside each node leaves every GPU with its share of the sums, which it all-reduces with
    the GPUs of the same place in the other nodes, by `all_reduce`; an all-gather ends it. One after the other: where
    they overlap, it is faster. With one GPU a node it is `all_reduce` alone.
    """
    inside = min(gpus, cluster.gpus_per_node)
    nodes = math.ceil(gpus / cluster.gpus_per_node)
    return ring_all_reduce(size, inside, cluster.inside) + all_reduce(size / inside, nodes, cluster.between)


# ----------------------------------------------------------------------------------------------------------- trainings


@dataclass(frozen=True)
class Training:
    """A training with DDP, as far as its speed depends on it. ``dataclasses.replace`` makes another from it.

    Attributes:
        shapes: those of all parameters.
        flops: floating point operations of one sample, forward and backward.
        flops_per_second: what one GPU achieves of them.
        batch: samples that a GPU takes through one forward and one backward pass.
        held, sent: bytes of one gradient value in memory, and in a message. ``sent=2`` is DDP's bf16_compress_hook.
        bucket: bytes of gradients that DDP gathers before it sends them (``bucket_cap_mb``).
        accumulate: passes for each optimizer step; all but the last are under ``no_sync``.
        power_sgd_rank: of DDP's powerSGD_hook, where it is not 0.
        sharded: FSDP in place of DDP.
    """

    shapes: tuple
    flops: float
    flops_per_second: float
    batch: float
    held: int = 4
    sent: int = 4
    bucket: float = 25 * 2**20
    accumulate: int = 1
    power_sgd_rank: int = 0
    sharded: bool = False

    @property
    def parameters(self):
        return sum(map(math.prod, self.shapes))

    def pass_seconds(self):
        """Of one forward and one backward pass of a GPU; the backward pass is two thirds of it."""
        return self.batch * self.flops / self.flops_per_second

    def message_bytes(self):
        """What all messages of an optimizer step hold, before the all-reduce's own factor."""
        return self.sent * sum(_values_sent(shape, self.power_sgd_rank) for shape in self.shapes)


def _values_sent(shape, rank):
    """Values in the messages for a gradient of that shape. Source: Vogels, Karimireddy and Jaggi, PowerSGD, 2019.

    A matrix [n, m] (of a convolution [n, everything else]) becomes one [n, rank] and one [m, rank], where that makes
    it less than half as large: else, as in PyTorch, it stays what it is, as vectors do.
    """
    values = math.prod(shape)
    low_rank = rank * (shape[0] + values // shape[0]) if rank and len(shape) > 1 else values
    return low_rank if 2 * low_rank < values else values


def exposed_seconds(training, gpus, cluster, all_reduce=ring_all_reduce):
    """Seconds of an optimizer step in which a GPU waits for messages and computes nothing.

    The gradients become ready evenly over the last backward pass, in buckets of equal size, which are sent one after
    the other. So all but the last one's message can hide behind computation, if there is enough of it: the wait is
    max(message, buckets x message - (buckets - 1) / buckets x backward). Source of the scheme: Li et al., PyTorch
    Distributed: Experiences on accelerating data parallel training, 2020, section 3.2.

    PowerSGD sends three messages for each bucket, one after the other: vectors, and the two factors. What it computes
    is not counted. FSDP gathers the weights before each forward and each backward pass, and reduce-scatters the
    gradients: three halves of an all-reduce in place of two, behind all of the computation (Rajbhandari et al., ZeRO,
    2020, section 7). These halves are those of a ring: give it no other `all_reduce`.
    """
    buckets = max(1, math.ceil(training.parameters * training.held / training.bucket))
    parts = 3 if training.power_sgd_rank else 1
    message = parts * all_reduce_seconds(training.message_bytes() / buckets / parts, gpus, cluster, all_reduce)
    cover = training.pass_seconds() * 2 / 3
    if training.sharded:
        message *= (2 * training.accumulate + 1) / 2
        cover = training.pass_seconds() * training.accumulate
    return max(message, buckets * message - (buckets - 1) / buckets * cover)


def efficiency(training, gpus, cluster, all_reduce=ring_all_reduce):
    """The share of a step that is computation: 1 where N GPUs do N times the work of one in the same time."""
    computing = training.accumulate * training.pass_seconds()
    return computing / (computing + exposed_seconds(training, gpus, cluster, all_reduce))


def scaling(training, cluster, all_reduce=ring_all_reduce, global_batch=None, counts=GPU_COUNTS):
    """The efficiency on each number of GPUs, ``{GPUs: efficiency}``.

    Weak scaling: every GPU has the batch of the training, so the global batch grows. With a `global_batch` (samples of
    an optimizer step), strong scaling: the GPUs share it, as long as each has at least one sample in each pass.
    """
    if global_batch is None:
        return {gpus: efficiency(training, gpus, cluster, all_reduce) for gpus in counts}
    batches = {gpus: global_batch / gpus / training.accumulate for gpus in counts}
    return {gpus: efficiency(replace(training, batch=batch), gpus, cluster, all_reduce)
            for gpus, batch in batches.items() if batch >= 1}


def stops_at(curve, share=0.5):
    """The first number of GPUs of a curve from `scaling` whose efficiency is below `share`; None if all are above."""
    return next((gpus for gpus, value in curve.items() if value < share), None)


def memory_bytes(parameters, gpus_sharing=1):
    """Bytes a GPU needs for weights, gradients and Adam's state in mixed precision; activations come on top.

    16 for each parameter: weight and gradient in bfloat16 (4), and a copy of the weight and two moments in float32
    (12). DDP has all of them on every GPU, FSDP shares them out. Source: Rajbhandari et al., ZeRO, 2020, section 3.
    """
    return 16 * parameters / gpus_sharing


def convnet_training():
    """The ConvNet of this series, on an H200: 39,000 images/s at batch 100, float32, as measured for this series."""
    shapes, flops = _counted(ConvNet(), torch.empty(1, 1, 28, 28))
    return Training(shapes, flops, flops_per_second=39_000 * flops, batch=100)


def resnet50_training():
    """ResNet-50 (He et al., 2015) under autocast, float32 gradients, on an A100: 2,470 images/s at batch 256.

    Source of the speed: NVIDIA's DeepLearningExamples, ResNet50 v1.5 for PyTorch, one A100 80GB, mixed precision.
    """
    from torchvision.models import resnet50

    shapes, flops = _counted(resnet50(), torch.empty(1, 3, 224, 224))
    return Training(shapes, flops, flops_per_second=2_470 * flops, batch=256)


def language_model_training(tokens=4096):
    """A transformer of 7 billion parameters, bfloat16, on H100s: 40 % of their 989e12 FLOP/s; 1 sequence a pass.

    tokens: of a sequence, which is one sample. Sources: shapes: Touvron et al., Llama 2, 2023 (7B; norms left out);
    6 FLOPs for each parameter and token: Kaplan et al., Scaling laws for neural language models, 2020; 989e12 dense
    bfloat16 FLOP/s: NVIDIA's data sheet of the H100 SXM; 38 to 43 % of it: Grattafiori et al., The Llama 3 herd of
    models, 2024.
    """
    width, hidden, vocabulary = 4096, 11008, 32000
    layer = [(width, width)] * 4 + [(hidden, width)] * 2 + [(width, hidden)]
    shapes = tuple(layer * 32 + [(vocabulary, width)] * 2)
    flops = 6 * sum(map(math.prod, shapes)) * tokens
    return Training(shapes, flops, flops_per_second=0.4 * 989e12, batch=1, held=2, sent=2)


def _counted(model, sample):
    """The shapes of a model's parameters, and the FLOPs of a sample forward and backward; computes no numbers."""
    model = model.to("meta")
    with FlopCounterMode(display=False) as counter:
        model(sample.to("meta")).sum().backward()
    return tuple(tuple(parameter.shape) for parameter in model.parameters()), counter.get_total_flops()
