"""Queues that move segments, one reference per queued item."""
import logging
import queue
import threading
from typing import Callable, Dict, List, Optional

from replaybus.segments import Segment, SegmentStore

log = logging.getLogger("replaybus.transport")


class BusClosed(Exception):
    pass


class Bus:
    """Takes over the reference of whatever is accepted."""

    def __init__(self, store: SegmentStore, depth: int = 128) -> None:
        self.store = store
        self._items: "queue.Queue[Segment]" = queue.Queue(depth)
        self._taps: Dict[str, Callable[[Segment], None]] = {}
        self._closed = threading.Event()

    def offer(self, seg: Segment) -> bool:
        """True: the bus owns the reference now.  False: the caller still does."""
        if self._closed.is_set():
            return False
        try:
            self._items.put_nowait(seg)
        except queue.Full:
            return False
        return True

    def push(self, seg: Segment) -> None:
        """Always takes the reference, also when it raises."""
        if self._closed.is_set():
            self.store.unref(seg)
            raise BusClosed()
        while True:
            try:
                self._items.put(seg, timeout=0.5)
                return
            except queue.Full:
                if self._closed.is_set():
                    self.store.unref(seg)
                    raise BusClosed() from None

    def pull(self, timeout: float) -> Optional[Segment]:
        """A segment with its reference, or ``None``."""
        try:
            return self._items.get(timeout=timeout)
        except queue.Empty:
            return None

    def tap(self, name: str, fn: Callable[[Segment], None]) -> None:
        self._taps[name] = fn

    def broadcast(self, seg: Segment) -> int:
        """Hand each tap a reference of its own; a tap unrefs when it is done."""
        sent = 0
        for name, fn in self._taps.items():
            mine = self.store.share(seg)  # leak: a tap that is closed raises and its reference is only logged
            try:
                fn(mine)
            except BusClosed:
                log.info("tap %s has gone", name)
                continue
            sent += 1
        return sent

    def close(self) -> List[int]:
        self._closed.set()
        idents: List[int] = []
        while (seg := self.pull(0.01)) is not None:
            idents.append(seg.ident)
            self.store.unref(seg)
        return idents


class Recorder:
    """A tap that keeps the last segment of each tag for debugging."""

    def __init__(self, store: SegmentStore) -> None:
        self.store = store
        self.closed = False
        self._last: Dict[str, Segment] = {}

    def __call__(self, seg: Segment) -> None:
        if self.closed:
            raise BusClosed()
        former = self._last.pop(seg.tag, None)
        if former is not None:
            self.store.unref(former)
        self._last[seg.tag] = seg

    def keep(self, seg: Segment) -> None:
        """Pin a segment by hand, beside what the bus sends."""
        self._last[seg.tag] = self.store.share(seg)  # leak: a second keep under this tag overwrites the first one's reference

    def close(self) -> None:
        self.closed = True
        for seg in self._last.values():
            self.store.unref(seg)
        self._last.clear()
