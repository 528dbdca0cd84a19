"""Flat-parameter unsharding and reduction for the FSDP-style wrapper."""
from __future__ import annotations

import logging
from array import array
from typing import Dict, Iterable, List, Optional

log = logging.getLogger("fsdp.flat_param")


class GatherBuffer:
    __slots__ = ("data", "numel", "index")

    def __init__(self, index: int, numel: int) -> None:
        self.index = index
        self.numel = numel
        self.data = array("f", [0.0]) * numel


class GatherBufferPool:
    """Fixed set of all-gather buffers, every one as large as the largest flat param."""

    def __init__(self, numel: int, count: int) -> None:
        self.numel = numel
        self._all = [GatherBuffer(i, numel) for i in range(count)]
        self._free = list(self._all)

    @property
    def in_use(self) -> int:
        return len(self._all) - len(self._free)

    def acquire(self) -> GatherBuffer:
        if not self._free:
            raise RuntimeError("gather buffer pool exhausted")
        return self._free.pop()

    def try_acquire(self) -> Optional[GatherBuffer]:
        return self._free.pop() if self._free else None

    def release(self, buf: GatherBuffer) -> None:
        self._free.append(buf)


def all_gather_into(dst: GatherBuffer, shard: array, world: int) -> None:
    n = len(shard)
    for r in range(world):
        dst.data[r * n:(r + 1) * n] = shard


class FlatParamHandle:
    def __init__(self, name: str, shard: array, world: int, pool: GatherBufferPool,
                 frozen: bool = False, low_precision: bool = False) -> None:
        self.name = name
        self.shard = shard
        self.world = world
        self.pool = pool
        self.frozen = frozen
        self.low_precision = low_precision
        self.grad: Optional[array] = None
        self._full: Optional[GatherBuffer] = None
        self._cast: Optional[GatherBuffer] = None

    @property
    def full_numel(self) -> int:
        return len(self.shard) * self.world

    def unshard(self) -> GatherBuffer:
        if self._full is not None:
            return self._full
        self._full = self.pool.acquire()  # clean: near miss, kept in the field and released by reshard, guarded against a second one
        all_gather_into(self._full, self.shard, self.world)
        return self._full

    def reshard(self) -> None:
        if self._full is None:
            return
        self.pool.release(self._full)
        self._full = None

    def _cast_shard(self) -> None:
        self._cast = self.pool.acquire()  # leak: pre_backward overwrites the one taken by pre_forward
        self._cast.data[:len(self.shard)] = self.shard

    def pre_forward(self) -> None:
        if self.low_precision:
            self._cast_shard()
        self.unshard()  # clean: resharded in post_forward

    def post_forward(self, reshard_after_forward: bool = True) -> None:
        if reshard_after_forward:
            self.reshard()

    def pre_backward(self) -> None:
        if self.low_precision:
            self._cast_shard()
        self.unshard()  # clean: near miss, already unsharded is a no-op, resharded in post_backward

    def post_backward(self) -> None:
        if self._cast is not None:
            self.pool.release(self._cast)
            self._cast = None
        self.reshard()


def gather_full(handle: FlatParamHandle) -> GatherBuffer:
    buf = handle.pool.acquire()  # clean: returned to the caller
    all_gather_into(buf, handle.shard, handle.world)
    return buf


def summon_full_params(handles: Iterable[FlatParamHandle]) -> Dict[str, array]:
    out: Dict[str, array] = {}
    for h in handles:
        full = gather_full(h)  # leak: sliced into a copy and dropped
        out[h.name] = full.data[:h.full_numel]
    return out


def export_state(handles: Iterable[FlatParamHandle]) -> Dict[str, List[float]]:
    out: Dict[str, List[float]] = {}
    for h in handles:
        full = gather_full(h)  # clean: released after the copy
        out[h.name] = list(full.data[:h.full_numel])
        h.pool.release(full)
    return out


def total_grad_norm(handles: Iterable[FlatParamHandle]) -> float:
    total = 0.0
    for h in handles:
        scratch = h.pool.acquire()  # leak: continue for params without grad skips the release
        if h.frozen or h.grad is None:
            continue
        n = len(h.grad)
        scratch.data[:n] = h.grad
        total += sum(x * x for x in scratch.data[:n])
        h.pool.release(scratch)
    return total ** 0.5


