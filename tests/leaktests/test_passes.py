"""The other passes: quiet, leases, faults, equivalence; and the planted twin, on which each must fail."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from auditor.leaktests.support import (
    SCENARIOS,
    Leak,
    Mismatch,
    assert_equivalent,
    assert_no_growth,
    assert_no_leases,
    assert_quiet,
    count_places,
    inject_faults,
    make_step,
    plant,
    pools_of,
)
from reference_modules.mixin import MemoryPoolMixin
from reference_modules.pool import TensorPool


class Pooled(MemoryPoolMixin, nn.Module):
    """Adds a pooled temporary to its input; `clears` says whether it does so correctly."""

    def __init__(self, pool=None, *, clears=True):
        super().__init__()
        self._init_memory_pool(pool is not None, pool=pool)
        self.layer = nn.Linear(4, 4)
        self.clears = clears

    def forward(self, x):
        y = self.layer(x)
        with self._lease_tensor(y.shape, y.dtype, y.device, zero_init=self.clears) as scratch:
            scratch[:1] += 1
            return y + scratch.clone()


def feed(turn):
    return (torch.randn(2 + turn, 4),), {}


def small_pool():
    return TensorPool(threshold_mb=0.0)


def test_quiet_finds_python_objects_and_says_of_which_type():
    kept = []
    with pytest.raises(Leak, match=r"Python's heap grows by .* blocks a step") as caught:
        assert_quiet(lambda: kept.append(threading.Event()))
    assert "1 Event" in str(caught.value)
    assert caught.value.culprits[0].line.startswith("tests/leaktests/test_passes.py:")


@pytest.mark.parametrize("every", [1, 2])
def test_quiet_finds_an_object_that_is_kept_every_second_step(every):
    kept, steps = [], iter(range(10_000))
    with pytest.raises(Leak, match="Python's heap grows by"):
        assert_quiet(lambda: kept.append(object()) if next(steps) % every == 0 else None, named=False)


def test_quiet_lets_a_working_module_pass():
    """After 16 steps without growth, or more that grow less than a leak; what is replaced is none."""
    last = []
    step = make_step(lambda: nn.Linear(4, 4), feed)
    assert assert_quiet(step).windows >= 2
    assert assert_quiet(lambda: last.__setitem__(slice(None), [object()])).windows >= 2


def test_quiet_sees_none_of_its_own_objects():
    assert assert_quiet(lambda: None, windows=1, steps=1, settle=0).windows == 1


def test_leases_are_counted_and_their_line_named():
    pool = small_pool()
    assert_no_leases(make_step(lambda: Pooled(pool), feed), pool)
    module = Pooled(pool)
    with pytest.raises(Leak) as caught:
        assert_no_leases(lambda: module._allocate_tensor((2,), torch.float32, "cpu"), pool)
    assert "test_leases_are_counted" in caught.value.culprits[0].line  # not the mixin's own


def test_a_lease_kept_between_steps_must_go_with_close():
    pool = small_pool()

    class Keeps(Pooled):
        def forward(self, x):
            if not hasattr(self, "kept"):
                self.kept = self._allocate_tensor((2,), torch.float32, "cpu")
            return super().forward(x)

    assert_no_leases(make_step(lambda: Keeps(pool), feed), pool)
    step = make_step(lambda: Keeps(pool), feed)
    with pytest.raises(Leak, match="1 lease not given back"):
        assert_no_leases(lambda: step(), pool)  # no close


def test_leases_without_a_pool_are_wrong_use():
    with pytest.raises(ValueError, match="given no pool"):
        assert_no_leases(lambda: None)


def test_pools_are_found_in_modules():
    pool = small_pool()
    assert pools_of(nn.Sequential(Pooled(pool), nn.Linear(1, 1))) == (pool,)
    assert pools_of(nn.Linear(1, 1)) == ()


def test_faults_are_injected_at_every_operation():
    step = lambda: torch.ones(2).add(1).mul(2)  # noqa: E731
    assert count_places(step) == inject_faults(step) == 3


def test_faults_at_acquires_count_acquires():
    pool = small_pool()
    step = make_step(lambda: Pooled(pool), feed)
    assert inject_faults(step, at="acquires", pools=(pool,)) == 1


def test_a_lease_lost_by_a_fault_is_named_with_the_fault():
    pool = small_pool()

    def step():
        scores = pool.allocate((2,), zero=True)
        scores.add_(1)
        scores.mul_(2)
        pool.deallocate(scores)

    with pytest.raises(Leak, match=r"fault \d, in the place of aten.add_"):
        inject_faults(step, pools=(pool,))


def test_memory_kept_by_a_fault_is_named_with_the_fault():
    kept = []

    def step():
        scores = torch.zeros(5)
        try:
            scores.add(1)
        except RuntimeError:
            kept.append(scores)

    with pytest.raises(
        Leak, match=r"20 bytes in 1 storage stay held; first of all after fault 2 \(aten.add.Tensor\)"
    ):
        inject_faults(step)


def test_too_many_operations_are_said_and_not_cut():
    with pytest.raises(ValueError, match="a step has 3 operations, the fault pass takes 2"):
        inject_faults(lambda: torch.ones(2).add(1).mul(2), most=2)


def test_equivalence_of_a_pool_that_changes_nothing():
    pool = small_pool()
    assert assert_equivalent(lambda on: Pooled(pool if on else None), feed) == 4 * 3 * 4


def test_equivalence_finds_what_is_read_before_it_is_written():
    pool = small_pool()
    with pytest.raises(Mismatch, match="output 0 differs"):
        assert_equivalent(lambda on: Pooled(pool if on else None, clears=not on), feed)


def test_equivalence_is_to_the_bit():
    def build(on):
        return (lambda x: x * 3 / 3) if on else (lambda x: x * 1)

    with pytest.raises(Mismatch, match="turn 0, fresh blocks: output 0"):
        assert_equivalent(build, lambda turn: ((torch.linspace(0.1, 1, 999),), {}))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_scenario_passes_on_a_module_and_fails_on_its_twin(scenario):
    assert_no_growth(make_step(lambda: nn.Linear(4, 4), feed, scenario))
    with pytest.raises(Leak) as caught:
        assert_no_growth(make_step(lambda: plant(nn.Linear(4, 4)), feed, scenario))
    assert "planted.py" in caught.value.culprits[0].line


def test_a_planted_graph_object_lease_and_fault_are_found_by_their_passes():
    pool = small_pool()
    with pytest.raises(Leak):
        assert_no_growth(make_step(lambda: plant(nn.Linear(4, 4), "graph"), feed))
    with pytest.raises(Leak):
        assert_quiet(make_step(lambda: plant(nn.Linear(4, 4), "object"), feed))
    with pytest.raises(Leak):
        assert_no_leases(make_step(lambda: plant(Pooled(pool), "lease", pool=pool), feed), pool)
    with pytest.raises(Leak):
        inject_faults(make_step(lambda: plant(nn.Linear(4, 4), "fault"), feed))


def test_functions_are_targets_too():
    assert_no_growth(make_step(lambda: torch.nn.functional.gelu, feed))
    with pytest.raises(Leak):
        assert_no_growth(make_step(lambda: plant(torch.nn.functional.gelu), feed))
