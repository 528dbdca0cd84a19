# Adapter slots on the GPU plus a pinned staging arena, shared by all requests of a worker.
import logging
import mmap
from pathlib import Path
from typing import Dict, Iterable, List, NamedTuple, Optional

logger = logging.getLogger(__name__)


class Span(NamedTuple):
    offset: int
    nbytes: int


class Arena:
    def __init__(self, capacity: int):
        self.buf = mmap.mmap(-1, capacity)
        self._holes: List[Span] = [Span(0, capacity)]

    def take(self, nbytes: int) -> Optional[Span]:
        for i, hole in enumerate(self._holes):
            if hole.nbytes < nbytes:
                continue
            rest = Span(hole.offset + nbytes, hole.nbytes - nbytes)
            if rest.nbytes:
                self._holes[i] = rest
            else:
                del self._holes[i]
            return Span(hole.offset, nbytes)
        return None

    def give(self, span: Span) -> None:
        self._holes.append(span)
        self._holes.sort()


class SlotTable:
    def __init__(self, n: int):
        self._names: List[Optional[str]] = [None] * n
        self._refs = [0] * n

    def acquire(self, name: str) -> Optional[int]:
        if name in self._names:
            slot = self._names.index(name)
        else:
            idle = [i for i, r in enumerate(self._refs) if r == 0]
            if not idle:
                return None
            slot = idle[0]
            self._names[slot] = name
        self._refs[slot] += 1
        return slot

    def release(self, slot: int) -> None:
        self._refs[slot] -= 1


class AdapterInfo(NamedTuple):
    rank: int
    nbytes: int
    path: str


class Request:
    def __init__(self, rid: str, adapter: Optional[str]):
        self.rid = rid
        self.adapter = adapter
        self.slot: Optional[int] = None
        self.error: Optional[str] = None


class LoraManager:
    def __init__(self, catalog: Dict[str, AdapterInfo], n_slots: int, arena: Arena, max_rank: int = 64):
        self.catalog = catalog
        self.slots = SlotTable(n_slots)
        self.arena = arena
        self.max_rank = max_rank
        self.staged: Dict[str, Span] = {}
        self.pinned: Dict[str, int] = {}
        self.waiting: List[Request] = []

    def activate(self, req: Request) -> bool:
        slot = self.slots.acquire(req.adapter)  # leak: an adapter of too high a rank is refused after its slot was taken
        if slot is None:
            return False
        if self.catalog[req.adapter].rank > self.max_rank:
            req.error = "rank too large"
            return False
        req.slot = slot
        return True

    def activate_batch(self, reqs: Iterable[Request]) -> List[Request]:
        admitted = []
        for req in reqs:
            if req.adapter is None:
                admitted.append(req)
                continue
            slot = self.slots.acquire(req.adapter)  # clean: near miss, skipped only when None, otherwise finish() releases it
            if slot is None:
                self.waiting.append(req)
                continue
            req.slot = slot
            admitted.append(req)
        return admitted

    def finish(self, req: Request) -> None:
        if req.slot is not None:
            self.slots.release(req.slot)
            req.slot = None

    def switch(self, req: Request, name: str) -> bool:
        slot = self.slots.acquire(name)  # leak: req.slot is overwritten while its old slot is still counted
        if slot is None:
            return False
        req.adapter, req.slot = name, slot
        return True

    def upgrade(self, req: Request, name: str) -> bool:
        slot = self.slots.acquire(name)  # clean: near miss, the old slot is released by finish() before the new is set
        if slot is None:
            return False
        self.finish(req)
        req.adapter, req.slot = name, slot
        return True

    def pin(self, name: str) -> bool:
        if name in self.pinned:
            return True
        slot = self.slots.acquire(name)  # clean: kept in pinned until unpin
        if slot is None:
            logger.warning("no room to pin %s", name)
            return False
        self.pinned[name] = slot
        return True

    def unpin(self, name: str) -> None:
        slot = self.pinned.pop(name, None)
        if slot is not None:
            self.slots.release(slot)

    def prefetch(self, names: Iterable[str]) -> int:
        n = 0
        for name in names:
            info = self.catalog[name]
            span = self.arena.take(info.nbytes)  # leak: a name that is staged already has its span overwritten
            if span is None:
                break
            self._read(info, span)
            self.staged[name] = span
            n += 1
        return n

    def upload(self, name: str, weights) -> bool:
        span = self.staged.pop(name, None)
        if span is None:
            info = self.catalog[name]
            span = self.arena.take(info.nbytes)  # clean: near miss, the finally below gives back whichever span is used
            if span is None:
                return False
            self._read(info, span)
        try:
            weights.copy_(memoryview(self.arena.buf)[span.offset:span.offset + span.nbytes])
        finally:
            self.arena.give(span)
        return True

    def _read(self, info: AdapterInfo, span: Span) -> None:
        raw = Path(info.path).read_bytes()
        self.arena.buf[span.offset:span.offset + span.nbytes] = raw[: span.nbytes]

    def merge(self, runner, a: str, b: str, weight: float):
        left = self.slots.acquire(a)  # leak: no room for the second returns with the first still held
        if left is None:
            return None
        right = self.slots.acquire(b)  # clean: released in the finally
        if right is None:
            return None
        try:
            return runner.blend(left, right, weight)
        finally:
            self.slots.release(left)
            self.slots.release(right)
