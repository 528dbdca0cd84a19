"""Shard reading for a training data pipeline: files, index files, chunk buffers."""
from __future__ import annotations

import contextlib
import gzip
import json
import os
import struct
import tempfile
from typing import IO, Dict, Iterable, Iterator, List, Optional, Tuple

HEADER = struct.Struct("<4sI")
MAGIC = b"SHRD"


class ChunkPool:
    """Fixed-size scratch buffers; grows when all are out."""

    def __init__(self, size: int, count: int) -> None:
        self.size = size
        self._idle = [bytearray(size) for _ in range(count)]
        self._out = 0

    def checkout(self) -> bytearray:
        if not self._idle:
            self._idle.append(bytearray(self.size))
        self._out += 1
        return self._idle.pop()

    def checkin(self, chunk: bytearray) -> None:
        self._out -= 1
        self._idle.append(chunk)

    @contextlib.contextmanager
    def chunk(self) -> Iterator[bytearray]:
        buf = self.checkout()  # clean: checked in by finally when the block ends
        try:
            yield buf
        finally:
            self.checkin(buf)

    @property
    def outstanding(self) -> int:
        return self._out


def read_header(path: str) -> Optional[int]:
    fh = open(path, "rb")  # leak: bad magic returns None without close
    raw = fh.read(HEADER.size)
    if len(raw) < HEADER.size:
        fh.close()
        return None
    magic, count = HEADER.unpack(raw)
    if magic != MAGIC:
        return None
    fh.close()
    return count


def open_shard(path: str) -> IO[bytes]:
    """Positioned behind the header; gz shards are opened transparently."""
    if path.endswith(".gz"):
        fh: IO[bytes] = gzip.open(path, "rb")  # clean: returned to the caller, closed on a short header
    else:
        fh = open(path, "rb")  # clean: returned to the caller, closed on a short header
    try:
        if len(fh.read(HEADER.size)) < HEADER.size:
            raise EOFError(path)
    except BaseException:
        fh.close()
        raise
    return fh


class ShardSet:
    def __init__(self, paths: List[str], pool: ChunkPool) -> None:
        self.paths = paths
        self.pool = pool
        self._handles: Dict[str, IO[bytes]] = {}
        self._current: Optional[IO[bytes]] = None

    def handle(self, path: str) -> IO[bytes]:
        if path not in self._handles:
            self._handles[path] = open_shard(path)  # clean: near miss, kept in the table until close
        return self._handles[path]

    def close(self) -> None:
        for fh in self._handles.values():
            fh.close()
        self._handles.clear()
        if self._current is not None:
            self._current.close()
            self._current = None

    def seek_shard(self, index: int) -> IO[bytes]:
        self._current = open_shard(self.paths[index])  # leak: the shard before it is overwritten unclosed
        return self._current

    def record(self, path: str, offset: int, length: int) -> bytes:
        buf = self.pool.checkout()  # clean: copied out, checked in finally
        try:
            fh = self.handle(path)  # clean: the table keeps it
            fh.seek(HEADER.size + offset)
            got = fh.readinto(memoryview(buf)[:length])  # type: ignore[attr-defined]
            return bytes(buf[:got])
        finally:
            self.pool.checkin(buf)

    def checksum(self, path: str) -> int:
        total = 0
        fh = open_shard(path)  # clean: closed after the loop
        buf = self.pool.checkout()  # leak: an empty read returns early, only the file is closed
        while True:
            n = fh.readinto(buf)  # type: ignore[attr-defined]
            if not n:
                fh.close()
                return total
            total = (total + sum(buf[:n])) & 0xFFFFFFFF
            if n < len(buf):
                break
        self.pool.checkin(buf)
        fh.close()
        return total

    def samples(self, size: int) -> Iterator[bytes]:
        for path in self.paths:
            try:
                fh = open_shard(path)  # clean: near miss, continue only where the open itself failed
            except EOFError:
                continue
            with fh:
                with self.pool.chunk() as buf:  # clean: with statement
                    while True:
                        n = fh.readinto(memoryview(buf)[:size])  # type: ignore[attr-defined]
                        if not n:
                            break
                        yield bytes(buf[:n])

    def lines(self, path: str) -> Iterator[Dict[str, object]]:
        fh = open(path, "r")  # leak: count_valid stops at the first bad line and the generator's close is never reached
        for line in fh:
            yield json.loads(line)
        fh.close()

    def count_valid(self, path: str) -> int:
        n = 0
        for rec in self.lines(path):
            if "text" not in rec:
                break
            n += 1
        return n

    def interleave(self, left: str, right: str) -> Iterator[Tuple[bytes, bytes]]:
        with contextlib.ExitStack() as stack:
            a = stack.enter_context(open_shard(left))  # clean: the exit stack closes it
            b = open_shard(right)  # clean: near miss, the exit stack's callback closes it
            stack.callback(b.close)
            while True:
                x, y = a.read(8), b.read(8)
                if not x or not y:
                    return
                yield x, y


class Writer:
    def __init__(self, path: str, pool: ChunkPool) -> None:
        self.path = path
        self.pool = pool
        self.staging = pool.checkout()  # clean: checked in by close
        self.fill = 0
        self.count = 0
        self.out = open(path, "wb")  # clean: closed by close
        self.out.write(HEADER.pack(MAGIC, 0))

    def add(self, rec: bytes) -> None:
        if self.fill + len(rec) > len(self.staging):
            self._spill()
        self.staging[self.fill:self.fill + len(rec)] = rec
        self.fill += len(rec)
        self.count += 1

    def _spill(self) -> None:
        self.out.write(self.staging[: self.fill])
        self.fill = 0

    def close(self) -> None:
        try:
            self._spill()
            self.out.seek(0)
            self.out.write(HEADER.pack(MAGIC, self.count))
        finally:
            self.out.close()
            self.pool.checkin(self.staging)


def write_shards(root: str, groups: Iterable[List[bytes]], pool: ChunkPool) -> List[str]:
    paths: List[str] = []
    for i, group in enumerate(groups):
        w = Writer(os.path.join(root, f"s{i}.bin"), pool)  # clean: closed each round
        for rec in group:
            w.add(rec)
        w.close()
        paths.append(w.path)
    return paths


def rewrite(src: str, dst: str, pool: ChunkPool, min_len: int) -> int:
    kept = 0
    writer = Writer(dst, pool)  # leak: OSError of the source is caught, -1 returned with the writer open
    try:
        with open_shard(src) as fh:  # clean: with statement
            for rec in iter(lambda: fh.read(8), b""):
                if len(rec) >= min_len:
                    writer.add(rec)
                    kept += 1
    except (OSError, EOFError):
        return -1
    writer.close()
    return kept


def sniff(path: str) -> str:
    return "gzip" if open(path, "rb").read(2) == b"\x1f\x8b" else "raw"  # leak: the handle is read and dropped


def main() -> None:
    pool = ChunkPool(64, 2)
    with tempfile.TemporaryDirectory() as root:
        paths = write_shards(root, [[b"abcdefgh"] * 3, [b"12345678"]], pool)
        shards = ShardSet(paths, pool)
        print([read_header(p) for p in paths], list(shards.samples(8)))
        print(shards.record(paths[0], 8, 8), shards.checksum(paths[0]), list(shards.interleave(*paths)))
        print(rewrite(paths[0], os.path.join(root, "o.bin"), pool, 8))
        shards.close()
    print(pool.outstanding)


if __name__ == "__main__":
    main()
