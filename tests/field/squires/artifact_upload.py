"""Chunked upload and download of artifacts (checkpoints, eval dumps) through a fixed arena of chunks."""
from __future__ import annotations

import hashlib
import logging
import queue
import threading
import zlib
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Callable, Iterable, Iterator, Protocol

log = logging.getLogger("artifacts.transfer")


class ArenaDry(RuntimeError):
    """No chunk became idle in time."""


class DigestMismatch(RuntimeError):
    pass


class PartMissing(KeyError):
    pass


class Backend(Protocol):
    def parts(self, key: str) -> list[int]: ...
    def put_part(self, key: str, part: int, data: memoryview) -> str: ...
    def read_part(self, key: str, part: int, into: memoryview) -> int: ...
    def complete(self, key: str, etags: list[str]) -> None: ...
    def abort(self, key: str) -> None: ...


class Chunk:
    __slots__ = ("buf", "used")

    def __init__(self, size: int):
        self.buf = memoryview(bytearray(size))
        self.used = 0

    def fill(self, data: memoryview) -> int:
        n = min(len(data), len(self.buf) - self.used)
        self.buf[self.used:self.used + n] = data[:n]
        self.used += n
        return n

    @property
    def full(self) -> bool:
        return self.used == len(self.buf)

    def filled(self) -> memoryview:
        return self.buf[:self.used]


class ChunkArena:
    def __init__(self, count: int, size: int):
        self._idle: queue.Queue[Chunk] = queue.Queue()
        self.size = size
        for _ in range(count):
            self._idle.put(Chunk(size))

    def checkout(self, timeout: float = 60.0) -> Chunk:
        try:
            chunk = self._idle.get(timeout=timeout)  # clean: returned to the caller
        except queue.Empty:
            raise ArenaDry(f"no chunk after {timeout:.0f}s") from None
        chunk.used = 0
        return chunk

    def checkin(self, chunk: Chunk) -> None:
        self._idle.put(chunk)

    @contextmanager
    def scratch(self) -> Iterator[Chunk]:
        chunk = self.checkout()  # clean: checked in by the finally
        try:
            yield chunk
        finally:
            self.checkin(chunk)


class UploadSession:
    """One artifact being written. Full chunks are sent by the executor, the last one at finish()."""

    def __init__(self, arena: ChunkArena, backend: Backend, pool: ThreadPoolExecutor, key: str):
        self._arena, self._backend, self._pool = arena, backend, pool
        self._key = key
        self._current: Chunk | None = None
        self._sent: list[Future[str]] = []
        self.bytes_written = 0

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        while len(view):
            if self._current is None:
                self._current = self._arena.checkout()  # leak: abort() drops the half-filled chunk
            n = self._current.fill(view)
            view = view[n:]
            self.bytes_written += n
            if self._current.full:
                self._flush()

    def _flush(self) -> None:
        chunk, self._current = self._current, None
        if chunk is not None:
            self._sent.append(self._pool.submit(self._send, chunk, len(self._sent)))

    def _send(self, chunk: Chunk, part: int) -> str:
        try:
            return self._backend.put_part(self._key, part, chunk.filled())
        finally:
            self._arena.checkin(chunk)

    def finish(self) -> None:
        self._flush()
        self._backend.complete(self._key, [f.result() for f in self._sent])
        log.info("%s: %d bytes in %d parts", self._key, self.bytes_written, len(self._sent))

    def abort(self) -> None:
        for future in self._sent:
            future.exception()
        self._backend.abort(self._key)
        self._current = None

    def __enter__(self) -> UploadSession:
        return self

    def __exit__(self, kind, exc, tb) -> None:
        if kind is None:
            self.finish()
        else:
            self.abort()


