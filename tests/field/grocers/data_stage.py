"""Batch staging of the data loader: pinned batches, shard handles, worker tokens."""
from __future__ import annotations

import logging
import queue
import random
import threading
from collections import deque
from typing import BinaryIO, Deque, Dict, Iterator, List, Optional

import torch

log = logging.getLogger(__name__)


class BatchPool:
    """Pinned batch tensors. borrow() gives None when empty."""

    def __init__(self, count: int, shape):
        self._q: "queue.Queue[torch.Tensor]" = queue.Queue()
        for _ in range(count):
            self._q.put(torch.empty(shape, dtype=torch.long).pin_memory())

    def borrow(self, wait: float = 0.0) -> Optional[torch.Tensor]:
        try:
            return self._q.get(timeout=wait) if wait else self._q.get_nowait()
        except queue.Empty:
            return None

    def hand_in(self, batch: torch.Tensor) -> None:
        self._q.put(batch)


class ShardHandles:
    """Counted shard files: open_shard adds a user, close_shard removes one."""

    def __init__(self, root: str):
        self.root = root
        self._open: Dict[str, List] = {}

    def open_shard(self, name: str) -> BinaryIO:
        entry = self._open.get(name)
        if entry is None:
            entry = self._open[name] = [open(f"{self.root}/{name}", "rb"), 0]  # clean: closed by the last user
        entry[1] += 1
        return entry[0]

    def close_shard(self, name: str) -> None:
        entry = self._open[name]
        entry[1] -= 1
        if entry[1] == 0:
            entry[0].close()
            del self._open[name]


class Prefetcher:
    """Fills batches ahead on a thread."""

    def __init__(self, pool: BatchPool, source: Iterator[List[int]], depth: int):
        self.pool = pool
        self.source = source
        self.ready: Deque[torch.Tensor] = deque()
        self.depth = depth
        self.out: Optional[torch.Tensor] = None

    def fill(self) -> None:
        while len(self.ready) < self.depth:
            batch = self.pool.borrow()  # leak: the source is at its end and the batch just borrowed is dropped
            if batch is None:
                return
            try:
                row = next(self.source)
            except StopIteration:
                return
            batch.view(-1)[: len(row)] = torch.tensor(row)
            self.ready.append(batch)

    def next(self) -> Optional[torch.Tensor]:
        if self.out is not None:
            self.pool.hand_in(self.out)
            self.out = None
        self.fill()
        if not self.ready:
            return None
        self.out = self.ready.popleft()
        return self.out

    def close(self) -> None:
        while self.ready:
            self.pool.hand_in(self.ready.popleft())
        if self.out is not None:
            self.pool.hand_in(self.out)
            self.out = None


class ShuffleBuffer:
    def __init__(self, pool: BatchPool, size: int):
        self.pool = pool
        self.size = size
        self.items: List[torch.Tensor] = []

    def add(self, row: List[int]) -> Optional[torch.Tensor]:
        batch = self.pool.borrow(wait=1.0)  # clean: near miss, the one pushed out is returned to the caller, drain ends the rest
        if batch is None:
            return None
        batch.view(-1)[: len(row)] = torch.tensor(row)
        if len(self.items) < self.size:
            self.items.append(batch)
            return None
        at = random.randrange(self.size)
        batch, self.items[at] = self.items[at], batch
        return batch

    def drain(self) -> None:
        for batch in self.items:
            self.pool.hand_in(batch)
        self.items.clear()


