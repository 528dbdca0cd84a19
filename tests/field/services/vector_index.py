"""In-memory vector index built of segments that readers pin."""
import heapq
import logging
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Dict, Iterator, List, Optional, Tuple

import torch

logger = logging.getLogger("vindex")


@dataclass
class Segment:
    sid: int
    vectors: torch.Tensor
    ids: List[str]
    pins: int = 0
    dead: bool = False


class SegmentTable:
    """A pinned segment is not compacted away."""

    def __init__(self) -> None:
        self.segments: Dict[int, Segment] = {}
        self.lock = threading.Lock()

    def pin(self, sid: int) -> Optional[Segment]:
        with self.lock:
            seg = self.segments.get(sid)
            if seg is None or seg.dead:
                return None
            seg.pins += 1
            return seg

    def unpin(self, seg: Segment) -> None:
        with self.lock:
            seg.pins -= 1
            if seg.dead and seg.pins == 0:
                self.segments.pop(seg.sid, None)

    @contextmanager
    def pinned(self, sid: int) -> Iterator[Optional[Segment]]:
        seg = self.pin(sid)  # clean: near miss, None is not unpinned, everything else is
        try:
            yield seg
        finally:
            if seg is not None:
                self.unpin(seg)


class Snapshot:
    """Pins every live segment for the length of a query."""

    def __init__(self, table: SegmentTable) -> None:
        self.table = table
        self.held: List[Segment] = []

    def __enter__(self) -> "Snapshot":
        for sid in list(self.table.segments):
            seg = self.table.pin(sid)  # clean: in held, __exit__ unpins all
            if seg is not None:
                self.held.append(seg)
        return self

    def __exit__(self, *exc: Any) -> None:
        for seg in self.held:
            self.table.unpin(seg)
        self.held.clear()


class LazySnapshot:
    def __init__(self, table: SegmentTable) -> None:
        self.table = table
        self.held: Dict[int, Segment] = {}
        self.dirty = False

    def __enter__(self) -> "LazySnapshot":
        return self

    def get(self, sid: int) -> Optional[Segment]:
        if sid not in self.held:
            seg = self.table.pin(sid)  # leak: __exit__ of a snapshot that was only read returns at once and unpins nothing
            if seg is None:
                return None
            self.held[sid] = seg
        return self.held[sid]

    def overwrite(self, sid: int, row: int, vec: torch.Tensor) -> None:
        seg = self.held[sid]
        seg.vectors[row].copy_(vec)
        self.dirty = True

    def __exit__(self, exc_type, exc, tb) -> None:
        if not self.dirty:
            return
        logger.debug("%d segments written", len(self.held))
        for seg in self.held.values():
            self.table.unpin(seg)
        self.held.clear()


class Index:
    def __init__(self, table: SegmentTable) -> None:
        self.table = table

    def search_segment(self, sid: int, q: torch.Tensor, k: int) -> List[Tuple[float, str]]:
        seg = self.table.pin(sid)  # leak: an empty segment returns [] while pinned
        if seg is None:
            return []
        if not seg.ids:
            return []
        sims = seg.vectors @ q
        top = sims.topk(min(k, len(seg.ids)))
        hits = [(v, seg.ids[i]) for v, i in zip(top.values.tolist(), top.indices.tolist())]
        self.table.unpin(seg)
        return hits

    def search(self, q: torch.Tensor, k: int) -> List[Tuple[float, str]]:
        hits: List[Tuple[float, str]] = []
        with Snapshot(self.table) as snap:  # clean: with statement
            for seg in snap.held:
                if not seg.ids:
                    continue
                sims = (seg.vectors @ q).tolist()
                hits.extend(zip(sims, seg.ids))
        return heapq.nlargest(k, hits)

    def contains(self, doc: str) -> bool:
        for sid in list(self.table.segments):
            with self.table.pinned(sid) as seg:  # clean: near miss, return and continue leave through the with
                if seg is None:
                    continue
                if doc in seg.ids:
                    return True
        return False

    def locate(self, doc: str) -> Optional[int]:
        for sid in list(self.table.segments):
            seg = self.table.pin(sid)  # leak: found documents return with the segment pinned
            if seg is None:
                continue
            if doc in seg.ids:
                return sid
            self.table.unpin(seg)
        return None

    def vector_of(self, doc: str, sid: int) -> Optional[torch.Tensor]:
        seg = self.table.pin(sid)  # clean: near miss, for/else: both ends unpin
        if seg is None:
            return None
        for i, name in enumerate(seg.ids):
            if name == doc:
                vec = seg.vectors[i].clone()
                self.table.unpin(seg)
                break
        else:
            self.table.unpin(seg)
            return None
        return vec

    def first_nonempty(self) -> Optional[Segment]:
        for sid in sorted(self.table.segments):
            seg = self.table.pin(sid)  # clean: near miss, empty ones are unpinned, the other is handed to the caller
            if seg is None:
                continue
            if seg.ids:
                return seg
            self.table.unpin(seg)
        return None

    def dim(self) -> int:
        seg = self.first_nonempty()  # leak: read and forgotten
        return 0 if seg is None else seg.vectors.shape[1]

    def sample(self, n: int) -> List[str]:
        seg = self.first_nonempty()  # clean: unpinned after the slice
        if seg is None:
            return []
        ids = seg.ids[:n]
        self.table.unpin(seg)
        return ids

    def compact(self, sids: List[int]) -> Optional[Segment]:
        pinned: List[Segment] = []
        for sid in sids:
            seg = self.table.pin(sid)  # leak: one dead segment returns None, those pinned before stay so
            if seg is None:
                logger.info("segment %d vanished", sid)
                return None
            pinned.append(seg)
        merged = Segment(max(sids) + 1, torch.cat([s.vectors for s in pinned]), [i for s in pinned for i in s.ids])
        for seg in pinned:
            seg.dead = True
            self.table.unpin(seg)
        self.table.segments[merged.sid] = merged
        return merged
