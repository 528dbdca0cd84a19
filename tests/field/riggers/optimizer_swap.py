"""Optimizer states on NVMe: tiles are read, updated on the CPU and written back in a software pipeline."""
from __future__ import annotations

import os
import queue
import threading
from dataclasses import dataclass

import numpy as np

TILE = 1 << 22


class TilePool:
    """Aligned host tiles for direct I/O. acquire() blocks, acquire_nowait() gives None."""

    def __init__(self, tiles: int, elems: int = TILE):
        self.elems = elems
        self._q: queue.LifoQueue = queue.LifoQueue()
        for _ in range(tiles):
            self._q.put(np.zeros(elems, dtype=np.float32))

    def acquire(self) -> np.ndarray:
        return self._q.get()

    def acquire_nowait(self) -> np.ndarray | None:
        try:
            return self._q.get_nowait()
        except queue.Empty:
            return None

    def release(self, tile: np.ndarray) -> None:
        self._q.put(tile)

    def acquire_trio(self) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """Tiles for the parameter and both moments."""
        p = self.acquire_nowait()  # clean: released on both failures, otherwise handed on
        if p is None:
            return None
        m = self.acquire_nowait()  # leak: where the third is missing only p is released
        if m is None:
            self.release(p)
            return None
        v = self.acquire_nowait()  # clean: handed on
        if v is None:
            self.release(p)
            return None
        return p, m, v


class SwapFile:
    """One file per optimizer state, addressed by tile number."""

    def __init__(self, path: str, elems: int):
        self.path = path
        self.elems = elems
        self.fd = open(path, "r+b", buffering=0)  # clean: close() closes it

    def read(self, number: int, into: np.ndarray) -> int:
        self.fd.seek(number * self.elems * 4)
        return self.fd.readinto(memoryview(into).cast("B")) or 0

    def write(self, number: int, tile: np.ndarray) -> None:
        self.fd.seek(number * self.elems * 4)
        self.fd.write(memoryview(tile).cast("B"))

    def close(self) -> None:
        self.fd.close()


class SwapSet:
    def __init__(self, folder: str, elems: int):
        self.folder = folder
        self.elems = elems
        self.files: dict[str, SwapFile] = {}
        self.journal = None

    def open_all(self, names: list[str]) -> None:
        for n in names:
            if n not in self.files:
                path = os.path.join(self.folder, n)
                self.files[n] = SwapFile(path, self.elems)  # clean: close_all closes each
        self.journal = open(os.path.join(self.folder, "journal"), "ab")  # leak: close_all leaves it open

    def note(self, step: int) -> None:
        self.journal.write(step.to_bytes(8, "little"))
        self.journal.flush()

    def close_all(self) -> None:
        while self.files:
            _, f = self.files.popitem()
            f.close()


@dataclass
class Stagework:
    number: int
    tile: np.ndarray
    dirty: bool = False


class Pipeline:
    """Reader thread, update on the caller's thread, writer thread."""

    def __init__(self, pool: TilePool, src: SwapFile):
        self.pool = pool
        self.src = src
        self.loaded: queue.Queue[Stagework | None] = queue.Queue(2)
        self.dirty: queue.Queue[Stagework | None] = queue.Queue(2)

    def _reader(self, numbers: list[int]) -> None:
        for n in numbers:
            tile = self.pool.acquire()  # clean: near miss, through both queues to _writer
            self.src.read(n, tile)
            self.loaded.put(Stagework(n, tile))
        self.loaded.put(None)

    def _writer(self) -> None:
        while True:
            item = self.dirty.get()
            if item is None:
                return
            if item.dirty:
                self.src.write(item.number, item.tile)
            self.pool.release(item.tile)

    def run(self, numbers: list[int], update) -> int:
        r = threading.Thread(target=self._reader, args=(numbers,), daemon=True)
        w = threading.Thread(target=self._writer, daemon=True)
        r.start()
        w.start()
        changed = 0
        while (item := self.loaded.get()) is not None:
            item.dirty = bool(update(item.number, item.tile))
            changed += item.dirty
            self.dirty.put(item)
        self.dirty.put(None)
        r.join()
        w.join()
        return changed


class FilterPipeline(Pipeline):
    """Only tiles that `wanted` accepts take part; the others are read for their statistics."""

    def __init__(self, pool: TilePool, src: SwapFile, wanted):
        super().__init__(pool, src)
        self.wanted = wanted
        self.skipped = 0.0

    def _reader(self, numbers: list[int]) -> None:
        for n in numbers:
            tile = self.pool.acquire()  # leak: an unwanted tile goes neither into the queue nor back
            self.src.read(n, tile)
            if self.wanted(n):
                self.loaded.put(Stagework(n, tile))
            else:
                self.skipped += float(tile.sum())
        self.loaded.put(None)


def adam_tile(pool: TilePool, files: dict[str, SwapFile], number: int, grad: np.ndarray, lr: float) -> bool:
    trio = pool.acquire_trio()  # clean: all three are released at the end
    if trio is None:
        return False
    p, m, v = trio
    for name, t in zip(("p", "m", "v"), trio):
        files[name].read(number, t)
    m *= 0.9
    m += 0.1 * grad
    v *= 0.95
    v += 0.05 * grad * grad
    p -= lr * m / (np.sqrt(v) + 1e-8)
    for name, t in zip(("p", "m", "v"), trio):
        files[name].write(number, t)
        pool.release(t)
    return True


def load_tile(pool: TilePool, f: SwapFile, number: int) -> np.ndarray | None:
    """The tile with its contents, or None behind the end of the file."""
    tile = pool.acquire()  # clean: near miss, released when nothing was read, else handed on
    if f.read(number, tile) == 0:
        pool.release(tile)
        return None
    return tile


def export_moments(pool: TilePool, f: SwapFile, tiles: int) -> np.ndarray:
    parts = []
    for n in range(tiles):
        tile = load_tile(pool, f, n)  # leak: copied to the list of parts, never released
        if tile is None:
            break
        parts.append(tile.astype(np.float16))
    return np.concatenate(parts) if parts else np.zeros(0, np.float16)


def compare_files(pool: TilePool, a: SwapFile, b: SwapFile, tiles: int) -> int:
    """Number of the first tile that differs, or -1."""
    for n in range(tiles):
        x = load_tile(pool, a, n)  # leak: stays when b ends before a
        y = load_tile(pool, b, n)  # leak: stays when a ends before b
        if x is None or y is None:
            return -1 if x is y else n
        same = np.array_equal(x, y)
        pool.release(x)
        pool.release(y)
        if not same:
            return n
    return -1
