"""The cost model and the timeline: numbers out of measurements."""

from types import SimpleNamespace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ddp_tutorial.cost import fit_cost_model
from ddp_tutorial.machines import bytes_sent
from ddp_tutorial.timeline import lanes_of


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
