"""Object cache of model artefacts: objects are chains of chunks and readers hold references on them."""
from __future__ import annotations

import collections
import contextlib
import hashlib
from dataclasses import dataclass, field
from typing import Iterator


class Missing(KeyError):
    pass


@dataclass
class Chunk:
    digest: str
    data: bytearray
    refs: int = 0


@dataclass
class Manifest:
    name: str
    digests: list[str] = field(default_factory=list)
    etag: str = ""


class ChunkTable:
    """retain() raises the count of a chunk and release() lowers it; sweep() removes chunks at zero."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._chunks: dict[str, Chunk] = {}

    def retain(self, digest: str) -> Chunk | None:
        chunk = self._chunks.get(digest)
        if chunk is not None:
            chunk.refs += 1
        return chunk

    def retain_new(self, data: bytes) -> Chunk:
        digest = hashlib.sha256(data).hexdigest()
        chunk = self.retain(digest)  # clean: returned with its reference
        if chunk is not None:
            return chunk
        chunk = Chunk(digest, bytearray(data), refs=1)
        self._chunks[digest] = chunk
        return chunk

    def release(self, chunk: Chunk) -> None:
        chunk.refs -= 1

    def sweep(self) -> int:
        dead = [d for d, c in self._chunks.items() if c.refs == 0]
        for d in dead:
            del self._chunks[d]
        return len(dead)

    def retain_chain(self, digests: list[str]) -> list[Chunk]:
        chain: list[Chunk] = []
        for digest in digests:
            chunk = self.retain(digest)  # leak: the chain so far keeps its references when one chunk is missing
            if chunk is None:
                raise Missing(digest)
            chain.append(chunk)
        return chain

    def retain_prefix(self, digests: list[str]) -> list[Chunk]:
        """As many chunks of the front as are present; the caller releases them."""
        chain: list[Chunk] = []
        for digest in digests:
            chunk = self.retain(digest)  # clean: a short chain is returned too
            if chunk is None:
                break
            chain.append(chunk)
        return chain

    @contextlib.contextmanager
    def held(self, digest: str):
        chunk = self.retain(digest)  # clean: released in finally
        if chunk is None:
            raise Missing(digest)
        try:
            yield chunk
        finally:
            self.release(chunk)


class Reader:
    """A file-like reader of one object, which holds the chunk under its cursor."""

    def __init__(self, table: ChunkTable, manifest: Manifest) -> None:
        self.table = table
        self.manifest = manifest
        self._index = 0
        self._cur: Chunk | None = None

    def _advance(self) -> bool:
        if self._cur is not None:
            self.table.release(self._cur)
            self._cur = None
        if self._index >= len(self.manifest.digests):
            return False
        self._cur = self.table.retain(self.manifest.digests[self._index])  # clean: near miss, the one before is released above and close() releases the last
        self._index += 1
        return self._cur is not None

    def next_chunk(self) -> bytes:
        return bytes(self._cur.data) if self._advance() else b""

    def seek(self, index: int) -> None:
        self.close()
        self._index = index

    def close(self) -> None:
        if self._cur is not None:
            self.table.release(self._cur)
            self._cur = None


class Bookmark:
    """Keeps one chunk of an object referenced between two requests."""

    def __init__(self, table: ChunkTable) -> None:
        self.table = table
        self.chunk: Chunk | None = None

    def place(self, digest: str) -> bool:
        self.chunk = self.table.retain(digest)  # leak: placing it again overwrites the chunk without releasing it
        return self.chunk is not None

    def clear(self) -> None:
        if self.chunk is not None:
            self.table.release(self.chunk)
            self.chunk = None


class ObjectCache:
    def __init__(self, table: ChunkTable, origin) -> None:
        self.table = table
        self.origin = origin
        self.manifests: dict[str, Manifest] = {}
        self._resident: dict[str, list[Chunk]] = {}
        self._pinned: dict[str, list[Chunk]] = {}
        self._recent: collections.OrderedDict[str, Chunk] = collections.OrderedDict()

    def put(self, name: str, parts: list[bytes]) -> None:
        self.evict(name)
        chain = []
        for part in parts:
            chain.append(self.table.retain_new(part))  # clean: resident until evict()
        self._resident[name] = chain
        self.manifests[name] = Manifest(name, [c.digest for c in chain])

    def put_pinned(self, name: str, parts: list[bytes]) -> None:
        chain = [self.table.retain_new(part) for part in parts]  # leak: pinning the name again replaces its chain unreleased
        self._pinned[name] = chain
        self.manifests[name] = Manifest(name, [c.digest for c in chain])

    def drop_pinned(self, name: str) -> None:
        for chunk in self._pinned.pop(name, []):
            self.table.release(chunk)

    def evict(self, name: str) -> bool:
        chain = self._resident.pop(name, None)
        if chain is None:
            return False
        for chunk in chain:
            self.table.release(chunk)
        return True

    def touch(self, digest: str) -> None:
        """Keeps the last 64 chunks warm."""
        if digest in self._recent:
            self._recent.move_to_end(digest)
            return
        chunk = self.table.retain(digest)  # clean: near miss, in _recent, and the oldest is released when it overflows
        if chunk is None:
            return
        self._recent[digest] = chunk
        while len(self._recent) > 64:
            _, old = self._recent.popitem(last=False)
            self.table.release(old)

    def iter_bytes(self, name: str) -> Iterator[bytes]:
        for digest in self.manifests[name].digests:
            with self.table.held(digest) as chunk:  # clean: context manager inside the generator
                yield bytes(chunk.data)

    def iter_views(self, name: str) -> Iterator[memoryview]:
        for digest in self.manifests[name].digests:
            chunk = self.table.retain(digest)  # leak: a consumer that stops early closes the generator at the yield
            if chunk is None:
                raise Missing(digest)
            yield memoryview(chunk.data)
            self.table.release(chunk)

    def head(self, name: str, n: int) -> bytes:
        out = b""
        for view in self.iter_views(name):
            out += bytes(view[: n - len(out)])
            if len(out) >= n:
                break
        return out

    def digest_of(self, name: str) -> str:
        chain = self.table.retain_chain(self.manifests[name].digests)  # clean: released in finally
        h = hashlib.sha256()
        try:
            for chunk in chain:
                h.update(chunk.data)
        finally:
            for chunk in chain:
                self.table.release(chunk)
        return h.hexdigest()

    def prefix_len(self, name: str) -> int:
        return len(self.table.retain_prefix(self.manifests[name].digests))  # leak: only the length is used

    def refresh(self, name: str, pos: int) -> bool:
        fresh = self.table.retain_new(self.origin.fetch(name, pos))  # leak: kept when the chunk has not changed
        chain = self._resident[name]
        if fresh.digest == chain[pos].digest:
            return False
        self.table.release(chain[pos])
        chain[pos] = fresh
        return True
