"""Writers of shard files."""
from __future__ import annotations

import logging
import os
import queue
import threading

import torch

from .fds import DescriptorSlots
from .serialize import stage_tensor
from .staging import Chunk, StagingRing

log = logging.getLogger(__name__)


class ShardWriter:
    def __init__(self, ring: StagingRing, fds: DescriptorSlots, folder: str):
        self.ring = ring
        self.fds = fds
        self.folder = folder
        self.written: dict[str, int] = {}

    def write_shard(self, name: str, t: torch.Tensor) -> bool:
        chunk = stage_tensor(self.ring, t)  # leak: the lease goes on when no descriptor slot is left
        fd = self.fds.open_slot(os.path.join(self.folder, name))  # clean: closed in finally
        if fd is None:
            log.warning("no descriptor for %s", name)
            return False
        try:
            self.written[name] = os.write(fd, chunk.bytes())
        finally:
            self.fds.close_slot(fd)
            self.ring.end_lease(chunk)
        return True

    def write_changed(self, name: str, t: torch.Tensor) -> bool:
        fd = self.fds.open_slot(os.path.join(self.folder, name))  # leak: not closed when the size has not changed
        if fd is None:
            return False
        if self.written.get(name) == t.numel() * t.element_size():
            return True
        chunk = stage_tensor(self.ring, t)  # clean: ended after the write
        self.written[name] = os.write(fd, chunk.bytes())
        self.ring.end_lease(chunk)
        self.fds.close_slot(fd)
        return True


class BackgroundWriter:
    """One thread that writes what submit() queued."""

    def __init__(self, ring: StagingRing, sink, depth: int = 8):
        self.ring = ring
        self.sink = sink
        self._q: "queue.Queue[Chunk | None]" = queue.Queue(depth)
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def submit(self, t: torch.Tensor) -> None:
        chunk = stage_tensor(self.ring, t)  # clean: near miss, queued for the thread, whose finally ends the lease
        self._q.put(chunk)

    def try_submit(self, t: torch.Tensor) -> bool:
        chunk = self.ring.lease_chunk()  # leak: dropped when the queue is full
        if chunk is None:
            return False
        raw = t.detach().contiguous().view(-1).view(torch.uint8)
        chunk.mem[: raw.numel()].copy_(raw)
        chunk.filled = raw.numel()
        try:
            self._q.put_nowait(chunk)
        except queue.Full:
            return False
        return True

    def _loop(self) -> None:
        while True:
            chunk = self._q.get()
            if chunk is None:
                return
            try:
                self.sink(chunk.bytes())
            except OSError:
                log.exception("checkpoint chunk was not written")
            finally:
                self.ring.end_lease(chunk)

    def stop(self) -> None:
        self._q.put(None)
        self._thread.join()
