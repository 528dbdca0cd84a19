# poolaudit leaktests, sha256 fd06021b9fae8f20: written again as long as that is the digest of the rest
"""Leak tests of reference_modules.attention.long_net.LongNet.

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
    assert_no_growth,
    assert_quiet,
    freeze_imports,
    make_step,
    plant,
    set_seed,
)
from reference_modules.attention.config import LongNetConfig  # noqa: E402
from reference_modules.attention.long_net import LongNet  # noqa: E402

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
    return LongNet(
        config=LongNetConfig(vocab_size=100, embed_dim=64, num_heads=4, depth=2),
        **options,
    ).to(device)


def feed(turn=0):
    b, n = SHAPES[turn % len(SHAPES)]
    set_seed(turn)
    return (), {
        "tokens_BN": torch.randint(0, 100, (b, n,), device=device),
    }


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
