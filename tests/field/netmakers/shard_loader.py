"""Streaming loader: worker processes fill shared-memory cells, the trainer drains them."""
from __future__ import annotations

import collections
import io
import tarfile
from multiprocessing import shared_memory
from typing import Callable, Iterator, NamedTuple

import numpy as np
import torch


class CellInfo(NamedTuple):
    cell: int
    length: int
    key: str


class CellBank:
    """N equal cells in one shared-memory segment; the numbers of idle cells sit in a deque."""

    def __init__(self, n: int, cell_bytes: int) -> None:
        self.n, self.cell_bytes = n, cell_bytes
        self.shm = shared_memory.SharedMemory(create=True, size=n * cell_bytes)  # clean: closed and unlinked by shutdown()
        self._idle = collections.deque(range(n))

    def grab(self) -> int | None:
        return self._idle.popleft() if self._idle else None  # clean: handed to the caller

    def drop(self, cell: int) -> None:
        self._idle.append(cell)

    def mem(self, cell: int) -> memoryview:
        lo = cell * self.cell_bytes
        return self.shm.buf[lo:lo + self.cell_bytes]

    def shutdown(self) -> None:
        self.shm.close()
        self.shm.unlink()


def iter_tar(path: str) -> Iterator[tuple[str, bytes]]:
    tar = tarfile.open(path)  # clean: closed in finally, also when the generator is closed
    try:
        for member in tar:
            if not member.isfile():
                continue
            with tar.extractfile(member) as f:  # clean: context manager
                blob = f.read()
            yield member.name, blob
    finally:
        tar.close()


def count_samples(path: str, suffix: str) -> int:
    tar = tarfile.open(path)  # leak: an empty archive returns before close
    names = tar.getnames()
    if not names:
        return 0
    n = sum(name.endswith(suffix) for name in names)
    tar.close()
    return n


class ShardReader:
    def __init__(self, bank: CellBank, decode: Callable[[bytes], np.ndarray | None]) -> None:
        self.bank = bank
        self.decode = decode
        self.skipped = 0

    def fill(self, key: str, arr: np.ndarray, cell: int) -> CellInfo:
        raw = arr.tobytes()
        self.bank.mem(cell)[: len(raw)] = raw
        return CellInfo(cell, len(raw), key)

    def samples(self, path: str) -> Iterator[CellInfo]:
        """Yields filled cells; whoever iterates owns each cell it was given."""
        for key, blob in iter_tar(path):
            cell = self.bank.grab()  # leak: a sample that does not decode continues without drop
            if cell is None:
                return
            arr = self.decode(blob)
            if arr is None:
                self.skipped += 1
                continue
            yield self.fill(key, arr, cell)

    def samples_filtered(self, path: str, keep: Callable[[str], bool]) -> Iterator[CellInfo]:
        cell: int | None = None
        for key, blob in iter_tar(path):
            if cell is None:
                cell = self.bank.grab()  # clean: near miss, a cell left over from a skipped sample serves the next one
                if cell is None:
                    return
            arr = self.decode(blob) if keep(key) else None
            if arr is None:
                self.skipped += 1
                continue
            info = self.fill(key, arr, cell)
            cell = None
            yield info
        if cell is not None:
            self.bank.drop(cell)

    def lengths(self, path: str) -> Iterator[tuple[str, int]]:
        for info in self.samples(path):  # clean: each cell is dropped before its length is passed on
            self.bank.drop(info.cell)
            yield info.key, info.length

    def longest(self, path: str) -> str:
        best = CellInfo(-1, -1, "")
        for info in self.samples(path):  # leak: the cells of the samples are never dropped
            if info.length > best.length:
                best = info
        return best.key


class Batch:
    """A batch which refers to its cells; recycle() when the copy to the device is done."""

    def __init__(self, bank: CellBank) -> None:
        self.bank = bank
        self.infos: list[CellInfo] = []

    def add(self, info: CellInfo) -> None:
        self.infos.append(info)

    def tensors(self) -> list[torch.Tensor]:
        return [torch.frombuffer(self.bank.mem(i.cell)[: i.length], dtype=torch.uint8) for i in self.infos]

    def recycle(self) -> None:
        for i in self.infos:
            self.bank.drop(i.cell)
        self.infos.clear()

    def __len__(self) -> int:
        return len(self.infos)


class ShardLoader:
    def __init__(self, reader: ShardReader, paths: list[str], batch_size: int, drop_last: bool = True) -> None:
        self.reader = reader
        self.paths = paths
        self.batch_size = batch_size
        self.drop_last = drop_last

    def _flat(self) -> Iterator[CellInfo]:
        for p in self.paths:
            yield from self.reader.samples(p)  # clean: passed through to the consumer

    def batches(self) -> Iterator[Batch]:
        batch = Batch(self.reader.bank)
        for info in self._flat():  # leak: with drop_last the short last batch is dropped with its cells
            batch.add(info)
            if len(batch) == self.batch_size:
                yield batch
                batch = Batch(self.reader.bank)
        if len(batch) and not self.drop_last:
            yield batch

    def batches_keyed(self, seen: set[str]) -> Iterator[Batch]:
        batch = Batch(self.reader.bank)
        for info in self._flat():  # clean: near miss, repeats are dropped at once and the last batch is recycled
            if info.key in seen:
                self.reader.bank.drop(info.cell)
                continue
            seen.add(info.key)
            batch.add(info)
            if len(batch) == self.batch_size:
                yield batch
                batch = Batch(self.reader.bank)
        if len(batch) and not self.drop_last:
            yield batch
        else:
            batch.recycle()

    def to_device(self, device: torch.device) -> Iterator[list[torch.Tensor]]:
        for batch in self.batches_keyed(set()):  # clean: recycled before the tensors are passed on
            out = [t.to(device) for t in batch.tensors()]
            batch.recycle()
            yield out


class ShuffleBuffer:
    """Reservoir of filled cells. close() gives back what was not drawn."""

    def __init__(self, bank: CellBank, size: int, seed: int) -> None:
        self.bank = bank
        self.size = size
        self.rng = np.random.default_rng(seed)
        self.pool: list[CellInfo] = []

    def push(self, info: CellInfo) -> CellInfo | None:
        if len(self.pool) < self.size:
            self.pool.append(info)
            return None
        i = int(self.rng.integers(self.size))
        out, self.pool[i] = self.pool[i], info
        return out

    def prime(self, reader: ShardReader, path: str) -> None:
        for info in reader.samples(path):  # clean: near miss, moved into self.pool, and what push() gives out is dropped
            spilled = self.push(info)
            if spilled is not None:
                self.bank.drop(spilled.cell)

    def duplicate(self, i: int) -> bool:
        src = self.pool[i]
        cell = self.bank.grab()  # leak: not dropped when the reservoir is full
        if cell is None or len(self.pool) >= self.size:
            return False
        self.bank.mem(cell)[: src.length] = bytes(self.bank.mem(src.cell)[: src.length])
        self.push(src._replace(cell=cell))
        return True

    def close(self) -> None:
        while self.pool:
            self.bank.drop(self.pool.pop().cell)


def bytes_of(bank: CellBank, info: CellInfo) -> io.BytesIO:
    return io.BytesIO(bytes(bank.mem(info.cell)[: info.length]))