class Prefetcher(threading.Thread):
    """Reads parts ahead of the consumer, who calls checkin for what comes out of ready."""

    def __init__(self, arena: ChunkArena, backend: Backend, key: str, depth: int = 4):
        super().__init__(name=f"prefetch-{key}", daemon=True)
        self._arena, self._backend, self._key = arena, backend, key
        self._halt = threading.Event()
        self.ready: queue.Queue[Chunk | None] = queue.Queue(depth)

    def run(self) -> None:
        for part in self._backend.parts(self._key):
            chunk = self._arena.checkout()  # leak: when halted meanwhile the loop is left with the chunk in hand
            if self._halt.is_set():
                log.debug("prefetch of %s halted at part %d", self._key, part)
                break
            chunk.used = self._backend.read_part(self._key, part, chunk.buf)
            self.ready.put(chunk)
        self.ready.put(None)

    def halt(self) -> None:
        self._halt.set()
        while (chunk := self.ready.get()) is not None:
            self._arena.checkin(chunk)


def verify(arena: ChunkArena, backend: Backend, key: str, digest: str) -> int:
    chunk = arena.checkout(timeout=10)  # leak: DigestMismatch is raised before the checkin
    sha, total = hashlib.sha256(), 0
    for part in backend.parts(key):
        n = backend.read_part(key, part, chunk.buf)
        sha.update(chunk.buf[:n])
        total += n
    if sha.hexdigest() != digest:
        raise DigestMismatch(f"{key}: {sha.hexdigest()} instead of {digest}")
    arena.checkin(chunk)
    return total


def same_bytes(arena: ChunkArena, backend: Backend, key_a: str, key_b: str) -> bool:
    left = arena.checkout()  # clean: near miss, checked in by hand when the second checkout fails and by the finally else
    try:
        right = arena.checkout(timeout=1)  # clean: checked in by the finally
    except ArenaDry:
        arena.checkin(left)
        raise
    try:
        for part in backend.parts(key_a):
            n, m = backend.read_part(key_a, part, left.buf), backend.read_part(key_b, part, right.buf)
            if left.buf[:n] != right.buf[:m]:
                return False
        return True
    except PartMissing:
        return False
    finally:
        arena.checkin(right)
        arena.checkin(left)


def repack(arena: ChunkArena, blocks: Iterable[bytes], emit: Callable[[memoryview], None]) -> int:
    """Deflate small blocks and pack them together. Blocks are never larger than a chunk."""
    emitted = 0
    out = arena.checkout()  # leak: rebound to the next chunk as soon as this one is full
    for block in blocks:
        packed = memoryview(zlib.compress(block))
        if out.used + len(packed) > arena.size:
            emit(out.filled())
            emitted += 1
            out = arena.checkout()  # leak: lost in the same way at the next turn that fills it
        out.fill(packed)
    if out.used:
        emit(out.filled())
        emitted += 1
    arena.checkin(out)
    return emitted


def checksum(arena: ChunkArena, backend: Backend, key: str) -> int:
    crc = 0
    with arena.scratch() as chunk:  # clean: context manager
        for part in backend.parts(key):
            n = backend.read_part(key, part, chunk.buf)
            crc = zlib.crc32(chunk.buf[:n], crc)
    return crc


class HotParts:
    """Least recently used parts, kept in chunks of the arena."""

    def __init__(self, arena: ChunkArena, backend: Backend, limit: int):
        self._arena, self._backend, self._limit = arena, backend, limit
        self._lru: OrderedDict[tuple[str, int], Chunk] = OrderedDict()

    def get(self, key: str, part: int) -> bytes:
        chunk = self._lru.get((key, part))
        if chunk is None:
            chunk = self._arena.checkout(timeout=5)  # clean: near miss, moves into the table and is checked in by eviction or clear()
            try:
                chunk.used = self._backend.read_part(key, part, chunk.buf)
            except PartMissing:
                self._arena.checkin(chunk)
                raise
            self._lru[key, part] = chunk
            if len(self._lru) > self._limit:
                self._arena.checkin(self._lru.popitem(last=False)[1])
        self._lru.move_to_end((key, part))
        return bytes(chunk.filled())

    def clear(self) -> None:
        while self._lru:
            self._arena.checkin(self._lru.popitem()[1])
