"""Device frames with pin counts; the frame table and the store in front of it."""
from __future__ import annotations

import logging
from typing import Dict, Iterable, List, Optional, Protocol, Tuple

log = logging.getLogger(__name__)
ExpertId = Tuple[int, int]


class FrameSource(Protocol):
    def grab(self) -> Optional[int]: ...

    def drop(self, frame: int) -> None: ...


class FrameTable:
    """Frames that hold one expert each."""

    def __init__(self, frames: int) -> None:
        self._idle = list(range(frames))

    def grab(self) -> Optional[int]:
        return self._idle.pop() if self._idle else None

    def drop(self, frame: int) -> None:
        self._idle.append(frame)


class TwoTierFrames:
    """Frames of the fast device, then of the slow one; slow frames are numbered from 10000."""

    def __init__(self, fast: FrameTable, slow: FrameTable) -> None:
        self.fast = fast
        self.slow = slow

    def grab(self) -> Optional[int]:
        frame = self.fast.grab()  # clean: handed to the caller
        if frame is not None:
            return frame
        other = self.slow.grab()  # clean: near miss, handed to the caller with the offset
        return None if other is None else other + 10_000

    def drop(self, frame: int) -> None:
        if frame >= 10_000:
            self.slow.drop(frame - 10_000)
        else:
            self.fast.drop(frame)


class MirroredFrames:
    """A frame and its twin, for weights that exist in two layouts."""

    def __init__(self, rows: FrameTable, cols: FrameTable) -> None:
        self.rows = rows
        self.cols = cols
        self._twin: Dict[int, int] = {}

    def grab(self) -> Optional[int]:
        row = self.rows.grab()  # clean: handed to the caller, or dropped without a twin
        if row is None:
            return None
        col = self.cols.grab()  # leak: drop forgets the twin in _twin
        if col is None:
            self.rows.drop(row)
            return None
        self._twin[row] = col
        return row

    def drop(self, frame: int) -> None:
        self._twin.pop(frame, None)
        self.rows.drop(frame)


class Resident:
    __slots__ = ("expert", "frame", "pins", "hits")

    def __init__(self, expert: ExpertId, frame: int) -> None:
        self.expert = expert
        self.frame = frame
        self.pins = 0
        self.hits = 0


class ExpertStore:
    def __init__(self, frames: FrameSource) -> None:
        self.frames = frames
        self._resident: Dict[ExpertId, Resident] = {}

    def has(self, expert: ExpertId) -> bool:
        return expert in self._resident

    def _evict_one(self) -> bool:
        idle = [r for r in self._resident.values() if r.pins == 0]
        if not idle:
            return False
        victim = min(idle, key=lambda r: r.hits)
        del self._resident[victim.expert]
        self.frames.drop(victim.frame)
        return True

    def fetch_pinned(self, expert: ExpertId) -> Optional[Resident]:
        """The resident expert, pinned; unpin() ends it."""
        res = self._resident.get(expert)
        if res is None:
            frame = self.frames.grab()  # clean: in the resident, which _evict_one drops
            if frame is None and self._evict_one():
                frame = self.frames.grab()  # clean: near miss, rebinds None only; kept in the resident
            if frame is None:
                return None
            res = Resident(expert, frame)
            self._resident[expert] = res
        res.pins += 1
        res.hits += 1
        return res

    def unpin(self, res: Resident) -> None:
        res.pins -= 1

    def invalidate(self, layer: int) -> int:
        gone = [r for e, r in self._resident.items() if e[0] == layer and r.pins == 0]
        for res in gone:
            del self._resident[res.expert]
            self.frames.drop(res.frame)
        return len(gone)

    def load_group(self, experts: Iterable[ExpertId]) -> List[Resident]:
        """All of the group pinned, or as many as there is room for."""
        out: List[Resident] = []
        for expert in experts:
            res = self.fetch_pinned(expert)  # clean: in the returned list
            if res is None:
                log.debug("no room for expert %s", expert)
                break
            out.append(res)
        return out

    def unload_group(self, group: List[Resident]) -> None:
        for res in group:
            self.unpin(res)
