"""Captured CUDA graphs per batch size, with static buffers from a two-level segment pool."""
from __future__ import annotations

import logging
import weakref
from collections import OrderedDict
from contextlib import ExitStack
from dataclasses import dataclass

import torch

log = logging.getLogger("serve.graphs")


@dataclass(eq=False)
class Segment:
    size: int
    data: torch.Tensor


class SegmentSource:
    """Upstream: counts what is out against a device limit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0

    def take_segment(self, size: int) -> Segment:
        if self.used + size > self.limit:
            raise MemoryError(size)
        self.used += size
        return Segment(size, torch.empty(size, dtype=torch.uint8, device="cuda"))

    def free_segment(self, seg: Segment) -> None:
        self.used -= seg.size


class GraphPool:
    """Keeps a few idle segments per size in front of the source."""

    def __init__(self, src: SegmentSource, keep: int = 8) -> None:
        self.src = src
        self.keep = keep
        self._idle: dict[int, list[Segment]] = {}

    def lease(self, size: int) -> Segment:
        stack = self._idle.get(size)
        if stack:
            return stack.pop()
        return self.src.take_segment(size)  # clean: handed on, unlease keeps it or frees it upstream

    def unlease(self, seg: Segment) -> None:
        stack = self._idle.setdefault(seg.size, [])
        if len(stack) >= self.keep:
            self.src.free_segment(seg)
        else:
            stack.append(seg)

    def trim(self) -> None:
        for stack in self._idle.values():
            while stack:
                self.src.free_segment(stack.pop())


class RoundedPool:
    """Rounds sizes up to powers of two; idle segments sit in one slot per size."""

    def __init__(self, src: SegmentSource) -> None:
        self.src = src
        self._slot: dict[int, Segment] = {}

    def lease(self, size: int) -> Segment:
        size = 1 << (size - 1).bit_length()
        seg = self._slot.pop(size, None)
        if seg is None:
            seg = self.src.take_segment(size)  # leak: unlease overwrites a full slot
        return seg

    def unlease(self, seg: Segment) -> None:
        self._slot[seg.size] = seg

    def trim(self) -> None:
        for seg in self._slot.values():
            self.src.free_segment(seg)
        self._slot.clear()


class Entry:
    def __init__(self, pool: GraphPool, inp: Segment, out: Segment) -> None:
        self.pool = pool
        self.inp, self.out = inp, out
        self.graph = torch.cuda.CUDAGraph()
        self.hits = 0

    def _drop_extra(self) -> None:
        """For subclasses with more segments."""

    def destroy(self) -> None:
        self.graph.reset()
        self.pool.unlease(self.inp)
        self.pool.unlease(self.out)
        self._drop_extra()


class SamplingEntry(Entry):
    def attach(self, vocab: int) -> None:
        self.noise = self.pool.lease(4 * vocab)  # clean: near miss, destroy of the base calls the hook below

    def _drop_extra(self) -> None:
        self.pool.unlease(self.noise)


class BeamEntry(Entry):
    def attach(self, beams: int, vocab: int) -> None:
        self.scores = self.pool.lease(4 * beams * vocab)  # leak: no hook, destroy of the base ignores it
        self.scores.data.zero_()


class StaticInput:
    """Given back by the finalizer when the wrapper is collected."""

    def __init__(self, pool: GraphPool, nbytes: int) -> None:
        seg = pool.lease(nbytes)  # clean: near miss, the finalizer unleases it
        self.view = seg.data[:nbytes]
        weakref.finalize(self, pool.unlease, seg)


class GraphCache:
    def __init__(self, pool: GraphPool, limit: int) -> None:
        self.pool = pool
        self.limit = limit
        self.entries: OrderedDict[int, Entry] = OrderedDict()
        self.rare: OrderedDict[int, Entry] = OrderedDict()

    def _fits(self, batch: int, seg: Segment) -> bool:
        return seg.data.numel() >= 2 * batch

    def capture(self, batch: int, dim: int) -> Entry | None:
        with ExitStack() as undo:
            inp = self.pool.lease(2 * batch * dim)  # clean: near miss, undone unless pop_all
            undo.callback(self.pool.unlease, inp)
            out = self.pool.lease(2 * batch * dim)  # clean: near miss, undone unless pop_all
            undo.callback(self.pool.unlease, out)
            if not self._fits(batch, inp):
                return None
            undo.pop_all()
            return Entry(self.pool, inp, out)

    def capture_shared(self, batch: int, dim: int) -> Entry | None:
        """Input and output in the same segment."""
        with ExitStack() as undo:
            seg = self.pool.lease(2 * batch * dim)  # leak: pop_all comes before the check that returns None
            undo.callback(self.pool.unlease, seg)
            extra = self.pool.lease(256)  # leak: pop_all comes before the check that returns None
            undo.callback(self.pool.unlease, extra)
            undo.pop_all()
            if not self._fits(batch, seg):
                log.info("batch %d is captured elsewhere", batch)
                return None
            return Entry(self.pool, seg, extra)

    def get(self, batch: int, dim: int) -> Entry | None:
        entry = self.entries.get(batch)
        if entry is None:
            entry = self.capture(batch, dim)  # clean: kept in entries, eviction and clear destroy it
            if entry is None:
                return None
            self.entries[batch] = entry
            if len(self.entries) > self.limit:
                _, old = self.entries.popitem(last=False)
                old.destroy()
        entry.hits += 1
        self.entries.move_to_end(batch)
        return entry

    def get_rare(self, batch: int, dim: int) -> Entry | None:
        entry = self.rare.get(batch)
        if entry is None:
            entry = self.capture(batch, dim)  # leak: the oldest is popped, not destroyed
            if entry is None:
                return None
            self.rare[batch] = entry
            while len(self.rare) > self.limit // 4:
                self.rare.popitem(last=False)
        entry.hits += 1
        return entry

    def clear(self) -> None:
        for table in (self.entries, self.rare):
            for entry in table.values():
                entry.destroy()
            table.clear()
        self.pool.trim()
