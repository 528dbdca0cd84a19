from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from dataclasses import dataclass
from typing import Any, Iterator, Optional, Sequence

import torch

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class PinnedBlock:
    data: torch.Tensor
    length: int = 0
    event: Optional[torch.cuda.Event] = None


class PinnedPool:
    def __init__(self, blocks: int, nbytes: int) -> None:
        self._queue: queue.Queue[PinnedBlock] = queue.Queue()
        self.nbytes = nbytes
        for _ in range(blocks):
            self._queue.put(PinnedBlock(torch.empty(nbytes, dtype=torch.uint8).pin_memory()))

    def get_block(self, timeout: float = 60.0) -> Optional[PinnedBlock]:
        try:
            return self._queue.get(timeout=timeout)
        except queue.Empty:
            return None

    def recycle(self, block: PinnedBlock) -> None:
        block.length = 0
        block.event = None
        self._queue.put(block)


class ShardCursor:
    def __init__(self, path: str) -> None:
        self.path = path
        self.file = open(path, "rb", buffering=0)  # clean: owned by the cursor, close() closes it

    def read_into(self, block: PinnedBlock) -> int:
        block.length = self.file.readinto(block.data.numpy()) or 0
        return block.length

    def close(self) -> None:
        self.file.close()


class ShardReader:
    def __init__(self, paths: Sequence[str], pool: PinnedPool) -> None:
        self.paths = list(paths)
        self.pool = pool
        self.cursor: Optional[ShardCursor] = None
        self._next_path = 0

    def _advance(self) -> bool:
        if self._next_path >= len(self.paths):
            return False
        if self.cursor is not None:
            self.cursor.close()
        self.cursor = ShardCursor(self.paths[self._next_path])  # clean: near miss, the previous cursor is closed first, close() closes the last
        self._next_path += 1
        return True

    def next_block(self) -> Optional[PinnedBlock]:
        if self.cursor is None and not self._advance():
            return None
        block = self.pool.get_block()  # leak: the end of the last shard returns None with the block held
        if block is None:
            return None
        while self.cursor.read_into(block) == 0:
            if not self._advance():
                return None
        return block

    def skip(self, n: int) -> int:
        skipped = 0
        for _ in range(n):
            block = self.next_block()  # clean: near miss, recycled before every break
            if block is None:
                break
            short = block.length < self.pool.nbytes
            self.pool.recycle(block)
            if short:
                break
            skipped += 1
        return skipped

    def peek_header(self, path: str) -> Optional[bytes]:
        cursor = ShardCursor(path)  # clean: near miss, closed in finally
        try:
            head = cursor.file.read(16)
            if len(head) < 16:
                return None
            return head
        finally:
            cursor.close()

    def count_empty(self) -> int:
        empty = 0
        for path in self.paths:
            cursor = ShardCursor(path)  # leak: an empty shard is counted and skipped without close
            if not cursor.file.read(1):
                empty += 1
                continue
            cursor.close()
        return empty

    def close(self) -> None:
        if self.cursor is not None:
            self.cursor.close()
            self.cursor = None


class PrefetchLoader:
    def __init__(self, reader: ShardReader, pool: PinnedPool, depth: int, device: torch.device) -> None:
        self.reader = reader
        self.pool = pool
        self.device = device
        self.ready: queue.Queue[Optional[PinnedBlock]] = queue.Queue(maxsize=depth)
        self.copying: deque[PinnedBlock] = deque()
        self.stop = threading.Event()
        self.failed = False
        self.thread: Optional[threading.Thread] = None

    def __enter__(self) -> PrefetchLoader:
        self.thread = threading.Thread(target=self._fill, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, exc_type: Any, exc: Any, tb: Any) -> None:
        self.stop.set()
        if self.failed:
            logger.error("prefetch thread failed on %s", self.reader.paths)
            self.reader.close()
            return
        while self.thread is not None and self.thread.is_alive():
            self._drain()
            self.thread.join(timeout=0.1)
        self._drain()
        while self.copying:
            self._reap(self.copying.popleft())
        self.reader.close()

    def _drain(self) -> None:
        while not self.ready.empty():
            block = self.ready.get_nowait()
            if block is not None:
                self.pool.recycle(block)

    def _fill(self) -> None:
        try:
            while not self.stop.is_set():
                block = self.reader.next_block()  # leak: after a failed read __exit__ returns before it drains the ready queue
                self.ready.put(block)
                if block is None:
                    return
        except OSError:
            self.failed = True
            self.ready.put(None)

    def _reap(self, block: PinnedBlock) -> None:
        if block.event is not None:
            block.event.synchronize()
        self.pool.recycle(block)

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            block = self.ready.get()
            if block is None:
                return
            gpu = block.data[: block.length].to(self.device, non_blocking=True)
            block.event = torch.cuda.Event()
            block.event.record()
            self.copying.append(block)
            while len(self.copying) > 2:
                self._reap(self.copying.popleft())
            yield gpu


def collate_pinned(samples: Sequence[torch.Tensor], pool: PinnedPool) -> Optional[torch.Tensor]:
    block = pool.get_block(timeout=1.0)  # leak: an oversized batch falls back to torch.cat and forgets the block
    if block is None:
        return torch.cat([s.reshape(-1) for s in samples])
    total = sum(s.numel() for s in samples)
    if total > pool.nbytes:
        return torch.cat([s.reshape(-1) for s in samples])
    offset = 0
    for sample in samples:
        block.data[offset : offset + sample.numel()].copy_(sample.reshape(-1))
        offset += sample.numel()
    out = block.data[:total].to("cuda")
    pool.recycle(block)
    return out


def gather_column(reader: ShardReader, pool: PinnedPool, stride: int) -> list[int]:
    values: list[int] = []
    while (block := reader.next_block()) is not None:  # clean: near miss, recycled in finally although short blocks continue
        try:
            if block.length < stride:
                continue
            values.extend(block.data[: block.length : stride].tolist())
        finally:
            pool.recycle(block)
    return values
