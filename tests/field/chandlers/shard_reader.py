"""Reading of webdataset-like shards for multimodal fine-tuning, with shared mappings."""
import logging
import random
import threading
from collections import deque
from typing import Any, Callable, Deque, Dict, Iterator, List, Optional, Tuple

import numpy as np

_logger = logging.getLogger(__name__)

Sample = Dict[str, Any]


class Mapping:
    def __init__(self, path: str):
        self.path = path
        self.array = np.memmap(path, dtype=np.uint8, mode="r")
        self.users = 0


class MappingTable:
    """Maps every shard once per process; unmapped when the last user detaches."""

    def __init__(self) -> None:
        self._maps: Dict[str, Mapping] = {}
        self._lock = threading.Lock()

    def attach(self, path: str) -> Mapping:
        with self._lock:
            m = self._maps.get(path)
            if m is None:
                m = self._maps[path] = Mapping(path)
            m.users += 1
            return m

    def detach(self, m: Mapping) -> None:
        with self._lock:
            m.users -= 1
            if m.users == 0:
                self._maps.pop(m.path, None)


class DecodeBuffers:
    def __init__(self, n: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._idle: Deque[np.ndarray] = deque(np.empty(nbytes, np.uint8) for _ in range(n))

    def fetch(self) -> Optional[np.ndarray]:
        try:
            return self._idle.popleft()
        except IndexError:
            return None

    def give(self, buf: np.ndarray) -> None:
        self._idle.append(buf)

    def fetch_clean(self) -> Optional[np.ndarray]:
        while self._idle:
            buf = self._idle.popleft()  # clean: near miss, a read-only buffer is replaced in the pool by a fresh one
            if buf.flags.writeable:
                return buf
            self._idle.append(np.empty(self.nbytes, np.uint8))
        return None


class ShardReader:
    def __init__(self, table: MappingTable, buffers: DecodeBuffers, record: int = 4096) -> None:
        self.table = table
        self.buffers = buffers
        self.record = record
        self.current: Optional[Mapping] = None
        self.lookahead: Deque[Mapping] = deque()
        self.shuffle: List[Tuple[np.ndarray, int]] = []

    def open_shard(self, path: str) -> None:
        if self.current is not None:
            self.table.detach(self.current)
        self.current = self.table.attach(path)  # clean: near miss, the previous shard is detached above

    def seek_shard(self, path: str, skip_small: bool) -> bool:
        m = self.table.attach(path)  # leak: a small shard that is skipped is never detached
        if skip_small and m.array.size < self.record:
            return False
        if self.current is not None:
            self.table.detach(self.current)
        self.current = m
        return True

    def schedule(self, paths: List[str], depth: int) -> None:
        for path in paths:
            if len(self.lookahead) >= depth:
                break
            self.lookahead.append(self.table.attach(path))  # clean: advance makes it current, close detaches the rest

    def advance(self) -> bool:
        if not self.lookahead:
            return False
        if self.current is not None:
            self.table.detach(self.current)
        self.current = self.lookahead.popleft()
        return True

    def close(self) -> None:
        if self.current is not None:
            self.table.detach(self.current)
            self.current = None
        while self.lookahead:
            self.table.detach(self.lookahead.popleft())
        self.shuffle.clear()

    def sizes(self, paths: List[str]) -> Dict[str, int]:
        out: Dict[str, int] = {}
        for path in paths:
            m = self.table.attach(path)  # clean: near miss, detached before the filter continues
            size = int(m.array.size)
            self.table.detach(m)
            if size < self.record:
                continue
            out[path] = size
        return out

    def samples(self, decode: Callable[[np.ndarray], Sample]) -> Iterator[Sample]:
        assert self.current is not None
        data = self.current.array
        for off in range(0, data.size - self.record + 1, self.record):
            buf = self.buffers.fetch()  # leak: an undecodable record is skipped without giving the buffer back
            if buf is None:
                return
            buf[:self.record] = data[off:off + self.record]
            try:
                sample = decode(buf[:self.record])
            except ValueError:
                _logger.debug("bad record at %d", off)
                continue
            self.buffers.give(buf)
            yield sample

    def labels(self, decode: Callable[[np.ndarray], Sample]) -> Iterator[int]:
        assert self.current is not None
        buf = self.buffers.fetch()  # clean: near miss, one buffer for the whole pass, given back in finally
        if buf is None:
            return
        try:
            for off in range(0, self.current.array.size - self.record + 1, self.record):
                buf[:self.record] = self.current.array[off:off + self.record]
                try:
                    yield int(decode(buf[:self.record])["label"])
                except KeyError:
                    continue
        finally:
            self.buffers.give(buf)

    def fill_shuffle(self, want: int) -> int:
        while len(self.shuffle) < want:
            buf = self.buffers.fetch_clean()  # leak: close() clears the shuffle list, the buffers in it are not given back
            if buf is None:
                break
            self.shuffle.append((buf, random.randrange(1 << 30)))
        return len(self.shuffle)

    def draw(self) -> Optional[bytes]:
        if not self.shuffle:
            return None
        buf, _ = self.shuffle.pop(random.randrange(len(self.shuffle)))
        out = buf.tobytes()
        self.buffers.give(buf)
        return out

    def pair(self, left: str, right: str) -> Optional[Tuple[Mapping, Mapping]]:
        a = self.table.attach(left)  # clean: near miss, detached upon unequal sizes, else returned
        b = self.table.attach(right)  # leak: upon unequal sizes only the left is detached
        if a.array.size != b.array.size:
            self.table.detach(a)
            return None
        return a, b

    def diff(self, left: str, right: str) -> int:
        both = self.pair(left, right)  # clean: near miss, both halves are detached after the comparison
        if both is None:
            return -1
        n = int((both[0].array != both[1].array).sum())
        for m in both:
            self.table.detach(m)
        return n

    def header(self, path: str) -> bytes:
        return bytes(self.table.attach(path).array[:16])  # leak: the mapping is only a temporary, its user count stays up
