"""Preference-pair loader: generators over pinned host buffers."""
from __future__ import annotations

import json
import logging
import queue
import threading
from collections import defaultdict, deque
from typing import Callable, Iterable, Iterator

import torch

log = logging.getLogger("prefs.loader")

IGNORE = -100


class PoolDry(RuntimeError):
    """Nothing came back in time."""


class BadRecord(ValueError):
    pass


class PinnedPool:
    def __init__(self, limit: int, patience: float = 60.0):
        self.limit = limit
        self.patience = patience
        self.total = 0
        self._shelves: dict[int, list[torch.Tensor]] = defaultdict(list)
        self._cond = threading.Condition()

    @staticmethod
    def shelf_of(numel: int) -> int:
        return max(10, (numel - 1).bit_length())

    def get(self, numel: int) -> torch.Tensor:
        key = self.shelf_of(numel)
        with self._cond:
            while True:
                if self._shelves[key]:
                    return self._shelves[key].pop()  # clean: returned to the caller
                if self.total + (1 << key) <= self.limit:
                    buf = torch.empty(1 << key, dtype=torch.int64, pin_memory=True)  # clean: returned to the caller
                    self.total += 1 << key
                    return buf
                if not self._cond.wait(self.patience):
                    raise PoolDry(f"shelf {key}, {self.total} of {self.limit} in use")

    def get_near(self, device: int, numel: int):
        """A buffer whose NUMA tag matches the device, if the shelf has one."""
        shelf = self._shelves[self.shelf_of(numel)]
        with self._cond:
            for _ in range(len(shelf)):
                buf = shelf.pop(0)  # leak: buffers with another tag are taken off the shelf and not put back
                if getattr(buf, "numa", 0) == device // 4:
                    return buf
        return None

    def put(self, buf: torch.Tensor) -> None:
        with self._cond:
            self._shelves[self.shelf_of(buf.numel())].append(buf)
            self._cond.notify()


def read_records(path) -> Iterator[dict]:
    with open(path, encoding="utf-8") as fh:  # clean: with statement
        for lineno, line in enumerate(fh, 1):
            rec = json.loads(line)
            if "chosen" not in rec:
                raise BadRecord(f"{path}:{lineno}")
            yield rec


def grouped(records: Iterable[dict], size: int) -> Iterator[list[dict]]:
    rows = []
    for rec in records:
        rows.append(rec)
        if len(rows) == size:
            yield rows
            rows = []
    if rows:
        yield rows


def fill(buf: torch.Tensor, rows: list[dict], key: str, width: int) -> torch.Tensor:
    mat = buf[: len(rows) * width].view(len(rows), width)
    mat.fill_(IGNORE)
    for i, row in enumerate(rows):
        ids = row[key][:width]
        mat[i, : len(ids)] = torch.as_tensor(ids)
    return mat


def batches(pool: PinnedPool, records, size: int, width: int):
    """Yields (buffer, matrix); the consumer puts the buffer back."""
    for rows in grouped(records, size):
        buf = pool.get(size * width)  # clean: every buffer is yielded and the consumer puts it back
        yield buf, fill(buf, rows, "chosen", width)


def full_batches(pool: PinnedPool, records, size: int, width: int):
    for rows in grouped(records, size):
        buf = pool.get(size * width)  # leak: the short last batch returns with the buffer
        mat = fill(buf, rows, "chosen", width)
        if len(rows) < size:
            log.debug("last batch has %d rows", len(rows))
            return
        yield buf, mat


def scoped_batches(pool: PinnedPool, records, size: int, width: int):
    """The matrix is valid until the next one is asked for."""
    buf = pool.get(size * width)  # clean: near miss, the finally also runs when the consumer leaves early
    try:
        for rows in grouped(records, size):
            yield fill(buf, rows, "chosen", width)
    finally:
        pool.put(buf)


def count_tokens(pool: PinnedPool, path, size=64, width=2048) -> int:
    total = 0
    for buf, mat in batches(pool, read_records(path), size, width):  # clean: put back in each turn
        total += int((mat != IGNORE).sum())
        pool.put(buf)
    return total


def score_file(pool: PinnedPool, path, model: Callable, size=16, width=4096) -> list[float]:
    scores: list[float] = []
    for buf, mat in batches(pool, read_records(path), size, width):  # leak: a batch without targets is skipped with its buffer
        keep = (mat != IGNORE).any(dim=1)
        if not bool(keep.any()):
            scores.extend([0.0] * mat.shape[0])
            continue
        scores.extend(model(mat[keep]).tolist())
        pool.put(buf)
    return scores


def longest(pool: PinnedPool, path, width=8192) -> int:
    best = 0
    for mat in scoped_batches(pool, read_records(path), 8, width):  # clean: the generator puts its own buffer back
        best = max(best, int((mat != IGNORE).sum(dim=1).max()))
        if best == width:
            break
    return best


def pair_batches(pool: PinnedPool, records, size: int, width: int):
    for rows in grouped(records, size):
        good = pool.get(size * width)  # leak: the second get() may raise PoolDry
        bad = pool.get(size * width)  # clean: yielded with its mate, the consumer puts both back
        yield (good, bad), fill(good, rows, "chosen", width), fill(bad, rows, "rejected", width)


class DeviceFeeder:
    """Copies to the GPU without waiting; a buffer is busy until its event is reached."""

    def __init__(self, pool: PinnedPool, device):
        self.pool = pool
        self.device = device
        self._flying: deque = deque()

    def send(self, rows: list[dict], width: int) -> torch.Tensor:
        self.reap()
        buf = self.pool.get(len(rows) * width)  # clean: near miss, waits in _flying until reap() or drain()
        out = fill(buf, rows, "chosen", width).to(self.device, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._flying.append((event, buf))
        return out

    def reap(self) -> None:
        while self._flying and self._flying[0][0].query():
            self.pool.put(self._flying.popleft()[1])

    def drain(self) -> None:
        while self._flying:
            event, buf = self._flying.popleft()
            event.synchronize()
            self.pool.put(buf)


class Prefetcher:
    def __init__(self, pool: PinnedPool, records, size: int, width: int, depth: int = 4):
        self.pool = pool
        self._q: queue.Queue = queue.Queue(depth)
        self._stop = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._pump, args=(records, size, width), daemon=True)
        self._thread.start()

    def _pump(self, records, size, width):
        try:
            for item in pair_batches(self.pool, records, size, width):  # leak: after the stop event the pair in hand is dropped
                while not self._stop.is_set():
                    try:
                        self._q.put(item, timeout=0.2)
                        break
                    except queue.Full:
                        continue
                if self._stop.is_set():
                    return
        except (BadRecord, PoolDry) as e:
            self._error = e
        finally:
            log.debug("pump ends, error=%r", self._error)

    def __iter__(self):
        while self._thread.is_alive() or not self._q.empty():
            try:
                bufs, good, bad = self._q.get(timeout=0.2)  # clean: near miss, the finally puts both back even if the trainer stops here
            except queue.Empty:
                continue
            try:
                yield good, bad
            finally:
                for b in bufs:
                    self.pool.put(b)
        if self._error is not None:
            raise self._error

    def close(self):
        self._stop.set()
        self._thread.join()
        while not self._q.empty():
            bufs, _, _ = self._q.get_nowait()  # clean: put back on the next lines
            for b in bufs:
                self.pool.put(b)
