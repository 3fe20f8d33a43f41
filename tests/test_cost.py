"""The cost model and the timeline: numbers out of measurements."""

import json
import math
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from needs import need
from torch.profiler import ProfilerActivity, profile, record_function

from ddp_tutorial import lab
from ddp_tutorial.cost import (
    ETHERNET_10,
    ETHERNET_100,
    INFINIBAND,
    Cluster,
    Link,
    Training,
    all_reduce_seconds,
    convnet_training,
    efficiency,
    exposed_seconds,
    fit_cost_model,
    language_model_training,
    memory_bytes,
    resnet50_training,
    ring_all_reduce,
    scaling,
    stops_at,
    tree_all_reduce,
)
from ddp_tutorial.machines import bytes_sent
from ddp_tutorial.timeline import lanes_of

ROOT = Path(__file__).resolve().parent.parent
LINK = Link(latency=1e-3, bandwidth=1e6)
ONE_GPU_NODES = Cluster(inside=Link(0, math.inf), between=LINK, gpus_per_node=1)


def test_an_exact_line_is_found():
    alpha, beta = fit_cost_model({size: 3e-4 + 2e-9 * size for size in (1000, 10**6, 10**8)})
    assert alpha == pytest.approx(3e-4) and beta == pytest.approx(2e-9)


def test_sizes_may_be_text_as_in_json_and_errors_count_relatively():
    times = {"1000": 1e-3, "2000": 1.5e-3, "1000000000": 2.0}
    alpha, beta = fit_cost_model(times)
    assert beta == pytest.approx(2e-9, rel=0.05)
    assert 1e-3 < alpha < 1.5e-3, "the small sizes have a say"


def event(name, start, end):
    return SimpleNamespace(name=name, time_range=SimpleNamespace(start=1000 * start, end=1000 * end))


def test_lanes_hold_the_last_step_only():
    events = [
        event("forward", 10, 12), event("backward", 12, 15), event("gloo:all_reduce", 13, 14),
        event("optimizer", 15, 16), event("aten::add", 16, 17),
        event("gloo:broadcast", 17, 18), event("forward", 18, 19), event("backward", 19, 22),
        event("gloo:all_reduce", 20, 25), event("finish", 22, 25), event("optimizer", 25, 26),
        event("gloo:all_reduce", 27, 28),
    ]  # fmt: skip
    assert lanes_of(SimpleNamespace(events=lambda: events)) == {
        "compute": [["forward", 8, 9], ["backward", 9, 12], ["finish", 12, 15], ["optimizer", 15, 16]],
        "messages": [["gloo:broadcast", 7, 8], ["gloo:all_reduce", 10, 15]],
    }


def test_lanes_of_a_real_profile():
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for name in ("forward", "backward", "finish", "optimizer"):
            with record_function(name):
                torch.ones(1000).sum()
    lanes = lanes_of(profiler)
    assert [name for name, _, _ in lanes["compute"]] == ["forward", "backward", "finish", "optimizer"]
    assert lanes["compute"][0][1] == 0 and all(start < end for _, start, end in lanes["compute"])


def test_bytes_sent_counts_what_is_written(tmp_path):
    before = bytes_sent()
    if before is None:
        pytest.skip("this system does not count what a process writes")
    (tmp_path / "file").write_bytes(bytes(100_000))
    assert 100_000 <= bytes_sent() - before < 110_000


# ---------------------------------------------------------------------------------------------------- all-reduces


def test_a_ring_sends_a_chunk_in_each_of_its_steps():
    # Three ranks, 3 MB: twice two steps, in each of which every rank sends 1 MB.
    assert ring_all_reduce(3e6, 3, LINK) == pytest.approx(4 * (1e-3 + 1))
    assert ring_all_reduce(3e6, 1, LINK) == 0
    assert ring_all_reduce(3e6, 10**6, LINK) == pytest.approx(2 * 10**6 * 1e-3 + 2 * 3, rel=1e-3)


def test_trees_go_up_and_down_their_levels():
    assert tree_all_reduce(3e6, 8, LINK) == pytest.approx(2 * 3 * 1e-3 + 6)
    assert tree_all_reduce(3e6, 5, LINK) == tree_all_reduce(3e6, 8, LINK), "levels are whole"
    assert tree_all_reduce(3e6, 1, LINK) == 0
    assert tree_all_reduce(1000, 512, LINK) < ring_all_reduce(1000, 512, LINK) / 50
    assert tree_all_reduce(3e6, 2, LINK) > ring_all_reduce(3e6, 2, LINK)


