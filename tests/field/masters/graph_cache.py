"""Captured decode graphs; each holds a memory pool and the input slot it was captured on."""
from __future__ import annotations

import heapq
import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Callable, NamedTuple

import torch

log = logging.getLogger("graphs")


class Key(NamedTuple):
    rows: int
    ctx: int


class CaptureError(RuntimeError): ...


class MemPools:
    def __init__(self, limit: int):
        self._idle = [torch.cuda.graph_pool_handle() for _ in range(limit)]
        self._busy: dict[Any, str] = {}

    def lease(self, who) -> Any | None:
        if not self._idle:
            return None
        h = self._idle.pop(0)  # clean: returned and noted as busy
        self._busy[h] = str(who)
        return h

    def unlease(self, h) -> None:
        self._busy.pop(h, None)
        self._idle.append(h)


class Slot:
    __slots__ = ("owner", "index", "cap")

    def __init__(self, owner, index, cap):
        self.owner, self.index, self.cap = owner, index, cap

    def view(self, rows: int) -> torch.Tensor:
        return self.owner.tokens[self.index][:rows]

    def drop(self) -> None:
        owner, self.owner = self.owner, None
        if owner is not None:
            heapq.heappush(owner._free, (self.cap, self.index))


class InputSlots:
    def __init__(self, caps, device="cuda"):
        self.tokens = [torch.zeros(c, dtype=torch.int64, device=device) for c in caps]
        self._free = [(c, i) for i, c in enumerate(caps)]
        heapq.heapify(self._free)

    def claim(self, rows: int) -> Slot | None:
        small = []
        while self._free:
            cap, i = heapq.heappop(self._free)  # leak: if nothing fits, the small ones set aside are not pushed back
            if cap >= rows:
                for e in small:
                    heapq.heappush(self._free, e)
                return Slot(self, i, cap)
            small.append((cap, i))
        return None


@dataclass
class Entry:
    graph: torch.cuda.CUDAGraph
    pool: Any
    slot: Slot
    out: torch.Tensor
    uses: int = 0


class GraphCache:
    def __init__(self, pools: MemPools, slots: InputSlots, cap: int = 16):
        self.pools, self.slots, self.cap = pools, slots, cap
        self.entries: OrderedDict[Key, Entry] = OrderedDict()
        self.manual: dict[Key, Entry] = {}

    def get(self, key: Key, fn: Callable) -> Entry | None:
        if key in self.manual:
            return self.manual[key]
        if key in self.entries:
            self.entries.move_to_end(key)
            return self.entries[key]
        while len(self.entries) >= self.cap:
            self._evict()
        e = self._capture(key, fn)
        if e is not None:
            self.entries[key] = e
        return e

    def _capture(self, key: Key, fn: Callable) -> Entry | None:
        pool = self.pools.lease(key)  # leak: without an input slot we return and keep the handle
        if pool is None:
            return None
        slot = self.slots.claim(key.rows)  # leak: invalidate() takes the entry out and forgets its slot
        if slot is None:
            return None
        g = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(g, pool=pool):
                out = fn(slot.view(key.rows))
        except RuntimeError as e:
            log.warning("capture of %s: %s", key, e)
            slot.drop()
            self.pools.unlease(pool)
            return None
        return Entry(g, pool, slot, out)

    def _release(self, e: Entry) -> None:
        e.graph.reset()
        e.slot.drop()
        self.pools.unlease(e.pool)

    def _evict(self) -> None:
        _, e = self.entries.popitem(last=False)
        self._release(e)

    def adopt(self, key: Key, e: Entry) -> None:
        old = self.manual.pop(key, None)
        if old is not None:
            self._release(old)
        self.manual[key] = e

    def invalidate(self, pred: Callable[[Key], bool]) -> int:
        """Weights were swapped below some graphs."""
        stale = [k for k in self.entries if pred(k)]
        for k in stale:
            e = self.entries.pop(k)
            e.graph.reset()
            self.pools.unlease(e.pool)
        return len(stale)

    def close(self) -> None:
        while self.entries:
            self._evict()
        while self.manual:
            self._release(self.manual.popitem()[1])


