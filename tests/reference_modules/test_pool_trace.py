"""The recorded traces under a limit of 1.1 times their peak, and the replayer itself."""

import pytest
import torch

from benchmarks import pool_trace
from benchmarks.traces.format import HERE, Trace, load, save
from benchmarks.traces.policies import Simulated

NAMES = ["serving", "training"]


@pytest.mark.parametrize("name", NAMES)
def test_under_a_tight_limit_nothing_is_refused_and_little_wasted(name):
    trace = load(HERE / f"{name}.json.gz")
    limit = int(trace.peak() * 1.1)
    steps = 1000 if name == "serving" else 200
    ours, exact = pool_trace.PoolReplay(limit), Simulated("exact", limit)
    for target in (ours, exact):
        assert pool_trace.replay(trace, target, steps) >= steps
    figures = ours.figures()
    assert figures["refused"] == 0
    assert figures["reserve_overhead"] <= 0.10
    assert figures["internal"] <= 0.06
    assert figures["hits"] >= 0.9 * exact.figures()["hits"]
    assert ours.pool.stats().leases == 0


@pytest.mark.parametrize("name", NAMES)
def test_a_million_steps_end_as_a_thousand(name):
    trace = load(HERE / f"{name}.json.gz")
    limit = int(trace.peak() * 1.1)
    million = pool_trace.until_it_repeats(trace, limit, 1_000_000)
    thousand = pool_trace.until_it_repeats(trace, limit, 1_000)
    assert million["steps"] >= 1_000_000
    assert million["refused"] == 0
    for figure in ("reserve_overhead", "internal"):
        assert million[figure] == pytest.approx(thousand[figure], abs=0.005)
    rates = [row["hits"] / (row["hits"] + row["misses"]) for row in (million, thousand)]
    assert rates[0] == pytest.approx(rates[1], abs=0.005)


def test_skipping_repeated_circles_counts_what_replaying_counts():
    trace = load(HERE / "training.json.gz")
    limit = int(trace.peak() * 1.1)
    replayed = pool_trace.PoolReplay(limit)
    pool_trace.replay(trace, replayed, 80)
    skipped = pool_trace.until_it_repeats(trace, limit, 80)
    assert skipped["replayed_circles"] < 20
    for figure, value in replayed.figures().items():
        assert skipped[figure] == pytest.approx(value)


def test_bookkeeping_is_under_a_hundredth_of_what_is_held():
    trace = load(HERE / "serving.json.gz")
    short = Trace(trace.name, trace.source, trace.steps[:60])
    assert pool_trace.bookkeeping(short, int(trace.peak() * 1.1), every=500) < 0.01


def test_a_trace_survives_its_file(tmp_path):
    trace = Trace("small", "made up", [[8192, 4096, -2], [-1, 5000, -1]])
    save(trace, tmp_path / "small.json.gz")
    assert load(tmp_path / "small.json.gz") == trace
    assert trace.peak() == 12288
    assert list(trace.events())[2] == (0, 0, 0)


def test_a_simulated_policy_evicts_the_longest_idle_and_refuses_what_cannot_fit():
    policy = Simulated("exact", 100)
    for number, nbytes in enumerate((40, 50)):
        policy.allocate(number, nbytes)
        policy.free(number, nbytes)
    policy.allocate(2, 50)
    policy.allocate(3, 60)
    assert (policy.hits, policy.misses, policy.evictions, policy.refused) == (1, 2, 1, 1)


def test_the_recorder_sees_births_and_deaths():
    from benchmarks.traces.record import Recorder

    recorder = Recorder()
    with recorder:
        kept = torch.empty(2048)
        (kept + 1).sum()
        torch.empty(3)
        recorder.step()
    assert recorder.finish() == [[8192, 8192, -1], [-2]]
