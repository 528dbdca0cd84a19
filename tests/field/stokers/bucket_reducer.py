from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from typing import Dict, Iterable, List, Optional, Protocol, Tuple

import torch
import torch.distributed as dist

log = logging.getLogger("reducer")


class Hook(Protocol):
    def __call__(self, flat: torch.Tensor) -> Optional[torch.Tensor]: ...


class BucketStore:
    """Communication buffers for gradient buckets."""

    def __init__(self, count: int, numel: int, device: torch.device) -> None:
        self.numel = numel
        self._bufs = [torch.empty(numel, device=device) for _ in range(count)]
        self._idle = list(range(count))

    def obtain(self) -> Tuple[int, torch.Tensor]:
        if not self._idle:
            raise LookupError("all gradient buckets are in use")
        index = self._idle.pop()
        return index, self._bufs[index]

    def relinquish(self, index: int) -> None:
        self._idle.append(index)


class StepGate:
    """Keeps the optimizer from stepping while reductions are under way."""

    def __init__(self) -> None:
        self._cond = threading.Condition()
        self._inside = 0

    def arrive(self) -> None:
        with self._cond:
            self._inside += 1

    def depart(self) -> None:
        with self._cond:
            self._inside -= 1
            self._cond.notify_all()

    def drain(self, timeout: float) -> bool:
        with self._cond:
            return self._cond.wait_for(lambda: self._inside == 0, timeout)


@dataclass
class Reduction:
    index: int
    params: List[torch.nn.Parameter]
    work: dist.Work
    flat: torch.Tensor


@dataclass
class GradReducer:
    store: BucketStore
    gate: StepGate
    group: dist.ProcessGroup
    hook: Optional[Hook] = None
    running: List[Reduction] = field(default_factory=list)
    leftovers: Dict[int, List[torch.nn.Parameter]] = field(default_factory=dict)
    carry: Optional[int] = None
    norm_lock: threading.Lock = field(default_factory=threading.Lock)

    def _pack(self, params: List[torch.nn.Parameter], flat: torch.Tensor) -> int:
        offset = 0
        for p in params:
            if p.grad is None:
                continue
            n = p.grad.numel()
            flat[offset : offset + n].copy_(p.grad.flatten())
            offset += n
        return offset

    def _unpack(self, params: List[torch.nn.Parameter], flat: torch.Tensor) -> None:
        offset = 0
        for p in params:
            if p.grad is None:
                continue
            n = p.grad.numel()
            p.grad.copy_(flat[offset : offset + n].view_as(p.grad))
            offset += n

    def launch(self, params: List[torch.nn.Parameter]) -> bool:
        self.gate.arrive()  # leak: a bucket without gradients returns without departing
        index, flat = self.store.obtain()  # clean: near miss, relinquished without gradients, otherwise kept in running
        used = self._pack(params, flat)
        if used == 0:
            self.store.relinquish(index)
            return False
        work = dist.all_reduce(flat[:used], group=self.group, async_op=True)
        self.running.append(Reduction(index, params, work, flat))
        return True

    def try_launch(self, params: List[torch.nn.Parameter]) -> bool:
        self.gate.arrive()  # clean: near miss, departed in the handler, otherwise in finish
        try:
            index, flat = self.store.obtain()  # clean: kept in running until finish
        except LookupError:
            self.gate.depart()
            return False
        used = self._pack(params, flat)
        work = dist.all_reduce(flat[: max(used, 1)], group=self.group, async_op=True)
        self.running.append(Reduction(index, params, work, flat))
        return True

    def finish(self) -> int:
        done = 0
        while self.running:
            red = self.running.pop(0)
            red.work.wait()
            self._unpack(red.params, red.flat)
            self.store.relinquish(red.index)
            self.gate.depart()
            done += 1
        return done

    def reduce_sync(self, params: List[torch.nn.Parameter]) -> bool:
        index, flat = self.store.obtain()  # leak: a hook that vetoes the bucket returns before relinquish
        used = self._pack(params, flat)
        if self.hook is not None:
            replaced = self.hook(flat[:used])
            if replaced is None:
                log.debug("hook vetoed a bucket of %d", used)
                return False
            flat[:used].copy_(replaced)
        dist.all_reduce(flat[:used], group=self.group)
        self._unpack(params, flat)
        self.store.relinquish(index)
        return True

    def compress(self, params: List[torch.nn.Parameter], rank: int) -> Optional[torch.Tensor]:
        index, flat = self.store.obtain()  # clean: near miss, relinquished on the short return as well
        used = self._pack(params, flat)
        if used < rank * rank:
            self.store.relinquish(index)
            return None
        side = int(used**0.5)
        u, s, v = torch.svd_lowrank(flat[: side * side].view(side, side), q=rank)
        self.store.relinquish(index)
        return u @ torch.diag(s) @ v.T

    def accumulate(self, params: List[torch.nn.Parameter]) -> None:
        index, flat = self.store.obtain()  # clean: near miss, swapped with the carried bucket, which is relinquished
        used = self._pack(params, flat)
        if self.carry is not None:
            flat[:used].add_(self.store._bufs[self.carry][:used])
            self.store.relinquish(self.carry)
        self.carry = index

    def defer(self, params: List[torch.nn.Parameter]) -> None:
        index, flat = self.store.obtain()  # clean: near miss, kept as the key of leftovers, flush relinquishes it
        self._pack(params, flat)
        self.leftovers[index] = params

    def flush(self) -> None:
        for index in list(self.leftovers):
            params = self.leftovers.pop(index)
            flat = self.store._bufs[index]
            dist.all_reduce(flat, group=self.group)
            self._unpack(params, flat)
            self.store.relinquish(index)

    def norm(self, params: Iterable[torch.nn.Parameter], skip_nan: bool) -> Optional[float]:
        self.norm_lock.acquire()  # leak: a non-finite norm returns with the lock held
        total = sum(p.grad.pow(2).sum().item() for p in params if p.grad is not None)
        if skip_nan and total != total:
            return None
        self.norm_lock.release()
        return total**0.5

    def try_norm(self, params: Iterable[torch.nn.Parameter]) -> Optional[float]:
        if not self.norm_lock.acquire(blocking=False):  # clean: near miss, not held where it returns None, else released by the finally
            return None
        try:
            grads = [p.grad for p in params if p.grad is not None]
            if not grads:
                return 0.0
            return torch.stack([g.norm() for g in grads]).norm().item()
        finally:
            self.norm_lock.release()

    def broadcast(self, params: List[torch.nn.Parameter], src: int) -> int:
        sent = 0
        index: Optional[int] = None
        for p in params:
            if index is None or p.numel() > self.store.numel - sent:
                if index is not None:
                    dist.broadcast(flat[:sent], src, group=self.group)
                sent = 0
                index, flat = self.store.obtain()  # leak: the full bucket that was just sent is rebound
            flat[sent : sent + p.numel()].copy_(p.data.flatten())
            sent += p.numel()
        if index is not None:
            dist.broadcast(flat[:sent], src, group=self.group)
            self.store.relinquish(index)
        return sent

    def close(self) -> None:
        self.finish()
        self.flush()
        if self.carry is not None:
            self.store.relinquish(self.carry)
            self.carry = None
