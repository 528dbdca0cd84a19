"""Faults of a backward pass share one graph, and those that cannot do not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from auditor.leaktests.support import InjectedFault, Leak, count_places, inject_faults, make_step
from auditor.leaktests.support.countdown import Countdown
from auditor.leaktests.support.watch import Watch

KEPT = []


class Counted(nn.Module):
    """Three layers; `forwards` says how often it was called."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.forwards = 0

    def forward(self, x):
        self.forwards += 1
        return self.layers(x)


class Pool:
    def __init__(self):
        self.out = {}

    def allocate(self, shape):
        block = torch.zeros(shape)
        self.out[id(block)] = block
        return block

    def deallocate(self, block):
        del self.out[id(block)]


def made_by(function, *given):
    class Made(nn.Module):
        def forward(self, x):
            return function.apply(x, *given)

    return Made()


def feed(turn):
    return (torch.ones(2, 4),), {}


def test_one_step_serves_for_all_faults_of_the_backward_pass():
    module = Counted()
    step = make_step(lambda: module, feed)
    places, forward = count_places(step), count_places(make_step(Counted, feed, "no_grad"))
    before = module.forwards
    assert inject_faults(step, warmup=0) == places
    own = module.forwards - before
    assert forward < own < places - 5  # those of the forward pass have one each; the rest of them share


def test_gradients_are_those_of_one_pass_afterwards():
    module = Counted()
    step = make_step(lambda: module, feed)
    step()
    expected = [parameter.grad.clone() for parameter in module.parameters()]
    inject_faults(step)
    assert all(map(torch.equal, expected, (parameter.grad for parameter in module.parameters())))


class KeepsOnFailure(torch.autograd.Function):
    """Its backward pass puts something aside, and takes it away only if all goes well."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        KEPT.append(grad * 3)
        result = grad * 2
        KEPT.pop()
        return result


def test_what_a_failed_backward_pass_keeps_is_found_and_named():
    KEPT.clear()
    with pytest.raises(Leak, match=r"test_one_graph.py:\d+ in KeepsOnFailure.backward") as caught:
        inject_faults(make_step(lambda: made_by(KeepsOnFailure), feed))
    assert "KEPT.append(grad * 3)" in str(caught.value)


class GoesOnce(torch.autograd.Function):
    """Has nothing left for a second pass through its graph."""

    @staticmethod
    def forward(ctx, x):
        ctx.factor = x + 1
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        factor, ctx.factor = ctx.factor, None
        return grad * factor


def test_code_that_goes_backward_once_has_a_step_for_each_fault():
    step = make_step(lambda: made_by(GoesOnce), feed)
    assert inject_faults(step) == count_places(step)


class TakesInBackward(torch.autograd.Function):
    """A lease of the backward pass that stays out when it fails."""

    @staticmethod
    def forward(ctx, x, pool):
        ctx.pool = pool
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        block = ctx.pool.allocate(grad.shape)
        result = grad * 2
        ctx.pool.deallocate(block)
        return result, None


def test_a_lease_that_a_failed_backward_pass_keeps_is_found():
    pool = Pool()
    step = make_step(lambda: made_by(TakesInBackward, pool), feed)
    with pytest.raises(Leak, match=r"1 lease not given back after fault \d+, in the place of aten\.mul"):
        inject_faults(step, pools=(pool,))


def test_steps_of_other_kinds_go_their_own_way():
    weight = torch.ones(4, requires_grad=True)

    def step():
        weight.grad = None
        (weight * 2).sum().backward()

    assert inject_faults(step) == count_places(step)


class Exp(torch.autograd.Function):
    """Its backward pass is code of its own, which makes calls of torch's functions."""

    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return (grad * y + y.sin()).add(1).mul(2)


class OtherCallsEachTime(Exp):
    """Whose code goes another way in every pass."""

    @staticmethod
    def backward(ctx, grad):
        KEPT.append(None)
        (y,) = ctx.saved_tensors
        return grad * y if len(KEPT) % 2 else y.sin() * grad


def operations_failed_in(monkeypatch, step):
    told = []
    tick = Countdown.tick

    def noted(count, what):
        try:
            tick(count, what)
        except InjectedFault:
            told.append(count.passed)
            raise

    monkeypatch.setattr(Countdown, "tick", noted)
    return inject_faults(step), told


def test_every_operation_of_a_node_s_own_code_fails(monkeypatch):
    step = make_step(lambda: made_by(Exp), feed)
    faults, told = operations_failed_in(monkeypatch, step)
    assert sorted(told) == list(range(1, faults + 1))


def test_code_that_goes_another_way_each_time_has_a_step_for_each_fault():
    KEPT.clear()
    assert inject_faults(make_step(lambda: made_by(OtherCallsEachTime), feed)) > 0


def test_few_operations_before_a_fault_are_watched():
    """In the forward pass, in the backward pass, and in a node's own code."""
    seen = []
    dispatch = Watch.__torch_dispatch__

    class Chain(nn.Module):
        def forward(self, x):
            for _ in range(20):
                x = x * 2
            return Exp.apply(x)

    def counted(watch, *given):
        seen.append(given[0])
        return dispatch(watch, *given)

    step = make_step(Chain, feed)
    places = count_places(step)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Watch, "__torch_dispatch__", counted)
        assert inject_faults(step) == places
    assert len(seen) < 7 * places  # four passes are watched as a whole; each half is what it was


def test_what_goes_another_way_when_its_calls_are_listened_to_is_not_listened_to():
    layer = nn.TransformerEncoderLayer(
        8, 2, 8, batch_first=True
    )  # takes its fast path only if nobody listens
    step = make_step(lambda: layer, lambda turn: ((torch.randn(2, 3, 8),), {}), "no_grad")
    assert inject_faults(step) == count_places(step) < 5
