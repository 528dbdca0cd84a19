"""Frames of a paged store, lent by reference count to iterators and tables."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Dict, Iterator, List, Optional, Tuple


@dataclass
class Frame:
    key: str
    data: bytes = b""
    refs: int = 0


class FrameStore:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.frames: Dict[str, Frame] = {}

    def load(self, key: str, data: bytes) -> bool:
        if len(self.frames) >= self.capacity and not self._evict():
            return False
        self.frames.setdefault(key, Frame(key, data))
        return True

    def _evict(self) -> bool:
        for key, frame in self.frames.items():
            if frame.refs == 0:
                del self.frames[key]
                return True
        return False

    def get_ref(self, key: str) -> Optional[Frame]:
        frame = self.frames.get(key)
        if frame is not None:
            frame.refs += 1
        return frame

    def drop_ref(self, frame: Frame) -> None:
        frame.refs -= 1


class Scanner:
    def __init__(self, store: FrameStore) -> None:
        self.store = store

    def guarded(self, keys: List[str]) -> Iterator[Frame]:
        """The frame is valid until the next one is asked for."""
        for key in keys:
            frame = self.store.get_ref(key)  # clean: near miss, finally around the yield drops it even if the consumer breaks off
            if frame is None:
                continue
            try:
                yield frame
            finally:
                self.store.drop_ref(frame)

    def streamed(self, keys: List[str]) -> Iterator[Frame]:
        for key in keys:
            frame = self.store.get_ref(key)  # leak: find_first breaks off at the yield, the drop behind it is not reached
            if frame is None:
                continue
            yield frame
            self.store.drop_ref(frame)

    def find_first(self, keys: List[str], needle: bytes) -> Optional[str]:
        hit = None
        for frame in self.streamed(keys):
            if needle in frame.data:
                hit = frame.key
                break
        return hit

    def handed(self, keys: List[str]) -> Iterator[Frame]:
        """The consumer drops each frame it gets."""
        for key in keys:
            frame = self.store.get_ref(key)  # clean: handed to the consumer by yield
            if frame is not None:
                yield frame

    def total(self, keys: List[str]) -> int:
        size = 0
        for frame in self.handed(keys):  # clean: each frame is dropped in the body
            size += len(frame.data)
            self.store.drop_ref(frame)
        return size

    def histogram(self, keys: List[str]) -> Dict[int, int]:
        out: Dict[int, int] = {}
        for frame in self.handed(keys):  # leak: continue for empty frames skips the drop
            if not frame.data:
                continue
            out[len(frame.data)] = out.get(len(frame.data), 0) + 1
            self.store.drop_ref(frame)
        return out

    def compare(self, a: str, b: str) -> int:
        left = self.store.get_ref(a)  # clean: near miss, dropped on the one-sided return and at the end
        if left is None:
            return -1
        right = self.store.get_ref(b)  # clean: None-checked, dropped at the end
        if right is None:
            self.store.drop_ref(left)
            return 1
        same = left.data == right.data
        self.store.drop_ref(right)
        self.store.drop_ref(left)
        return 0 if same else 2

    def longest(self, keys: List[str]) -> Optional[bytes]:
        best: Optional[Frame] = None
        for key in keys:
            frame = self.store.get_ref(key)  # leak: a better frame replaces best without a drop of the one before
            if frame is None:
                continue
            if best is None or len(frame.data) > len(best.data):
                best = frame
            else:
                self.store.drop_ref(frame)
        if best is None:
            return None
        data = best.data
        self.store.drop_ref(best)
        return data


class PageTable:
    def __init__(self, store: FrameStore) -> None:
        self.store = store
        self.entries: Dict[int, Frame] = {}
        self.watched: List[Tuple[Frame, Callable[[str], None]]] = []

    def map(self, page: int, key: str) -> bool:
        frame = self.store.get_ref(key)  # clean: near miss, the entry it displaces is dropped first
        if frame is None:
            return False
        old = self.entries.pop(page, None)
        if old is not None:
            self.store.drop_ref(old)
        self.entries[page] = frame
        return True

    def watch(self, key: str, fn: Callable[[str], None]) -> None:
        frame = self.store.get_ref(key)  # leak: clear and unmap drop the entries, nothing takes frames out of watched
        if frame is not None:
            self.watched.append((frame, fn))

    def notify(self) -> None:
        for frame, fn in self.watched:
            fn(frame.key)

    def unmap(self, page: int) -> None:
        frame = self.entries.pop(page, None)
        if frame is not None:
            self.store.drop_ref(frame)

    def clear(self) -> None:
        for page in list(self.entries):
            self.unmap(page)
