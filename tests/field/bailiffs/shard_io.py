"""Reading and writing of weight shards through page-locked buffers."""
from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import BinaryIO, Iterable, NamedTuple

MAGIC = b"SHRD"


class PinnedBuffer:
    __slots__ = ("data", "index")

    def __init__(self, index: int, size: int) -> None:
        self.index = index
        self.data = bytearray(size)


class PinnedBuffers:
    def __init__(self, count: int, size: int) -> None:
        self.size = size
        self._idle = [PinnedBuffer(i, size) for i in range(count)]
        self._lent: dict[int, PinnedBuffer] = {}

    def lend(self) -> PinnedBuffer:
        if not self._idle:
            raise MemoryError("no pinned buffer is idle")
        buf = self._idle.pop()
        self._lent[buf.index] = buf
        return buf

    def reclaim(self, buf: PinnedBuffer) -> None:
        del self._lent[buf.index]
        self._idle.append(buf)


class Span(NamedTuple):
    offset: int
    length: int


class ShardWriter:
    def __init__(self, path: Path) -> None:
        self._fh = open(path, "wb")  # leak: close returns early where nothing waits to be written
        self._pending: list[bytes] = []
        self.written = 0

    def add(self, payload: bytes) -> None:
        self._pending.append(payload)
        if len(self._pending) >= 64:
            self._drain()

    def _drain(self) -> None:
        for payload in self._pending:
            self.written += self._fh.write(payload)
        self._pending.clear()

    def close(self) -> None:
        if not self._pending:
            return
        self._drain()
        self._fh.close()


class IndexWriter:
    def __init__(self, path: Path) -> None:
        self._fh = open(path, "wb")  # clean: near miss, only the draining hangs on the condition
        self._pending: dict[str, Span] = {}

    def add(self, name: str, span: Span) -> None:
        self._pending[name] = span

    def close(self) -> None:
        if self._pending:
            self._fh.write(json.dumps(self._pending).encode())
            self._pending = {}
        self._fh.close()


class ShardSet:
    """A manifest followed by its shards, all kept open."""

    def __init__(self, manifest: Path, shards: Iterable[Path]) -> None:
        self._files = [open(p, "rb") for p in (manifest, *shards)]  # leak: close leaves the manifest open

    def read(self, shard: int, span: Span) -> bytes:
        fh = self._files[shard + 1]
        fh.seek(span.offset)
        return fh.read(span.length)

    def close(self) -> None:
        for fh in self._files[1:]:
            fh.close()
        self._files = []


class MergedReader:
    def __init__(self, manifest: Path, shards: Iterable[Path]) -> None:
        self._files = [open(p, "rb") for p in (manifest, *shards)]  # clean: near miss, head and rest both closed

    def names(self) -> list[str]:
        self._files[0].seek(0)
        return json.loads(self._files[0].read())

    def close(self) -> None:
        head, *rest = self._files
        for fh in rest:
            fh.close()
        head.close()
        self._files = []


def read_footer(path: Path) -> dict | None:
    fh = open(path, "rb")  # leak: a file without the magic is left open
    fh.seek(-8, 2)
    size, magic = struct.unpack("<I4s", fh.read(8))
    if magic != MAGIC:
        return None
    fh.seek(-8 - size, 2)
    footer = json.loads(fh.read(size))
    fh.close()
    return footer


def read_header(path: Path) -> dict | None:
    fh = open(path, "rb")  # clean: near miss, closed before the magic is looked at
    head = fh.read(8)
    body = fh.read()
    fh.close()
    if len(head) < 8 or head[4:] != MAGIC:
        return None
    return json.loads(body[: struct.unpack("<I", head[:4])[0]])


def copy_span(src: Path, dst: Path, span: Span) -> int:
    with open(src, "rb") as fin:  # clean: with closes it
        fin.seek(span.offset)
        payload = fin.read(span.length)
        if len(payload) < span.length:
            return 0
    with open(dst, "ab") as fout:  # clean: with closes it
        return fout.write(payload)


class SpanLoader:
    def __init__(self, buffers: PinnedBuffers) -> None:
        self.buffers = buffers
        self.short_reads = 0

    def load(self, fh: BinaryIO, span: Span, sink: list[bytes]) -> bool:
        buf = self.buffers.lend()  # leak: a short read returns False with the buffer
        fh.seek(span.offset)
        got = fh.readinto(memoryview(buf.data)[: span.length])
        if got < span.length:
            self.short_reads += 1
            return False
        sink.append(bytes(buf.data[:got]))
        self.buffers.reclaim(buf)
        return True

    def load_tail(self, fh: BinaryIO, span: Span, sink: list[bytes]) -> bool:
        buf = self.buffers.lend()  # clean: near miss, reclaimed whatever was read
        fh.seek(span.offset)
        got = fh.readinto(memoryview(buf.data)[: span.length])
        complete = got == span.length
        if complete:
            sink.append(bytes(buf.data[:got]))
        else:
            self.short_reads += 1
        self.buffers.reclaim(buf)
        return complete

    def load_many(self, fh: BinaryIO, spans: list[Span]) -> list[bytes]:
        pairs = [(span, self.buffers.lend()) for span in spans]  # leak: the buffers of short reads are not reclaimed
        full = [(s, b) for s, b in pairs if self._fill(fh, s, b)]
        out = [bytes(b.data[: s.length]) for s, b in full]
        for _, buf in full:
            self.buffers.reclaim(buf)
        return out

    def load_some(self, fh: BinaryIO, spans: list[Span]) -> list[bytes]:
        pairs = [(span, self.buffers.lend()) for span in spans]  # clean: near miss, every pair is reclaimed
        out = [bytes(b.data[: s.length]) for s, b in pairs if self._fill(fh, s, b)]
        for _, buf in pairs:
            self.buffers.reclaim(buf)
        return out

    def _fill(self, fh: BinaryIO, span: Span, buf: PinnedBuffer) -> bool:
        fh.seek(span.offset)
        return fh.readinto(memoryview(buf.data)[: span.length]) == span.length
