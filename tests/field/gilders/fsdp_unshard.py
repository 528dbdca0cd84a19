"""Flat-parameter handles for fully sharded training: unshard before compute, reshard after."""
from __future__ import annotations

import logging
from typing import Dict, List, Optional, Sequence

try:
    import torch
except ImportError:  # unit tests run on the CPU image
    torch = None

log = logging.getLogger(__name__)


def _new_buffer(numel: int, device: str):
    if torch is not None:
        return torch.empty(numel, device=device)
    return [0.0] * numel


def _snapshot(buf) -> list:
    return buf.tolist() if torch is not None else list(buf)


class FlatBufferPool:
    """Size-bucketed full-parameter buffers."""

    def __init__(self, device: str = "cpu", max_outstanding: int = 16):
        self.device = device
        self.max_outstanding = max_outstanding
        self._idle: Dict[int, List] = {}
        self._outstanding = 0

    @property
    def outstanding(self) -> int:
        return self._outstanding

    def borrow(self, numel: int):
        idle = self._idle.get(numel)
        buf = idle.pop() if idle else _new_buffer(numel, self.device)
        self._outstanding += 1
        return buf

    def try_borrow(self, numel: int):
        if self._outstanding >= self.max_outstanding:
            return None
        return self.borrow(numel)  # clean: handed on to the caller

    def give_back(self, buf) -> None:
        self._outstanding -= 1
        self._idle.setdefault(len(buf), []).append(buf)


