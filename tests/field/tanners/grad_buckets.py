"""Gradient buckets: flat communication buffers rented per bucket, reduced asynchronously."""
from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Callable, Dict, List, Optional


class FlatBuffer:
    def __init__(self, n: int) -> None:
        self.data = [0.0] * n
        self.used = 0


class BufferLot:
    def __init__(self, count: int, numel: int) -> None:
        self._lot = [FlatBuffer(numel) for _ in range(count)]

    def rent(self) -> Optional[FlatBuffer]:
        return self._lot.pop() if self._lot else None

    def refund(self, fb: FlatBuffer) -> None:
        fb.used = 0
        self._lot.append(fb)

    def spare(self) -> int:
        return len(self._lot)


class BucketAllocator:
    """Adds back pressure: reduces what is open before it gives up."""

    def __init__(self, lot: BufferLot, relieve: Callable[[], bool]) -> None:
        self.lot = lot
        self.relieve = relieve

    def bucket(self) -> Optional[FlatBuffer]:
        fb = self.lot.rent()  # clean: wrapper, handed on
        if fb is None and self.relieve():
            return self.lot.rent()  # clean: wrapper, handed on
        return fb

    def bucket_or_raise(self) -> FlatBuffer:
        fb = self.bucket()  # clean: wrapper of the wrapper, None raises
        if fb is None:
            raise MemoryError("no bucket")
        return fb

    def discard(self, fb: FlatBuffer) -> None:
        self.lot.refund(fb)


AllReduce = Callable[[List[float]], "Future[List[float]]"]


class Reducer:
    def __init__(self, lot: BufferLot, all_reduce: AllReduce, numel: int) -> None:
        self.alloc = BucketAllocator(lot, self._relieve)
        self.all_reduce = all_reduce
        self.numel = numel
        self._open: Optional[FlatBuffer] = None
        self._flight: Dict[int, FlatBuffer] = {}
        self._deferred: List[FlatBuffer] = []
        self._next = 0
        self.grads: List[float] = []

    def _relieve(self) -> bool:
        if not self._deferred:
            return False
        self.alloc.discard(self._deferred.pop())
        return True

    # -- filling -----------------------------------------------------------
    def push(self, grad: List[float]) -> None:
        if self._open is not None and self._open.used + len(grad) > self.numel:
            self._launch(self._open)
            self._open = None
        if self._open is None:
            self._open = self.alloc.bucket_or_raise()  # clean: near miss, launched before the field is overwritten
        fb = self._open
        fb.data[fb.used:fb.used + len(grad)] = grad
        fb.used += len(grad)

    def finish(self) -> None:
        if self._open is not None:
            fb, self._open = self._open, None
            self._launch(fb)

    def _launch(self, fb: FlatBuffer) -> None:
        key, self._next = self._next, self._next + 1
        self._flight[key] = fb
        fut = self.all_reduce(fb.data[: fb.used])
        fut.add_done_callback(lambda f: self._landed(key, f))

    def _landed(self, key: int, fut: "Future[List[float]]") -> None:
        fb = self._flight.pop(key)
        if fut.exception() is None:
            self.grads.extend(fut.result())
        self.alloc.discard(fb)

    # -- single tensors ------------------------------------------------------
    def reduce_sparse(self, rows: Dict[int, float], on_ready: Callable[[List[float]], None]) -> bool:
        fb = self.alloc.bucket()  # leak: popped from the flight table by the callback and dropped when empty
        if fb is None:
            return False
        key, self._next = self._next, self._next + 1
        self._flight[key] = fb
        for i, v in enumerate(rows.values()):
            fb.data[i] = v
        fb.used = len(rows)

        def landed(fut: "Future[List[float]]") -> None:
            mine = self._flight.pop(key)
            summed = fut.result()
            if not summed:
                return
            on_ready(summed)
            self.alloc.discard(mine)

        self.all_reduce(fb.data[: fb.used]).add_done_callback(landed)
        return True

    def reduce_now(self, grad: List[float], scratch: Optional[FlatBuffer] = None, keep: bool = False) -> List[float]:
        fb = scratch or self.alloc.bucket_or_raise()  # clean: near miss, rented only without scratch and then discarded or deferred
        fb.data[: len(grad)] = grad
        fb.used = len(grad)
        out = self.all_reduce(fb.data[: fb.used]).result()
        if scratch is None:
            if keep:
                self._deferred.append(fb)
            else:
                self.alloc.discard(fb)
        return out

    def reduce_scaled(self, grad: List[float], scale: float, scratch: Optional[FlatBuffer] = None) -> List[float]:
        owned = scratch is None
        fb = self.alloc.bucket_or_raise() if owned else scratch  # leak: a zero scale returns before the owned one is discarded
        fb.data[: len(grad)] = grad
        fb.used = len(grad)
        if scale == 0.0:
            return [0.0] * len(grad)
        out = [v * scale for v in self.all_reduce(fb.data[: fb.used]).result()]
        if owned:
            self.alloc.discard(fb)
        return out

    def checksum(self, grad: List[float]) -> float:
        return sum(self._stage(grad).data[: len(grad)])  # leak: the staged buffer is summed and dropped

    def max_abs(self, grad: List[float]) -> float:
        fb = self._stage(grad)  # clean: discarded below
        m = max((abs(v) for v in fb.data[: fb.used]), default=0.0)
        self.alloc.discard(fb)
        return m

    def _stage(self, grad: List[float]) -> FlatBuffer:
        fb = self.alloc.bucket_or_raise()  # clean: wrapper, returned filled
        fb.data[: len(grad)] = grad
        fb.used = len(grad)
        return fb

    def drop_deferred(self) -> None:
        for fb in self._deferred:
            self.alloc.discard(fb)
        self._deferred.clear()
