"""The ledger pass: what it counts, what it lets pass, what it says, and what it leaves behind."""

from __future__ import annotations

import gc
import threading

import numpy
import pytest
import torch
from torch import nn

from auditor.leaktests.support import CycleGarbage, Leak, assert_no_growth, nothing_stays, stillness


class Remembers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.history = []

    def forward(self, x):
        self.history.append(self.layer(x).detach().mean() * 2)


def test_a_leak_is_named_by_size_operation_line_and_holders():
    module, x = Remembers(), torch.randn(2, 4)
    with pytest.raises(Leak) as caught:
        assert_no_growth(lambda: module(x))
    (culprit,) = caught.value.culprits
    assert (culprit.storages_a_step, culprit.bytes_a_step) == (1.0, 4.0)
    assert culprit.operation == "aten.mul.Tensor"
    assert culprit.line.startswith("tests/leaktests/test_ledger.py:") and "Remembers.forward" in culprit.line
    assert "attribute `history` of a tests.leaktests.test_ledger.Remembers" in culprit.held_by
    message = str(caught.value)
    assert "memory grows by 4 bytes and 1 storage a step" in message
    assert "self.history.append(self.layer(x).detach().mean() * 2)" in message


def test_what_only_a_node_of_autograd_saved_is_seen_and_said():
    weight, total = nn.Parameter(torch.ones(4)), [torch.zeros(())]

    def step():
        total[0] = total[0] + weight.exp().sum()

    with pytest.raises(Leak) as caught:
        assert_no_growth(step)
    (culprit,) = caught.value.culprits
    assert culprit.bytes_a_step == 16
    assert culprit.held_by[0].startswith("autograd's node ExpBackward0, which saved it")


def test_a_view_keeps_its_whole_storage():
    views = []
    with pytest.raises(Leak) as caught:
        assert_no_growth(lambda: views.append(torch.zeros(1000)[:1]))
    assert caught.value.culprits[0].bytes_a_step == 4000


def test_a_storage_that_grows_in_place_is_seen():
    buffer = torch.zeros(1)
    with pytest.raises(Leak, match="memory grows by 4 bytes and 0 storages a step"):
        assert_no_growth(lambda: buffer.resize_(buffer.numel() + 1))


def test_memory_of_numpy_is_seen():
    kept = []
    with pytest.raises(Leak) as caught:
        assert_no_growth(lambda: kept.append(torch.from_numpy(numpy.zeros(3))))
    assert caught.value.culprits[0].bytes_a_step == 24


def test_lazy_modules_are_followed_from_before_their_first_call():
    lazy, other = nn.LazyLinear(4), nn.LazyLinear(4)
    assert_no_growth(lambda: lazy(torch.randn(2, 3)))
    del other


def test_threads_are_followed():
    kept = []

    def step():
        thread = threading.Thread(target=lambda: kept.append(torch.zeros(5)))
        thread.start()
        thread.join()

    with pytest.raises(Leak) as caught:
        assert_no_growth(step)
    assert caught.value.culprits[0].bytes_a_step == 20


def test_what_the_collector_frees_is_another_verdict():
    def step():
        record = {"scores": torch.zeros(3)}
        record["self"] = record

    with pytest.raises(
        CycleGarbage, match="1 storage a step are freed by the cycle collector alone"
    ) as caught:
        assert_no_growth(step)
    assert "test_ledger.py" in caught.value.culprits[0].line
    assert assert_no_growth(step, cycles="allow").windows == 3


def test_a_leak_at_every_seventh_step_is_found():
    kept, turn = [], [0]

    def step():
        turn[0] += 1
        if turn[0] % 7 == 0:
            kept.append(torch.zeros(1))

    with pytest.raises(Leak):
        assert_no_growth(step)


def test_a_cache_that_fills_is_waited_for():
    cache, turn = {}, [0]

    def step():
        turn[0] += 1
        cache.setdefault(turn[0] % 20, torch.zeros(2))

    steady = assert_no_growth(step)
    assert steady.windows > 3
    assert len(cache) == 20


def test_a_cache_that_takes_longer_than_allowed_is_a_leak():
    cache, turn = {}, [0]

    def step():
        turn[0] += 1
        cache.setdefault(turn[0] % 20, torch.zeros(2))

    with pytest.raises(Leak):
        assert_no_growth(step, settle=0)


def test_a_buffer_that_is_emptied_now_and_then_is_no_leak():
    waiting = []

    def step():
        waiting.append(torch.zeros(2))
        if len(waiting) == 5:
            waiting.clear()

    assert assert_no_growth(step).windows == 12


def test_nothing_stays_names_what_stayed():
    kept = []
    with pytest.raises(Leak, match=r"test_ledger\.py"), nothing_stays():
        kept.append(torch.zeros(1))
    with nothing_stays():
        torch.zeros(1)


def test_the_process_is_left_as_it_was(monkeypatch):
    gc.unfreeze()  # generated tests that are collected in the same process freeze what is there,
    monkeypatch.setattr(stillness, "_freezes", False)  # and passes before this one have seen it
    threads, runs = torch.get_num_threads(), threading.Thread.run

    def step():
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        assert_no_growth(step)
    assert gc.isenabled() and gc.get_freeze_count() == 0
    assert torch.get_num_threads() == threads
    assert threading.Thread.run is runs
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
