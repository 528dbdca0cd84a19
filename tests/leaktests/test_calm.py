"""Steps that leave C's heap as it was are not followed; whatever moves it is, and so is all where the heap
says nothing.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys

import numpy
import pytest
import torch

from auditor.leaktests.support import assert_no_growth, calm
from auditor.leaktests.support.garbage import free_harmless
from auditor.leaktests.support.heap import heap_bytes
from auditor.leaktests.support.ledger import Ledger, Level

AS_THE_GATE = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}
KEPT = [torch.zeros(1)]
WEIGHT = torch.ones(4, requires_grad=True)


def still():
    (WEIGHT * 2).sum().backward()


def keeps_a_storage():
    KEPT.append(torch.zeros(1))


def keeps_every_fifth():
    if len(KEPT) % 5 == 0:
        KEPT.append(torch.zeros(1))
    KEPT.append(None)


def keeps_what_only_a_graph_holds():
    KEPT[0] = KEPT[0] + WEIGHT.exp().sum()


def grows_in_place():
    with torch.no_grad():
        KEPT[0].resize_(KEPT[0].numel() + 1)


def leaves_a_cycle():
    record = {"scores": torch.zeros(3)}
    record["self"] = record


def told(name: str, **options: int) -> None:
    """How a step of this file ends, in a process of its own, and in how many of its runs nobody looked on."""
    watched = []

    def step() -> None:
        watched.append(torch._C._len_torch_dispatch_stack())
        globals()[name]()

    step()  # gradients are there
    try:
        assert_no_growth(step, **options)
        ended = "passed"
    except AssertionError as failure:
        ended = type(failure).__name__
    print(json.dumps([ended, watched.count(0), sum(watched)]))


def ends(name, **options):
    code = f"from tests.leaktests.test_calm import told; told({name!r}, **{options!r})"
    done = subprocess.run([sys.executable, "-c", code], env=AS_THE_GATE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


needs_glibc = pytest.mark.skipif(
    not heap_bytes(), reason="this C library does not say what malloc handed out"
)


@needs_glibc
def test_nobody_looks_on_where_the_heap_stands_still():
    ended, unwatched, watched = ends("still")
    assert (ended, watched) == ("passed", 0)
    assert unwatched >= 13


@needs_glibc
@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("keeps_a_storage", "Leak"),
        ("keeps_every_fifth", "Leak"),
        ("keeps_what_only_a_graph_holds", "Leak"),
        ("grows_in_place", "Leak"),
        ("leaves_a_cycle", "CycleGarbage"),
    ],
)
def test_what_stays_moves_the_heap(name, verdict):
    ended, _, watched = ends(name)
    assert ended == verdict
    assert watched


@needs_glibc
def test_no_steps_are_spent_where_nothing_may_settle():
    assert ends("still", settle=0)[1] == 1  # the one before the pass


def at_heaps(monkeypatch, *heaps):
    """What `stands_still` says of a step that does nothing, on a heap that has these sizes after each of
    its runs.
    """
    sizes, now = iter(heaps), [1000]
    monkeypatch.setattr(calm, "_sees_storages", lambda: True)
    monkeypatch.setattr(calm, "heap_bytes", lambda: now[-1])
    return calm.stands_still(lambda: now.append(next(sizes)), Ledger().take_stock, windows=2, steps=1)


def test_less_than_a_storage_may_move(monkeypatch):
    assert isinstance(at_heaps(monkeypatch, 1016, 984), Level)
    assert at_heaps(monkeypatch, 1112, 1224) is None
    assert at_heaps(monkeypatch, 888, 776) is None


def test_it_may_move_once_before(monkeypatch):
    assert isinstance(at_heaps(monkeypatch, 9000, 9000, 9000), Level)


def test_another_malloc_tells_nothing(monkeypatch):
    monkeypatch.setattr(calm, "heap_bytes", lambda: 0)
    assert calm.stands_still(lambda: None, Ledger().take_stock, windows=1, steps=1) is None


def test_threads_that_end_a_little_later_move_nothing(monkeypatch):
    readings = iter([9000, 1000, 1000, 1000, 5000, 5000, 1000])
    monkeypatch.setattr(calm, "_sees_storages", lambda: True)
    monkeypatch.setattr(calm, "heap_bytes", lambda: next(readings))
    assert calm.stands_still(lambda: None, Ledger().take_stock, windows=1, steps=1)


class Opaque:
    """Might hold anything."""


def class_of_a_function():
    class Local:
        size = 3

        def grow(self):
            return Local.size + 1


def in_a_cycle(held):
    record = {"held": held}
    record["self"] = record


def freed(make):
    """How much garbage in cycles was freed of what this leaves."""
    gc.collect()
    gc.disable()
    try:
        make()
        free_harmless()
        return gc.collect() == 0
    finally:
        gc.enable()


def test_garbage_that_can_hold_no_storage_is_freed():
    assert freed(class_of_a_function)
    assert freed(lambda: in_a_cycle({"size": (1, "x")}))


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(3),
        lambda: numpy.zeros(3),
        lambda: {"deep": (numpy.zeros(3),)},
        lambda: torch.zeros(3).__dlpack__(),
        lambda: (WEIGHT * 2).grad_fn,
        Opaque,
    ],
)
def test_garbage_that_may_hold_one_is_left_to_the_ledger(make):
    assert not freed(lambda: in_a_cycle(make()))
