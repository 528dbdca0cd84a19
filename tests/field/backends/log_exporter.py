"""Ships request logs: records are gathered in batches, batches leave by credits."""
from __future__ import annotations

import json
import logging
import os
import queue
import threading
from dataclasses import dataclass, field
from typing import TextIO

log = logging.getLogger("export")


class BatchPool:
    """Recycles the lists that records are gathered in."""

    def __init__(self, count: int) -> None:
        self._ready: queue.LifoQueue[list] = queue.LifoQueue()
        for _ in range(count):
            self._ready.put([])

    def fresh(self) -> list | None:
        try:
            return self._ready.get_nowait()  # clean: handed to the caller
        except queue.Empty:
            return None

    def fresh_wait(self, timeout: float) -> list | None:
        try:
            batch = self._ready.get(timeout=timeout)  # clean: near miss, one with stale records is emptied and handed on too
        except queue.Empty:
            return None
        if batch:
            batch.clear()
        return batch

    def done_with(self, batch: list) -> None:
        batch.clear()
        self._ready.put(batch)


class Credits:
    """Send credits granted by the collector."""

    def __init__(self, count: int) -> None:
        self._sem = threading.BoundedSemaphore(count)

    def spend(self, timeout: float = 0.5) -> bool:
        return self._sem.acquire(timeout=timeout)  # clean: the credit belongs to the caller

    def earn(self) -> None:
        self._sem.release()


@dataclass
class Stream:
    name: str
    batch: list | None = None
    rejected: int = 0
    backlog: list[list] = field(default_factory=list)


class Collector:
    def post(self, name: str, lines: list[str]) -> int:
        return 202 if lines else 204


class Exporter:
    def __init__(self, pool: BatchPool, credits: Credits, collector: Collector) -> None:
        self._pool = pool
        self._credits = credits
        self._collector = collector
        self._streams: dict[str, Stream] = {}
        self._files: dict[str, TextIO] = {}

    def stream(self, name: str) -> Stream:
        return self._streams.setdefault(name, Stream(name))

    def record(self, name: str, entry: dict) -> bool:
        stream = self.stream(name)
        if stream.batch is None:
            stream.batch = self._pool.fresh()  # clean: near miss, only where the stream has none; rotate or close moves it on
            if stream.batch is None:
                stream.rejected += 1
                return False
        stream.batch.append(json.dumps(entry))
        return True

    def rotate(self, stream: Stream) -> bool:
        batch = self._pool.fresh_wait(0.1)  # leak: an empty current batch returns and the new one is dropped
        if batch is None:
            return False
        if not stream.batch:
            return False
        stream.backlog.append(stream.batch)
        stream.batch = batch
        return True

    def ship(self, stream: Stream) -> int:
        shipped = 0
        while stream.backlog:
            if not self._credits.spend():  # leak: a refusal of the collector breaks out with the credit spent
                break
            batch = stream.backlog[0]
            if self._collector.post(stream.name, batch) != 202:
                log.warning("%s: collector refused %d lines", stream.name, len(batch))
                break
            stream.backlog.pop(0)
            shipped += len(batch)
            self._pool.done_with(batch)
            self._credits.earn()
        return shipped

    def ship_now(self, name: str, entries: list[dict]) -> bool:
        if not self._credits.spend(timeout=0):  # clean: near miss, earned again when there is no batch, and in the finally
            return False
        batch = self._pool.fresh()  # clean: returned to the pool by the finally
        if batch is None:
            self._credits.earn()
            return False
        try:
            batch.extend(json.dumps(e) for e in entries)
            return self._collector.post(name, batch) == 202
        finally:
            self._pool.done_with(batch)
            self._credits.earn()

    def sample(self, name: str, entries: list[dict], every: int) -> list[str]:
        batch = self._pool.fresh()  # leak: a slice of it is returned and the batch itself forgotten
        if batch is None:
            return []
        batch.extend(json.dumps(e) for e in entries)
        return batch[::every]

    def spill(self, name: str, root: str) -> int:
        stream = self.stream(name)
        out = self._files.get(name)
        if out is None:
            out = self._files[name] = open(os.path.join(root, name), "a")  # clean: near miss, opened once per name, close closes it
        lines = 0
        for batch in stream.backlog:
            lines += len(batch)
            out.writelines(line + "\n" for line in batch)
            self._pool.done_with(batch)
        stream.backlog.clear()
        return lines

    def reopen(self, name: str, root: str) -> None:
        self._files[name] = open(os.path.join(root, name), "w")  # leak: a file already open under the name is replaced unclosed

    def close(self) -> None:
        for stream in self._streams.values():
            for batch in stream.backlog:
                self._pool.done_with(batch)
            stream.backlog.clear()
            if stream.batch is not None:
                self._pool.done_with(stream.batch)
                stream.batch = None
        while self._files:
            _, out = self._files.popitem()
            out.close()
