"""Reading token shards as streams.

A shard is a file of length-prefixed records.  Open files are expensive on the
cluster file system, so they are shared through HandleCache: pin() opens or
reuses one, unpin() allows it to be evicted again.  The streams built on top are
plain generators which can be chained, mixed and resumed.
"""

import contextlib
import io
import json
import logging
import random
import struct
from collections import OrderedDict
from typing import Iterable, Iterator, NamedTuple, Optional

log = logging.getLogger(__name__)
_LEN = struct.Struct("<I")


class ShardCorrupt(Exception):
    pass


class TooManyOpen(Exception):
    pass


class Cursor(NamedTuple):
    shard: str
    offset: int
    index: int


class Handle:
    def __init__(self, path: str, file: io.BufferedReader):
        self.path = path
        self.file = file
        self.pins = 0

    def record_at(self, offset: int) -> tuple[bytes, int]:
        self.file.seek(offset)
        head = self.file.read(_LEN.size)
        if not head:
            return b"", -1
        if len(head) < _LEN.size:
            raise ShardCorrupt(f"{self.path}: short header at {offset}")
        (n,) = _LEN.unpack(head)
        body = self.file.read(n)
        if len(body) < n:
            raise ShardCorrupt(f"{self.path}: short record at {offset}")
        return body, offset + _LEN.size + n


class HandleCache:
    def __init__(self, limit: int = 64):
        self.limit = limit
        self._open: "OrderedDict[str, Handle]" = OrderedDict()

    def pin(self, path: str) -> Handle:
        h = self._open.get(path)
        if h is not None:
            self._open.move_to_end(path)
        else:
            self._evict()
            h = Handle(path, open(path, "rb"))  # clean: near miss, the file stays in the table and is closed on eviction or in close()
            self._open[path] = h
        h.pins += 1
        return h

    def unpin(self, h: Handle) -> None:
        if h.pins <= 0:
            raise RuntimeError(f"{h.path} is not pinned")
        h.pins -= 1

    def _evict(self) -> None:
        if len(self._open) < self.limit:
            return
        for path, h in self._open.items():
            if h.pins == 0:
                del self._open[path]
                h.file.close()
                return
        raise TooManyOpen(str(len(self._open)))

    def replace(self, path: str) -> Optional[Handle]:
        """Reopen a shard that was rewritten; returns it pinned."""
        try:
            f = open(path, "rb")  # leak: the new file is not closed when the old handle is still pinned
        except FileNotFoundError:
            return None
        old = self._open.get(path)
        if old is not None and old.pins:
            log.warning("%s is in use, not reopened", path)
            return None
        if old is not None:
            old.file.close()
        h = self._open[path] = Handle(path, f)
        h.pins = 1
        return h

    @contextlib.contextmanager
    def pinned(self, path: str):
        h = self.pin(path)  # clean: unpinned in finally
        try:
            yield h
        finally:
            self.unpin(h)

    def close(self) -> None:
        while self._open:
            _, h = self._open.popitem()
            h.file.close()


def read_header(cache: HandleCache, path: str) -> dict:
    """The first record of a shard is a JSON header; {} when it is damaged."""
    h = cache.pin(path)  # leak: ShardCorrupt from record_at() is handled and the pin stays
    try:
        body, _ = h.record_at(0)
        header = json.loads(body) if body else {}
    except ShardCorrupt as exc:
        log.error("no header: %s", exc)
        return {}
    cache.unpin(h)
    return header


def records(cache: HandleCache, path: str, start: int = 0) -> Iterator[tuple[bytes, Cursor]]:
    h = cache.pin(path)  # clean: near miss, the finally also runs when the generator is closed early
    index = 0
    try:
        off = start
        while True:
            body, nxt = h.record_at(off)
            if nxt < 0:
                return
            yield body, Cursor(path, nxt, index)
            index += 1
            off = nxt
    finally:
        cache.unpin(h)


def sample_first(cache: HandleCache, paths: Iterable[str], want: int) -> list[bytes]:
    """The first `want` bytes of records over some shards, for the tokenizer stats."""
    out, got = [], 0
    for path in paths:
        h = cache.pin(path)  # leak: the inner return leaves with the pin when enough was read
        off = 0
        while True:
            body, off = h.record_at(off)
            if off < 0:
                break
            out.append(body)
            got += len(body)
            if got >= want:
                return out
        cache.unpin(h)
    return out


class ShardReader:
    """Random access in one shard; owns a pin until it is closed."""

    def __init__(self, cache: HandleCache, path: str):
        self.cache = cache
        self.handle = cache.pin(path)  # clean: the reader owns it and close() unpins
        self.offsets: list[int] = []

    def index(self) -> "ShardReader":
        off = 0
        while True:
            _, nxt = self.handle.record_at(off)
            if nxt < 0:
                return self
            self.offsets.append(off)
            off = nxt

    def __getitem__(self, i: int) -> bytes:
        return self.handle.record_at(self.offsets[i])[0]

    def __len__(self) -> int:
        return len(self.offsets)

    def close(self) -> None:
        if self.handle is not None:
            self.cache.unpin(self.handle)
            self.handle = None


class Mixture:
    """Draws records from several readers by weight."""

    def __init__(self, cache: HandleCache, spec: dict[str, float], seed: int):
        self.cache = cache
        self.rng = random.Random(seed)
        self.readers: dict[str, ShardReader] = {}
        self.weights = dict(spec)

    def open(self) -> None:
        for path in self.weights:
            reader = ShardReader(self.cache, path)  # leak: a shard without records is skipped and its reader is not closed
            reader.index()
            if len(reader) == 0:
                log.info("%s is empty", path)
                continue
            self.readers[path] = reader

    def reweight(self, path: str, weight: float) -> None:
        if weight <= 0:
            reader = self.readers.pop(path, None)
            if reader is not None:
                reader.close()
            self.weights.pop(path, None)
            return
        if path not in self.readers:
            reader = ShardReader(self.cache, path)  # clean: near miss, closed when index() raises, then kept in readers
            try:
                reader.index()
            except ShardCorrupt:
                reader.close()
                raise
            self.readers[path] = reader
        self.weights[path] = weight

    def draw(self) -> Iterator[bytes]:
        names = list(self.readers)
        w = [self.weights[n] for n in names]
        while names:
            reader = self.readers[self.rng.choices(names, w)[0]]
            yield reader[self.rng.randrange(len(reader))]

    def close(self) -> None:
        for reader in self.readers.values():
            reader.close()
        self.readers.clear()


def diff_shards(cache: HandleCache, left: str, right: str) -> Optional[int]:
    """Number of the first record that differs; None if the files agree or cannot be compared."""
    a = b = None
    try:
        a = ShardReader(cache, left)  # clean: closed in finally
        a.index()
        b = ShardReader(cache, right).index()  # leak: index() raises ShardCorrupt before b is bound, the finally sees None
        for i in range(min(len(a), len(b))):
            if a[i] != b[i]:
                return i
        return None if len(a) == len(b) else min(len(a), len(b))
    except ShardCorrupt as exc:
        log.warning("not compared: %s", exc)
        return None
    finally:
        for reader in (a, b):
            if reader is not None:
                reader.close()
