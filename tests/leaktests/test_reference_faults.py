"""Every reference module survives a failure at every one of its operations and acquires, forward and
backward.

`pytest -s tests/leaktests/test_reference_faults.py` prints how many faults were injected.
"""

from __future__ import annotations

import pytest
import torch

from auditor.leaktests.support import count_places, inject_faults, make_step
from reference_modules.pool import TensorPool
from tests.leaktests.clean.ours import MODULES, built


def tiny(name):
    """The module's inputs at their smallest: the pass is quadratic."""
    args, kwargs = MODULES[name][1](0)
    return tuple(part[:, :16] for part in args), kwargs


def lending(name):
    """Two sequences whose last segment is a single token: there every module has something to pool."""
    args, kwargs = MODULES[name][1](1)
    return tuple(part[:, :17].repeat(2, *[1] * (part.dim() - 1)) for part in args), kwargs


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_nothing_stays_held_after_any_fault(name, capsys):
    pool = TensorPool(threshold_mb=0.0)
    step = make_step(lambda: built(name, pool), lambda turn: tiny(name))
    forward = make_step(lambda: built(name, pool), lambda turn: tiny(name), "no_grad")
    borrowing = make_step(lambda: built(name, pool), lambda turn: lending(name))
    step()  # what is made once and kept is made
    operations, acquires = count_places(step), count_places(borrowing, at="acquires", pools=(pool,))
    most = max(400, operations)  # LongNet and the layers have more operations than a generated test takes
    assert inject_faults(step, pools=(pool,), most=most) == operations > 0
    refused = inject_faults(borrowing, at="acquires", pools=(pool,))
    assert refused >= acquires > 0  # who is refused may go on in halves, which ask for leases of their own
    assert inject_faults(forward, pools=(pool,)) > 0
    assert pool.stats().leases == 0
    with capsys.disabled():
        print(f"\n{name}: {operations} faults at operations, {refused} at acquires")
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
