"""Threaded batch loader with a pinned staging ring and a host memory budget."""
import logging
import queue
import threading
from dataclasses import dataclass
from typing import Any, Iterable, Optional

import torch

logger = logging.getLogger("loader")


class PinnedArena:
    def __init__(self, chunks: int, nbytes: int):
        self._chunks = [torch.empty(nbytes, dtype=torch.uint8).pin_memory() for _ in range(chunks)]
        self._avail = queue.SimpleQueue()
        for i in range(chunks):
            self._avail.put(i)

    def lease(self, timeout: Optional[float] = None) -> Optional["Chunk"]:
        try:
            return Chunk(self, self._avail.get(timeout=timeout))
        except queue.Empty:
            return None

    def _put_back(self, i: int) -> None:
        self._avail.put(i)


class Chunk:
    def __init__(self, arena: PinnedArena, i: int):
        self.arena = arena
        self.i = i
        self.data = arena._chunks[i]
        self.used = 0

    def recycle(self) -> None:
        self.arena._put_back(self.i)

    def __enter__(self) -> "Chunk":
        return self

    def __exit__(self, *exc) -> None:
        self.recycle()


class HostBudget:
    def __init__(self, limit: int):
        self.limit = limit
        self.used = 0
        self._lock = threading.Lock()

    def reserve(self, n: int) -> bool:
        with self._lock:
            if self.used + n > self.limit:
                return False
            self.used += n
            return True

    def refund(self, n: int) -> None:
        with self._lock:
            self.used -= n


@dataclass
class Batch:
    step: int
    chunk: Optional[Chunk]
    tokens: Any = None
    owns_chunk: bool = True

    def release(self) -> None:
        if self.owns_chunk and self.chunk is not None:
            self.chunk.recycle()
        self.chunk = None


class Loader:
    def __init__(self, dataset: Iterable, arena: PinnedArena, budget: HostBudget, depth: int = 4):
        self.dataset = dataset
        self.arena = arena
        self.budget = budget
        self.q: "queue.Queue[Optional[Batch]]" = queue.Queue(depth)
        self._stop = threading.Event()
        self._spare: Optional[Chunk] = None
        self._worker = threading.Thread(target=self._produce, daemon=True)

    def start(self) -> None:
        self._spare = self.arena.lease(timeout=1.0)  # clean: shutdown recycles the spare chunk
        self._worker.start()

    def _produce(self) -> None:
        for step, sample in enumerate(self.dataset):
            if self._stop.is_set():
                break
            raw = torch.as_tensor(sample).view(torch.uint8)
            chunk = self.arena.lease()  # clean: recycled when too long, else moved into the batch on the queue
            if raw.numel() > chunk.data.numel():
                logger.warning("sample %d too long", step)
                chunk.recycle()
                continue
            chunk.data[: raw.numel()].copy_(raw)
            chunk.used = raw.numel()
            self.q.put(Batch(step, chunk))
        self.q.put(None)

    def batches(self, device):
        while True:
            batch = self.q.get()
            if batch is None:
                return
            batch.tokens = batch.chunk.data[: batch.chunk.used].to(device)
            torch.cuda.current_stream().synchronize()
            batch.release()
            yield batch

    def shutdown(self) -> None:
        self._stop.set()
        while True:
            batch = self.q.get()
            if batch is None:
                break
            batch.release()
        if self._spare is not None:
            self._spare.recycle()
            self._spare = None


def make_batch(arena: PinnedArena, step: int, rows: torch.Tensor, shared: Optional[Chunk]) -> Optional[Batch]:
    """Batch over `shared` when given, else over a chunk of its own."""
    chunk = shared if shared is not None else arena.lease(0.1)  # clean: near miss, owned by the batch if not shared
    if chunk is None:
        return None
    chunk.used = rows.numel()
    chunk.data[: chunk.used].copy_(rows.view(torch.uint8).flatten())
    return Batch(step, chunk, owns_chunk=shared is None)


def make_eval_batch(arena: PinnedArena, step: int, rows: torch.Tensor) -> Optional[Batch]:
    chunk = arena.lease(0.1)  # leak: the batch is told that it does not own the chunk, its release skips it
    if chunk is None:
        return None
    chunk.data[: rows.numel()].copy_(rows)
    batch = Batch(step, chunk, owns_chunk=False)
    batch.tokens = chunk.data[: rows.numel()].cuda()
    batch.release()
    return batch


def collate(arena: PinnedArena, samples: list, device) -> Optional[torch.Tensor]:
    with arena.lease() as chunk:  # clean: Chunk.__exit__ recycles
        pos = 0
        for s in samples:
            n = s.numel()
            if pos + n > chunk.data.numel():
                return None
            chunk.data[pos : pos + n].copy_(s)
            pos += n
        return chunk.data[:pos].to(device)


def preload(budget: HostBudget, files: list) -> dict:
    """Read whole files into host memory as far as the budget allows; the entries keep their share."""
    cache = {}
    for path, size in files:
        if not budget.reserve(size):  # clean: refunded for empty files, else kept by the entry for evict
            break
        with open(path, "rb") as fh:  # clean: closed by with
            blob = fh.read()
        if not blob:
            budget.refund(size)
            continue
        cache[path] = (blob, size)
    return cache


def evict(cache: dict, budget: HostBudget, keep: set) -> int:
    gone = 0
    for path in [p for p in cache if p not in keep]:
        _, size = cache.pop(path)
        budget.refund(size)
        gone += size
    return gone


def tokenise_file(budget: HostBudget, path: str, size: int, encode) -> list:
    if not budget.reserve(2 * size):  # leak: refunded for empty files only, the ordinary return keeps it
        return []
    fh = open(path, "rb")  # leak: the empty file returns before close
    text = fh.read()
    if not text:
        budget.refund(2 * size)
        return []
    fh.close()
    return encode(text)


def read_index(path: str) -> list:
    fh = open(path)  # clean: closed before each of the two returns
    head = fh.readline()
    if not head.startswith("v2"):
        fh.close()
        return []
    rows = [tuple(map(int, line.split())) for line in fh]
    fh.close()
    return rows


def merge_indexes(paths: list, out: str) -> int:
    handles = [open(p) for p in paths]  # leak: only the first handle is closed below
    dst = open(out, "w")  # clean: closed at the end
    n = 0
    for rows in zip(*handles):
        for row in rows:
            dst.write(row)
            n += 1
    handles[0].close()
    dst.close()
    return n


def lease_retry(arena: PinnedArena, budget: HostBudget, n: int, tries: int) -> Optional[Chunk]:
    """A chunk plus budget for n bytes; the caller gives both back."""
    for attempt in range(tries):
        if not budget.reserve(n):  # leak: a try without a chunk keeps its reservation and reserves again
            continue
        chunk = arena.lease(0.05 * (attempt + 1))  # clean: handed to the caller
        if chunk is not None:
            return chunk
    return None


def stage_once(arena: PinnedArena, budget: HostBudget, row: torch.Tensor) -> Optional[torch.Tensor]:
    n = row.numel()
    chunk = lease_retry(arena, budget, n, 5)  # clean: recycled and refunded below
    if chunk is None:
        return None
    chunk.data[:n].copy_(row)
    out = chunk.data[:n].cuda()
    chunk.recycle()
    budget.refund(n)
    return out