def test_inside_and_between_nodes():
    cluster = Cluster(inside=Link(1e-6, 1e9), between=LINK, gpus_per_node=8)
    assert all_reduce_seconds(8e6, 8, cluster) == ring_all_reduce(8e6, 8, cluster.inside)
    assert all_reduce_seconds(8e6, 4, cluster) == ring_all_reduce(8e6, 4, cluster.inside)
    between = all_reduce_seconds(8e6, 32, cluster) - ring_all_reduce(8e6, 8, cluster.inside)
    assert between == pytest.approx(ring_all_reduce(1e6, 4, LINK)), "each GPU sends its eighth to other nodes"
    assert all_reduce_seconds(8e6, 25, cluster) == all_reduce_seconds(8e6, 32, cluster)
    assert all_reduce_seconds(8e6, 3, ONE_GPU_NODES, tree_all_reduce) == tree_all_reduce(8e6, 3, LINK)
    assert all_reduce_seconds(8e6, 1, cluster) == 0


# ------------------------------------------------------------------------------------------------------ trainings

# One million float32 gradients, 4 MB; a pass takes 1.5 s, its backward part 1 s.
SMALL = Training(shapes=((1000, 1000),), flops=3.0, flops_per_second=2.0, batch=1, bucket=1e6)


def seconds_waited(ready, message):
    """Play it: each bucket's message starts when the bucket is ready and the message before it has gone."""
    free = 0.0
    for moment in ready:
        free = max(free, moment) + message
    return free - ready[-1]


@pytest.mark.parametrize("seed", range(20))
def test_waiting_is_what_playing_the_messages_gives(seed):
    dice = random.Random(seed)
    training = replace(SMALL, batch=dice.uniform(0.1, 10), bucket=dice.choice([4e6, 2e6, 1e6, 1e5]))
    gpus = dice.choice([2, 3, 8])
    buckets = round(4e6 / training.bucket)
    message = ring_all_reduce(training.bucket, gpus, LINK)
    backward = training.batch  # seconds
    ready = [backward * (number + 1) / buckets for number in range(buckets)]
    assert exposed_seconds(training, gpus, ONE_GPU_NODES) == pytest.approx(seconds_waited(ready, message))


def test_efficiency_is_the_share_that_computes():
    assert efficiency(SMALL, 1, ONE_GPU_NODES) == 1
    one_bucket = replace(SMALL, bucket=4e6)
    waits = ring_all_reduce(4e6, 2, LINK)
    assert efficiency(one_bucket, 2, ONE_GPU_NODES) == pytest.approx(1.5 / (1.5 + waits)), "nothing hides"
    four = efficiency(replace(one_bucket, accumulate=4), 2, ONE_GPU_NODES)
    assert four == pytest.approx(6 / (6 + waits)), "one all-reduce for four passes"
    larger = efficiency(replace(one_bucket, batch=4), 2, ONE_GPU_NODES)
    assert larger == pytest.approx(four)
    half = exposed_seconds(replace(one_bucket, sent=2), 2, ONE_GPU_NODES)
    assert half == pytest.approx(ring_all_reduce(2e6, 2, LINK))


def test_power_sgd_sends_two_thin_matrices():
    training = replace(SMALL, shapes=((1000, 20, 5, 10), (1000,), (4, 4)), bucket=1e9, power_sgd_rank=2)
    # 1000 x 1000 becomes twice 1000 x 2; a vector, and a matrix too small to gain from it, stay.
    assert training.message_bytes() == 4 * (2 * 2000 + 1000 + 16)
    assert replace(training, power_sgd_rank=0).message_bytes() == 4 * (10**6 + 1000 + 16)
    assert replace(training, power_sgd_rank=300).message_bytes() == 4 * (10**6 + 1000 + 16)
    waits = exposed_seconds(training, 2, ONE_GPU_NODES)
    assert waits == pytest.approx(3 * ring_all_reduce(training.message_bytes() / 3, 2, LINK))


def test_sharding_sends_half_as_much_again_and_divides_the_memory():
    one_bucket = replace(SMALL, bucket=4e6)
    sharded = replace(one_bucket, sharded=True)
    plain = exposed_seconds(one_bucket, 2, ONE_GPU_NODES)
    assert exposed_seconds(sharded, 2, ONE_GPU_NODES) == pytest.approx(1.5 * plain)
    # Weights are gathered in each pass, gradients scattered once.
    four = replace(sharded, accumulate=4)
    assert exposed_seconds(four, 2, ONE_GPU_NODES) == pytest.approx(4.5 * plain)
    assert memory_bytes(7e9) == 112e9 and memory_bytes(7e9, 16) == 7e9


def test_weak_and_strong_scaling():
    weak = scaling(SMALL, ONE_GPU_NODES, counts=(1, 2, 4))
    assert weak == {gpus: efficiency(SMALL, gpus, ONE_GPU_NODES) for gpus in (1, 2, 4)}
    strong = scaling(replace(SMALL, accumulate=2), ONE_GPU_NODES, global_batch=16, counts=(1, 4, 8, 16))
    assert list(strong) == [1, 4, 8], "a GPU without a sample does not count"
    assert strong[8] == efficiency(replace(SMALL, accumulate=2, batch=1), 8, ONE_GPU_NODES)
    assert list(scaling(SMALL, ONE_GPU_NODES)) == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
    assert stops_at({1: 1.0, 2: 0.5, 4: 0.4}) == 4 and stops_at({1: 1.0, 2: 0.5}) is None
    assert stops_at({1: 1.0, 2: 0.85, 4: 0.4}, share=0.9) == 2


