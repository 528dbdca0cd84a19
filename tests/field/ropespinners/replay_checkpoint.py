"""Activation checkpoint and replay: inputs and RNG states sit in numbered slots until the backward replays the block."""
import contextlib
import functools
import logging
import weakref
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import torch

logger = logging.getLogger(__name__)


class RngVault:
    """Slots for RNG states: a preallocated byte tensor and a counter of how many slots are out."""

    def __init__(self, n: int, state_bytes: int = 5056):
        self._mem = torch.empty(n, state_bytes, dtype=torch.uint8)
        self._open = [True] * n
        self.out = 0

    def deposit(self) -> int:
        """Takes a slot and writes the current state into it; -1 when full."""
        for i, is_open in enumerate(self._open):
            if is_open:
                self._open[i] = False
                self.out += 1
                st = torch.random.get_rng_state()
                self._mem[i, : st.numel()].copy_(st)
                return i
        return -1

    def restore(self, slot: int) -> None:
        torch.random.set_rng_state(self._mem[slot].clone())

    def withdraw(self, slot: int) -> None:
        self._open[slot] = True
        self.out -= 1


class HiddenStore:
    """Buffers for saved hidden states, keyed by numel."""

    def __init__(self, per_size: int):
        self.per_size = per_size
        self._made: Dict[int, int] = {}
        self._idle: Dict[int, List[torch.Tensor]] = {}

    def lend(self, numel: int, dtype) -> torch.Tensor:
        idle = self._idle.setdefault(numel, [])
        while idle:
            t = idle.pop()  # leak: a buffer of another dtype is thrown away and still counted in _made
            if t.dtype == dtype:
                return t
        if self._made.get(numel, 0) >= self.per_size:
            raise RuntimeError(f"hidden store: no buffer of {numel}")
        self._made[numel] = self._made.get(numel, 0) + 1
        return torch.empty(numel, dtype=dtype, device="cuda")

    def settle(self, t: torch.Tensor) -> None:
        self._idle[t.numel()].append(t)

    @contextlib.contextmanager
    def lent(self, numel: int, dtype) -> Iterator[torch.Tensor]:
        t = self.lend(numel, dtype)  # clean: settled in finally
        try:
            yield t
        finally:
            self.settle(t)


class Tape:
    """Records of one forward. replay() runs the block again, and closes the record."""

    def __init__(self, vault: RngVault, store: HiddenStore):
        self.vault = vault
        self.store = store
        self.records: List[Tuple[Callable, torch.Tensor, torch.Size, int]] = []

    def record(self, fn: Callable, x: torch.Tensor) -> bool:
        buf = self.store.lend(x.numel(), x.dtype)  # clean: settled when there is no slot, else by replay() or abandon()
        slot = self.vault.deposit()  # clean: near miss, -1 is no slot, otherwise in the record that replay() or abandon() closes
        if slot < 0:
            self.store.settle(buf)
            return False
        buf.copy_(x.reshape(-1))
        self.records.append((fn, buf, x.shape, slot))
        return True

    def replay(self) -> Optional[torch.Tensor]:
        if not self.records:
            return None
        fn, buf, shape, slot = self.records.pop()
        try:
            self.vault.restore(slot)
            x = buf.view(shape).detach().clone().requires_grad_()
            with torch.enable_grad():
                return fn(x)
        finally:
            self.vault.withdraw(slot)
            self.store.settle(buf)

    def abandon(self) -> None:
        for _, buf, _, slot in self.records:
            self.store.settle(buf)
            self.vault.withdraw(slot)
        self.records = []