class Trainer:
    """Consumes shuffled batches."""

    def __init__(self, pool: BatchPool, shuffle: ShuffleBuffer, step):
        self.pool = pool
        self.shuffle = shuffle
        self.step = step
        self.replay: Deque[torch.Tensor] = deque(maxlen=8)

    def feed(self, row: List[int]) -> None:
        batch = self.shuffle.add(row)  # clean: handed in after the step
        if batch is None:
            return
        self.step(batch.cuda(non_blocking=True))
        torch.cuda.current_stream().synchronize()
        self.pool.hand_in(batch)

    def feed_replay(self, row: List[int]) -> None:
        batch = self.shuffle.add(row)  # leak: the bounded replay deque pushes its oldest out
        if batch is None:
            return
        self.step(batch.cuda())
        self.replay.append(batch)

    def close(self) -> None:
        self.shuffle.drain()
        while self.replay:
            self.pool.hand_in(self.replay.popleft())


class ShardCursor:
    """Reads shards one after the other; seek jumps to another."""

    def __init__(self, shards: ShardHandles, names: List[str]):
        self.shards = shards
        self.names = names
        self.at = 0
        self.name: Optional[str] = None
        self.fh: Optional[BinaryIO] = None

    def read(self, n: int) -> bytes:
        while self.at < len(self.names):
            if self.fh is None:
                self.name = self.names[self.at]
                self.fh = self.shards.open_shard(self.name)  # leak: seek sets the handle None without close_shard
            data = self.fh.read(n)
            if data:
                return data
            self.shards.close_shard(self.name)
            self.fh = None
            self.at += 1
        return b""

    def seek(self, at: int) -> None:
        if at != self.at:
            self.at = at
            self.fh = None

    def close(self) -> None:
        if self.fh is not None:
            self.shards.close_shard(self.name)
            self.fh = None


class MixReader:
    """Reads several corpora at given weights."""

    def __init__(self, shards: ShardHandles):
        self.shards = shards
        self.members: Dict[str, BinaryIO] = {}

    def set_mix(self, names: List[str]) -> None:
        for name in list(self.members):
            if name not in names:
                del self.members[name]
                self.shards.close_shard(name)
        for name in names:
            if name not in self.members:
                self.members[name] = self.shards.open_shard(name)  # clean: near miss, the names that stay are skipped and the others closed

    def peek(self, name: str) -> bytes:
        fh = self.shards.open_shard(name)  # leak: a member shard returns without taking off this user
        fh.seek(0)
        head = fh.read(16)
        if name in self.members:
            return head
        self.shards.close_shard(name)
        return head

    def close(self) -> None:
        for name in self.members:
            self.shards.close_shard(name)
        self.members.clear()


class TokenGate:
    """Workers need a token for decoding; held tokens are kept by worker id."""

    def __init__(self, n: int):
        self.sem = threading.Semaphore(n)
        self.held: Dict[int, int] = {}

    def enter(self, worker: int) -> bool:
        if not self.sem.acquire(timeout=10.0):  # clean: near miss, counted per worker, leave and lost release as many
            return False
        self.held[worker] = self.held.get(worker, 0) + 1
        return True

    def leave(self, worker: int) -> None:
        if self.held.get(worker, 0) > 0:
            self.held[worker] -= 1
            self.sem.release()

    def lost(self, worker: int) -> None:
        for _ in range(self.held.pop(worker, 0)):
            self.sem.release()


def decode(gate: TokenGate, worker: int, samples: List[bytes], fn) -> List[object]:
    out: List[object] = []
    for raw in samples:
        if not gate.enter(worker):  # leak: a sample that does not decode is skipped without leave
            break
        try:
            out.append(fn(raw))
        except ValueError:
            log.debug("bad sample")
            continue
        gate.leave(worker)
    return out


def preview(pool: BatchPool, shards: ShardHandles, name: str) -> Optional[List[int]]:
    fh = shards.open_shard(name)  # clean: finally
    try:
        batch = pool.borrow()  # leak: a short read returns before hand_in
        if batch is None:
            return None
        data = fh.read(batch.numel())
        if len(data) < batch.numel():
            return list(data)
        batch.view(-1).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        head = batch.view(-1)[:16].tolist()
        pool.hand_in(batch)
        return head
    finally:
        shards.close_shard(name)
