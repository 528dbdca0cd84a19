"""Checkpoint writer: bandwidth shares, directory leases and the files themselves."""
from __future__ import annotations

import hashlib
import logging
import os
import shutil
import threading
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO, Callable, Dict, Iterator, List, Optional

log = logging.getLogger("checkpoint")

_io_slots = threading.Semaphore(4)
_leases: Dict[str, int] = {}
_leases_lock = threading.Lock()


def lease_dir(path: Path) -> bool:
    """True when the directory is ours until unlease_dir(); nested leases of one process are refused."""
    with _leases_lock:
        if str(path) in _leases:
            return False
        _leases[str(path)] = os.getpid()
        return True


def unlease_dir(path: Path) -> None:
    with _leases_lock:
        _leases.pop(str(path), None)


class BandwidthShare:
    def __init__(self, rate: int, owner: "BandwidthPool") -> None:
        self.rate = rate
        self.owner = owner
        self.returned = False

    def release(self) -> None:
        """A second call does nothing."""
        if not self.returned:
            self.returned = True
            self.owner._take_back(self.rate)


class BandwidthPool:
    def __init__(self, total: int) -> None:
        self._left = total
        self._lock = threading.Lock()

    def request(self, rate: int) -> Optional[BandwidthShare]:
        with self._lock:
            if rate > self._left:
                return None
            self._left -= rate
        return BandwidthShare(rate, self)

    def request_up_to(self, rate: int) -> BandwidthShare:
        with self._lock:
            granted = min(rate, self._left)
            self._left -= granted
        return BandwidthShare(granted, self)

    def _take_back(self, rate: int) -> None:
        with self._lock:
            self._left += rate


@contextmanager
def io_slot() -> Iterator[None]:
    _io_slots.acquire()  # clean: released in finally
    try:
        yield
    finally:
        _io_slots.release()


def write_shard(pool: BandwidthPool, path: Path, data: bytes) -> int:
    share = pool.request_up_to(len(data))  # clean: released after the write
    with io_slot():  # clean: the context manager releases it
        with open(path, "wb") as out:  # clean: closed by with
            step = max(1, share.rate // 8)
            for at in range(0, len(data), step):
                out.write(data[at : at + step])
    share.release()
    return share.rate


def write_if_new(pool: BandwidthPool, path: Path, data: bytes) -> bool:
    share = pool.request_up_to(len(data))  # leak: the same digest returns before release
    digest = hashlib.sha1(data).hexdigest()
    side = path.with_suffix(".sha1")
    if side.exists() and side.read_text() == digest:
        return False
    path.write_bytes(data)
    side.write_text(digest)
    share.release()
    return True


def prune(root: Path, keep: int) -> List[str]:
    removed: List[str] = []
    folders = sorted(p for p in root.iterdir() if p.is_dir())
    for folder in folders[: max(0, len(folders) - keep)]:
        if not lease_dir(folder):  # leak: a folder with the marker "keep" is passed over with its lease
            continue
        if (folder / "keep").exists():
            log.info("%s is kept", folder)
            continue
        shutil.rmtree(folder)
        removed.append(folder.name)
        unlease_dir(folder)
    return removed


def verify(path: Path, expected: Dict[str, str]) -> bool:
    _io_slots.acquire()  # leak: the first wrong digest returns without a release
    for name, digest in expected.items():
        data = (path / name).read_bytes()
        if hashlib.sha1(data).hexdigest() != digest:
            log.error("%s/%s is damaged", path, name)
            return False
    _io_slots.release()
    return True


def open_shards(path: Path, count: int) -> List[BinaryIO]:
    """The caller closes the files."""
    return [open(path / f"shard-{i}", "rb") for i in range(count)]  # clean: handed to the caller


def total_size(path: Path, count: int) -> int:
    total = 0
    for src in open_shards(path, count):  # leak: the files are read once and never closed
        total += src.seek(0, os.SEEK_END)
    return total


def reserve_upload(pool: BandwidthPool, path: Path, rate: int, stack: ExitStack) -> bool:
    """The stack of the caller gives both back."""
    share = pool.request(rate)  # clean: near miss, its release() is a callback of the caller's stack
    if share is None:
        return False
    stack.callback(share.release)
    if lease_dir(path):  # clean: the stack gives it back
        stack.callback(unlease_dir, path)
        return True
    return False


def upload(pool: BandwidthPool, path: Path, send: Callable[[Path], int]) -> int:
    with ExitStack() as stack:
        if not reserve_upload(pool, path, 1 << 16, stack):  # clean: near miss, the stack gives it back
            return 0
        return send(path)


def detach_upload(pool: BandwidthPool, path: Path, send: Callable[[Path], int]) -> int:
    stack = ExitStack()
    share = pool.request_up_to(1 << 16)  # leak: pop_all() moves the callback to a stack that nobody closes
    stack.callback(share.release)
    with stack:
        sent = send(path)
        stack.pop_all()
    return sent


class AsyncSaver:
    """A thread saves in the background; the share travels with it."""

    def __init__(self, pool: BandwidthPool) -> None:
        self.pool = pool
        self.threads: List[threading.Thread] = []

    def save(self, path: Path, data: bytes) -> bool:
        share = self.pool.request(len(data))  # clean: near miss, the thread releases it when it is done
        if share is None:
            return False
        thread = threading.Thread(target=self._work, args=(path, data, share))
        self.threads.append(thread)
        thread.start()
        return True

    def _work(self, path: Path, data: bytes, share: BandwidthShare) -> None:
        try:
            path.write_bytes(data)
        finally:
            share.release()

    def save_small(self, path: Path, data: bytes) -> None:
        share = self.pool.request_up_to(4096)  # leak: handed to a thread that never releases it
        thread = threading.Thread(target=self._work_small, args=(path, data, share))
        self.threads.append(thread)
        thread.start()

    def _work_small(self, path: Path, data: bytes, share: BandwidthShare) -> None:
        for at in range(0, len(data), max(1, share.rate)):
            with open(path, "ab") as out:  # clean: closed by with
                out.write(data[at : at + share.rate])

    def join(self) -> None:
        while self.threads:
            self.threads.pop().join()
