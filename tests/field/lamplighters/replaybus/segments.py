"""Fixed-size trajectory segments, recycled between actors and learner.

A segment is *checked out* with one reference.  ``share`` adds a reference,
``unref`` removes one; the last ``unref`` puts the segment on the free stack.
"""
import contextlib
import logging
import threading
from typing import Dict, Iterator, List, Optional

import numpy as np

log = logging.getLogger("replaybus.segments")


class StoreFull(Exception):
    """Raised when the free stack is empty."""


class SealedSegment(Exception):
    """Raised on a write to a segment that is complete."""


class Segment:
    __slots__ = ("ident", "obs", "rew", "length", "refs", "sealed", "tag")

    def __init__(self, ident: int, horizon: int, obs_dim: int) -> None:
        self.ident = ident
        self.obs = np.zeros((horizon, obs_dim), dtype=np.float32)
        self.rew = np.zeros(horizon, dtype=np.float32)
        self.length = 0
        self.refs = 0
        self.sealed = False
        self.tag = ""

    def add(self, obs: np.ndarray, rew: float) -> bool:
        """Append a step; True when the segment is full."""
        if self.sealed:
            raise SealedSegment(self.ident)
        self.obs[self.length] = obs
        self.rew[self.length] = rew
        self.length += 1
        self.sealed = self.length == len(self.rew)
        return self.sealed


class SegmentStore:
    def __init__(self, count: int, horizon: int, obs_dim: int) -> None:
        self._guard = threading.Lock()
        self._stack: List[Segment] = [Segment(i, horizon, obs_dim) for i in range(count)]
        self._by_tag: Dict[str, Segment] = {}

    def check_out(self, tag: str = "") -> Segment:
        with self._guard:
            if not self._stack:
                raise StoreFull(tag)
            seg = self._stack.pop()  # clean: initialised and returned
        seg.refs, seg.length, seg.sealed, seg.tag = 1, 0, False, tag
        return seg

    def check_out_idle(self, margin: int) -> Optional[Segment]:
        """Like ``check_out``, but leaves ``margin`` segments for the actors."""
        with self._guard:
            if not self._stack:
                return None
            seg = self._stack.pop()  # leak: below the margin it returns None with the segment off the stack
            if len(self._stack) < margin:
                log.debug("margin of %d reached", margin)
                return None
        seg.refs, seg.length, seg.sealed = 1, 0, False
        return seg

    def check_out_tagged(self, tag: str) -> Segment:
        """The open segment for ``tag``; one more reference for each caller."""
        with self._guard:
            seg = self._by_tag.get(tag)
            if seg is not None:
                seg.refs += 1  # clean: the caller gets the reference
                return seg
            if not self._stack:
                raise StoreFull(tag)
            seg = self._stack.pop()  # clean: registered under its tag and returned
            seg.refs, seg.length, seg.sealed, seg.tag = 1, 0, False, tag
            self._by_tag[tag] = seg
            return seg

    def share(self, seg: Segment) -> Segment:
        with self._guard:
            seg.refs += 1  # clean: the caller gets the reference
        return seg

    def unref(self, seg: Segment) -> None:
        with self._guard:
            seg.refs -= 1
            if seg.refs == 0:
                self._by_tag.pop(seg.tag, None)
                self._stack.append(seg)

    @contextlib.contextmanager
    def borrowed(self, seg: Segment) -> Iterator[Segment]:
        mine = self.share(seg)  # clean: finally
        try:
            yield mine
        finally:
            self.unref(mine)
