"""CPU Adam over swapped partitions, double buffered."""
from __future__ import annotations

from typing import Dict, List, Optional, Tuple

import numpy as np

from .pinned import PinnedBuffer
from .swapper import PartitionSwapper


class OffloadedAdam:
    def __init__(self, swapper: PartitionSwapper, partitions: List[Tuple[str, int]], lr: float = 1e-3,
                 own_staging: bool = True):
        self.swapper = swapper
        self.pool = swapper.pool
        self.partitions = partitions
        self.lr = lr
        self.own_staging = own_staging
        self._staging: Optional[PinnedBuffer] = None
        self._grads: Dict[str, PinnedBuffer] = {}
        self._norms: Dict[str, PinnedBuffer] = {}

    # -- gradients -------------------------------------------------------
    def accumulate(self, name: str, grad: np.ndarray) -> None:
        buf = self._grads.get(name)
        if buf is None:
            buf = self.pool.checkout(timeout=5.0)  # clean: near miss, taken only when the table has none; apply empties the table
            if buf is None:
                raise RuntimeError("pinned pool exhausted")
            buf.view[:] = 0
            self._grads[name] = buf
        buf.view[: grad.size] += grad

    def record_norm(self, name: str, grad: np.ndarray) -> None:
        buf = self.pool.checkout(timeout=5.0)  # leak: a second record of the same name overwrites the entry
        if buf is None:
            return
        buf.view[0] = float(np.linalg.norm(grad))
        self._norms[name] = buf

    def collect_norms(self) -> Dict[str, float]:
        out = {}
        for name, buf in self._norms.items():
            out[name] = float(buf.view[0])
            self.pool.checkin(buf)
        self._norms = {}
        return out

    def apply(self) -> None:
        for name, numel in self.partitions:
            grad = self._grads.pop(name, None)
            if grad is None:
                continue
            state = self.swapper.fetch(name, numel)  # clean: checked in at the end of the iteration
            state.view[:numel] -= self.lr * grad.view[:numel]
            self.swapper.swap_out(name, state.view[:numel].copy())
            self.pool.checkin(state)
            self.pool.checkin(grad)

    # -- stepping --------------------------------------------------------
    def step(self) -> int:
        if not self.partitions:
            return 0
        cur = self.swapper.fetch(*self.partitions[0])  # clean: checked in by the first iteration
        for i, (name, numel) in enumerate(self.partitions):
            nxt = None
            if i + 1 < len(self.partitions):
                nxt = self.swapper.fetch(*self.partitions[i + 1])  # clean: near miss, becomes cur and is checked in by the next iteration
            self._update(cur, numel)
            self.pool.checkin(cur)
            cur = nxt
        return len(self.partitions)

    def step_with_overflow_check(self) -> bool:
        if not self.partitions:
            return True
        cur = self.swapper.fetch(*self.partitions[0])  # clean: checked in on the overflow return and in each iteration
        for i, (name, numel) in enumerate(self.partitions):
            nxt = None
            if i + 1 < len(self.partitions):
                nxt = self.swapper.fetch(*self.partitions[i + 1])  # leak: the overflow return gives back cur only
            if not np.isfinite(cur.view[:numel]).all():
                self.pool.checkin(cur)
                return False
            self._update(cur, numel)
            self.pool.checkin(cur)
            cur = nxt
        return True

    def _update(self, buf: PinnedBuffer, numel: int) -> None:
        buf.view[:numel] *= 1.0 - self.lr

    # -- staging ---------------------------------------------------------
    def begin(self, shared: Optional[PinnedBuffer] = None) -> None:
        if self.own_staging:
            self._staging = self.pool.checkout(timeout=5.0)  # clean: near miss, end checks it in under the same flag
        else:
            self._staging = shared

    def end(self) -> None:
        if self.own_staging and self._staging is not None:
            self.pool.checkin(self._staging)
        self._staging = None


def run_epoch(opt: OffloadedAdam, batches: List[Dict[str, np.ndarray]]) -> Dict[str, float]:
    for grads in batches:
        opt.begin()
        for name, g in grads.items():
            opt.accumulate(name, g)
            opt.record_norm(name, g)
        opt.apply()
        opt.end()
    opt.swapper.drain_writes()
    return opt.collect_norms()
