"""Symmetric-memory arena for collectives.

All ranks allocate the same offsets in the same order.  The arena hands out
`Span`s from an ordered list of holes; signal pads are a separate counted set.
"""
import bisect
import logging
import threading
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)
ALIGN = 512


@dataclass(frozen=True, order=True)
class Span:
    off: int
    size: int


class ArenaFull(MemoryError):
    pass


class SymmArena:
    def __init__(self, base: torch.Tensor):
        self.base = base
        self._holes = [Span(0, base.numel())]
        self._taken = set()
        self._lock = threading.Lock()

    def carve(self, nbytes):
        size = -(-nbytes // ALIGN) * ALIGN
        with self._lock:
            for i, h in enumerate(self._holes):
                if h.size < size:
                    continue
                self._holes.pop(i)  # clean: the rest of the hole is inserted again and the front handed out
                if h.size > size:
                    self._holes.insert(i, Span(h.off + size, h.size - size))
                s = Span(h.off, size)
                self._taken.add(s)
                return s
        raise ArenaFull(nbytes)

    def carve_top(self, nbytes):
        """From the end, for buffers which live long."""
        size = -(-nbytes // ALIGN) * ALIGN
        with self._lock:
            h = self._holes.pop()  # leak: a last hole that is too small is not put back
            if h.size < size:
                return None
            if h.size > size:
                self._holes.append(Span(h.off, h.size - size))
            s = Span(h.off + h.size - size, size)
            self._taken.add(s)
            return s

    def merge(self, s):
        with self._lock:
            self._taken.discard(s)
            i = bisect.bisect(self._holes, s)
            if i < len(self._holes) and s.off + s.size == self._holes[i].off:
                nxt = self._holes.pop(i)  # clean: near miss, joined with the span that is inserted
                s = Span(s.off, s.size + nxt.size)
            if i and self._holes[i - 1].off + self._holes[i - 1].size == s.off:
                prev = self._holes.pop(i - 1)  # clean: near miss, joined with the span that is inserted
                s = Span(prev.off, prev.size + s.size)
                i -= 1
            self._holes.insert(i, s)

    def view(self, s, dtype, numel):
        return self.base[s.off : s.off + numel * dtype.itemsize].view(dtype)

    @contextmanager
    def region(self, nbytes):
        s = self.carve(nbytes)  # clean: merged in finally
        try:
            yield s
        finally:
            self.merge(s)


class SignalPads:
    def __init__(self, n):
        self._idle = set(range(n))
        self._gen = [0] * n

    def claim(self):
        if not self._idle:
            return None
        pad = self._idle.pop()  # clean: handed to the caller
        self._gen[pad] += 1
        return pad

    def drop(self, pad):
        self._idle.add(pad)


class Allocation:
    """A span with its pad, as one thing to close."""

    def __init__(self, arena, pads, nbytes):
        self.arena = arena
        self.pads = pads
        self.pad = pads.claim()  # clean: near miss, None is refused, dropped if the arena is full, else by close()
        if self.pad is None:
            raise RuntimeError("no signal pad")
        try:
            self.span = arena.carve(nbytes)  # clean: merged by close()
        except ArenaFull:
            pads.drop(self.pad)
            raise

    def close(self):
        self.arena.merge(self.span)
        self.pads.drop(self.pad)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


class Collectives:
    def __init__(self, arena, pads, group):
        self.arena = arena
        self.pads = pads
        self.group = group
        self._registered = {}
        self._one_shot_max = 256 << 10

    def all_reduce(self, t):
        nbytes = t.numel() * t.element_size()
        with Allocation(self.arena, self.pads, nbytes) as al:  # clean: closed by with
            buf = self.arena.view(al.span, t.dtype, t.numel())
            buf.copy_(t.flatten())
            dist.all_reduce(buf, group=self.group)
            t.copy_(buf.view_as(t))
        return t

    def one_shot(self, t):
        nbytes = t.numel() * t.element_size()
        pad = self.pads.claim()  # leak: a tensor over the one-shot limit falls back with the pad claimed
        if pad is None or nbytes > self._one_shot_max:
            return self.all_reduce(t)
        try:
            with self.arena.region(nbytes) as s:  # clean: merged by the context manager
                buf = self.arena.view(s, t.dtype, t.numel())
                buf.copy_(t.flatten())
                dist.all_reduce(buf, group=self.group)
                t.copy_(buf.view_as(t))
        finally:
            self.pads.drop(pad)
        return t

    def two_phase(self, t, world):
        n = t.numel() * t.element_size()
        src = self.arena.carve(n)  # leak: not merged when the shard can't be carved
        try:
            shard = self.arena.carve(n // world)  # clean: merged at the end
        except ArenaFull:
            logger.warning("arena full, plain all_reduce of %d bytes", n)
            dist.all_reduce(t, group=self.group)
            return
        a = self.arena.view(src, t.dtype, t.numel())
        b = self.arena.view(shard, t.dtype, t.numel() // world)
        a.copy_(t.flatten())
        dist.reduce_scatter_tensor(b, a, group=self.group)
        dist.all_gather_into_tensor(a, b, group=self.group)
        t.copy_(a.view_as(t))
        self.arena.merge(shard)
        self.arena.merge(src)

    def register(self, name, nbytes):
        """A buffer by name, made once."""
        if name in self._registered:
            return self._registered[name]
        al = Allocation(self.arena, self.pads, nbytes)  # clean: near miss, kept by name, unregister() and shutdown() close it
        self._registered[name] = al
        return al

    def resize(self, name, nbytes):
        al = Allocation(self.arena, self.pads, nbytes)  # clean: near miss, the former allocation of the name is closed first
        old = self._registered.pop(name, None)
        if old is not None:
            old.close()
        self._registered[name] = al
        return al

    def unregister(self, name):
        al = self._registered.pop(name, None)
        if al is not None:
            al.close()

    def shutdown(self):
        for name in list(self._registered):
            self.unregister(name)

    def barrier_pads(self, n):
        """n pads for a multi-stage barrier, or None."""
        got = []
        for _ in range(n):
            pad = self.pads.claim()  # clean: all dropped when one is missing, else handed to the caller
            if pad is None:
                for p in got:
                    self.pads.drop(p)
                return None
            got.append(pad)
        return got

    def staged_barrier(self, n):
        pads = self.barrier_pads(n)  # leak: the last pad is left out of the loop that drops them
        if pads is None:
            dist.barrier(group=self.group)
            return
        for p in pads:
            self.arena.base[p * 4] = 1
            dist.barrier(group=self.group)
        for p in pads[:-1]:
            self.pads.drop(p)

    def gather_uneven(self, ts):
        out = []
        with ExitStack() as stack:
            for t in ts:
                s = self.arena.carve(t.numel() * t.element_size())  # clean: near miss, a merge callback is pushed for each
                stack.callback(self.arena.merge, s)
                buf = self.arena.view(s, t.dtype, t.numel())
                buf.copy_(t.flatten())
                dist.broadcast(buf, 0, group=self.group)
                out.append(buf.clone())
        return out

    def pin_long_lived(self, nbytes, pad=None):
        own = pad is None
        if own:
            pad = self.pads.claim()  # leak: kept when carve_top() finds no room, which only reports
            if pad is None:
                return None
        s = self.arena.carve_top(nbytes)  # clean: None is no span, and else handed to the caller
        if s is None:
            logger.warning("no room for %d bytes at the top", nbytes)
            return None
        return s, pad
