"""Gradient bucketing and asynchronous all-reduce.

Parameters are assigned to buckets in reverse order of use.  A bucket borrows a flat communication buffer from
a pool when its first gradient is ready and gives it back when the reduced gradients have been scattered.
"""
from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from typing import Callable, Deque, Dict, List, Optional

import torch
import torch.distributed as dist


class FlatBuffers:
    def __init__(self, numel: int, limit: int, dtype=torch.float32, device="cuda"):
        self.numel = numel
        self._idle: Deque[torch.Tensor] = deque()
        self._made = 0
        self._limit = limit
        self._mk = lambda: torch.empty(numel, dtype=dtype, device=device)
        self._cv = threading.Condition()

    def checkout(self) -> torch.Tensor:
        with self._cv:
            while not self._idle and self._made >= self._limit:
                self._cv.wait()
            if self._idle:
                return self._idle.popleft()
            self._made += 1
            return self._mk()

    def checkout_nowait(self) -> Optional[torch.Tensor]:
        with self._cv:
            if self._idle:
                return self._idle.popleft()
            if self._made < self._limit:
                self._made += 1
                return self._mk()
            return None

    def checkin(self, flat: torch.Tensor) -> None:
        with self._cv:
            self._idle.append(flat)
            self._cv.notify()

    def retype(self, dtype) -> int:
        """Converts idle buffers in place of a restart (fp32 to bf16 reduction)."""
        changed = 0
        for _ in range(self._limit):
            flat = self.checkout_nowait()  # leak: a buffer that has the type already is skipped and lost
            if flat is None:
                break
            if flat.dtype == dtype:
                continue
            flat.data = flat.data.to(dtype)
            changed += 1
            self.checkin(flat)
        return changed


class Bucket:
    def __init__(self, params: List[torch.nn.Parameter], pool: FlatBuffers):
        self.params = params
        self.pool = pool
        self.flat: Optional[torch.Tensor] = None
        self.ready = 0
        self.work = None
        self.error_feedback: Optional[torch.Tensor] = None

    def on_grad(self, index: int) -> bool:
        if self.flat is None:
            self.flat = self.pool.checkout()  # clean: near miss, taken only when None, finish ends it
        off = sum(p.numel() for p in self.params[:index])
        g = self.params[index].grad
        self.flat[off:off + g.numel()].copy_(g.flatten())
        self.ready += 1
        return self.ready == len(self.params)

    def start_feedback(self) -> None:
        self.error_feedback = self.pool.checkout()  # leak: no method of the bucket ever checks it in
        self.error_feedback.zero_()

    def launch(self) -> None:
        if self.error_feedback is not None:
            self.flat.add_(self.error_feedback)
        self.work = dist.all_reduce(self.flat, async_op=True)

    def finish(self, world: int) -> None:
        self.work.wait()
        off = 0
        for p in self.params:
            p.grad.copy_(self.flat[off:off + p.numel()].view_as(p.grad).div_(world))
            off += p.numel()
        self.pool.checkin(self.flat)
        self.flat = None
        self.work = None
        self.ready = 0


class Reducer:
    def __init__(self, pool: FlatBuffers, world: int):
        self.pool = pool
        self.world = world
        self._inflight: "OrderedDict[str, tuple]" = OrderedDict()
        self._side: Dict[str, torch.Tensor] = {}

    def reduce_async(self, name: str, grad: torch.Tensor) -> None:
        flat = self.pool.checkout()  # clean: near miss, kept in _inflight, poll and drain check it in
        flat[: grad.numel()].copy_(grad.flatten())
        work = dist.all_reduce(flat, async_op=True)
        self._inflight[name] = (flat, work, grad)

    def reduce_sparse(self, name: str, grad: torch.Tensor, topk: int) -> int:
        idx = grad.abs().flatten().topk(topk).indices
        flat = self.pool.checkout()  # leak: parked in _side, of which end_step only drops the references
        flat[:topk].copy_(grad.flatten()[idx])
        dist.all_reduce(flat[:topk])
        grad.flatten()[idx] = flat[:topk] / self.world
        self._side[name] = flat
        return int(idx.numel())

    def poll(self) -> int:
        done = [n for n, (_, w, _) in self._inflight.items() if w.is_completed()]
        for name in done:
            flat, _, grad = self._inflight.pop(name)
            grad.copy_(flat[: grad.numel()].view_as(grad)).div_(self.world)
            self.pool.checkin(flat)
        return len(done)

    def drain(self) -> None:
        while self._inflight:
            _, (flat, work, grad) = self._inflight.popitem(last=False)
            work.wait()
            grad.copy_(flat[: grad.numel()].view_as(grad)).div_(self.world)
            self.pool.checkin(flat)

    def end_step(self) -> None:
        self.drain()
        self._side.clear()


def global_grad_norm(pool: FlatBuffers, params, max_norm: float) -> float:
    flat = pool.checkout()  # leak: the return for a norm within bounds does not check it in
    sq = torch.stack([p.grad.float().pow(2).sum() for p in params])
    flat[0] = sq.sum()
    dist.all_reduce(flat[:1])
    norm = float(flat[0].sqrt())
    if norm <= max_norm:
        return norm
    scale = max_norm / (norm + 1e-6)
    for p in params:
        p.grad.mul_(scale)
    pool.checkin(flat)
    return norm


def checkout_patiently(pool: FlatBuffers, tries: int, pause: float) -> Optional[torch.Tensor]:
    for attempt in range(tries):
        flat = pool.checkout_nowait()  # clean: returned when there is one
        if flat is not None:
            return flat
        time.sleep(pause * (attempt + 1))
    return None


def attach_hooks(buckets: List[Bucket], world: int, after: Callable[[Bucket], None]) -> None:
    for bucket in buckets:
        for i, p in enumerate(bucket.params):
            def hook(param, i=i, bucket=bucket):
                if bucket.on_grad(i):
                    bucket.launch()
                    after(bucket)
            p.register_post_accumulate_grad_hook(hook)


def reduce_with_callback(pool: FlatBuffers, grad: torch.Tensor, world: int):
    flat = pool.checkout()  # clean: near miss, the future's callback checks it in
    flat[: grad.numel()].copy_(grad.flatten())
    fut = dist.all_reduce(flat, async_op=True).get_future()

    def settle(f):
        grad.copy_(flat[: grad.numel()].view_as(grad)).div_(world)
        pool.checkin(flat)
        return grad

    return fut.then(settle)


def reduce_with_log(pool: FlatBuffers, grad: torch.Tensor, world: int, report: Callable[[float], None]):
    flat = pool.checkout()  # leak: the callback copies out and reports, nobody checks it in
    flat[: grad.numel()].copy_(grad.flatten())
    fut = dist.all_reduce(flat, async_op=True).get_future()

    def settle(f):
        grad.copy_(flat[: grad.numel()].view_as(grad)).div_(world)
        report(float(grad.norm()))
        return grad

    return fut.then(settle)
