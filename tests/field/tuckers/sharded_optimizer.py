"""ZeRO-style sharded Adam with flat scratch buffers that are reused from step to step."""
from __future__ import annotations

import logging
import math
import threading
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

log = logging.getLogger(__name__)


class FlatBufferPool:
    """Fixed number of equally sized flat buffers; `borrow` blocks never, it returns None when dry."""

    def __init__(self, count: int, numel: int, dtype=torch.float32, device="cuda"):
        self.numel = numel
        self._free = [torch.empty(numel, dtype=dtype, device=device) for _ in range(count)]
        self._out: dict[int, torch.Tensor] = {}
        self._mu = threading.Lock()

    def borrow(self):
        with self._mu:
            if not self._free:
                return None
            buf = self._free.pop()
            self._out[buf.data_ptr()] = buf
            return buf

    def give(self, buf: torch.Tensor) -> None:
        with self._mu:
            self._out.pop(buf.data_ptr())
            self._free.append(buf)

    def outstanding(self) -> int:
        with self._mu:
            return len(self._out)

    def borrow_pair(self):
        """Two buffers or nothing."""
        first = self.borrow()  # clean: given back when the second is missing, else both handed to the caller
        if first is None:
            return None
        second = self.borrow()  # clean: handed to the caller in the tuple
        if second is None:
            self.give(first)
            return None
        return first, second

    def borrow_many(self, n: int):
        got = []
        while len(got) < n:
            buf = self.borrow()  # leak: when the pool runs dry the buffers collected so far are dropped with the list
            if buf is None:
                log.warning("wanted %d flat buffers, had %d", n, len(got))
                return None
            got.append(buf)
        return got


@dataclass
class Shard:
    name: str
    param: torch.Tensor
    offset: int
    length: int
    exp_avg: torch.Tensor = None
    exp_avg_sq: torch.Tensor = None
    steps: int = 0


@dataclass
class StepStats:
    grad_norm: float = 0.0
    clipped: bool = False
    skipped: list = field(default_factory=list)


