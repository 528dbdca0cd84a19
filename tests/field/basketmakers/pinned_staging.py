"""Pinned host staging for weight upload and activation download."""
from __future__ import annotations

import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Callable, Optional

import torch


def _bucket(nbytes: int) -> int:
    size = 4096
    while size < nbytes:
        size <<= 1
    return size


class PinnedArena:
    def __init__(self, budget: int):
        self.budget = budget
        self.used = 0
        self._bins: dict[int, list[torch.Tensor]] = defaultdict(list)
        self._cv = threading.Condition()

    def pin(self, nbytes: int) -> Optional[torch.Tensor]:
        size = _bucket(nbytes)
        with self._cv:
            if self._bins[size]:
                return self._bins[size].pop()
            if self.used + size > self.budget:
                return None
            self.used += size
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def pin_wait(self, nbytes: int) -> torch.Tensor:
        while True:
            t = self.pin(nbytes)  # clean: returned as soon as there is one
            if t is not None:
                return t
            with self._cv:
                self._cv.wait(0.05)

    def unpin(self, t: torch.Tensor) -> None:
        with self._cv:
            self._bins[t.numel()].append(t)
            self._cv.notify()

    def trim(self, size: int) -> int:
        freed = 0
        with self._cv:
            while self._bins[size]:
                self._bins[size].pop()
                self.used -= size
                freed += size
        return freed


@dataclass
class Copy:
    host: torch.Tensor
    event: torch.cuda.Event
    on_done: Optional[Callable[[], None]] = None


class Uploader:
    def __init__(self, arena: PinnedArena, stream: torch.cuda.Stream):
        self.arena = arena
        self.stream = stream
        self.pending: list[Copy] = []

    def _launch(self, host: torch.Tensor, dst: torch.Tensor) -> torch.cuda.Event:
        ev = torch.cuda.Event()
        with torch.cuda.stream(self.stream):
            dst.copy_(host[: dst.numel()], non_blocking=True)
            ev.record()
        return ev

    def upload(self, src: bytes, dst: torch.Tensor) -> None:
        host = self.arena.pin_wait(len(src))  # clean: moved into self.pending, which reap() unpins
        host[: len(src)].copy_(torch.frombuffer(src, dtype=torch.uint8))
        self.pending.append(Copy(host, self._launch(host, dst)))

    def reap(self) -> int:
        keep, done = [], 0
        for copy in self.pending:
            if not copy.event.query():
                keep.append(copy)
                continue
            self.arena.unpin(copy.host)
            if copy.on_done:
                copy.on_done()
            done += 1
        self.pending = keep
        return done

    def upload_sync(self, src: bytes, dst: torch.Tensor) -> bool:
        host = self.arena.pin(len(src))  # leak: not unpinned when dst is too small
        if host is None:
            return False
        if dst.numel() < len(src):
            return False
        host[: len(src)].copy_(torch.frombuffer(src, dtype=torch.uint8))
        self._launch(host, dst).synchronize()
        self.arena.unpin(host)
        return True

    def upload_with_callback(self, src: bytes, dst: torch.Tensor, executor) -> None:
        host = self.arena.pin_wait(len(src))  # clean: near miss, the executor's callback unpins it
        host[: len(src)].copy_(torch.frombuffer(src, dtype=torch.uint8))
        ev = self._launch(host, dst)
        fut = executor.submit(ev.synchronize)
        fut.add_done_callback(lambda _f, h=host: self.arena.unpin(h))

    def upload_all(self, parts: list[bytes], dsts: list[torch.Tensor]) -> int:
        sent = 0
        for part, dst in zip(parts, dsts):
            host = self.arena.pin_wait(len(part))  # leak: the continue for meta tensors skips the unpin
            if dst.is_meta:
                continue
            host[: len(part)].copy_(torch.frombuffer(part, dtype=torch.uint8))
            self._launch(host, dst).synchronize()
            self.arena.unpin(host)
            sent += 1
        return sent

    def double_buffer(self, chunks: list[bytes], dst: torch.Tensor) -> bool:
        a = self.arena.pin(1 << 20)  # leak: kept when the second half cannot be had
        if a is None:
            return False
        b = self.arena.pin(1 << 20)  # clean: unpinned with a at the end
        if b is None:
            return False
        for i, chunk in enumerate(chunks):
            half = a if i % 2 == 0 else b
            half[: len(chunk)].copy_(torch.frombuffer(chunk, dtype=torch.uint8))
            self._launch(half, dst).synchronize()
        self.arena.unpin(a)
        self.arena.unpin(b)
        return True

    def triple_buffer(self, chunks: list[bytes], dst: torch.Tensor) -> bool:
        ring: list[torch.Tensor] = []
        try:
            for _ in range(3):
                t = self.arena.pin(1 << 20)  # clean: near miss, finally unpins what the ring has
                if t is None:
                    return False
                ring.append(t)
            for i, chunk in enumerate(chunks):
                ring[i % 3][: len(chunk)].copy_(torch.frombuffer(chunk, dtype=torch.uint8))
                self._launch(ring[i % 3], dst).synchronize()
            return True
        finally:
            for t in ring:
                self.arena.unpin(t)


class Downloader:
    def __init__(self, arena: PinnedArena, retries: int = 3):
        self.arena = arena
        self.retries = retries

    def _stage(self, dev: torch.Tensor) -> torch.Tensor:
        host = self.arena.pin_wait(dev.nbytes)  # clean: returned to the caller
        host[: dev.nbytes].copy_(dev.view(torch.uint8).flatten())
        return host

    def to_bytes(self, dev: torch.Tensor) -> bytes:
        host = self._stage(dev)  # clean: unpinned in finally
        try:
            return host[: dev.nbytes].numpy().tobytes()
        finally:
            self.arena.unpin(host)

    def checksum(self, dev: torch.Tensor) -> int:
        return int(self._stage(dev)[: dev.nbytes].long().sum())  # leak: staged tensor dropped after the sum

    def send(self, dev: torch.Tensor, sock) -> bool:
        for attempt in range(self.retries):
            host = self._stage(dev)  # leak: each failed attempt stages anew without unpinning
            if sock.push(host, dev.nbytes):
                self.arena.unpin(host)
                return True
            time.sleep(0.01 * (attempt + 1))
        return False

    def send_once_staged(self, dev: torch.Tensor, sock) -> bool:
        host = self._stage(dev)  # clean: near miss, unpinned on success and after the last try
        for _ in range(self.retries):
            if sock.push(host, dev.nbytes):
                self.arena.unpin(host)
                return True
        self.arena.unpin(host)
        return False

    def try_peek(self, dev: torch.Tensor, n: int) -> Optional[bytes]:
        host = self.arena.pin(n)  # clean: unpinned on both ways
        if host is None:
            return None
        if n > dev.nbytes:
            self.arena.unpin(host)
            return None
        host[:n].copy_(dev.view(torch.uint8).flatten()[:n])
        out = host[:n].numpy().tobytes()
        self.arena.unpin(host)
        return out
