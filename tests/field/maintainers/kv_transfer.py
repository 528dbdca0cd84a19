"""Transfer buffers for disaggregated prefill (asyncio side)."""
from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Callable, Dict, List, Optional

import torch


class TransferRing:
    """Fixed set of staging tensors for KV that goes to a decode node."""

    def __init__(self, depth: int, numel: int):
        self._ready: List[torch.Tensor] = [torch.zeros(numel) for _ in range(depth)]
        self._wake = asyncio.Event()

    async def reserve(self) -> torch.Tensor:
        while not self._ready:
            self._wake.clear()
            await self._wake.wait()
        return self._ready.pop(0)  # clean: the awaiting caller receives it

    def reserve_nowait(self) -> Optional[torch.Tensor]:
        return self._ready.pop(0) if self._ready else None  # clean: the caller receives it

    def recycle(self, buf: torch.Tensor) -> None:
        self._ready.append(buf)
        self._wake.set()


@dataclass
class SendJob:
    rid: str
    kv: torch.Tensor
    buf: Optional[torch.Tensor] = None
    peer: str = ""


class PrefillSender:
    def __init__(self, ring: TransferRing, link: Callable[[str, torch.Tensor], bool]):
        self.ring = ring
        self.link = link
        self.jobs: Dict[str, SendJob] = {}
        self.tasks: Dict[str, asyncio.Task] = {}

    def _stage(self, job: SendJob, buf: torch.Tensor) -> None:
        buf[: job.kv.numel()].copy_(job.kv.flatten())

    async def send(self, job: SendJob) -> bool:
        buf = await self.ring.reserve()  # leak: a job without a peer returns and keeps the buffer
        if not job.peer:
            return False
        self._stage(job, buf)
        ok = self.link(job.peer, buf)
        self.ring.recycle(buf)
        return ok

    async def send_guarded(self, job: SendJob) -> bool:
        buf = await self.ring.reserve()  # clean: near miss, the finally also covers the early return
        try:
            if job.rid in self.jobs:
                return False
            self._stage(job, buf)
            return self.link(job.peer, buf)
        finally:
            self.ring.recycle(buf)

    async def _push(self, job: SendJob, buf: torch.Tensor) -> None:
        """Sends buf and recycles it."""
        self._stage(job, buf)
        await asyncio.sleep(0)
        self.link(job.peer, buf)
        self.ring.recycle(buf)

    async def spawn(self, job: SendJob) -> None:
        buf = await self.ring.reserve()  # clean: near miss, the task that takes it recycles it
        self.tasks[job.rid] = asyncio.create_task(self._push(job, buf))

    async def _push_checked(self, job: SendJob, buf: torch.Tensor) -> None:
        if job.kv.numel() == 0:
            return
        self._stage(job, buf)
        self.link(job.peer, buf)
        self.ring.recycle(buf)

    async def spawn_checked(self, job: SendJob) -> None:
        buf = await self.ring.reserve()  # leak: the task returns at once for an empty KV and does not recycle it
        self.tasks[job.rid] = asyncio.create_task(self._push_checked(job, buf))

    def open_job(self, rid: str, kv: torch.Tensor) -> bool:
        if rid in self.jobs:
            return False
        buf = self.ring.reserve_nowait()  # clean: the job in jobs carries it, close_job recycles it
        if buf is None:
            return False
        self.jobs[rid] = SendJob(rid, kv, buf=buf)
        return True

    def refill_job(self, rid: str) -> bool:
        """Give a job a clean buffer for its next layer."""
        job = self.jobs[rid]
        fresh = self.ring.reserve_nowait()  # leak: overwrites job.buf, and the earlier buffer is not recycled
        if fresh is None:
            return False
        fresh.zero_()
        job.buf = fresh
        return True

    def with_callback(self, job: SendJob, on_sent: Callable[[torch.Tensor], None]) -> bool:
        buf = self.ring.reserve_nowait()  # clean: near miss, passed to _finish, which recycles it after the callback
        if buf is None:
            return False
        self._stage(job, buf)
        self._finish(buf, on_sent)
        return True

    def _finish(self, buf: torch.Tensor, on_sent: Callable[[torch.Tensor], None]) -> None:
        on_sent(buf.clone())
        self.ring.recycle(buf)

    def broadcast(self, job: SendJob, peers: List[str]) -> int:
        sent = 0
        for peer in peers:
            buf = self.ring.reserve_nowait()  # leak: the continue after a refused link skips recycle
            if buf is None:
                break
            self._stage(job, buf)
            if not self.link(peer, buf):
                continue
            sent += 1
            self.ring.recycle(buf)
        return sent

    async def gather_pair(self, a: SendJob, b: SendJob) -> bool:
        first = await self.ring.reserve()  # clean: near miss, recycled also when no second buffer is free
        second = self.ring.reserve_nowait()  # clean: near miss, the short return is the None branch
        if second is None:
            self.ring.recycle(first)
            return False
        self._stage(a, first)
        self._stage(b, second)
        ok = self.link(a.peer, first) and self.link(b.peer, second)
        for buf in (first, second):
            self.ring.recycle(buf)
        return ok

    def close_job(self, rid: str) -> None:
        job = self.jobs.pop(rid, None)
        if job is not None and job.buf is not None:
            self.ring.recycle(job.buf)
            job.buf = None