class ShardedAdam:
    def __init__(self, shards, pool: FlatBufferPool, lr=1e-4, betas=(0.9, 0.95), eps=1e-8, group=None):
        self.shards = list(shards)
        self.pool = pool
        self.lr = lr
        self.betas = betas
        self.eps = eps
        self.group = group
        self._master: dict[str, torch.Tensor] = {}
        self._norm_buf = None

    # ---- master weights ------------------------------------------------------------------

    def attach_master(self, shard: Shard) -> bool:
        if shard.name in self._master:
            return True
        buf = self.pool.borrow()  # clean: kept in _master, given back by detach_all
        if buf is None:
            return False
        buf[: shard.length].copy_(shard.param.float().flatten())
        self._master[shard.name] = buf
        return True

    def detach_all(self) -> None:
        while self._master:
            name, buf = self._master.popitem()
            log.debug("detach %s", name)
            self.pool.give(buf)

    # ---- gradients -----------------------------------------------------------------------

    def _reduce(self, shard: Shard):
        """Reduced gradient in a pool buffer; the caller gives it back."""
        buf = self.pool.borrow()  # clean: handed on to the caller
        if buf is None:
            return None
        view = buf[: shard.length]
        view.copy_(shard.param.grad.flatten())
        dist.all_reduce(view, group=self.group)
        view.div_(dist.get_world_size(self.group))
        return buf

    def grad_snapshot(self, shard: Shard):
        reduced = self._reduce(shard)  # leak: cloned for the caller and the pool buffer is dropped
        if reduced is None:
            return None
        return reduced[: shard.length].clone()

    def global_norm(self, stats: StepStats) -> float:
        total = 0.0
        for shard in self.shards:
            if shard.param.grad is None:
                continue
            reduced = self._reduce(shard)  # leak: a non-finite shard continues without giving the buffer back
            if reduced is None:
                stats.skipped.append(shard.name)
                continue
            sq = reduced[: shard.length].pow(2).sum().item()
            if not math.isfinite(sq):
                stats.skipped.append(shard.name)
                continue
            total += sq
            self.pool.give(reduced)
        stats.grad_norm = math.sqrt(total)
        return stats.grad_norm

    def local_norm(self) -> float:
        scratch = self.pool.borrow()  # clean: near miss, every path after the None check reaches the finally
        if scratch is None:
            return float("nan")
        try:
            acc = 0.0
            for shard in self.shards:
                if shard.param.grad is None:
                    continue
                view = scratch[: shard.length]
                view.copy_(shard.param.grad.flatten())
                acc += view.pow(2).sum().item()
                if not math.isfinite(acc):
                    return float("inf")
            return math.sqrt(acc)
        finally:
            self.pool.give(scratch)

    # ---- update --------------------------------------------------------------------------

    def step(self, max_norm: float | None = None) -> StepStats:
        stats = StepStats()
        scale = 1.0
        if max_norm is not None:
            norm = self.local_norm()
            if norm > max_norm:
                scale = max_norm / (norm + 1e-6)
                stats.clipped = True
        for shard in self.shards:
            if shard.param.grad is None:
                stats.skipped.append(shard.name)
                continue
            pair = self.pool.borrow_pair()  # clean: both halves given back at the end of the iteration
            if pair is None:
                stats.skipped.append(shard.name)
                continue
            upd, denom = pair
            self._adam(shard, upd[: shard.length], denom[: shard.length], scale)
            self.pool.give(upd)
            self.pool.give(denom)
        return stats

    def step_lowmem(self, scale: float) -> int:
        """Same update with one shard in flight; the denominator is formed in place."""
        done = 0
        for shard in self.shards:
            pair = self.pool.borrow_pair()  # leak: only the first of the two buffers is given back
            if pair is None:
                break
            upd, denom = pair
            self._adam(shard, upd[: shard.length], denom[: shard.length], scale)
            self.pool.give(upd)
            done += 1
        return done

    def _adam(self, shard, upd, denom, scale):
        b1, b2 = self.betas
        shard.steps += 1
        upd.copy_(shard.param.grad.flatten()).mul_(scale)
        shard.exp_avg.mul_(b1).add_(upd, alpha=1 - b1)
        shard.exp_avg_sq.mul_(b2).addcmul_(upd, upd, value=1 - b2)
        torch.sqrt(shard.exp_avg_sq, out=denom).add_(self.eps)
        torch.div(shard.exp_avg, denom, out=upd)
        shard.param.data.flatten().add_(upd, alpha=-self.lr)

    def gather_full(self, full: torch.Tensor, prefetch: bool) -> None:
        ahead = None
        if prefetch:
            ahead = self.pool.borrow()  # clean: near miss, given back below under the same flag
        for shard in self.shards:
            dst = full[shard.offset : shard.offset + shard.length]
            if ahead is not None:
                ahead[: shard.length].copy_(shard.param.flatten())
                dst.copy_(ahead[: shard.length])
            else:
                dst.copy_(shard.param.flatten())
        if prefetch and ahead is not None:
            self.pool.give(ahead)

    def all_shards_scratch(self) -> float:
        bufs = self.pool.borrow_many(len(self.shards))  # clean: every list item is given back in the loop
        if bufs is None:
            return 0.0
        peak = 0.0
        for shard, buf in zip(self.shards, bufs):
            buf[: shard.length].copy_(shard.param.flatten())
            peak = max(peak, buf[: shard.length].abs().max().item())
        for buf in bufs:
            self.pool.give(buf)
        return peak

    def warm_norm_buffer(self) -> None:
        if self._norm_buf is not None:
            self.pool.give(self._norm_buf)
        self._norm_buf = self.pool.borrow()  # clean: near miss, the old one is given back first and close ends it

    def close(self) -> None:
        self.detach_all()
        if self._norm_buf is not None:
            self.pool.give(self._norm_buf)
            self._norm_buf = None
        if self.pool.outstanding():
            log.warning("%d flat buffers still out", self.pool.outstanding())


def smooth_updates(pool: FlatBufferPool, rows: list[torch.Tensor], decay: float) -> torch.Tensor | None:
    """Exponential average over rows, newest last."""
    acc = pool.borrow()  # leak: rebound to the next accumulator in the loop, only the last one is given back
    if acc is None:
        return None
    acc.zero_()
    for row in rows:
        nxt = pool.borrow()  # leak: becomes acc and is overwritten again by the following row
        if nxt is None:
            break
        n = row.numel()
        torch.lerp(row.flatten(), acc[:n], decay, out=nxt[:n])
        acc = nxt
    out = acc.clone()
    pool.give(acc)
    return out


def smooth_updates_swap(pool: FlatBufferPool, rows: list[torch.Tensor], decay: float) -> torch.Tensor | None:
    acc = pool.borrow()  # clean: near miss, each swap gives the old accumulator back
    if acc is None:
        return None
    acc.zero_()
    for row in rows:
        nxt = pool.borrow()  # clean: near miss, swapped into acc and given back by the next round or the end
        if nxt is None:
            break
        n = row.numel()
        torch.lerp(row.flatten(), acc[:n], decay, out=nxt[:n])
        acc, nxt = nxt, acc
        pool.give(nxt)
    out = acc.clone()
    pool.give(acc)
    return out
