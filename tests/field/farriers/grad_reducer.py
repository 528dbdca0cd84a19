"""Bucketed gradient reduction overlapped with backward. Wire buffers come from a small pool per bucket size."""
import logging
import time
from collections import OrderedDict
from typing import Callable, Dict, List, Optional, Tuple

import torch
import torch.distributed as dist

LOG = logging.getLogger("reducer")


class WirePool:
    def __init__(self, bucket_numel: int, depth: int, dtype=torch.bfloat16, device="cuda"):
        self.bucket_numel = bucket_numel
        self._stack = [torch.empty(bucket_numel, dtype=dtype, device=device) for _ in range(depth)]

    def draw(self) -> Optional[torch.Tensor]:
        return self._stack.pop() if self._stack else None

    def refund(self, wire: torch.Tensor) -> None:
        self._stack.append(wire)


class OrderTokens:
    """Launch order must agree on all ranks; a token is held from the launch until the wait."""

    def __init__(self, window: int):
        self.window = window
        self._next = 0
        self._open: Dict[int, bool] = {}

    def open(self) -> Optional[int]:
        if len(self._open) >= self.window:
            return None
        tok = self._next
        self._next += 1
        self._open[tok] = True
        return tok

    def retire(self, tok: int) -> None:
        self._open.pop(tok)


class Bucket:
    def __init__(self, bid: int, params: List[torch.nn.Parameter]):
        self.bid = bid
        self.params = params
        self.pending = len(params)
        self.wire: Optional[torch.Tensor] = None
        self.work = None
        self.token: Optional[int] = None


class Reducer:
    def __init__(self, buckets: List[Bucket], pool: WirePool, tokens: OrderTokens, group=None, predivide: float = 1.0):
        self.buckets = buckets
        self.pool = pool
        self.tokens = tokens
        self.group = group
        self.predivide = predivide
        self._inflight: "OrderedDict[int, Bucket]" = OrderedDict()
        self._sparse: List[Tuple[torch.Tensor, object]] = []
        self.no_sync = False

    def _pack(self, b: Bucket, wire: torch.Tensor) -> int:
        off = 0
        for p in b.params:
            if p.grad is None:
                continue
            n = p.grad.numel()
            wire[off : off + n].copy_(p.grad.reshape(-1))
            off += n
        return off

    def _unpack(self, b: Bucket, wire: torch.Tensor) -> None:
        off = 0
        for p in b.params:
            if p.grad is None:
                continue
            n = p.grad.numel()
            p.grad.copy_(wire[off : off + n].view_as(p.grad))
            off += n

    def launch(self, b: Bucket) -> bool:
        tok = self.tokens.open()  # clean: near miss, retired when no wire is left, otherwise by finish with the bucket
        if tok is None:
            return False
        wire = self.pool.draw()  # leak: a bucket without any gradient retires its token and returns with the wire drawn
        if wire is None:
            self.tokens.retire(tok)
            return False
        n = self._pack(b, wire)
        if n == 0:
            self.tokens.retire(tok)
            return True
        wire[:n].div_(self.predivide)
        b.wire, b.token = wire, tok
        b.work = dist.all_reduce(wire[:n], group=self.group, async_op=True)
        self._inflight[b.bid] = b
        return True

    def launch_tail(self, b: Bucket) -> bool:
        tok = self.tokens.open()  # leak: without a wire the tail is left for later and the token stays open
        if tok is None:
            return False
        wire = self.pool.draw()  # clean: near miss, the empty tail refunds it before returning
        if wire is None:
            return False
        n = self._pack(b, wire)
        if n == 0:
            self.pool.refund(wire)
            self.tokens.retire(tok)
            return True
        b.wire, b.token = wire, tok
        b.work = dist.all_reduce(wire[:n], group=self.group, async_op=True)
        self._inflight[b.bid] = b
        return True

    def launch_sparse(self, g: torch.Tensor) -> bool:
        wire = self.pool.draw()  # clean: near miss, too large a gradient refunds it, otherwise finish goes over the list
        if wire is None:
            return False
        vals = g.coalesce().values().reshape(-1)
        if vals.numel() > wire.numel():
            self.pool.refund(wire)
            return False
        wire[: vals.numel()].copy_(vals)
        self._sparse.append((wire, dist.all_reduce(wire, group=self.group, async_op=True)))
        return True

    def hook(self, b: Bucket) -> Callable[[torch.nn.Parameter], None]:
        def _fire(_p: torch.nn.Parameter) -> None:
            b.pending -= 1
            if b.pending or self.no_sync:
                return
            if not self.launch(b):
                self._finish_one()
                self.launch(b)

        return _fire

    def _finish_one(self) -> None:
        if not self._inflight:
            return
        _, b = self._inflight.popitem(last=False)
        b.work.wait()
        self._unpack(b, b.wire)
        self.pool.refund(b.wire)
        self.tokens.retire(b.token)
        b.wire = b.work = b.token = None

    def finish(self) -> None:
        for b in self.buckets:
            if 0 < b.pending < len(b.params) and b.work is None:
                self.launch_tail(b)
        while self._inflight:
            self._finish_one()
        for wire, work in self._sparse:
            work.wait()
            self.pool.refund(wire)
        self._sparse.clear()
        for b in self.buckets:
            b.pending = len(b.params)

    def compress_topk(self, b: Bucket, k: int, emit: Callable[[torch.Tensor, torch.Tensor], bool]) -> int:
        sent = 0
        for lo in range(0, len(b.params), 8):
            vals = self.pool.draw()  # clean: near miss, refunded when its partner is missing and at the end of the turn
            if vals is None:
                break
            idx = self.pool.draw()  # leak: the handler for a failed emit refunds the values but not the index wire
            if idx is None:
                self.pool.refund(vals)
                break
            n = self._pack(Bucket(-1, b.params[lo : lo + 8]), vals)
            top = vals[:n].abs().topk(min(k, n)).indices
            idx[: top.numel()].copy_(top)
            try:
                emit(vals[top], idx[: top.numel()])
            except RuntimeError as e:
                LOG.warning("top-k emit of bucket %d: %s", b.bid, e)
                self.pool.refund(vals)
                continue
            sent += top.numel()
            self.pool.refund(vals)
            self.pool.refund(idx)
        return sent


def calibrate(pool: WirePool, group, reps: int) -> float:
    wires = []
    for _ in range(reps):
        w = pool.draw()  # leak: the first wire serves the warm-up and only the timed ones are refunded
        if w is None:
            break
        wires.append(w)
    warm, timed = wires[:1], wires[1:]
    for w in warm:
        dist.all_reduce(w, group=group)
    t0 = time.perf_counter()
    works = [dist.all_reduce(w, group=group, async_op=True) for w in timed]
    for work in works:
        work.wait()
    dt = time.perf_counter() - t0
    for w in timed:
        pool.refund(w)
    return dt / max(len(timed), 1)