class Replayed(torch.autograd.Function):
    vault: RngVault = None
    store: HiddenStore = None

    @staticmethod
    def forward(ctx, fn, x, keep_rng):
        ctx.fn = fn
        ctx.keep_rng = keep_rng
        ctx.buf = Replayed.store.lend(x.numel(), x.dtype)  # clean: near miss, on ctx, and backward settles it
        ctx.slot = Replayed.vault.deposit() if keep_rng else -1  # clean: near miss, backward withdraws it under the same keep_rng
        ctx.buf.copy_(x.reshape(-1))
        ctx.shape = x.shape
        with torch.no_grad():
            return fn(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.buf.view(ctx.shape).detach().clone().requires_grad_()
        Replayed.store.settle(ctx.buf)
        ctx.buf = None
        if ctx.keep_rng and ctx.slot >= 0:
            Replayed.vault.restore(ctx.slot)
            Replayed.vault.withdraw(ctx.slot)
        with torch.enable_grad():
            y = ctx.fn(x)
        (gx,) = torch.autograd.grad(y, x, grad)
        return None, gx, None


@contextlib.contextmanager
def frozen_rng(vault: RngVault) -> Iterator[None]:
    """The body runs, then RNG goes back to where it was."""
    slot = vault.deposit()  # leak: without finally a raise in the body, which try_block() expects, skips the withdraw
    if slot < 0:
        raise RuntimeError("vault full")
    yield
    vault.restore(slot)
    vault.withdraw(slot)


def try_block(vault: RngVault, fn: Callable, x: torch.Tensor) -> Optional[torch.Tensor]:
    try:
        with frozen_rng(vault):  # clean: with
            return fn(x)
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
        return None


def retry_smaller(store: HiddenStore, fn: Callable, x: torch.Tensor, parts: Sequence[int]) -> Optional[torch.Tensor]:
    for n in parts:
        size = x.numel() // n
        buf = store.lend(size, x.dtype)  # leak: an out-of-memory try goes on to the next size without settle
        try:
            outs = []
            for piece in x.reshape(-1).split(size):
                buf[: piece.numel()].copy_(piece)
                outs.append(fn(buf[: piece.numel()]))
            store.settle(buf)
            return torch.cat(outs)
        except torch.cuda.OutOfMemoryError:
            logger.info("%d parts are too few", n)
    return None


def compare_replay(tape: Tape, fn: Callable, x: torch.Tensor, tol: float) -> bool:
    """Debug aid: forward, replay, compare."""
    want = fn(x)
    if not tape.record(fn, x):  # clean: replayed on the next line
        return True
    got = tape.replay()
    return torch.allclose(want, got, atol=tol)


def chunks_saved(store: HiddenStore, x: torch.Tensor, n: int) -> Iterator[torch.Tensor]:
    """Yields saved copies, which go back when the consumer asks for the next one."""
    for piece in x.chunk(n):
        buf = store.lend(piece.numel(), piece.dtype)  # leak: a consumer that stops early, as first_bad() does, leaves the last one lent
        buf.copy_(piece.reshape(-1))
        yield buf
        store.settle(buf)


def first_bad(store: HiddenStore, x: torch.Tensor, n: int) -> Optional[int]:
    for i, buf in enumerate(chunks_saved(store, x, n)):
        if not torch.isfinite(buf).all():
            return i
    return None


def saved_norm(store: HiddenStore, x: torch.Tensor) -> float:
    with store.lent(x.numel(), torch.float32) as buf:  # clean: with
        buf.copy_(x.reshape(-1))
        return float(buf.norm())


class DeferredReplay:
    """Replays asked for by hooks; run() does them in order of arrival, with done called on each."""

    def __init__(self, store: HiddenStore):
        self.store = store
        self._jobs: List[Tuple[torch.Tensor, Callable[[torch.Tensor], None]]] = []
        self._closed = False

    def ask(self, x: torch.Tensor, done: Callable[[torch.Tensor], None]) -> bool:
        buf = self.store.lend(x.numel(), x.dtype)  # leak: once closed, the buffer is lent and not queued
        buf.copy_(x.reshape(-1))
        if self._closed:
            return False
        self._jobs.append((buf, done))
        return True

    def run(self) -> None:
        jobs, self._jobs = self._jobs, []
        for buf, done in jobs:
            try:
                done(buf)
            finally:
                self.store.settle(buf)

    def close(self) -> None:
        self._closed = True
        self.run()


class Borrowed:
    """A lent buffer tied to the life of an owner object."""

    def __init__(self, store: HiddenStore, owner: Any, numel: int):
        self.buf = store.lend(numel, torch.float16)  # clean: near miss, the finalizer of owner settles it
        self._fin = weakref.finalize(owner, store.settle, self.buf)

    def early(self) -> None:
        self._fin()


def stash_pair(store: HiddenStore, a: torch.Tensor, b: torch.Tensor, cb: Callable[..., None]) -> None:
    ba = store.lend(a.numel(), a.dtype)  # clean: settled through the callback's partial
    try:
        bb = store.lend(b.numel(), b.dtype)  # clean: settled through the callback's partial
    except RuntimeError:
        store.settle(ba)
        raise
    ba.copy_(a.reshape(-1))
    bb.copy_(b.reshape(-1))
    cb(functools.partial(_settle_both, store, ba, bb))


def _settle_both(store: HiddenStore, ba: torch.Tensor, bb: torch.Tensor) -> None:
    store.settle(ba)
    store.settle(bb)
