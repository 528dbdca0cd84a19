"""Background offload of activations to host memory."""
import logging
import queue
import threading
from dataclasses import dataclass
from typing import Dict, Optional

import torch

_log = logging.getLogger("offload")


@dataclass
class OffloadJob:
    key: str
    device_tensor: torch.Tensor
    host: torch.Tensor
    done: threading.Event


class HostArena:
    def __init__(self, count: int, numel: int) -> None:
        self._q: "queue.LifoQueue[torch.Tensor]" = queue.LifoQueue()
        for _ in range(count):
            self._q.put(torch.empty(numel))

    def alloc(self) -> Optional[torch.Tensor]:
        try:
            return self._q.get_nowait()
        except queue.Empty:
            return None

    def dealloc(self, t: torch.Tensor) -> None:
        self._q.put(t)


class OffloadWorker:
    def __init__(self, arena: HostArena) -> None:
        self.arena = arena
        self.jobs: "queue.Queue[Optional[OffloadJob]]" = queue.Queue()
        self.stored: Dict[str, OffloadJob] = {}
        self._thread: Optional[threading.Thread] = None
        self._running = threading.Lock()

    def start(self) -> bool:
        if not self._running.acquire(blocking=False):  # clean: near miss, held while running, stop() releases it
            return False
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()
        return True

    def stop(self) -> None:
        if self._thread is None:
            return
        self.jobs.put(None)
        self._thread.join()
        self._thread = None
        self._running.release()

    def _loop(self) -> None:
        while True:
            job = self.jobs.get()
            if job is None:
                return
            job.host[: job.device_tensor.numel()].copy_(job.device_tensor.reshape(-1))
            job.done.set()

    def offload(self, key: str, t: torch.Tensor) -> bool:
        if key in self.stored:
            return False
        host = self.arena.alloc()  # clean: moves into the job, reload() and discard() dealloc it
        if host is None:
            _log.debug("host arena full")
            return False
        job = OffloadJob(key, t, host, threading.Event())
        self.stored[key] = job
        self.jobs.put(job)
        return True

    def offload_if_large(self, key: str, t: torch.Tensor, threshold: int) -> bool:
        host = self.arena.alloc()  # leak: small tensors return False with the host buffer allocated
        if host is None:
            return False
        if t.numel() < threshold:
            return False
        job = OffloadJob(key, t, host, threading.Event())
        self.discard(key)
        self.stored[key] = job
        self.jobs.put(job)
        return True

    def offload_twice(self, key: str, t: torch.Tensor) -> None:
        for suffix in ("a", "b"):
            host = self.arena.alloc()  # clean: near miss, an older job of the key is discarded before the new one is stored
            if host is None:
                return
            job = OffloadJob(key + suffix, t, host, threading.Event())
            self.discard(job.key)
            self.stored[job.key] = job
            self.jobs.put(job)

    def reload(self, key: str) -> Optional[torch.Tensor]:
        job = self.stored.pop(key, None)
        if job is None:
            return None
        job.done.wait()
        out = job.host[: job.device_tensor.numel()].view_as(job.device_tensor).clone()
        self.arena.dealloc(job.host)
        return out

    def discard(self, key: str) -> None:
        job = self.stored.pop(key, None)
        if job is not None:
            job.done.wait()
            self.arena.dealloc(job.host)

    def shutdown(self) -> None:
        for key in list(self.stored):
            self.discard(key)
        self.stop()


class FireAndForget:
    """Stores host copies for debugging, keyed by step."""

    def __init__(self, arena: HostArena, every: int) -> None:
        self.arena = arena
        self.every = every
        self.latest: Optional[torch.Tensor] = None
        self.by_step: Dict[int, torch.Tensor] = {}

    def dump(self, step: int, t: torch.Tensor) -> None:
        host = self.arena.alloc()  # leak: on steps that are not dumped the buffer is dropped at the end
        if host is None:
            return
        host[: t.numel()].copy_(t.reshape(-1))
        if step % self.every == 0:
            self.by_step[step] = host

    def dump_latest(self, t: torch.Tensor) -> None:
        if self.latest is None:
            self.latest = self.arena.alloc()  # clean: near miss, allocated once and written over in place, close() deallocs
        if self.latest is not None:
            self.latest[: t.numel()].copy_(t.reshape(-1))

    def close(self) -> None:
        for host in self.by_step.values():
            self.arena.dealloc(host)
        self.by_step = {}
        if self.latest is not None:
            self.arena.dealloc(self.latest)
            self.latest = None


def roundtrip(arena: HostArena, t: torch.Tensor) -> Optional[bool]:
    host = arena.alloc()  # leak: only the equal case deallocs
    if host is None:
        return None
    flat = host[: t.numel()]
    flat.copy_(t.reshape(-1))
    if torch.equal(flat, t.reshape(-1)):
        arena.dealloc(host)
        return True
    return False
