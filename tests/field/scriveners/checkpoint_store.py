"""Reads and writes sharded checkpoints: files, per shard locks and a cache of open shards."""
from __future__ import annotations

import hashlib
import json
import logging
import struct
import threading
from pathlib import Path
from typing import BinaryIO, Iterator, Optional

log = logging.getLogger("checkpoint_store")
MAGIC = b"CKPT"


class ShardLocks:
    """One lock for each shard name."""

    def __init__(self) -> None:
        self._locks: dict[str, threading.Lock] = {}
        self._guard = threading.Lock()

    def _of(self, name: str) -> threading.Lock:
        with self._guard:
            return self._locks.setdefault(name, threading.Lock())

    def hold(self, name: str, timeout: float = -1) -> bool:
        return self._of(name).acquire(timeout=timeout)  # clean: handed to the caller, let_go() releases it

    def let_go(self, name: str) -> None:
        self._of(name).release()


class ShardFile:
    """An open shard; shut() closes the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO = open(path, "rb")  # clean: closed by shut()
        self.reads = 0

    def read_at(self, offset: int, size: int) -> bytes:
        self._file.seek(offset)
        self.reads += 1
        return self._file.read(size)

    def shut(self) -> None:
        self._file.close()


class JournaledShard:
    """A shard and a journal of what was read from it."""

    def __init__(self, path: Path) -> None:
        self._data = open(path, "rb")  # clean: closed by shut()
        self._journal = open(path.with_suffix(".journal"), "a")  # leak: shut() closes the data file only

    def read_at(self, offset: int, size: int) -> bytes:
        self._journal.write(json.dumps({"offset": offset, "size": size}) + "\n")
        self._data.seek(offset)
        return self._data.read(size)

    def shut(self) -> None:
        self._journal.flush()
        self._data.close()


class OpenShards:
    """At most `limit` open shards; the one that was used least is shut."""

    def __init__(self, root: Path, limit: int) -> None:
        self.root = root
        self.limit = limit
        self._open: dict[str, ShardFile] = {}
        self._side: dict[str, ShardFile] = {}

    def get(self, name: str) -> ShardFile:
        """Borrowed, the table stays the owner."""
        shard = self._open.get(name)
        if shard is None:
            while len(self._open) >= self.limit:
                victim = min(self._open, key=lambda n: self._open[n].reads)
                self._open.pop(victim).shut()
            shard = ShardFile(self.root / name)  # clean: near miss, kept in the table, which shuts it
            self._open[name] = shard
        return shard

    def reopen(self, name: str) -> ShardFile:
        old = self._open.pop(name, None)
        if old is not None:
            old.shut()
        self._open[name] = ShardFile(self.root / name)  # clean: near miss, the old one was shut
        return self._open[name]

    def attach_side(self, name: str, suffix: str) -> None:
        """Optimizer state next to the weights."""
        self._side[name] = ShardFile(self.root / (name + suffix))  # leak: close() clears the table without shut

    def close(self) -> None:
        for shard in self._open.values():
            shard.shut()
        self._open.clear()
        self._side.clear()


class CheckpointStore:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.locks = ShardLocks()
        self.shards = OpenShards(root, 8)
        self.writes = 0

    def header(self, name: str) -> Optional[dict]:
        with open(self.root / name, "rb") as f:  # clean: near miss, return leaves the block
            if f.read(4) != MAGIC:
                return None
            (size,) = struct.unpack("<I", f.read(4))
            return json.loads(f.read(size))

    def digest(self, name: str) -> str:
        shard = ShardFile(self.root / name)  # leak: opened for the digest and never shut
        h = hashlib.sha256()
        offset = 0
        while chunk := shard.read_at(offset, 1 << 20):
            h.update(chunk)
            offset += len(chunk)
        return h.hexdigest()

    def write(self, name: str, body: bytes) -> bool:
        if not self.locks.hold(name, 5.0):  # clean: let go in the finally
            return False
        try:
            if (self.root / name).exists():
                return False
            self._write_file(name, body)
            return True
        finally:
            self.locks.let_go(name)

    def _write_file(self, name: str, body: bytes) -> None:
        with open(self.root / name, "wb") as f:  # clean: the block closes it
            f.write(MAGIC + struct.pack("<I", len(body)) + body)
        self.writes += 1

    def overwrite(self, name: str, body: bytes, keep: bool) -> bool:
        if not self.locks.hold(name, 5.0):  # leak: a file that is to be kept leaves the shard locked
            return False
        if keep and (self.root / name).exists():
            log.info("keeping %s", name)
            return False
        self._write_file(name, body)
        self.locks.let_go(name)
        return True

    def copy(self, source: str, target: str) -> bool:
        if not self.locks.hold(source, 2.0):  # leak: kept when the target cannot be locked
            return False
        if not self.locks.hold(target, 2.0):  # clean: let go after the copy
            return False
        self._write_file(target, (self.root / source).read_bytes()[8:])
        self.locks.let_go(target)
        self.locks.let_go(source)
        return True

    def records(self, name: str) -> Iterator[bytes]:
        with open(self.root / name, "rb") as f:  # clean: near miss, the end of the generator closes it
            while head := f.read(4):
                (size,) = struct.unpack("<I", head)
                if size == 0:
                    return
                yield f.read(size)

    def prune(self, names: list[str]) -> list[str]:
        removed: list[str] = []
        for name in names:
            if not self.locks.hold(name, 0.0):  # leak: `continue` for a missing file leaves it locked
                continue
            path = self.root / name
            if not path.exists():
                continue
            path.unlink()
            removed.append(name)
            self.locks.let_go(name)
        return removed

    def freeze(self, names: list[str]) -> list[str]:
        """Locks what can be locked; thaw() ends it."""
        return [name for name in names if self.locks.hold(name, 0.1)]  # clean: handed to the caller, see thaw()

    def thaw(self, frozen: list[str]) -> None:
        for name in frozen:
            self.locks.let_go(name)

    def close(self) -> None:
        log.info("%d checkpoints written", self.writes)
        self.shards.close()
