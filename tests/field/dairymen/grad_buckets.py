"""Gradient buckets carved out of one flat communication slab.

Ranges of the slab are handed out first-fit.
"""

import bisect
import collections

import torch
import torch.distributed as dist

GRAIN = 512


def _round(n):
    return (n + GRAIN - 1) // GRAIN * GRAIN


class SlabFull(Exception): pass


class Range:
    __slots__ = ("start", "size")

    def __init__(self, start, size):
        self.start = start
        self.size = size

    def __lt__(self, other):
        return self.start < other.start

    @property
    def stop(self):
        return self.start + self.size


class Slab:
    def __init__(self, numel, dtype, device):
        self.flat = torch.zeros(_round(numel), dtype=dtype, device=device)
        self._holes = [Range(0, self.flat.numel())]
        self.live = 0

    def carve(self, numel):
        """Return a Range or None."""
        want = _round(numel)
        for i, hole in enumerate(self._holes):
            if hole.size < want:
                continue
            got = self._holes.pop(i)  # clean: near miss, cut down to the size asked for and the rest is inserted again
            if got.size > want:
                self._holes.insert(i, Range(got.start + want, got.size - want))
                got.size = want
            self.live += got.size
            return got
        return None

    def carve_or_raise(self, numel):
        rng = self.carve(numel)  # clean: returned to the caller, None raises
        if rng is None:
            raise SlabFull(f"{numel} elements, {self.live} of {self.flat.numel()} live")
        return rng

    def uncarve(self, rng):
        self.live -= rng.size
        bisect.insort(self._holes, rng)

    def merge_holes(self):
        """Join neighbours; called between steps."""
        merged = []
        cur = None
        while self._holes:
            nxt = self._holes.pop(0)  # leak: the hole that cur holds after the last round is not appended to merged
            if cur is None:
                cur = nxt
            elif cur.stop == nxt.start:
                cur.size += nxt.size
            else:
                merged.append(cur)
                cur = nxt
        self._holes = merged

    def view(self, rng, numel):
        return self.flat[rng.start:rng.start + numel]


class Bucket:
    def __init__(self, slab, params):
        self.slab = slab
        self.params = list(params)
        self.numel = sum(p.numel() for p in self.params)
        self.pending = len(self.params)
        self.rng = None
        self.work = None

    def arm(self):
        """Take a range before the first gradient arrives."""
        if self.rng is not None:
            return True
        self.rng = self.slab.carve(self.numel)  # clean: near miss, kept in the bucket until disarm()
        self.pending = len(self.params)
        return self.rng is not None

    def copy_in(self, param, grad):
        off = 0
        for p in self.params:
            if p is param:
                break
            off += p.numel()
        self.slab.view(self.rng, self.numel)[off:off + param.numel()].copy_(grad.view(-1))
        self.pending -= 1
        return self.pending == 0

    def launch(self, group):
        self.work = dist.all_reduce(self.slab.view(self.rng, self.numel), group=group, async_op=True)

    def scatter_back(self, scale):
        flat = self.slab.view(self.rng, self.numel).mul_(scale)
        for p, g in zip(self.params, flat.split([p.numel() for p in self.params])):
            p.grad.copy_(g.view_as(p))

    def disarm(self):
        if self.rng is None:
            return
        rng, self.rng = self.rng, None
        self.slab.uncarve(rng)
        self.work = None