class Recorder:
    def __init__(self, cache: GraphCache, key: Key):
        self.cache, self.key = cache, key
        self.pool = self.slot = self.graph = self.out = None

    def begin(self) -> bool:
        if self.pool is not None:
            raise CaptureError("already recording")
        pool = self.cache.pools.lease(self.key)  # clean: near miss, unleased if there is no slot, else moved to self
        if pool is None:
            return False
        slot = self.cache.slots.claim(self.key.rows)  # clean: moved to self; finish() or abort() take it from there
        if slot is None:
            self.cache.pools.unlease(pool)
            return False
        self.pool, self.slot = pool, slot
        self.graph = torch.cuda.CUDAGraph()
        self.graph.capture_begin(pool=pool)
        return True

    def step(self, fn) -> None:
        self.out = fn(self.slot.view(self.key.rows) if self.out is None else self.out)
        if self.out is None:
            raise CaptureError(f"{fn} returned nothing")

    def abort(self):
        self.graph.capture_end()
        self.slot.drop()
        self.cache.pools.unlease(self.pool)
        self.pool = self.slot = self.graph = None

    def finish(self) -> Entry:
        self.graph.capture_end()
        e = Entry(self.graph, self.pool, self.slot, self.out)
        self.pool = self.slot = self.graph = None
        return e


def record(cache: GraphCache, key: Key, fns) -> bool:
    rec = Recorder(cache, key)
    if not rec.begin():  # clean: near miss, aborted on CaptureError, else finished and adopted
        return False
    try:
        for fn in fns:
            rec.step(fn)
    except CaptureError as e:
        log.warning("recording %s: %s", key, e)
        rec.abort()
        return False
    cache.adopt(key, rec.finish())
    return True


def warm_up(cache: GraphCache, keys, fn, free_bytes) -> int:
    """Touch the allocator with the biggest buckets first, so that captures find memory."""
    pool = cache.pools.lease("warm-up")  # leak: short of memory we return out of the loop with the handle
    if pool is None:
        return 0
    done = 0
    for k in sorted(keys, reverse=True):
        if free_bytes() < (1 << 30):
            log.warning("warm-up stops at %s", k)
            return done
        with torch.cuda.use_mem_pool(pool):
            fn(torch.zeros(k.rows, dtype=torch.int64, device="cuda"))
        done += 1
    cache.pools.unlease(pool)
    return done


class Runner:
    def __init__(self, cache: GraphCache, model, buckets):
        self.cache, self.model, self.buckets = cache, model, sorted(buckets)

    def bucket(self, rows, ctx) -> Key | None:
        return next((k for k in self.buckets if k.rows >= rows and k.ctx >= ctx), None)

    def run(self, toks: torch.Tensor, ctx: int) -> torch.Tensor:
        key = self.bucket(toks.numel(), ctx)
        e = self.cache.get(key, self.model) if key else None
        if e is None:
            return self._eager(toks)
        e.slot.view(toks.numel()).copy_(toks)
        e.graph.replay()
        e.uses += 1
        return e.out[:toks.numel()]

    def _eager(self, toks):
        slot = self.cache.slots.claim(toks.numel())  # clean: dropped in the finally unless it is None
        try:
            if slot is None:
                return self.model(toks)
            x = slot.view(toks.numel())
            x.copy_(toks)
            return self.model(x)
        finally:
            if slot is not None:
                slot.drop()

    def compare(self, toks: torch.Tensor, tol=1e-2) -> bool:
        """Graph against eager on the same rows, for the nightly check."""
        slot = self.cache.slots.claim(toks.numel())  # leak: dropped only if the two agree
        if slot is None:
            return True
        slot.view(toks.numel()).copy_(toks)
        a, b = self.run(toks, 1), self.model(slot.view(toks.numel()))
        if (a - b).abs().max().item() > tol:
            log.error("graph and eager differ for %d rows", toks.numel())
            return False
        slot.drop()
        return True
