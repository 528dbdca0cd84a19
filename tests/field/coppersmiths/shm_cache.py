"""Shared-memory sample cache between data workers; segments are reference counted by the parent."""
import heapq
import pickle
import threading
from multiprocessing import shared_memory
from typing import Any, Callable, Dict, Iterator, List, Optional


class Segment:
    __slots__ = ("index", "shm", "refs", "length")

    def __init__(self, index: int, shm: shared_memory.SharedMemory):
        self.index = index
        self.shm = shm
        self.refs = 0
        self.length = 0

    def __lt__(self, other: "Segment") -> bool:
        return self.index < other.index


class SegmentArena:
    def __init__(self, count: int, size: int):
        self.size = size
        self._heap: List[Segment] = []
        self._mu = threading.Lock()
        for i in range(count):
            self._heap.append(Segment(i, shared_memory.SharedMemory(create=True, size=size)))
        heapq.heapify(self._heap)

    def carve(self) -> Optional[Segment]:
        with self._mu:
            if not self._heap:
                return None
            seg = heapq.heappop(self._heap)  # clean: returned with one reference
        seg.refs = 1
        return seg

    def carve_sized(self, nbytes: int) -> Optional[Segment]:
        with self._mu:
            if not self._heap:
                return None
            seg = heapq.heappop(self._heap)  # leak: popped segment is lost when nbytes does not fit
        if nbytes > self.size:
            return None
        seg.refs = 1
        seg.length = nbytes
        return seg

    def retain(self, seg: Segment) -> Segment:
        with self._mu:
            seg.refs += 1
        return seg

    def drop(self, seg: Segment) -> None:
        with self._mu:
            seg.refs -= 1
            if seg.refs == 0:
                seg.length = 0
                heapq.heappush(self._heap, seg)


class SampleCache:
    def __init__(self, arena: SegmentArena, decode: Callable[[bytes], Any]):
        self.arena = arena
        self.decode = decode
        self._by_key: Dict[str, Segment] = {}
        self._lock = threading.Lock()
        self.pinned: List[Segment] = []

    def store(self, key: str, obj: Any) -> bool:
        blob = pickle.dumps(obj)
        seg = self.arena.carve()  # leak: an oversized blob returns False and keeps the segment
        if seg is None:
            return False
        if len(blob) > self.arena.size:
            return False
        seg.shm.buf[:len(blob)] = blob
        seg.length = len(blob)
        with self._lock:
            old = self._by_key.pop(key, None)
            self._by_key[key] = seg
        if old is not None:
            self.arena.drop(old)
        return True

    def store_if_absent(self, key: str, blob: bytes) -> bool:
        if len(blob) > self.arena.size:
            return False
        seg = self.arena.carve()  # clean: near miss, dropped when another worker was faster
        if seg is None:
            return False
        seg.shm.buf[:len(blob)] = blob
        seg.length = len(blob)
        with self._lock:
            won = self._by_key.setdefault(key, seg) is seg
        if not won:
            self.arena.drop(seg)
        return won

    def preload(self, key: str, blob: bytes) -> None:
        seg = self.arena.carve()  # leak: setdefault keeps the older entry and seg is dropped on the floor
        if seg is None:
            return
        n = min(len(blob), self.arena.size)
        seg.shm.buf[:n] = blob[:n]
        seg.length = n
        self._by_key.setdefault(key, seg)

    def peek(self, key: str) -> Optional[Segment]:
        with self._lock:
            seg = self._by_key.get(key)
            if seg is None:
                return None
            return self.arena.retain(seg)  # clean: reference is handed to the caller

    def load(self, key: str) -> Optional[Any]:
        seg = self.peek(key)  # clean: dropped in finally
        if seg is None:
            return None
        try:
            return self.decode(bytes(seg.shm.buf[:seg.length]))
        finally:
            self.arena.drop(seg)

    def size_of(self, key: str) -> int:
        seg = self.peek(key)  # leak: length is read and the reference never dropped
        return seg.length if seg is not None else 0

    def load_range(self, key: str, lo: int, hi: int) -> Optional[bytes]:
        seg = self.peek(key)  # leak: range beyond the end returns without drop
        if seg is None:
            return None
        if hi > seg.length:
            return None
        data = bytes(seg.shm.buf[lo:hi])
        self.arena.drop(seg)
        return data

    def contains_prefix(self, key: str, magic: bytes) -> bool:
        seg = self.peek(key)  # clean: both outcomes are computed before the drop
        if seg is None:
            return False
        same = bytes(seg.shm.buf[:len(magic)]) == magic
        self.arena.drop(seg)
        return same

    def pin(self, key: str) -> bool:
        seg = self.peek(key)  # clean: near miss, appended to pinned, which unpin_all() drops
        if seg is not None:
            self.pinned.append(seg)
        return seg is not None

    def unpin_all(self) -> None:
        segs, self.pinned = self.pinned, []
        for s in segs:
            self.arena.drop(s)

    def evict(self, key: str) -> None:
        with self._lock:
            seg = self._by_key.pop(key, None)
        if seg is not None:
            self.arena.drop(seg)

    def batch(self, keys: List[str]) -> Optional[List[Any]]:
        held: List[Segment] = []
        for key in keys:
            seg = self.peek(key)  # leak: one missing key returns None with held not dropped
            if seg is None:
                return None
            held.append(seg)
        out = [self.decode(bytes(s.shm.buf[:s.length])) for s in held]
        for s in held:
            self.arena.drop(s)
        return out

    def batch_partial(self, keys: List[str]) -> List[Any]:
        held: List[Segment] = []
        try:
            for key in keys:
                seg = self.peek(key)  # clean: held is dropped in finally also when a key is missing
                if seg is None:
                    return []
                held.append(seg)
            return [self.decode(bytes(s.shm.buf[:s.length])) for s in held]
        finally:
            for s in held:
                self.arena.drop(s)

    def rename(self, old: str, new: str) -> bool:
        with self._lock:
            seg = self._by_key.pop(old, None)
            if seg is None:
                return False
            prev = self._by_key.get(new)
            self._by_key[new] = seg
        if prev is not None:
            self.arena.drop(prev)
        return True
