"""Sharded checkpoint writer. One file a rank, an index on rank 0."""
from __future__ import annotations

import json
import logging
import os
import shutil
import struct
import tempfile
import time
import zlib
from typing import IO, Any, Iterator, Optional

log = logging.getLogger("ckpt")
MAGIC = b"SHRD"
HDR = struct.Struct("<4sII")


class ShardCorrupt(Exception):
    pass


def shard_path(root: str, step: int, rank: int) -> str:
    return os.path.join(root, f"step_{step:08d}", f"rank_{rank:05d}.bin")


def write_shard(path: str, state: dict[str, bytes]) -> int:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    f = open(path + ".tmp", "wb")  # clean: closed in the finally
    try:
        for name, blob in sorted(state.items()):
            key = name.encode()
            f.write(HDR.pack(MAGIC, len(key), len(blob)))
            f.write(key)
            f.write(blob)
        f.flush()
        os.fsync(f.fileno())
        n = f.tell()
    finally:
        f.close()
    os.replace(path + ".tmp", path)
    return n


def read_shard(path: str, only: Optional[set[str]] = None) -> dict[str, bytes]:
    f = open(path, "rb")  # leak: the short-header return leaves it open
    out: dict[str, bytes] = {}
    while True:
        raw = f.read(HDR.size)
        if not raw:
            break
        if len(raw) < HDR.size:
            log.warning("truncated shard %s, keeping %d entries", path, len(out))
            return out
        magic, klen, blen = HDR.unpack(raw)
        if magic != MAGIC:
            raise ShardCorrupt(path)
        name = f.read(klen).decode()
        blob = f.read(blen)
        if only is None or name in only:
            out[name] = blob
    f.close()
    return out


def newest(root: str) -> Optional[int]:
    best: Optional[int] = None
    for d in os.listdir(root):
        idx = os.path.join(root, d, "index.json")
        if not os.path.exists(idx):
            continue
        f = open(idx)  # leak: a partial index continues without close
        meta = json.load(f)
        if not meta.get("complete"):
            continue
        f.close()
        if best is None or meta["step"] > best:
            best = meta["step"]
    return best


def write_index(root: str, step: int, world: int) -> None:
    d = os.path.dirname(shard_path(root, step, 0))
    with open(os.path.join(d, "index.json"), "w") as f:  # clean: with block
        json.dump({"step": step, "world": world, "complete": True}, f)


def open_retry(path: str, mode: str, tries: int = 5) -> IO[Any]:
    """Lustre hands out ESTALE for a while after a failover."""
    for i in range(tries - 1):
        try:
            return open(path, mode)  # clean: returned to the caller
        except OSError as e:
            log.info("open %s: %s (%d)", path, e, i)
            time.sleep(0.01 * (1 << i))
    return open(path, mode)  # clean: returned to the caller


def same_contents(a: str, b: str) -> bool:
    fa = open_retry(a, "rb")  # leak: the mismatch return closes neither
    fb = open_retry(b, "rb")  # leak: the mismatch return closes neither
    while True:
        ca, cb = fa.read(65536), fb.read(65536)
        if ca != cb:
            return False
        if not ca:
            break
    fa.close()
    fb.close()
    return True


def copy_shard(src: str, dst: str) -> bool:
    try:
        fi = open(src, "rb")  # leak: when dst cannot be opened the survived error leaves src open
        fo = open(dst, "wb")  # clean: closed by its finally
        try:
            shutil.copyfileobj(fi, fo)
        finally:
            fo.close()
            fi.close()
    except OSError as e:
        log.warning("copy %s -> %s: %s", src, dst, e)
        return False
    return True


def iter_records(path: str) -> Iterator[bytes]:
    f = open(path, "rb")  # clean: the generator's finally closes it
    try:
        while len(raw := f.read(HDR.size)) == HDR.size:
            _, klen, blen = HDR.unpack(raw)
            f.seek(klen, os.SEEK_CUR)
            yield f.read(blen)
    finally:
        f.close()


class RankWriter:
    """Keeps the shard open across `add` calls; `finish` commits it."""

    def __init__(self, root: str, rank: int, compress: bool = False) -> None:
        self.root = root
        self.rank = rank
        self.compress = compress
        self._f: Optional[IO[bytes]] = None
        self._log: Optional[IO[str]] = None
        self._path = ""

    def begin(self, step: int) -> None:
        self._path = shard_path(self.root, step, self.rank)
        os.makedirs(os.path.dirname(self._path), exist_ok=True)
        if self._f is not None:
            log.warning("previous shard not finished, dropping it")
            self._f.close()
        self._f = open(self._path + ".tmp", "wb")  # clean: near miss, an unfinished one is closed before the overwrite
        self._log = open(self._path + ".log", "a")  # leak: a second begin without finish overwrites the log handle

    def add(self, name: str, blob: bytes) -> None:
        assert self._f is not None
        data = zlib.compress(blob, 1) if self.compress else blob
        key = name.encode()
        self._f.write(HDR.pack(MAGIC, len(key), len(data)) + key + data)
        if self._log is not None:
            self._log.write(f"{name} {len(data)}\n")

    def finish(self) -> None:
        f, self._f = self._f, None
        if f is not None:
            f.close()
            os.replace(self._path + ".tmp", self._path)
        if self._log is not None:
            self._log.close()
            self._log = None


class Reader:
    """Context manager over one shard."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.bad = False

    def __enter__(self) -> "Reader":
        self._f = open(self.path, "rb")  # leak: __exit__ returns before close when the shard was marked bad
        return self

    def header(self) -> bytes:
        raw = self._f.read(HDR.size)
        self.bad = raw[:4] != MAGIC
        return raw

    def __exit__(self, et: Any, ev: Any, tb: Any) -> bool:
        if self.bad:
            log.error("bad shard %s", self.path)
            return False
        self._f.close()
        return False


def audit(root: str, step: int, world: int) -> list[int]:
    bad = []
    for r in range(world):
        with Reader(shard_path(root, step, r)) as rd:  # clean: used as a context manager
            rd.header()
            if rd.bad:
                bad.append(r)
    return bad


def _lockfile(path: str) -> Optional[int]:
    try:
        return os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)  # clean: returned to the caller
    except FileExistsError:
        return None


def prune(root: str, keep: int) -> int:
    lock = os.path.join(root, ".prune")
    fd = _lockfile(lock)  # leak: few enough steps returns without os.close
    if fd is None:
        return 0
    steps = sorted(d for d in os.listdir(root) if d.startswith("step_"))
    if len(steps) <= keep:
        os.unlink(lock)
        return 0
    for d in steps[:-keep]:
        shutil.rmtree(os.path.join(root, d), ignore_errors=True)
    os.close(fd)
    os.unlink(lock)
    return len(steps) - keep


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as tmp:
        for s in (1, 2, 3):
            write_shard(shard_path(tmp, s, 0), {"w": b"abc", "b": b"d"})
            write_index(tmp, s, 1)
        w = RankWriter(tmp, 1)
        w.begin(3)
        w.add("w", b"x" * 10)
        w.finish()
        print(newest(tmp), read_shard(shard_path(tmp, 3, 1)), audit(tmp, 3, 2), list(iter_records(shard_path(tmp, 3, 0))))
        print(prune(tmp, 1))
