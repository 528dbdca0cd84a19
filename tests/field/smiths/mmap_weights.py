"""Memory-mapped safetensors-like shards: plain handles, raw descriptors and maps."""
from __future__ import annotations

import json
import mmap
import os
import struct
import tempfile
from contextlib import contextmanager
from typing import BinaryIO, Dict, Iterator, List, Optional, Tuple

HEADER = struct.Struct("<Q")


def read_header(path: str) -> Optional[dict]:
    f = open(path, "rb")  # leak: a short file returns without close
    raw = f.read(HEADER.size)
    if len(raw) < HEADER.size:
        return None
    (n,) = HEADER.unpack(raw)
    meta = json.loads(f.read(n))
    f.close()
    return meta


def read_header_checked(path: str) -> Optional[dict]:
    f = open(path, "rb")  # clean: finally
    try:
        raw = f.read(HEADER.size)
        if len(raw) < HEADER.size:
            return None
        (n,) = HEADER.unpack(raw)
        return json.loads(f.read(n))
    finally:
        f.close()


def shard_names(index_path: str) -> List[str]:
    return sorted(set(json.load(open(index_path))["weight_map"].values()))  # leak: the handle is dropped unclosed


def write_shard(path: str, tensors: Dict[str, bytes]) -> None:
    meta, off = {}, 0
    for name, blob in tensors.items():
        meta[name] = [off, off + len(blob)]
        off += len(blob)
    head = json.dumps(meta).encode()
    with open(path, "wb") as f:  # clean: with closes it
        f.write(HEADER.pack(len(head)))
        f.write(head)
        for blob in tensors.values():
            f.write(blob)


def open_first(candidates: List[str]) -> Optional[BinaryIO]:
    for path in candidates:
        try:
            f = open(path, "rb")  # leak: an empty candidate is skipped with its handle open
        except FileNotFoundError:
            continue
        if os.fstat(f.fileno()).st_size == 0:
            continue
        return f
    return None


def open_newest(candidates: List[str]) -> Optional[BinaryIO]:
    best: Optional[BinaryIO] = None
    stamp = -1.0
    for path in candidates:
        if not os.path.exists(path):
            continue
        f = open(path, "rb")  # clean: near miss, the loser of every comparison is closed
        mtime = os.fstat(f.fileno()).st_mtime
        if mtime <= stamp:
            f.close()
            continue
        if best is not None:
            best.close()
        best, stamp = f, mtime
    return best


def newest_magic(candidates: List[str]) -> bytes:
    f = open_newest(candidates)  # clean: closed below when there is one
    if f is None:
        return b""
    with f:
        return f.read(4)


def first_magic(candidates: List[str]) -> bytes:
    f = open_first(candidates)  # leak: read and forgotten
    return f.read(4) if f else b""


class MappedShard:
    def __init__(self, path: str) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDONLY)  # clean: close() closes the descriptor
        self.view = mmap.mmap(self.fd, 0, access=mmap.ACCESS_READ)  # clean: close() closes the map
        (n,) = HEADER.unpack(self.view[: HEADER.size])
        self.base = HEADER.size + n
        self.meta = json.loads(self.view[HEADER.size : self.base])

    def tensor(self, name: str) -> bytes:
        lo, hi = self.meta[name]
        return self.view[self.base + lo : self.base + hi]

    def close(self) -> None:
        self.view.close()
        os.close(self.fd)


class StreamingShard:
    """Sequential reader used while quantising on load."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.f: Optional[BinaryIO] = None
        self.read_bytes = 0

    def __enter__(self) -> "StreamingShard":
        self.f = open(self.path, "rb")  # leak: __exit__ returns before close when nothing was read
        return self

    def chunk(self, n: int) -> bytes:
        data = self.f.read(n)
        self.read_bytes += len(data)
        return data

    def __exit__(self, exc_type, exc, tb) -> bool:
        if not self.read_bytes:
            return False
        self.f.close()
        self.f = None
        return False


class ShardSet:
    """Open maps by file name, at most `limit` of them."""

    def __init__(self, root: str, limit: int = 4) -> None:
        self.root = root
        self.limit = limit
        self.open_maps: Dict[str, MappedShard] = {}

    def shard(self, name: str) -> MappedShard:
        hit = self.open_maps.get(name)
        if hit is not None:
            return hit
        while len(self.open_maps) >= self.limit:
            oldest = next(iter(self.open_maps))
            self.open_maps.pop(oldest).close()
        shard = MappedShard(os.path.join(self.root, name))  # clean: near miss, the table owns it and evicts with close
        self.open_maps[name] = shard
        return shard

    def close(self) -> None:
        for shard in self.open_maps.values():
            shard.close()
        self.open_maps.clear()


def tensor_copy(path: str, name: str) -> bytes:
    shard = MappedShard(path)  # clean: finally
    try:
        return shard.tensor(name)
    finally:
        shard.close()


def find_tensor(paths: List[str], name: str) -> Optional[bytes]:
    for path in paths:
        shard = MappedShard(path)  # leak: the hit returns without close
        if name in shard.meta:
            return shard.tensor(name)
        shard.close()
    return None


def count_tensors(paths: List[str]) -> int:
    return sum(len(MappedShard(p).meta) for p in paths)  # leak: mapped for the count, never closed


@contextmanager
def raw_fd(path: str, flags: int = os.O_RDONLY) -> Iterator[int]:
    fd = os.open(path, flags)  # clean: finally
    try:
        yield fd
    finally:
        os.close(fd)


def prefault(path: str) -> int:
    with raw_fd(path) as fd:  # clean: the context manager closes it
        size = os.fstat(fd).st_size
        if size == 0:
            return 0
        view = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)  # clean: closed below, an empty file never gets here
        total = sum(view[i] for i in range(0, size, mmap.PAGESIZE))
        view.close()
        return total


def copy_shard(src: str, dst: str) -> Tuple[bool, int]:
    fin = open(src, "rb")  # leak: the destination that cannot be opened returns without closing the source
    try:
        fout = open(dst, "xb")  # clean: closed below
    except FileExistsError:
        return False, 0
    n = fout.write(fin.read())
    fout.close()
    fin.close()
    return True, n


def main() -> None:
    with tempfile.TemporaryDirectory() as root:
        a, b = os.path.join(root, "a.st"), os.path.join(root, "b.st")
        write_shard(a, {"w": b"1234", "b": b"56"})
        write_shard(b, {"u": b"89"})
        print(read_header_checked(a), tensor_copy(a, "b"), newest_magic([a, b])[:1], prefault(a) >= 0)
        shards = ShardSet(root, limit=1)
        print(shards.shard("a.st").tensor("w"), shards.shard("b.st").tensor("u"))
        shards.close()


if __name__ == "__main__":
    main()
