"""Gradient bucketing with overlapped reduce-scatter."""
from __future__ import annotations

import threading
from collections import OrderedDict, deque
from typing import Callable, NamedTuple, Optional

import torch
import torch.distributed as dist
from torch import Tensor


class Bucket:
    __slots__ = ("flat", "fill", "params", "serial")

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device):
        self.flat = torch.zeros(numel, dtype=dtype, device=device)
        self.fill = 0
        self.params: list[str] = []
        self.serial = -1

    def room(self) -> int:
        return self.flat.numel() - self.fill


class BucketPool:
    def __init__(self, n: int, numel: int, dtype: torch.dtype, device: torch.device):
        self.free = deque(Bucket(numel, dtype, device) for _ in range(n))
        self.numel = numel
        self._next = 0

    def obtain(self) -> Optional[Bucket]:
        if not self.free:
            return None
        b = self.free.popleft()
        b.serial = self._next
        self._next += 1
        return b

    def dispose(self, b: Bucket) -> None:
        b.fill = 0
        b.params.clear()
        self.free.append(b)


class CreditGate:
    """Caps collectives in flight; refuses instead of blocking."""

    def __init__(self, credits: int):
        self.credits = credits
        self._lock = threading.Lock()

    def issue(self) -> bool:
        with self._lock:
            if self.credits == 0:
                return False
            self.credits -= 1
            return True

    def retire(self) -> None:
        with self._lock:
            self.credits += 1


class Inflight(NamedTuple):
    bucket: Bucket
    work: "dist.Work"


class Reducer:
    def __init__(self, pool: BucketPool, gate: CreditGate, group: dist.ProcessGroup, sink: Callable[[str, Tensor], None]):
        self.pool = pool
        self.gate = gate
        self.group = group
        self.sink = sink
        self.current: Optional[Bucket] = None
        self.inflight: "OrderedDict[int, Inflight]" = OrderedDict()
        self.deferred: list[Bucket] = []
        self.embed: Optional[Bucket] = None

    def add(self, name: str, grad: Tensor) -> bool:
        if grad.numel() > self.pool.numel:
            return self._reduce_large(name, grad)
        if self.current is not None and self.current.room() < grad.numel():
            self.flush()
        if self.current is None:
            self.current = self.pool.obtain()  # clean: near miss, flush() and reset() move the field on or dispose of it
            if self.current is None:
                return False
        b = self.current
        b.flat[b.fill : b.fill + grad.numel()].copy_(grad.flatten())
        b.fill += grad.numel()
        b.params.append(name)
        return True

    def flush(self) -> None:
        if self.current is None:
            return
        b, self.current = self.current, None
        if not self.gate.issue():  # clean: near miss, retired by wait_oldest() with the bucket
            self.deferred.append(b)
            return
        self._launch(b)

    def _launch(self, b: Bucket) -> None:
        work = dist.all_reduce(b.flat, group=self.group, async_op=True)
        self.inflight[b.serial] = Inflight(b, work)

    def wait_oldest(self) -> None:
        if not self.inflight:
            return
        _, item = self.inflight.popitem(last=False)
        item.work.wait()
        self.gate.retire()
        for name in item.bucket.params:
            self.sink(name, item.bucket.flat)
        self.pool.dispose(item.bucket)

    def pump_deferred(self) -> int:
        sent = 0
        while self.deferred and self.gate.issue():  # leak: a deferred bucket that holds nothing is dropped with its credit taken
            b = self.deferred.pop(0)
            if b.fill == 0:
                self.pool.dispose(b)
                continue
            self._launch(b)
            sent += 1
        return sent

    def _reduce_large(self, name: str, grad: Tensor) -> bool:
        if not self.gate.issue():  # clean: retired right after the blocking reduce
            return False
        dist.all_reduce(grad, group=self.group)
        self.gate.retire()
        self.sink(name, grad)
        return True

    def add_sparse(self, name: str, idx: Tensor, values: Tensor) -> bool:
        b = self.pool.obtain()  # leak: with no credit left the bucket is not disposed of
        if b is None:
            return False
        b.flat[: values.numel()].copy_(values.flatten())
        b.params.append(name)
        if not self.gate.issue():  # clean: wait_oldest() retires it
            return False
        self._launch(b)
        return True

    def add_embedding(self, name: str, grad: Tensor) -> None:
        if self.embed is None:
            self.embed = self.pool.obtain()  # leak: reset() clears the field and leaves the bucket outside the pool
        if self.embed is None:
            self.sink(name, grad)
            return
        self.embed.flat[: grad.numel()].add_(grad.flatten()[: self.embed.flat.numel()])
        self.embed.params.append(name)

    def finish_embedding(self) -> None:
        if self.embed is None:
            return
        dist.all_reduce(self.embed.flat, group=self.group)
        for name in self.embed.params:
            self.sink(name, self.embed.flat)
        self.pool.dispose(self.embed)
        self.embed = None

    def reset(self) -> None:
        """Throw away the accumulated step, e.g. after a loss-scale overflow."""
        while self.inflight:
            self.wait_oldest()
        if self.current is not None:
            self.pool.dispose(self.current)
            self.current = None
        for b in self.deferred:
            self.pool.dispose(b)
        self.deferred.clear()
        self.embed = None


def snapshot_grads(pool: BucketPool, grads: dict[str, Tensor]) -> Optional[dict[str, Tensor]]:
    held: list[Bucket] = []
    out: dict[str, Tensor] = {}
    for name, g in grads.items():
        b = pool.obtain()  # clean: near miss, the tail loop disposes of all of them, broken off or not
        if b is None:
            break
        held.append(b)
        b.flat[: g.numel()].copy_(g.flatten())
        out[name] = b.flat[: g.numel()].clone()
    complete = len(out) == len(grads)
    for b in held:
        pool.dispose(b)
    return out if complete else None


def probe_bandwidth(pool: BucketPool, group: dist.ProcessGroup, rounds: int) -> float:
    total = 0.0
    for _ in range(rounds):
        b = pool.obtain()  # leak: every round but the last overwrites the bucket still held
        if b is None:
            return 0.0
        dist.all_reduce(b.flat, group=group)
        total += b.flat.numel() * b.flat.element_size()
    if rounds:
        pool.dispose(b)
    return total


def pick_bucket(pool: BucketPool, spare: Optional[Bucket]) -> Optional[Bucket]:
    if spare is not None and spare.room():
        return spare
    return pool.obtain()  # clean: returned to the caller


def checksum(pool: BucketPool, grad: Tensor, spare: Optional[Bucket] = None) -> float:
    b = pick_bucket(pool, spare)  # clean: near miss, disposed of unless it is the caller's spare
    if b is None:
        return float("nan")
    b.flat[: grad.numel()].copy_(grad.flatten())
    value = b.flat[: grad.numel()].double().sum().item()
    if b is not spare:
        pool.dispose(b)
    return value