def clip_grads(handles: Iterable[FlatParamHandle], coef: float) -> int:
    clipped = 0
    for h in handles:
        if h.grad is None:
            continue
        scratch = h.pool.acquire()  # clean: near miss, both ways of the loop release
        if h.frozen:
            h.pool.release(scratch)
            continue
        for i, g in enumerate(h.grad):
            scratch.data[i] = g * coef
        h.grad = scratch.data[:len(h.grad)]
        clipped += 1
        h.pool.release(scratch)
    return clipped


def reduce_scatter(handle: FlatParamHandle) -> bool:
    """Returns False when the caller has to fall back to the unbucketed path."""
    pool = handle.pool
    send = pool.try_acquire()  # leak: kept when no receive buffer is left
    if send is None:
        return False
    recv = pool.try_acquire()  # clean: None-checked and released at the end
    if recv is None:
        log.debug("no receive buffer for %s", handle.name)
        return False
    if handle.grad is not None:
        n = len(handle.grad)
        send.data[:n] = handle.grad
        recv.data[:n] = send.data[:n]
        handle.grad = recv.data[:n]
    pool.release(send)
    pool.release(recv)
    return True


class ForwardPrefetcher:
    """Gathers the next params while the current layer computes."""

    def __init__(self, pool: GatherBufferPool, depth: int = 2) -> None:
        self.pool = pool
        self.depth = depth
        self._inflight: Dict[str, GatherBuffer] = {}

    def prefetch(self, upcoming: List[FlatParamHandle]) -> None:
        for h in upcoming[:self.depth]:
            if h.name in self._inflight:
                continue
            buf = self.pool.try_acquire()  # clean: put into the table; consume and cancel give back
            if buf is None:
                break
            all_gather_into(buf, h.shard, h.world)
            self._inflight[h.name] = buf

    def consume(self, handle: FlatParamHandle) -> Optional[array]:
        buf = self._inflight.pop(handle.name, None)
        if buf is None:
            return None
        data = buf.data[:handle.full_numel]
        self.pool.release(buf)
        return data

    def cancel(self) -> None:
        for buf in self._inflight.values():
            self.pool.release(buf)
        self._inflight.clear()


class BackwardPrefetcher:
    """Follows the recorded post-forward order, in reverse."""

    def __init__(self, pool: GatherBufferPool) -> None:
        self.pool = pool
        self.order: List[FlatParamHandle] = []
        self._ready: Dict[str, GatherBuffer] = {}

    def record(self, handle: FlatParamHandle) -> None:
        self.order.append(handle)

    def prefetch_before(self, handle: FlatParamHandle) -> None:
        pos = self.order.index(handle)
        if pos == 0:
            return
        prev = self.order[pos - 1]
        if prev.name not in self._ready:
            self._ready[prev.name] = gather_full(prev)  # leak: new_iteration drops the table with unconsumed entries

    def take(self, handle: FlatParamHandle) -> None:
        buf = self._ready.pop(handle.name, None)
        if buf is not None:
            self.pool.release(buf)

    def new_iteration(self) -> None:
        self.order = []
        self._ready = {}


def main() -> None:
    pool = GatherBufferPool(numel=16, count=24)
    handles = [FlatParamHandle(f"layer{i}", array("f", [float(i)] * 4), 2, pool, frozen=i == 1) for i in range(3)]
    pre = ForwardPrefetcher(pool)
    back = BackwardPrefetcher(pool)
    for i, h in enumerate(handles):
        pre.prefetch(handles[i:])
        h.pre_forward()
        pre.consume(h)
        h.post_forward()
        back.record(h)
    pre.cancel()
    for h in reversed(handles):
        back.prefetch_before(h)
        h.pre_backward()
        h.grad = array("f", [1.0] * 4)
        back.take(h)
        h.post_backward()
        reduce_scatter(h)
    print(total_grad_norm(handles), clip_grads(handles, 0.5), sorted(summon_full_params(handles)), len(export_state(handles)))
    back.new_iteration()
    log.info("in use: %d", pool.in_use)


if __name__ == "__main__":
    main()