class FlatParamHandle:
    def __init__(self, name: str, numel: int, pool: FlatBufferPool, world_size: int = 1,
                 reshard_after_forward: bool = True):
        self.name = name
        self.numel = numel
        self.padded = (numel + world_size - 1) // world_size * world_size
        self.pool = pool
        self.world_size = world_size
        self.reshard_after_forward = reshard_after_forward
        self.shard = [0.0] * (self.padded // world_size)
        self._full = None
        self._unreduced = None
        self._accum: Optional[list] = None

    @property
    def is_unsharded(self) -> bool:
        return self._full is not None

    def _all_gather(self, out) -> None:
        n = len(self.shard)
        for r in range(self.world_size):
            for i, v in enumerate(self.shard):
                out[r * n + i] = v

    # -- forward ---------------------------------------------------------
    def unshard(self) -> None:
        if self._full is not None:
            return
        self._full = self.pool.borrow(self.padded)  # clean: kept in the handle, reshard gives it back
        self._all_gather(self._full)

    def adopt(self, full) -> None:
        self._full = full
        self._all_gather(full)

    def reshard(self) -> None:
        if self._full is None:
            return
        self.pool.give_back(self._full)
        self._full = None

    # -- backward --------------------------------------------------------
    def prepare_gradient(self) -> None:
        self._unreduced = self.pool.borrow(self.padded)  # leak: each micro-batch overwrites it, post_backward gives back only the last one
        for i in range(self.padded):
            self._unreduced[i] = 0.0

    def post_backward(self, is_last_microbatch: bool) -> None:
        grad = self._unreduced
        if self._accum is None:
            self._accum = _snapshot(grad)
        else:
            self._accum = [a + g for a, g in zip(self._accum, _snapshot(grad))]
        if not is_last_microbatch:
            return
        self._reduce_scatter(self._accum)
        self._accum = None
        self.pool.give_back(grad)
        self._unreduced = None

    def _reduce_scatter(self, grad: Sequence[float]) -> None:
        n = len(self.shard)
        for i in range(n):
            self.shard[i] -= 1e-3 * sum(grad[r * n + i] for r in range(self.world_size))

    # -- state -----------------------------------------------------------
    def _gathered(self):
        full = self.pool.borrow(self.padded)  # clean: handed to the caller
        self._all_gather(full)
        return full

    def state_dict_entry(self) -> list:
        full = self._gathered()  # leak: the caller gets a copy, the pooled buffer is dropped
        return _snapshot(full)[: self.numel]

    def full_norm(self) -> float:
        full = self._gathered()  # clean: given back in the finally
        try:
            return sum(float(v) * float(v) for v in full[: self.numel]) ** 0.5
        finally:
            self.pool.give_back(full)

    def summon(self, writeback: bool, scale: float = 1.0) -> list:
        """Full parameter as a list; with `writeback` the scaled values go into the shard."""
        full = self.pool.borrow(self.padded)  # leak: the writeback branch returns without giving it back
        self._all_gather(full)
        if not writeback:
            values = _snapshot(full)
            self.pool.give_back(full)
            return values
        for i in range(self.padded):
            full[i] = full[i] * scale
        for i in range(len(self.shard)):
            self.shard[i] = float(full[i])
        return _snapshot(full)

    def low_precision_view(self) -> list:
        lp = self.pool.borrow(self.padded // 2)  # leak: rebound for odd sizes
        if self.padded % 2:
            lp = self.pool.borrow(self.padded // 2 + 1)  # clean: given back below
        for i in range(len(lp)):
            lp[i] = self.shard[i % len(self.shard)]
        out = _snapshot(lp)
        self.pool.give_back(lp)
        return out


class ForwardPrefetcher:
    """Starts the next handle's all-gather while the current one computes."""

    def __init__(self, pool: FlatBufferPool):
        self.pool = pool
        self._inflight: Dict[str, object] = {}

    def launch(self, handle: FlatParamHandle) -> None:
        if handle.is_unsharded or handle.name in self._inflight:
            return
        buf = self.pool.try_borrow(handle.padded)  # clean: near miss, None or moved into the table that claim and finish empty
        if buf is None:
            log.debug("prefetch of %s skipped", handle.name)
            return
        self._inflight[handle.name] = buf

    def claim(self, handle: FlatParamHandle) -> None:
        buf = self._inflight.pop(handle.name, None)
        if buf is None:
            handle.unshard()
            return
        if handle.is_unsharded:
            self.pool.give_back(buf)
            return
        handle.adopt(buf)

    def finish(self) -> None:
        for buf in self._inflight.values():
            self.pool.give_back(buf)
        self._inflight.clear()


class BackwardPrefetcher:
    def __init__(self, pool: FlatBufferPool):
        self.pool = pool
        self._pending: Dict[str, object] = {}

    def launch(self, handle: FlatParamHandle) -> None:
        if handle.name in self._pending:
            return
        self._pending[handle.name] = self.pool.borrow(handle.padded)  # leak: claim pops and drops it when the handle is still unsharded

    def claim(self, handle: FlatParamHandle) -> None:
        buf = self._pending.pop(handle.name, None)
        if handle.is_unsharded:
            return
        if buf is None:
            handle.unshard()
        else:
            handle.adopt(buf)

    def finish(self) -> None:
        while self._pending:
            _, buf = self._pending.popitem()
            self.pool.give_back(buf)


def train_step(handles: List[FlatParamHandle], pool: FlatBufferPool, micro_batches: int) -> None:
    fwd, bwd = ForwardPrefetcher(pool), BackwardPrefetcher(pool)
    for mb in range(micro_batches):
        for i, h in enumerate(handles):
            fwd.claim(h)
            if i + 1 < len(handles):
                fwd.launch(handles[i + 1])
            if h.reshard_after_forward:
                h.reshard()
        for i in reversed(range(len(handles))):
            h = handles[i]
            bwd.claim(h)
            if i > 0:
                bwd.launch(handles[i - 1])
            h.prepare_gradient()
            h.post_backward(mb == micro_batches - 1)
            h.reshard()
    fwd.finish()
    bwd.finish()


if __name__ == "__main__":
    pool = FlatBufferPool()
    hs = [FlatParamHandle(f"layers.{i}", 5 + i, pool, 2, reshard_after_forward=i % 2 == 0) for i in range(3)]
    train_step(hs, pool, 2)
    hs[0].state_dict_entry(), hs[0].full_norm(), hs[0].summon(True), hs[0].low_precision_view()
    print("outstanding", pool.outstanding)
