"""Sharded checkpoint writer and reader with directory locks, write tickets and open file handles."""
from __future__ import annotations

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Iterator, Optional

import torch


class DirLock:
    def __init__(self, root: Path) -> None:
        self.path = root / ".lock"

    def grab(self) -> bool:
        try:
            fd = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)  # clean: near miss, only marks existence and is closed at once
        except FileExistsError:
            return False
        os.close(fd)
        return True

    def drop(self) -> None:
        self.path.unlink(missing_ok=True)


class WriteTickets:
    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.outstanding: dict[int, int] = {}
        self._next = 0
        self._cv = threading.Condition()

    def draw(self, nbytes: int, block: bool = True) -> Optional[int]:
        with self._cv:
            while sum(self.outstanding.values()) + nbytes > self.max_bytes and self.outstanding:
                if not block:
                    return None
                self._cv.wait()
            self._next += 1
            self.outstanding[self._next] = nbytes
            return self._next

    def punch(self, ticket: int) -> None:
        with self._cv:
            self.outstanding.pop(ticket, None)
            self._cv.notify_all()


class ShardFile:
    def __init__(self, path: Path, mode: str = "rb") -> None:
        self.fh: BinaryIO = open(path, mode)  # clean: near miss, a field that close() and __exit__ close
        self.dirty = "w" in mode

    def __enter__(self) -> "ShardFile":
        return self

    def __exit__(self, et: Optional[type], ev: Optional[BaseException], tb: Optional[TracebackType]) -> None:
        self.close()

    def close(self) -> None:
        if self.dirty:
            self.fh.flush()
        self.fh.close()


class LockedDir:
    def __init__(self, lock: DirLock) -> None:
        self.lock = lock
        self.held = False

    def __enter__(self) -> "LockedDir":
        self.held = self.lock.grab()  # leak: __exit__ returns early on a FileNotFoundError it swallows, the lock stays
        return self

    def __exit__(self, et: Optional[type], ev: Optional[BaseException], tb: Optional[TracebackType]) -> bool:
        if et is not None and issubclass(et, FileNotFoundError):
            return True
        if self.held:
            self.lock.drop()
        return False


@dataclass
class PendingWrite:
    ticket: int
    future: Future[int]


@dataclass
class CheckpointWriter:
    root: Path
    tickets: WriteTickets
    threads: ThreadPoolExecutor
    pending: list[PendingWrite] = field(default_factory=list)
    log: Optional[ShardFile] = None

    def _write(self, path: Path, tensor: torch.Tensor) -> int:
        with ShardFile(path, "wb") as shard:  # clean: closed by the with statement
            return shard.fh.write(tensor.numpy().tobytes())

    def submit(self, name: str, tensor: torch.Tensor) -> None:
        ticket = self.tickets.draw(tensor.nbytes)  # clean: near miss, goes into pending and drain punches it
        assert ticket is not None
        fut = self.threads.submit(self._write, self.root / f"{name}.bin", tensor.cpu())
        self.pending.append(PendingWrite(ticket, fut))

    def submit_background(self, name: str, tensor: torch.Tensor) -> bool:
        ticket = self.tickets.draw(tensor.nbytes, block=False)  # clean: near miss, the done callback punches it
        if ticket is None:
            return False
        fut = self.threads.submit(self._write, self.root / f"{name}.bin", tensor.cpu())
        fut.add_done_callback(lambda _f, t=ticket: self.tickets.punch(t))
        return True

    def submit_delta(self, name: str, tensor: torch.Tensor, base: torch.Tensor) -> bool:
        ticket = self.tickets.draw(tensor.nbytes)  # leak: an unchanged tensor returns early with the ticket outstanding
        assert ticket is not None
        delta = tensor - base
        if not bool(delta.any()):
            return False
        fut = self.threads.submit(self._write, self.root / f"{name}.delta", delta)
        self.pending.append(PendingWrite(ticket, fut))
        return True

    def drain(self) -> int:
        total = 0
        while self.pending:
            item = self.pending.pop()
            try:
                total += item.future.result()
            except OSError:
                total -= 1
            finally:
                self.tickets.punch(item.ticket)
        return total

    def rotate_log(self, step: int) -> None:
        self.log = ShardFile(self.root / f"log-{step}.bin", "wb")  # leak: the log of the last rotation is overwritten without close

    def finalize(self, step: int) -> bool:
        lock = DirLock(self.root)
        if not lock.grab():  # clean: near miss, dropped on both the incomplete and the complete way
            return False
        if self.drain() < 0:
            lock.drop()
            return False
        (self.root / "latest").write_text(str(step))
        lock.drop()
        if self.log is not None:
            self.log.close()
            self.log = None
        return True

    def prune(self, steps: list[int]) -> int:
        removed = 0
        for step in steps:
            lock = DirLock(self.root / str(step))
            if not lock.grab():  # leak: a directory without its marker is skipped with the lock file left
                continue
            marker = lock.path.parent / "complete"
            if not marker.exists():
                continue
            marker.unlink()
            lock.drop()
            removed += 1
        return removed


def list_shards(root: Path) -> list[str]:
    with LockedDir(DirLock(root)):  # clean: dropped by __exit__, listing does not open single files
        return sorted(p.name for p in root.iterdir() if p.suffix == ".bin")


def iter_shards(paths: list[Path]) -> Iterator[bytes]:
    for path in paths:
        shard = ShardFile(path)  # leak: an empty shard ends the iteration with the handle open
        head = shard.fh.read(8)
        if not head:
            return
        yield head + shard.fh.read()
        shard.close()


def verify_shards(paths: list[Path], sizes: dict[str, int]) -> list[str]:
    bad: list[str] = []
    opened = [ShardFile(p) for p in paths]  # clean: near miss, all of them are closed in the loop below
    for path, shard in zip(paths, opened):
        if len(shard.fh.read()) != sizes.get(path.name, -1):
            bad.append(path.name)
        shard.close()
    return bad
