"""The fault pass, closer: each operation once, watched late or not, and pools that say no."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from auditor.leaktests.support import InjectedFault, Leak, count_places, inject_faults, make_step
from auditor.leaktests.support.late import LateWatch


class Blocks:
    """A pool of numbers that answers None when it has too few."""

    def __init__(self, size=4):
        self.free = list(range(size))

    def alloc_blocks(self, count) -> list[int] | None:
        if count > len(self.free):
            return None
        return [self.free.pop() for _ in range(count)]

    def free_blocks(self, blocks):
        self.free += blocks


def feed(turn):
    return (torch.randn(2, 4),), {}


def noting(step, told):
    """The step, which lets its failures through and writes them down."""

    def noted():
        try:
            step()
        except InjectedFault as fault:
            told.append(int(str(fault).split()[3].rstrip(",")))
            raise

    return noted


def two_passes():
    """Two backward passes in one step, the second through the first's graph."""
    weight = torch.ones(3, requires_grad=True)
    loss = (weight.exp() * 2).sum()
    (slope,) = torch.autograd.grad(loss, weight, create_graph=True)
    slope.square().sum().backward()


@pytest.mark.parametrize("step", [two_passes, make_step(lambda: nn.LayerNorm(4), feed)])
def test_every_operation_fails_once_in_forward_and_backward(step):
    told = []
    places = count_places(step)
    assert inject_faults(noting(step, told)) == places
    assert told == list(range(1, places + 1))


def test_what_comes_before_the_backward_pass_is_not_watched():
    class Count:
        passed = 0

    class Counted(torch.utils._python_dispatch.TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            count.passed += 1
            Counted.seen += 1
            return func(*args, **(kwargs or {}))

    count, step = Count(), make_step(lambda: nn.Linear(4, 4), feed)
    step()  # later ones find gradients to forget
    late = LateWatch(Counted(), count)
    with late._watch:
        late.learn(step)
    whole, Counted.seen, count.passed = count.passed, 0, 0
    with late.before(whole):
        step()
    assert count.passed == whole
    assert 0 < Counted.seen < whole
    with late.before(1):
        Counted.seen = 0
        step()
    assert Counted.seen == whole


def test_what_a_failed_backward_pass_keeps_in_its_context_alone_is_found():
    kept = []

    class Exp(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = x.exp()  # made before the backward pass, and saved in C++ alone
            ctx.save_for_backward(y)
            return y.clone()

        @staticmethod
        def backward(ctx, slope):
            try:
                return slope * ctx.saved_tensors[0]
            except RuntimeError:
                kept.append(ctx)
                raise

    with pytest.raises(Leak, match="stay held") as caught:
        inject_faults(make_step(lambda: Exp.apply, feed))
    assert any("Exp.forward" in culprit.line for culprit in caught.value.culprits)


class Totals:
    """Adds up what it is given, and keeps the sum's graph: only after a failure, or in every step anew."""

    def __init__(self, pool, *, fresh):
        self.pool, self.fresh = pool, fresh
        self.start = torch.ones(4, requires_grad=True)
        self.total = self.start.sum()

    def __call__(self, x):
        y = (self.start * 2).exp()  # saved by its own node, in C++ alone
        if self.fresh:
            self.total = self.start.sum()
        try:
            block = self.pool.alloc_blocks(1)
        except InjectedFault:
            self.total = self.total + y.sum()
            raise
        self.pool.free_blocks(block)
        return x + y


def test_what_a_failed_acquire_leaves_in_a_graph_alone_is_found():
    pool = Blocks()
    with pytest.raises(Leak, match="stay held") as found:
        inject_faults(make_step(lambda: Totals(pool, fresh=False), feed), at="acquires", pools=(pool,))
    assert any("Totals.__call__" in culprit.line for culprit in found.value.culprits)
    assert inject_faults(make_step(lambda: Totals(pool, fresh=True), feed), at="acquires", pools=(pool,)) == 1


def test_what_a_failed_acquire_keeps_is_found_though_nobody_watched():
    pool, kept = Blocks(), []

    def step(keeps):
        y = torch.ones(4).exp()
        try:
            pool.free_blocks(pool.alloc_blocks(1))
        except InjectedFault:
            kept[:] = [*kept, y] if keeps else kept
            raise

    with pytest.raises(Leak, match="stay held") as found:
        inject_faults(lambda: step(True), at="acquires", pools=(pool,))
    assert "exp" in found.value.culprits[0].operation
    assert inject_faults(lambda: step(False), at="acquires", pools=(pool,)) == 1


def fork(pool, *, mended):
    blocks = pool.alloc_blocks(1)
    if blocks is None:
        return
    draft = pool.alloc_blocks(1)
    if draft is None:
        if mended:
            pool.free_blocks(blocks)
        return
    pool.free_blocks(blocks)
    pool.free_blocks(draft)


def test_a_pool_that_says_no_is_a_fault_of_its_own():
    pool = Blocks()
    assert inject_faults(lambda: fork(pool, mended=True), at="refusals", pools=(pool,)) == 2
    with pytest.raises(
        Leak, match="1 lease not given back after fault 2, in the place of an acquire"
    ) as found:
        inject_faults(lambda: fork(pool, mended=False), at="refusals", pools=(pool,))
    assert found.value.culprits[0].line.endswith("in fork")


def test_a_pool_that_never_says_no_is_not_made_to():
    class Tensors:
        def allocate(self, shape) -> torch.Tensor:
            return torch.empty(shape)

        def deallocate(self, tensor):
            pass

    pool = Tensors()
    step = lambda: pool.deallocate(pool.allocate((1,)))  # noqa: E731
    assert inject_faults(step, at="refusals", pools=(pool,)) == 0
    assert inject_faults(step, at="acquires", pools=(pool,)) == 1


def test_a_step_that_leaks_without_a_fault_is_not_blamed_on_one():
    pool, kept = Blocks(100), []
    with pytest.raises(Leak, match="1 lease not given back by a step without any fault"):
        inject_faults(lambda: pool.alloc_blocks(1), at="acquires", pools=(pool,))
    with pytest.raises(Leak, match="a step without any fault leaves 8 bytes too"):
        inject_faults(lambda: kept.append(torch.zeros(2)))
