"""Nothing corrupts: random programs against a model without a pool.

POOL_FUZZ_PROGRAMS says how many; set, the programs are new ones every time, unset they are the same 1,000.
"""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from reference_modules.pool import TensorPool, blocks
from tests.reference_modules.pool_model import Model

PROGRAMS = int(os.environ.get("POOL_FUZZ_PROGRAMS", "1000"))
STEPS = 30

SHAPES = [(), (0, 3), (1,), (5,), (16,), (4, 5), (2, 3, 4), (16, 17), (8, 8, 8), (1100,)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8]
ALIASES = {
    "view": lambda t: t.view(-1)[1:],
    "detach": lambda t: t.detach(),
    "transpose": lambda t: t.transpose(0, -1) if t.dim() else t.view(1),
    "data": lambda t: t.data,
    "numpy": lambda t: t.numpy(),
    "dlpack": lambda t: torch.from_dlpack(t),
    "bytes": lambda t: t.view(torch.uint8),
}
CHANGES = {
    "add": lambda t: t.add_(1),
    "multiply": lambda t: t.mul_(3),
    "fill": lambda t: t.fill_(7),
    "part": lambda t: t.view(-1)[:2].fill_(2),
    "set": lambda t: t.set_(torch.ones(4, dtype=t.dtype)),
    "re-point": lambda t: setattr(t, "data", torch.full((3,), 5, dtype=t.dtype)),
    "requires_grad": lambda t: t.requires_grad_(),
    "shrink": lambda t: t.resize_(1) if t.numel() else None,  # growing reads what nobody wrote
}
RE_POINTING = {"set", "re-point"}
GRAPHS = {
    "product": lambda t, w: t * w,
    "square": lambda t, w: (t.detach() * w) ** 2,
    "sine of a view": lambda t, w: (t.view(-1) * w.view(-1)).sin(),
}
AT = st.integers(0, 30)


class PoolPrograms(RuleBasedStateMachine):
    @initialize(
        debug=st.booleans(),
        tracking=st.booleans(),
        max_bytes=st.sampled_from([None, 2_000, 20_000]),
        threshold_mb=st.sampled_from([0, 0, 0.0005]),
    )
    def open(self, debug, tracking, max_bytes, threshold_mb):
        pool = TensorPool(
            max_bytes=max_bytes, threshold_mb=threshold_mb, debug=debug, tracking=tracking, name="fuzzed"
        )
        self.model = Model(pool)

    @rule(shape=st.sampled_from(SHAPES), dtype=st.sampled_from(DTYPES), zero=st.booleans())
    def allocate(self, shape, dtype, zero):
        self.model.allocate(shape, dtype, zero)

    @rule(shape=st.sampled_from(SHAPES), mode=st.sampled_from([torch.no_grad, torch.inference_mode]))
    def allocate_in_mode(self, shape, mode):
        with mode():
            self.model.allocate(shape, torch.float32, True)

    @rule(shape=st.sampled_from(SHAPES))
    def allocate_in_thread(self, shape):
        self.model.in_thread(lambda: self.model.allocate(shape, torch.float32, False))

    @rule(at=AT)
    def release(self, at):
        self.model.release(at)

    @rule(at=AT)
    def release_and_drop(self, at):
        self.model.release(at)
        self.model.drop(at)

    @rule(at=AT)
    def release_in_thread(self, at):
        self.model.in_thread(lambda: self.model.release(at))

    @rule()
    def release_foreign(self):
        self.model.release_foreign()

    @rule(at=AT)
    def drop(self, at):
        self.model.drop(at)

    @rule(at=AT)
    def drop_in_cycle(self, at):
        self.model.drop_in_cycle(at)

    @rule(at=AT, how=st.sampled_from(sorted(ALIASES)))
    def alias(self, at, how):
        self.model.alias(at, ALIASES[how], exports=how == "dlpack")

    @rule(
        at=AT, how=st.sampled_from(sorted(CHANGES)), mode=st.sampled_from([torch.no_grad, torch.enable_grad])
    )
    def change(self, at, how, mode):
        with mode():
            self.model.change(at, CHANGES[how], re_points=how in RE_POINTING)

    @rule(at=AT, how=st.sampled_from(sorted(GRAPHS)))
    def start_graph(self, at, how):
        self.model.start_graph(at, GRAPHS[how])

    @rule(at=AT)
    def finish_graph(self, at):
        self.model.finish_graph(at)

    @rule(keep=st.sampled_from([0, 500]))
    def trim(self, keep):
        self.model.pool.trim(keep)

    @precondition(lambda self: hasattr(self, "model"))
    @invariant()
    def both_worlds_agree(self):
        self.model.check()

    def teardown(self):
        if hasattr(self, "model"):
            self.model.close()


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_programs_behave_as_without_a_pool(monkeypatch, one_thread):
    monkeypatch.setattr(
        blocks, "LARGE", 4096
    )  # so that small tensors live in mappings too: a use after free crashes
    run_state_machine_as_test(
        PoolPrograms,
        settings=settings(
            max_examples=PROGRAMS,
            stateful_step_count=STEPS,
            deadline=None,
            database=None,
            derandomize="POOL_FUZZ_PROGRAMS" not in os.environ,
            suppress_health_check=list(HealthCheck),
        ),
    )
