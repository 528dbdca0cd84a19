# poolaudit leaktests, sha256 7ec1f256269f6eba: written again as long as that is the digest of the rest
"""Leak tests of reference_modules.attention.ring.RingDilatedAttention.

`poolaudit leaktests` wrote this file from its signature. After every step exactly as much must be
alive as before it: no tolerances, no second tries. Change what you like: a changed file is never
written over. POOLAUDIT_DEVICE=cuda runs it on a GPU.
"""

import os
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from leak_support import (  # noqa: E402
    Leak,
    assert_equivalent,
    assert_no_growth,
    assert_no_leases,
    assert_quiet,
    freeze_imports,
    inject_faults,
    make_step,
    plant,
    pools_of,
    set_seed,
)
from reference_modules.attention.ring import RingDilatedAttention  # noqa: E402

device = os.environ.get("POOLAUDIT_DEVICE", "cpu")
freeze_imports()  # what they brought need not be looked through after every step
SHAPES = [(2, 32), (1, 33), (3, 16), (2, 1)]  # sequences, tokens in each
SCENARIOS = [
    "train",
    "eval",
    "no_grad",
    "checkpointed",
    "autocast",
    "changing_shapes",
    "two_threads",
    "deepcopied",
    "pickled",
]
STEPS = {"train": 4, "changing_shapes": 1}  # in a window; one of changing_shapes goes through all shapes


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """What is written to relative paths goes away with the test."""
    monkeypatch.chdir(tmp_path)


def build(**options):
    set_seed(0)
    return RingDilatedAttention(
        segment_lengths=[16, 32],
        dilation_rates=[1, 2],
        **options,
    ).to(device)


def feed(turn=0):
    b, n = SHAPES[turn % len(SHAPES)]
    set_seed(turn)
    return (), {
        "q": torch.randn(b, n, 4, 16, device=device),
        "k": torch.randn(b, n, 4, 16, device=device),
        "v": torch.randn(b, n, 4, 16, device=device),
    }


def pooled():
    return build(enable_memory_pool=True, memory_pool_threshold_mb=0.0)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_memory_stays_level(scenario):
    assert_no_growth(make_step(build, feed, scenario), steps=STEPS.get(scenario, 2))


def test_a_planted_leak_is_found():
    step = make_step(lambda: plant(build()), feed, "train")
    with pytest.raises(Leak, match="memory grows by"):
        assert_no_growth(step, windows=2, steps=1, settle=0, named=False)


def test_nothing_grows_unseen():
    """Neither Python's heap nor C's, nor the device's memory, with nobody looking on."""
    assert_quiet(make_step(build, feed, "train"))


def test_a_planted_object_is_found():
    step = make_step(lambda: plant(build(), "object"), feed, "train")
    with pytest.raises(Leak, match="Python's heap grows by"):
        assert_quiet(step, windows=1, steps=4, settle=0, named=False)


def test_nothing_stays_held_after_a_failure():
    """Fails at each of its 299 operations, one after the other."""
    assert inject_faults(make_step(build, lambda turn: feed(3), "train")) > 0


def test_what_a_planted_failure_holds_is_found():
    step = make_step(lambda: plant(build(), "fault"), lambda turn: feed(3), "no_grad")
    with pytest.raises(Leak):
        inject_faults(step, last=1, named=False)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_lease_comes_back(scenario):
    step = make_step(pooled, lambda turn: feed(turn + 1), scenario)
    assert assert_no_leases(step, *pools_of(step.target)) > 0


def test_a_planted_lease_is_found():
    pool = pools_of(pooled())[0]
    step = make_step(lambda: plant(pooled(), "lease", pool=pool), feed, "train")
    with pytest.raises(Leak):
        assert_no_leases(step, pool)


def test_the_pool_changes_no_bit():
    """Outputs and gradients, on fresh, reused and poisoned blocks."""
    assert_equivalent(lambda with_pool: pooled() if with_pool else build(), feed)


def test_no_lease_stays_out_after_a_failed_acquire():
    step = make_step(pooled, lambda turn: feed(turn + 1), "train")
    assert inject_faults(step, at="acquires", pools=pools_of(step.target)) > 0
