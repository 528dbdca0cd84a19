"""Prefill to decode KV transfer over a NIXL-like engine."""
from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Optional

import torch


@dataclass(frozen=True)
class RegionHandle:
    key: int
    addr: int
    length: int


@dataclass(eq=False)
class Ticket:
    xfer_id: int
    peer: str
    state: str = "pending"


class RegionRegistry:
    def __init__(self, max_regions: int) -> None:
        self._max = max_regions
        self._live: dict[int, RegionHandle] = {}
        self._next = 0

    def register(self, tensor: torch.Tensor) -> Optional[RegionHandle]:
        if len(self._live) >= self._max:
            return None
        self._next += 1
        handle = RegionHandle(self._next, tensor.data_ptr(), tensor.numel() * tensor.element_size())
        self._live[handle.key] = handle
        return handle

    def deregister(self, handle: RegionHandle) -> None:
        self._live.pop(handle.key, None)


class TransferEngine:
    """Tickets occupy a work queue entry until they are retired."""

    def __init__(self, depth: int) -> None:
        self._lock = threading.Lock()
        self._depth = depth
        self._open: dict[int, Ticket] = {}
        self._seq = 0

    def submit(self, peer: str, regions: list[RegionHandle]) -> Optional[Ticket]:
        with self._lock:
            if len(self._open) >= self._depth:
                return None
            self._seq += 1
            ticket = Ticket(self._seq, peer)
            self._open[ticket.xfer_id] = ticket
            return ticket

    def poll(self, ticket: Ticket) -> str:
        return ticket.state

    def retire(self, ticket: Ticket) -> None:
        with self._lock:
            self._open.pop(ticket.xfer_id, None)


@dataclass(eq=False)
class SendJob:
    rid: str
    peer: str
    handles: list[RegionHandle] = field(default_factory=list)
    ticket: Optional[Ticket] = None
    deadline: float = 0.0


class KvSender:
    def __init__(self, registry: RegionRegistry, engine: TransferEngine, timeout_s: float = 30.0) -> None:
        self.registry = registry
        self.engine = engine
        self.timeout_s = timeout_s
        self.jobs: dict[str, SendJob] = {}
        self.queue: deque[SendJob] = deque()
        self._aux: dict[str, RegionHandle] = {}

    def bind_cache(self, layer: str, cache: torch.Tensor) -> bool:
        if layer in self._aux:
            return True
        handle = self.registry.register(cache)  # clean: near miss, stored once per layer, and shutdown() deregisters all of them
        if handle is None:
            return False
        self._aux[layer] = handle
        return True

    def enqueue(self, rid: str, peer: str, layers: list[torch.Tensor]) -> bool:
        job = SendJob(rid, peer)
        for layer in layers:
            handle = self.registry.register(layer)  # leak: when the registry is full midway the earlier handles of the job are dropped
            if handle is None:
                return False
            job.handles.append(handle)
        self.queue.append(job)
        return True

    def enqueue_atomic(self, rid: str, peer: str, layers: list[torch.Tensor]) -> bool:
        job = SendJob(rid, peer)
        for layer in layers:
            handle = self.registry.register(layer)  # clean: near miss, _drop_handles rolls the job back on None
            if handle is None:
                self._drop_handles(job)
                return False
            job.handles.append(handle)
        self.queue.append(job)
        return True

    def _drop_handles(self, job: SendJob) -> None:
        while job.handles:
            self.registry.deregister(job.handles.pop())

    def pump(self) -> None:
        while self.queue:
            job = self.queue[0]
            ticket = self.engine.submit(job.peer, job.handles)  # leak: progress() retires done and failed tickets but not timed out ones
            if ticket is None:
                return
            self.queue.popleft()
            job.ticket = ticket
            job.deadline = time.monotonic() + self.timeout_s
            self.jobs[job.rid] = job

    def progress(self) -> list[str]:
        finished: list[str] = []
        for rid, job in list(self.jobs.items()):
            if job.ticket is None:
                continue
            state = self.engine.poll(job.ticket)
            if state in ("done", "failed"):
                self.engine.retire(job.ticket)
                self._drop_handles(job)
                del self.jobs[rid]
                finished.append(rid)
            elif time.monotonic() > job.deadline:
                self._drop_handles(job)
                del self.jobs[rid]
        return finished

    def send_now(self, peer: str, tensor: torch.Tensor) -> bool:
        handle = self.registry.register(tensor)  # clean: deregistered in finally
        if handle is None:
            return False
        try:
            ticket = self.engine.submit(peer, [handle])  # clean: retired by _wait on every way
            return ticket is not None and self._wait(ticket)
        finally:
            self.registry.deregister(handle)

    def _wait(self, ticket: Ticket) -> bool:
        end = time.monotonic() + self.timeout_s
        try:
            while time.monotonic() < end:
                if self.engine.poll(ticket) != "pending":
                    return self.engine.poll(ticket) == "done"
                time.sleep(0.001)
            return False
        finally:
            self.engine.retire(ticket)

    def send_metadata(self, peers: list[str], blob: torch.Tensor) -> int:
        handle = self.registry.register(blob)  # leak: the early return for a busy engine goes past the deregister
        if handle is None:
            return 0
        sent = 0
        for peer in peers:
            ticket = self.engine.submit(peer, [handle])  # clean: near miss, None has nothing to retire and a ticket is retired by _wait
            if ticket is None:
                return sent
            sent += int(self._wait(ticket))
        self.registry.deregister(handle)
        return sent

    def resend(self, rid: str) -> bool:
        job = self.jobs.get(rid)
        if job is None:
            return False
        job.ticket = self.engine.submit(job.peer, job.handles)  # leak: the pending ticket of the job is overwritten without being retired
        return job.ticket is not None

    def shutdown(self) -> None:
        for job in list(self.queue):
            self._drop_handles(job)
        self.queue.clear()
        for job in self.jobs.values():
            if job.ticket is not None:
                self.engine.retire(job.ticket)
            self._drop_handles(job)
        self.jobs.clear()
        for handle in self._aux.values():
            self.registry.deregister(handle)
        self._aux.clear()