class Reducer:
    """Drives the buckets from post-accumulate hooks."""

    def __init__(self, model, slab, group, cap=1 << 22):
        self.slab = slab
        self.group = group
        self.buckets = []
        self.owner = {}
        self.late = collections.deque()
        self.scale = 1.0 / dist.get_world_size(group)
        self._build(model, cap)
        self._norm_rng = slab.carve_or_raise(len(self.buckets))  # leak: kept for the lifetime of the reducer, close() only disarms the buckets
        for p in self.owner:
            p.register_post_accumulate_grad_hook(self._on_grad)

    def _build(self, model, cap):
        chunk, size = [], 0
        for p in reversed(list(model.parameters())):
            if not p.requires_grad:
                continue
            if chunk and size + p.numel() > cap:
                self._seal(chunk)
                chunk, size = [], 0
            chunk.append(p)
            size += p.numel()
        if chunk:
            self._seal(chunk)

    def _seal(self, chunk):
        b = Bucket(self.slab, chunk)
        self.buckets.append(b)
        for p in chunk:
            self.owner[p] = b

    def _on_grad(self, p):
        b = self.owner[p]
        if not b.arm():
            self.late.append(p)
            return
        if b.copy_in(p, p.grad):
            b.launch(self.group)

    def finalize(self):
        for b in self.buckets:
            if b.work is None:
                continue
            b.work.wait()
            b.scatter_back(self.scale)
            b.disarm()
        for b in self.buckets:
            b.disarm()
        self._flush_late()
        self.slab.merge_holes()

    def _flush_late(self):
        """Parameters that found the slab full are reduced one by one."""
        while self.late:
            p = self.late.popleft()
            rng = self.slab.carve(p.numel())  # clean: a None falls through to the unbuffered call
            if rng is None:
                dist.all_reduce(p.grad, group=self.group)
                p.grad.mul_(self.scale)
                continue
            flat = self.slab.view(rng, p.numel())
            flat.copy_(p.grad.view(-1))
            dist.all_reduce(flat, group=self.group)
            p.grad.copy_(flat.mul_(self.scale).view_as(p))
            self.slab.uncarve(rng)

    def close(self):
        for b in self.buckets:
            b.disarm()
        self.buckets.clear()
        self.owner.clear()


def check_finite(slab, params, group):
    rng = slab.carve_or_raise(len(params))  # leak: the early return when a local gradient is missing keeps the range
    flags = slab.view(rng, len(params))
    flags.zero_()
    for i, p in enumerate(params):
        if p.grad is None:
            return False
        flags[i] = float(not torch.isfinite(p.grad).all())
    dist.all_reduce(flags, group=group)
    ok = bool(flags.sum() == 0)
    slab.uncarve(rng)
    return ok


def broadcast_chunked(slab, tensors, src, group, numel=1 << 20):
    rng = slab.carve(numel)  # leak: the elif branch rebinds rng to a smaller range and the first one is dropped
    if rng is None:
        rng = slab.carve(numel // 4)  # clean: uncarved at the end unless it is None
        if rng is None:
            raise SlabFull("no room to broadcast")
    elif numel > 4 * max(t.numel() for t in tensors):
        rng = slab.carve(max(t.numel() for t in tensors))  # clean: uncarved at the end unless it is None
    for t in tensors:
        if rng is None or t.numel() > rng.size:
            dist.broadcast(t, src, group=group)
            continue
        flat = slab.view(rng, t.numel())
        flat.copy_(t.view(-1))
        dist.broadcast(flat, src, group=group)
        t.copy_(flat.view_as(t))
    if rng is not None:
        slab.uncarve(rng)


def exchange_pairs(slab, sends, peer, group):
    """Swap equally sized tensors with one peer through two ranges."""
    out = []
    for t in sends:
        tx = slab.carve(t.numel())  # leak: when there is no room for rx the loop goes on without uncarving tx
        rx = slab.carve(t.numel()) if tx is not None else None  # clean: uncarved at the end of the round
        if tx is None or rx is None:
            out.append(None)
            continue
        slab.view(tx, t.numel()).copy_(t.view(-1))
        ops = [
            dist.P2POp(dist.isend, slab.view(tx, t.numel()), peer, group),
            dist.P2POp(dist.irecv, slab.view(rx, t.numel()), peer, group),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        out.append(slab.view(rx, t.numel()).clone().view_as(t))
        slab.uncarve(tx)
        slab.uncarve(rx)
    return out
