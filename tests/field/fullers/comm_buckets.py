"""Gradient buckets for data-parallel training, reduced through pooled communication buffers."""
from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Callable, Dict, List, Optional, Tuple

logger = logging.getLogger(__name__)
Grad = List[float]


@dataclass(eq=False)
class CommBuffer:
    capacity: int
    data: List[float] = field(default_factory=list)


class CommBufferPool:
    def __init__(self) -> None:
        self._spare: Dict[int, List[CommBuffer]] = {}
        self.live = 0

    def obtain(self, capacity: int) -> CommBuffer:
        self.live += 1
        spare = self._spare.get(capacity)
        return spare.pop() if spare else CommBuffer(capacity)

    def restore(self, buf: CommBuffer) -> None:
        self.live -= 1
        buf.data.clear()
        self._spare.setdefault(buf.capacity, []).append(buf)


class Work:
    """Handle of one asynchronous collective."""

    def __init__(self, buf: CommBuffer, world: int) -> None:
        self.buf = buf
        self.world = world

    def wait(self) -> None:
        self.buf.data[:] = [v / self.world for v in self.buf.data]


class GradReducer:
    def __init__(self, pool: CommBufferPool, world: int, capacity: int = 32) -> None:
        self.pool = pool
        self.world = world
        self.capacity = capacity
        self.skip_step = False
        self._inflight: List[Tuple[Work, CommBuffer, Grad]] = []
        self._norm_buf: Optional[CommBuffer] = None
        self._scale_buf: Optional[CommBuffer] = None

    def _packed(self, grads: List[Optional[Grad]]) -> CommBuffer:
        buf = self.pool.obtain(self.capacity)  # clean: returned to the caller
        for grad in grads:
            if grad is not None:
                buf.data.extend(grad)
        return buf

    def launch(self, grad: Grad) -> None:
        buf = self._packed([grad])  # clean: moved into the list in flight, drain restores it
        self._inflight.append((Work(buf, self.world), buf, grad))

    def drain(self) -> None:
        pending, self._inflight = self._inflight, []
        for work, buf, grad in pending:
            work.wait()
            grad[:] = buf.data
            self.pool.restore(buf)

    def reduce_now(self, grads: List[Optional[Grad]]) -> Optional[List[float]]:
        buf = self._packed(grads)  # leak: a bucket without gradients returns with the buffer out
        if not buf.data:
            return None
        Work(buf, self.world).wait()
        out = list(buf.data)
        self.pool.restore(buf)
        return out

    def grad_norm(self, grads: List[Optional[Grad]]) -> float:
        flat = self._packed(grads).data  # leak: only the data is kept, the buffer itself is dropped
        return sum(v * v for v in flat) ** 0.5

    def max_abs(self, grads: List[Optional[Grad]]) -> float:
        buf = self._packed(grads)  # clean: restored before the return
        peak = max((abs(v) for v in buf.data), default=0.0)
        self.pool.restore(buf)
        return peak

    def fit(self, nbytes: int) -> CommBuffer:
        capacity = self.capacity
        buf = self.pool.obtain(capacity)  # leak: the buffer found too small is rebound in the loop
        while buf.capacity < nbytes:
            capacity *= 2
            buf = self.pool.obtain(capacity)  # leak: a second round of growing rebinds this one too
        return buf

    def fit_exact(self, nbytes: int) -> CommBuffer:
        capacity = self.capacity
        buf = self.pool.obtain(capacity)  # clean: near miss, restored before the loop binds a wider one
        while buf.capacity < nbytes:
            self.pool.restore(buf)
            capacity *= 2
            buf = self.pool.obtain(capacity)  # clean: restored by the next round or returned
        return buf

    def begin_norm(self) -> None:
        if self.world > 1:
            self._norm_buf = self.pool.obtain(8)  # clean: near miss, end_norm tests the same world size

    def end_norm(self) -> float:
        total = 1.0
        if self.world > 1:
            self._norm_buf.data.append(total)
            total = sum(self._norm_buf.data) / self.world
            self.pool.restore(self._norm_buf)
            self._norm_buf = None
        return total

    def begin_scale(self) -> None:
        if self.world > 1:
            self._scale_buf = self.pool.obtain(8)  # leak: end_scale does nothing on a skipped step, the next begin overwrites it

    def end_scale(self, scale: float) -> float:
        if self.world > 1 and not self.skip_step:
            self._scale_buf.data.append(scale)
            scale = max(self._scale_buf.data)
            self.pool.restore(self._scale_buf)
            self._scale_buf = None
        return scale

    def step(self, found_inf: Callable[[], bool]) -> bool:
        self.begin_norm()
        self.begin_scale()
        self.skip_step = found_inf()
        self.end_norm()
        self.end_scale(1.0)
        return not self.skip_step


def main() -> None:
    pool = CommBufferPool()
    red = GradReducer(pool, world=2)
    grad = [2.0, 4.0]
    red.launch(grad)
    red.drain()
    assert grad == [1.0, 2.0] and red.max_abs([grad, None]) == 2.0
    pool.restore(red.fit_exact(100))  # clean: restored by the call around it
    assert red.step(lambda: False)
    assert pool.live == 0


if __name__ == "__main__":
    main()