def test_the_three_trainings_are_counted():
    convnet, resnet, language_model = convnet_training(), resnet50_training(), language_model_training()
    # He et al., 2015: 25.6 million parameters; 3.8e9 multiply-adds forward, 4.1e9 with the stride where torchvision
    # has it; two FLOPs each, and the backward pass twice the forward pass.
    assert resnet.parameters == pytest.approx(25.6e6, rel=0.01)
    assert resnet.flops == pytest.approx(3 * 2 * 4.1e9, rel=0.02)
    assert resnet.message_bytes() == pytest.approx(102e6, rel=0.01)
    # By hand: two convolutions of 5 x 5, of which the first needs no gradient of its input, and a linear layer.
    first, second, linear = 28 * 28 * 25 * 16, 14 * 14 * 25 * 16 * 32, 7 * 7 * 32 * 10
    assert convnet.flops == 2 * (2 * first + 3 * second + 3 * linear)
    assert convnet.pass_seconds() == pytest.approx(100 / 39_000)
    assert language_model.parameters == pytest.approx(6.74e9, rel=0.01)
    assert language_model.pass_seconds() == pytest.approx(6 * 6.74e9 * 4096 / (0.4 * 989e12), rel=0.01)


def test_where_they_stop():
    """What the notebook says of them."""
    convnet, resnet, language_model = convnet_training(), resnet50_training(), language_model_training()
    assert stops_at(scaling(convnet, INFINIBAND)) == 1024
    assert stops_at(scaling(convnet, INFINIBAND, tree_all_reduce)) is None
    assert stops_at(scaling(resnet, INFINIBAND)) is None
    assert stops_at(scaling(resnet, ETHERNET_10)) == 128
    assert stops_at(scaling(language_model, INFINIBAND)) == 512
    assert stops_at(scaling(replace(language_model, bucket=1e9), INFINIBAND)) is None
    assert stops_at(scaling(language_model, ETHERNET_100)) == 16
    assert memory_bytes(language_model.parameters) > 80e9 > memory_bytes(language_model.parameters, 8)
    for training in (convnet, resnet, language_model):
        ring = scaling(training, INFINIBAND)
        for remedy in ({"batch": 8 * training.batch}, {"accumulate": 8}, {"sent": training.sent // 2}):
            better = scaling(replace(training, **remedy), INFINIBAND)
            assert all(better[gpus] >= ring[gpus] - 1e-12 for gpus in ring), remedy
            assert better[4096] > ring[4096]


# ------------------------------------------------------------------------------------------- against a measurement

LARGE = (2**20, 2**22)  # several times what the limit lets through at once


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """What benchmarks/lab_all_reduce.py says of four machines with 100 Mbit/s."""
    need("ip")
    name = f"cost{os.getpid()}"
    result = tmp_path_factory.mktemp("lab") / "all_reduce.json"
    lab.up(machines=4, bandwidth=100, name=name, say=lambda line: None)
    try:
        meeting = ["WORLD_SIZE=4", "MASTER_ADDR=node0", "MASTER_PORT=29500", "OMP_WAIT_POLICY=PASSIVE"]
        options = ["--json", result, "--repeats", 3, "--sizes", 4096, *LARGE]
        words = ["env", *meeting, sys.executable, ROOT / "benchmarks" / "lab_all_reduce.py", *options]
        started = [subprocess.Popen(lab.exec_command(rank, [*words[:1], f"RANK={rank}", *words[1:]], name))
                   for rank in range(4)]
        assert [process.wait(timeout=100) for process in started] == [0] * 4
        yield json.loads(result.read_text())
    finally:
        lab.down(name, say=lambda line: None)  # ends what still runs


def test_gloo_sends_as_many_bytes_as_a_ring(measured):
    for ranks in (2, 3, 4):
        for size in LARGE:
            assert measured["sent"][str(ranks)][str(size)] / size == pytest.approx(2 * (ranks - 1) / ranks, rel=0.01)


def test_two_ranks_predict_three_and_four(measured):
    """Within 20 %; in 16 runs beside other work it was 10 % at most. 4 KiB are not predicted: there load decides."""
    alpha, beta = fit_cost_model(measured["seconds"]["2"])
    link = Link(latency=alpha / 2, bandwidth=1 / beta)  # a ring of two takes 2 alpha + size / bandwidth
    assert link.bandwidth == pytest.approx(100e6 / 8, rel=0.2), "what the lab was told"
    for ranks in (3, 4):
        for size in LARGE:
            seconds = measured["seconds"][str(ranks)][str(size)]
            assert ring_all_reduce(size, ranks, link) == pytest.approx(seconds, rel=0.2), (ranks, size)
