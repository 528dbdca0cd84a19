"""Worker threads: lease a shard, pack it, write it."""
from __future__ import annotations

import logging
import queue
import threading
from pathlib import Path

import numpy as np

from .buffers import BufferPool, PoolDry, RowBuffer
from .leases import LeaseBoard, LeaseLost, ShardLease
from .packer import Packer

log = logging.getLogger(__name__)


class RowWriter(threading.Thread):
    def __init__(self, path: Path, pool: BufferPool) -> None:
        super().__init__(name=f"writer-{path.stem}")
        self._path = path
        self._pool = pool
        self.rows: queue.SimpleQueue[RowBuffer | None] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        with open(self._path, "wb") as out:  # clean: context manager
            while (row := self.rows.get()) is not None:
                try:
                    out.write(row.ids[: row.used].tobytes())
                finally:
                    self._pool.hand_back(row)

    def finish(self) -> None:
        self.rows.put(None)
        self.join()


class Pipeline:
    def __init__(self, board: LeaseBoard, pool: BufferPool, out: Path, eos: int) -> None:
        self._board = board
        self._pool = pool
        self._out = out
        self._eos = eos
        self._current: ShardLease | None = None

    def _documents(self, shard: Path) -> list[np.ndarray]:
        ids = np.fromfile(shard, np.uint32)
        parts = np.split(ids, np.flatnonzero(ids == self._eos) + 1)
        return [p for p in parts if len(p)]

    def work(self) -> int:
        done = 0
        while (lease := self._board.next()) is not None:  # leak: a shard without documents is skipped without finish() or abandon()
            docs = self._documents(lease.shard)
            if not docs:
                log.info("%s is empty", lease.shard)
                continue
            try:
                self._pack(lease, docs)
            except (PoolDry, LeaseLost) as exc:
                log.warning("%s: %r", lease.shard, exc)
                self._board.abandon(lease)
                continue
            self._board.finish(lease)
            done += 1
        return done

    def _pack(self, lease: ShardLease, docs: list[np.ndarray]) -> None:
        writer = RowWriter(self._out / f"{lease.shard.stem}.bin", self._pool)
        packer = Packer(self._pool, writer.rows.put)
        try:
            for doc in docs:
                lease.check()
                if len(doc) > self._pool.length:
                    packer.add_long(doc)
                else:
                    packer.add(doc)
        finally:
            packer.close()
            writer.finish()

    def repack(self, shard: Path) -> bool:
        """By hand, for one shard; the lease stays ours until release_current()."""
        if self._current is not None:
            self.release_current()
        self._current = self._board.take(shard)  # clean: near miss, the one before was released, release_current() abandons this one
        try:
            self._pack(self._current, self._documents(shard))
        except PoolDry:
            return False
        return True

    def release_current(self) -> None:
        if self._current is not None:
            self._board.abandon(self._current)
            self._current = None

    def compare(self, left: Path, right: Path) -> bool:
        a = self._board.take(left)  # leak: the second shard is packed by somebody else, take() raises LeaseLost and this lock stays
        b = self._board.take(right)  # clean: finally
        try:
            return np.array_equal(np.fromfile(left, np.uint32), np.fromfile(right, np.uint32))
        finally:
            self._board.abandon(b)
            self._board.abandon(a)

    def count(self, shard: Path) -> int:
        with self._board.holding(shard) as lease:  # clean: context manager
            return len(self._documents(lease.shard))

    def sample(self, shard: Path, n: int) -> np.ndarray | None:
        row = self._pool.rent()  # clean: every way out passes the finally
        try:
            for doc in self._documents(shard)[:n]:
                if len(doc) > row.room():
                    return None
                row.append(doc)
            return row.ids[: row.used].copy()
        finally:
            self._pool.hand_back(row)
