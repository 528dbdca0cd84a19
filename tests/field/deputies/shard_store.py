"""Sharded checkpoint reader and writer with a bounded set of open files and directory locks."""
from __future__ import annotations

import json
import os
import struct
import tempfile
import threading
from pathlib import Path
from typing import BinaryIO, Iterable, Iterator

import torch

MAGIC = b"SHRD"


class CorruptShard(ValueError):
    pass


class FileBudget:
    """Limits how many shard files a process holds open. Each open() needs a close()."""

    def __init__(self, limit: int) -> None:
        self._sem = threading.BoundedSemaphore(limit)

    def open(self, path: Path, mode: str = "rb") -> BinaryIO:
        self._sem.acquire()  # clean: near miss, given back if the open fails, else by close()
        try:
            return open(path, mode)  # clean: handed to the caller, who calls close()
        except OSError:
            self._sem.release()
            raise

    def close(self, f: BinaryIO) -> None:
        try:
            f.close()
        finally:
            self._sem.release()


class DirLock:
    def __init__(self, root: Path) -> None:
        self.path = root / ".lock"
        self.fd: int | None = None

    def acquire(self) -> bool:
        try:
            self.fd = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)  # clean: near miss, kept in fd, closed by release()
        except FileExistsError:
            return False
        return True

    def release(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
            self.path.unlink(missing_ok=True)


def read_header(f: BinaryIO) -> dict[str, dict]:
    if f.read(4) != MAGIC:
        raise CorruptShard(f.name)
    (n,) = struct.unpack("<Q", f.read(8))
    return json.loads(f.read(n))


class ShardReader:
    def __init__(self, root: Path, budget: FileBudget) -> None:
        self.root = root
        self.budget = budget
        self.files: dict[str, BinaryIO] = {}
        self.index: dict[str, tuple[str, dict]] = {}
        self.extra: BinaryIO | None = None

    def scan(self) -> None:
        for path in sorted(self.root.glob("*.shard")):
            f = self.budget.open(path)  # leak: a corrupt shard is skipped with its file still open
            try:
                header = read_header(f)
            except CorruptShard:
                continue
            for name, meta in header.items():
                self.index[name] = (path.name, meta)
            self.budget.close(f)

    def _file(self, shard: str) -> BinaryIO:
        if shard not in self.files:
            self.files[shard] = self.budget.open(self.root / shard)  # clean: near miss, cached in files, closed by close() or evict()
        return self.files[shard]

    def evict(self, keep: set[str]) -> None:
        for shard in [s for s in self.files if s not in keep]:
            self.budget.close(self.files.pop(shard))

    def tensor(self, name: str) -> torch.Tensor:
        shard, meta = self.index[name]
        f = self._file(shard)  # clean: near miss, borrowed from the cache, not owned here
        f.seek(meta["offset"])
        data = bytearray(f.read(meta["nbytes"]))
        return torch.frombuffer(data, dtype=getattr(torch, meta["dtype"])).view(meta["shape"])

    def reload(self, shard: str) -> None:
        """Reopen a shard that was rewritten on disk."""
        self.files[shard] = self.budget.open(self.root / shard)  # leak: the file cached under that name is overwritten unclosed
        for name, meta in read_header(self.files[shard]).items():
            self.index[name] = (shard, meta)

    def attach_extra(self, name: str) -> None:
        if self.extra is not None:
            self.budget.close(self.extra)
        self.extra = self.budget.open(self.root / name)  # leak: close() walks files only and forgets extra

    def iter_headers(self) -> Iterator[tuple[str, dict]]:
        for path in sorted(self.root.glob("*.shard")):
            f = self.budget.open(path)  # clean: near miss, the finally runs also when the consumer stops
            try:
                yield path.name, read_header(f)
            finally:
                self.budget.close(f)

    def same_layout(self, a: str, b: str) -> bool:
        fa = self.budget.open(self.root / a)  # leak: not closed when b is missing and FileNotFoundError is answered with False
        try:
            fb = self.budget.open(self.root / b)  # clean: closed below
        except FileNotFoundError:
            return False
        same = read_header(fa) == read_header(fb)
        self.budget.close(fb)
        self.budget.close(fa)
        return same

    def close(self) -> None:
        for f in self.files.values():
            self.budget.close(f)
        self.files.clear()


class ShardWriter:
    def __init__(self, root: Path, budget: FileBudget) -> None:
        self.root = root
        self.budget = budget
        self.lock = DirLock(root)

    def _encode(self, tensors: dict[str, torch.Tensor]) -> tuple[bytes, list[bytes]]:
        blobs, header, offset = [], {}, 0
        for name, t in tensors.items():
            blob = t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            header[name] = {"offset": offset, "nbytes": len(blob), "shape": list(t.shape), "dtype": str(t.dtype)[6:]}
            blobs.append(blob)
            offset += len(blob)
        raw = json.dumps(header).encode()
        return MAGIC + struct.pack("<Q", len(raw)) + raw, blobs

    def write(self, shard: str, tensors: dict[str, torch.Tensor], overwrite: bool = False) -> bool:
        if not self.lock.acquire():  # leak: an existing shard without overwrite returns False and the directory stays locked
            return False
        target = self.root / shard
        if target.exists() and not overwrite:
            return False
        head, blobs = self._encode(tensors)
        tmp = target.with_suffix(".tmp")
        f = self.budget.open(tmp, "wb")  # clean: closed in the finally
        try:
            f.write(head)
            for blob in blobs:
                f.write(blob)
        finally:
            self.budget.close(f)
        tmp.replace(target)
        self.lock.release()
        return True

    def spool(self, blobs: Iterable[bytes]) -> Path:
        fd, name = tempfile.mkstemp(dir=self.root, suffix=".spool")  # clean: near miss, fdopen takes the descriptor over and the with closes it
        with os.fdopen(fd, "wb") as out:
            for blob in blobs:
                out.write(blob)
        return Path(name)

    def reserve_name(self) -> str:
        fd, name = tempfile.mkstemp(dir=self.root, suffix=".shard")  # leak: only the name is used, the descriptor stays open
        return os.path.basename(name)
