"""Weight hand-over from the trainer to rollout engines: versions, a read/write lock and transfer chunks."""
from __future__ import annotations

import logging
import queue
import threading
import time
from typing import Callable, Dict, Iterator, List, Optional, Tuple

import torch

log = logging.getLogger("weight_sync")


class ReadWriteLock:
    def __init__(self) -> None:
        self._cond = threading.Condition()
        self._readers = 0
        self._writing = False

    def enter_read(self, timeout: Optional[float] = None) -> bool:
        with self._cond:
            if not self._cond.wait_for(lambda: not self._writing, timeout):
                return False
            self._readers += 1
            return True

    def exit_read(self) -> None:
        with self._cond:
            self._readers -= 1
            self._cond.notify_all()

    def enter_write(self) -> None:
        with self._cond:
            self._cond.wait_for(lambda: not self._writing and self._readers == 0)
            self._writing = True

    def exit_write(self) -> None:
        with self._cond:
            self._writing = False
            self._cond.notify_all()


class ChunkPool:
    def __init__(self, count: int, numel: int):
        self.numel = numel
        self._q: "queue.SimpleQueue[torch.Tensor]" = queue.SimpleQueue()
        for _ in range(count):
            self._q.put(torch.empty(numel, dtype=torch.bfloat16))

    def next_chunk(self) -> torch.Tensor:
        return self._q.get()

    def recycle_chunk(self, chunk: torch.Tensor) -> None:
        self._q.put(chunk)


class Version:
    """Weights of one step, kept while an engine refers to them."""

    def __init__(self, step: int, weights: Dict[str, torch.Tensor], on_idle: Callable[["Version"], None]):
        self.step = step
        self.weights = weights
        self._refs = 0
        self._on_idle = on_idle

    def ref(self) -> "Version":
        self._refs += 1
        return self

    def deref(self) -> None:
        self._refs -= 1
        if self._refs == 0:
            self._on_idle(self)


class WeightStore:
    def __init__(self, chunks: ChunkPool):
        self.rw = ReadWriteLock()
        self.chunks = chunks
        self._latest: Optional[Version] = None
        self._idle_steps: List[int] = []

    def publish(self, step: int, weights: Dict[str, torch.Tensor]) -> None:
        fresh = Version(step, weights, lambda v: self._idle_steps.append(v.step))
        self.rw.enter_write()  # clean: exit_write follows
        old, self._latest = self._latest, fresh.ref()  # clean: dereferenced by publish or retire
        self.rw.exit_write()
        if old is not None:
            old.deref()

    def retire(self) -> None:
        self.rw.enter_write()  # clean: exit_write follows
        old, self._latest = self._latest, None
        self.rw.exit_write()
        if old is not None:
            old.deref()

    def checkout(self) -> Optional[Version]:
        """The latest version with a reference for the caller."""
        self.rw.enter_read()  # leak: without a version it returns inside the read section
        if self._latest is None:
            return None
        version = self._latest.ref()  # clean: returned to the caller
        self.rw.exit_read()
        return version

    def peek_step(self, timeout: float) -> int:
        if not self.rw.enter_read(timeout):  # clean: near miss, not entered when False
            return -1
        step = self._latest.step if self._latest is not None else -1
        self.rw.exit_read()
        return step

    def stream(self, version: Version, names: List[str]) -> Iterator[Tuple[str, torch.Tensor]]:
        """Pieces of the weights; each chunk is the consumer's, to recycle."""
        for name in names:
            flat = version.weights[name].flatten()
            for start in range(0, flat.numel(), self.chunks.numel):
                piece = flat[start : start + self.chunks.numel]
                chunk = self.chunks.next_chunk()  # clean: yielded to the consumer, who recycles it
                chunk[: piece.numel()].copy_(piece)
                yield name, chunk


class Engine:
    def __init__(self, store: WeightStore, name: str):
        self.store = store
        self.name = name
        self.version: Optional[Version] = None
        self._fallback: Optional[Version] = None
        self._outbox: "queue.Queue[Optional[Tuple[str, torch.Tensor]]]" = queue.Queue()

    def update(self) -> bool:
        """Changes over to the latest version, if it is a newer one."""
        latest = self.store.checkout()  # leak: an unchanged step returns with the new reference
        if latest is None:
            return False
        if self.version is not None and latest.step == self.version.step:
            return False
        if self.version is not None:
            self.version.deref()
        self.version = latest
        return True

    def keep_fallback(self) -> None:
        """Remembers the present version, for a rollback."""
        if self.version is None:
            return
        if self._fallback is not None:
            self._fallback.deref()
        self._fallback = self.version.ref()  # clean: near miss, rollback moves it to version, shutdown derefs

    def rollback(self) -> bool:
        if self._fallback is None:
            return False
        if self.version is not None:
            self.version.deref()
        self.version, self._fallback = self._fallback, None
        return True

    def shutdown(self) -> None:
        for held in (self.version, self._fallback):
            if held is not None:
                held.deref()
        self.version = self._fallback = None

    def checksum(self, version: Version, names: List[str]) -> float:
        total = 0.0
        for name, chunk in self.store.stream(version, names):  # leak: continue skips the chunks of a bias
            if name.endswith(".bias"):
                continue
            total += float(chunk.float().sum())
            self.store.chunks.recycle_chunk(chunk)
        return total

    def send_all(self, version: Version, names: List[str]) -> None:
        for item in self.store.stream(version, names):  # clean: near miss, queued, sender_loop recycles
            self._outbox.put(item)
        self._outbox.put(None)

    def sender_loop(self, send: Callable[[str, torch.Tensor], None]) -> int:
        sent = 0
        while True:
            item = self._outbox.get()
            if item is None:
                return sent
            send(*item)
            self.store.chunks.recycle_chunk(item[1])
            sent += 1

    def wait_for_step(self, step: int, patience: float) -> Optional[Version]:
        """A version of at least `step`, with a reference for the caller."""
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            version = self.store.checkout()  # leak: versions that are too old are dropped by the next attempt
            if version is not None and version.step >= step:
                return version
            time.sleep(0.05)
        return None

    def sync_to(self, step: int) -> bool:
        version = self.wait_for_step(step, 30.0)  # clean: None or becomes the version, see shutdown
        if version is None:
            return False
        old, self.version = self.version, version
        if old is not None:
            old.deref()
        return True
