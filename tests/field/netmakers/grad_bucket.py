"""Gradient bucketing with asynchronous all-reduce, in the manner of DDP's reducer."""
from __future__ import annotations

import heapq
import logging
import threading
from dataclasses import dataclass, field
from typing import Callable

import torch
import torch.distributed as dist

log = logging.getLogger(__name__)


@dataclass(order=True)
class Flat:
    cap: int
    seq: int
    data: torch.Tensor = field(compare=False)


class FlatStore:
    """Best-fit store of flat buffers, a heap by capacity."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._heap: list[Flat] = []
        self._seq = 0
        self._mu = threading.Lock()

    def fetch(self, numel: int) -> Flat:
        small: list[Flat] = []
        found = None
        with self._mu:
            while self._heap:
                f = heapq.heappop(self._heap)  # clean: near miss, the ones that are too small are pushed again below
                if f.cap >= numel:
                    found = f
                    break
                small.append(f)
            for f in small:
                heapq.heappush(self._heap, f)
            if found is None:
                self._seq += 1
                found = Flat(numel, self._seq, torch.empty(numel, device=self.device))
        return found

    def fetch_exact(self, numel: int) -> Flat | None:
        """A cached flat of exactly this capacity, else None."""
        with self._mu:
            while self._heap:
                f = heapq.heappop(self._heap)  # leak: flats of another capacity are popped and not pushed again
                if f.cap == numel:
                    return f
        return None

    def stow(self, flat: Flat) -> None:
        with self._mu:
            heapq.heappush(self._heap, flat)


@dataclass
class Bucket:
    params: list[torch.nn.Parameter]
    pending: int = 0
    flat: Flat | None = None
    work: dist.Work | None = None

    @property
    def numel(self) -> int:
        return sum(p.numel() for p in self.params)


class Reducer:
    def __init__(self, store: FlatStore, buckets: list[Bucket], group=None) -> None:
        self.store = store
        self.buckets = buckets
        self.group = group
        self.require_sync = True
        self._launched: list[Bucket] = []

    def prepare(self) -> None:
        for b in self.buckets:
            b.pending = len(b.params)
            if b.flat is None:
                b.flat = self.store.fetch(b.numel)  # clean: kept in the bucket until finalize or reset

    def on_grad(self, b: Bucket, p: torch.nn.Parameter, offset: int) -> None:
        b.flat.data[offset:offset + p.numel()].copy_(p.grad.flatten())
        b.pending -= 1
        if b.pending == 0:
            b.work = dist.all_reduce(b.flat.data[: b.numel], group=self.group, async_op=True)
            self._launched.append(b)

    def finalize(self) -> None:
        while self._launched:
            b = self._launched.pop(0)
            b.work.wait()
            off = 0
            for p in b.params:
                p.grad.copy_(b.flat.data[off:off + p.numel()].view_as(p))
                off += p.numel()
            self.store.stow(b.flat)
            b.flat = b.work = None

    def reset(self) -> None:
        self._launched.clear()
        for b in self.buckets:
            if b.flat is not None:
                self.store.stow(b.flat)
                b.flat = None

    def rebuild(self, order: list[torch.nn.Parameter], cap: int) -> None:
        """New buckets in the order in which gradients arrived."""
        self.reset()
        fresh: list[Bucket] = []
        cur = Bucket([])
        for p in order:
            if cur.params and cur.numel + p.numel() > cap:
                fresh.append(cur)
                cur = Bucket([])
            cur.params.append(p)
        fresh.append(cur)
        for b in fresh:
            b.flat = self.store.fetch(b.numel)  # clean: kept in the new buckets, which replace the old
        self.buckets = fresh

    def extend(self, groups: list[list[torch.nn.Parameter]]) -> None:
        for params in groups:
            flat = self.store.fetch(sum(p.numel() for p in params))  # leak: continue on a frozen group skips the bucket that would hold it
            if not any(p.requires_grad for p in params):
                continue
            self.buckets.append(Bucket(params, len(params), flat))

    def reduce_now(self, grads: list[torch.Tensor]) -> None:
        n = sum(g.numel() for g in grads)
        flat = self.store.fetch(n)  # leak: not stowed when require_sync is off
        torch.cat([g.flatten() for g in grads], out=flat.data[:n])
        if not self.require_sync:
            return
        dist.all_reduce(flat.data[:n], group=self.group)
        off = 0
        for g in grads:
            g.copy_(flat.data[off:off + g.numel()].view_as(g))
            off += g.numel()
        self.store.stow(flat)

    def reduce_then(self, g: torch.Tensor, done: Callable[[torch.Tensor], None]) -> None:
        flat = self.store.fetch(g.numel())  # clean: near miss, stowed by the future's callback
        flat.data[: g.numel()].copy_(g.flatten())
        work = dist.all_reduce(flat.data[: g.numel()], group=self.group, async_op=True)

        def finish(_fut) -> None:
            done(flat.data[: g.numel()].clone())
            self.store.stow(flat)

        work.get_future().add_done_callback(finish)

    def reduce_if_finite(self, g: torch.Tensor, done: Callable[[torch.Tensor], None]) -> None:
        flat = self.store.fetch(g.numel())  # leak: the callback stows only a finite result
        flat.data[: g.numel()].copy_(g.flatten())
        work = dist.all_reduce(flat.data[: g.numel()], group=self.group, async_op=True)

        def finish(_fut) -> None:
            out = flat.data[: g.numel()]
            if torch.isfinite(out).all():
                done(out.clone())
                self.store.stow(flat)
            else:
                log.warning("overflow in a bucket of %d", g.numel())

        work.get_future().add_done_callback(finish)


class ErrorFeedback:
    """Compressed all-reduce. Residuals live in flats, one per bucket index."""

    def __init__(self, store: FlatStore, density: float) -> None:
        self.store = store
        self.density = density
        self.residual: dict[int, Flat] = {}

    def _residual_for(self, idx: int, numel: int) -> Flat:
        r = self.residual.get(idx)
        if r is None:
            r = self.store.fetch(numel)  # clean: stored in self.residual, emptied by reset
            r.data.zero_()
            self.residual[idx] = r
        return r

    def _dense(self, values: torch.Tensor, index: torch.Tensor, numel: int) -> Flat:
        out = self.store.fetch(numel)  # clean: returned to the caller, who stows it
        out.data.zero_()
        out.data[index] = values
        return out

    def compress(self, idx: int, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        r = self._residual_for(idx, grad.numel())  # clean: near miss, only looked at here, self.residual owns it
        n = grad.numel()
        acc = self.store.fetch(n)  # clean: stowed after the residual is brought up to date
        torch.add(grad, r.data[:n], out=acc.data[:n])
        k = max(1, int(n * self.density))
        _, index = acc.data[:n].abs().topk(k)
        values = acc.data[index].clone()
        r.data[:n].copy_(acc.data[:n])
        r.data[index] = 0
        self.store.stow(acc)
        return values, index

    def decompress(self, parts: list[tuple[torch.Tensor, torch.Tensor]], numel: int) -> torch.Tensor:
        total = torch.zeros(numel)
        for values, index in parts:
            total += self._dense(values, index, numel).data[:numel]  # leak: the dense flat is added and dropped
        return total

    def decompress_into(self, out: torch.Tensor, parts: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for values, index in parts:
            dense = self._dense(values, index, out.numel())  # clean: stowed at the end of each round
            out += dense.data[: out.numel()]
            self.store.stow(dense)

    def resize(self, idx: int, numel: int) -> None:
        old = self.residual.pop(idx, None)
        new = self.store.fetch(numel)  # clean: takes the place of old, which is stowed
        new.data.zero_()
        if old is not None:
            n = min(numel, old.cap)
            new.data[:n].copy_(old.data[:n])
            self.store.stow(old)
        self.residual[idx] = new

    def reset(self) -> None:
        for r in self.residual.values():
            self.store.stow(r)
        self.residual.clear()
