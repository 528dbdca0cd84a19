"""Checkpoint shard reader: file handles, staging slabs and an index of tensors."""
from __future__ import annotations

import io
import json
import os
import struct
from dataclasses import dataclass
from typing import IO, Dict, Iterator, List, Optional, Tuple

MAGIC = b"SHRD"


@dataclass
class TensorMeta:
    name: str
    offset: int
    nbytes: int


class Slab:
    def __init__(self, nbytes: int) -> None:
        self.view = bytearray(nbytes)


class SlabPool:
    def __init__(self, count: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._idle = [Slab(nbytes) for _ in range(count)]

    def take(self) -> Slab:
        if not self._idle:
            return Slab(self.nbytes)
        return self._idle.pop()

    def put_back(self, slab: Slab) -> None:
        self._idle.append(slab)


def read_header(path: str) -> Optional[List[TensorMeta]]:
    f = open(path, "rb")  # leak: a wrong magic returns with the file open
    if f.read(4) != MAGIC:
        return None
    (n,) = struct.unpack("<I", f.read(4))
    metas = [TensorMeta(*row) for row in json.loads(f.read(n))]
    f.close()
    return metas


def open_shard(path: str) -> IO[bytes]:
    f = open(path, "rb")  # clean: handed to the caller, closed before the raise
    if f.read(4) != MAGIC:
        f.close()
        raise ValueError(f"{path}: not a shard")
    return f


def is_shard(path: str) -> bool:
    try:
        open_shard(path)  # leak: the handle of a good shard is discarded
    except ValueError:
        return False
    return True


def write_shard(path: str, tensors: Dict[str, bytes]) -> None:
    offset, rows = 0, []
    for name, data in tensors.items():
        rows.append([name, offset, len(data)])
        offset += len(data)
    head = json.dumps(rows).encode()
    with open(path, "wb") as f:  # clean: with
        f.write(MAGIC + struct.pack("<I", len(head)) + head)
        for data in tensors.values():
            f.write(data)


class ShardReader:
    """One base shard and an optional overlay."""

    def __init__(self, slabs: SlabPool) -> None:
        self.slabs = slabs
        self.fh: Optional[IO[bytes]] = None
        self.base = 0
        self.index: Dict[str, TensorMeta] = {}
        self.overlay: Optional[IO[bytes]] = None
        self.overlay_index: Dict[str, TensorMeta] = {}

    def open(self, path: str) -> None:
        self.close()
        self.fh = open_shard(path)  # clean: near miss, close runs before the field is set
        (n,) = struct.unpack("<I", self.fh.read(4))
        self.index = {r[0]: TensorMeta(*r) for r in json.loads(self.fh.read(n))}
        self.base = 8 + n

    def open_overlay(self, path: str) -> int:
        """Second shard whose tensors shadow those of the first."""
        fh = open_shard(path)  # leak: set over the overlay of an earlier call, whose handle is never closed
        (n,) = struct.unpack("<I", fh.read(4))
        self.overlay_index = {r[0]: TensorMeta(*r) for r in json.loads(fh.read(n))}
        self.overlay = fh
        return len(self.overlay_index)

    def close(self) -> None:
        if self.overlay is not None:
            self.overlay.close()
            self.overlay = None
        if self.fh is not None:
            self.fh.close()
            self.fh = None

    def _read_into(self, meta: TensorMeta) -> Slab:
        slab = self.slabs.take()  # clean: the wrapper hands it on
        self.fh.seek(self.base + meta.offset)
        self.fh.readinto(memoryview(slab.view)[:meta.nbytes])
        return slab

    def read(self, name: str) -> bytes:
        meta = self.index[name]
        slab = self._read_into(meta)  # leak: copied out and dropped
        return bytes(slab.view[:meta.nbytes])

    def read_pooled(self, name: str) -> bytes:
        meta = self.index[name]
        slab = self._read_into(meta)  # clean: copied out, then put back
        out = bytes(slab.view[:meta.nbytes])
        self.slabs.put_back(slab)
        return out

    def stream(self, names: List[str]) -> Iterator[Tuple[str, Slab]]:
        """The consumer puts each slab back."""
        for name in names:
            if name not in self.index:
                continue
            yield name, self._read_into(self.index[name])  # clean: ownership goes out with the yield

    def digest_all(self, names: List[str]) -> Dict[str, int]:
        out: Dict[str, int] = {}
        for name, slab in self.stream(names):  # leak: scalar-sized tensors are skipped without putting their slab back
            nbytes = self.index[name].nbytes
            if nbytes < 4:
                continue
            out[name] = sum(slab.view[:nbytes])
            self.slabs.put_back(slab)
        return out

    def total(self, names: List[str]) -> int:
        acc = 0
        for name, slab in self.stream(names):  # clean: each slab is put back
            acc += sum(slab.view[:self.index[name].nbytes])
            self.slabs.put_back(slab)
        return acc


def merge_shards(paths: List[str], out_path: str) -> int:
    handles: List[IO[bytes]] = []
    written = 0
    out = open(out_path, "wb")  # clean: finally
    try:
        for p in paths:
            handles.append(open(p, "rb"))  # clean: near miss, all handles are closed in finally
        for h in handles:
            written += out.write(h.read())
        return written
    finally:
        for h in handles:
            h.close()
        out.close()


def first_readable(paths: List[str]) -> Optional[str]:
    for p in paths:
        try:
            f = open(p, "rb")  # leak: empty files are skipped while still open
        except OSError:
            continue
        if os.path.getsize(p) == 0:
            continue
        f.close()
        return p
    return None


def tail(path: str, n: int) -> bytes:
    f = open(path, "rb") if os.path.exists(path) else None  # clean: near miss, closed whenever it was opened
    data = b""
    if f is not None:
        f.seek(0, io.SEEK_END)
        f.seek(max(0, f.tell() - n))
        data = f.read()
    if f:
        f.close()
    return data
