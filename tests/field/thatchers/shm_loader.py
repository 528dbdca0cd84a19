"""Shared-memory slab ring between decode workers and the trainer process."""
from __future__ import annotations

import collections
import logging
import threading
from dataclasses import dataclass
from typing import Callable, Deque, Dict, Iterable, Iterator, List, Optional, Sequence

log = logging.getLogger(__name__)

DecodeFn = Callable[[bytes, memoryview], int]


@dataclass
class Slab:
    index: int
    view: memoryview
    length: int = 0

    def tobytes(self) -> bytes:
        return bytes(self.view[: self.length])


class SlabRing:
    """Equal slabs carved out of one shared segment that the launcher mapped."""

    def __init__(self, segment: memoryview, n_slabs: int) -> None:
        step = len(segment) // n_slabs
        self._free: Deque[Slab] = collections.deque(
            Slab(i, segment[i * step : (i + 1) * step]) for i in range(n_slabs)
        )
        self._cond = threading.Condition()
        self._closed = False

    def claim(self, timeout: Optional[float] = None) -> Optional[Slab]:
        with self._cond:
            if not self._cond.wait_for(lambda: bool(self._free) or self._closed, timeout):
                return None
            if self._closed:
                return None
            slab = self._free.popleft()
            slab.length = 0
            return slab

    def surrender(self, slab: Slab) -> None:
        with self._cond:
            self._free.append(slab)
            self._cond.notify()

    def claim_many(self, count: int) -> List[Slab]:
        got: List[Slab] = []
        while len(got) < count:
            slab = self.claim(timeout=0.5)  # clean: near miss, a partial set is surrendered before the empty list is returned
            if slab is None:
                for held in got:
                    self.surrender(held)
                return []
            got.append(slab)
        return got

    def shutdown(self) -> None:
        with self._cond:
            self._closed = True
            self._cond.notify_all()


class DecodeWorker:
    def __init__(self, ring: SlabRing, decode: DecodeFn, out: Deque[Slab], retries: int = 3) -> None:
        self.ring = ring
        self.decode = decode
        self.out = out
        self.retries = retries
        self.stalls = 0
        self.skipped = 0

    def push(self, record: bytes) -> bool:
        slab = self.ring.claim(timeout=5.0)  # leak: a record that decodes to nothing returns without surrendering
        if slab is None:
            self.stalls += 1
            return False
        n = self.decode(record, slab.view)
        if n == 0:
            self.skipped += 1
            return False
        slab.length = n
        self.out.append(slab)
        return True

    def push_or_drop(self, record: bytes) -> None:
        slab = self.ring.claim(timeout=0.0)  # clean: near miss, queued for the prefetcher, or surrendered when the record is corrupt
        if slab is None:
            self.stalls += 1
            return
        try:
            slab.length = self.decode(record, slab.view)
        except ValueError as err:
            log.warning("dropping record: %s", err)
            self.ring.surrender(slab)
            return
        self.out.append(slab)

    def push_pair(self, image: bytes, mask: bytes) -> bool:
        left = self.ring.claim(timeout=1.0)  # leak: not rolled back when there is no slab for the mask
        if left is None:
            return False
        right = self.ring.claim(timeout=1.0)  # clean: queued together with the image
        if right is None:
            self.stalls += 1
            return False
        left.length = self.decode(image, left.view)
        right.length = self.decode(mask, right.view)
        self.out.extend((left, right))
        return True

    def push_with_retry(self, fetch: Callable[[], bytes], min_bytes: int) -> bool:
        for _ in range(self.retries):
            slab = self.ring.claim(timeout=1.0)  # leak: a short read goes round the loop and claims another slab
            if slab is None:
                continue
            slab.length = self.decode(fetch(), slab.view)
            if slab.length < min_bytes:
                self.skipped += 1
                continue
            self.out.append(slab)
            return True
        return False

    def push_until_valid(self, fetch: Callable[[], bytes], min_bytes: int) -> bool:
        slab = self.ring.claim(timeout=1.0)  # clean: near miss, one slab serves every attempt and the else branch surrenders it
        if slab is None:
            return False
        for _ in range(self.retries):
            slab.length = self.decode(fetch(), slab.view)
            if slab.length >= min_bytes:
                self.out.append(slab)
                break
        else:
            self.ring.surrender(slab)
            return False
        return True

    def probe_size(self, record: bytes) -> int:
        slab = self.ring.claim()  # clean: near miss, finally surrenders around the return
        if slab is None:
            return -1
        try:
            return self.decode(record, slab.view)
        finally:
            self.ring.surrender(slab)


class Prefetcher:
    def __init__(self, ring: SlabRing, ready: Deque[Slab], decode: DecodeFn) -> None:
        self.ring = ring
        self.ready = ready
        self.decode = decode
        self._ahead: Dict[int, Slab] = {}

    def next_bytes(self) -> Optional[bytes]:
        if not self.ready:
            return None
        slab = self.ready.popleft()
        data = slab.tobytes()
        self.ring.surrender(slab)
        return data

    def warm(self, items: Iterable[tuple[int, bytes]]) -> None:
        for idx, record in items:
            if idx in self._ahead:
                continue
            slab = self.ring.claim(timeout=0.0)  # leak: rewind() throws the look-ahead table away with its slabs
            if slab is None:
                break
            slab.length = self.decode(record, slab.view)
            self._ahead[idx] = slab

    def take(self, idx: int) -> Optional[bytes]:
        slab = self._ahead.pop(idx, None)
        if slab is None:
            return None
        data = slab.tobytes()
        self.ring.surrender(slab)
        return data

    def rewind(self) -> None:
        log.debug("rewind with %d samples ahead", len(self._ahead))
        self._ahead = {}

    def batches(self, records: Sequence[bytes], size: int) -> Iterator[List[bytes]]:
        for start in range(0, len(records), size):
            chunk = records[start : start + size]
            slabs = self.ring.claim_many(len(chunk))  # clean: near miss, finally surrenders the batch even when the consumer closes us
            if not slabs:
                return
            try:
                for slab, rec in zip(slabs, chunk):
                    slab.length = self.decode(rec, slab.view)
                yield [s.tobytes() for s in slabs if s.length]
            finally:
                for slab in slabs:
                    self.ring.surrender(slab)

    def close(self) -> None:
        while self.ready:
            self.ring.surrender(self.ready.popleft())
        for slab in self._ahead.values():
            self.ring.surrender(slab)
        self._ahead.clear()
