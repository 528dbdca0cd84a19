"""Asynchronous checkpointing: device tensors are staged to host slabs, then written by asyncio tasks."""
from __future__ import annotations

import asyncio
import json
import os
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import torch


class SlabPool:
    def __init__(self, n: int, nbytes: int):
        self.nbytes = nbytes
        self._slabs: asyncio.Queue = asyncio.Queue()
        for _ in range(n):
            self._slabs.put_nowait(bytearray(nbytes))

    async def get(self) -> bytearray:
        return await self._slabs.get()

    def get_nowait(self) -> bytearray | None:
        return None if self._slabs.empty() else self._slabs.get_nowait()

    def put(self, slab: bytearray) -> None:
        self._slabs.put_nowait(slab)

    @asynccontextmanager
    async def staging(self):
        slab = await self.get()  # clean: put back in the finally
        try:
            yield slab
        finally:
            self.put(slab)


class WriterSlots:
    """At most n writers per filesystem; slots are numbered for the log."""

    def __init__(self, n: int):
        self._ids = list(range(n))

    def book(self) -> int | None:
        return self._ids.pop() if self._ids else None

    def unbook(self, slot: int) -> None:
        self._ids.append(slot)


@dataclass
class WriteJob:
    path: str
    slab: bytearray
    nbytes: int
    slot: int | None = None


@dataclass
class Manifest:
    step: int
    files: dict = field(default_factory=dict)

    def dump(self, path: str) -> None:
        with open(path + ".tmp", "w") as fh:  # clean: closed by with
            json.dump({"step": self.step, "files": self.files}, fh)
        os.replace(path + ".tmp", path)


class Checkpointer:
    def __init__(self, root: str, pool: SlabPool, slots: WriterSlots):
        self.root = root
        self.pool = pool
        self.slots = slots
        self.tasks: set[asyncio.Task] = set()
        self.jobs: list[WriteJob] = []
        self.deferred: dict[str, WriteJob] = {}
        self._journal = None

    def open_journal(self) -> None:
        self._journal = open(os.path.join(self.root, "journal"), "a")  # clean: close() closes it

    async def _fill(self, t: torch.Tensor) -> tuple[bytearray, int]:
        slab = await self.pool.get()  # clean: handed to the caller in the tuple
        raw = t.detach().cpu().contiguous().view(torch.uint8).flatten().numpy()
        slab[: raw.nbytes] = raw.tobytes()
        return slab, raw.nbytes

    async def save(self, step: int, state: dict) -> Manifest:
        man = Manifest(step)
        for name, t in state.items():
            slab, n = await self._fill(t)  # clean: near miss, the write task puts the slab back in its finally
            path = os.path.join(self.root, f"{step}-{name}")
            man.files[name] = n
            task = asyncio.create_task(self._write(WriteJob(path, slab, n)))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
        return man

    async def _write(self, job: WriteJob) -> None:
        try:
            await asyncio.to_thread(self._dump, job.path, job.slab, job.nbytes)
        finally:
            self.pool.put(job.slab)

    def _dump(self, path: str, slab: bytearray, n: int) -> None:
        fd = open(path, "wb")  # clean: closed in the finally
        try:
            fd.write(memoryview(slab)[:n])
            fd.flush()
            os.fsync(fd.fileno())
        finally:
            fd.close()

    async def save_one(self, name: str, t: torch.Tensor, skip_same: bool) -> bool:
        slab, n = await self._fill(t)  # leak: an unchanged file returns before the slab is put back
        path = os.path.join(self.root, name)
        if skip_same and os.path.exists(path) and os.path.getsize(path) == n:
            return False
        await asyncio.to_thread(self._dump, path, slab, n)
        self.pool.put(slab)
        return True

    async def digest(self, t: torch.Tensor) -> int:
        slab, n = await self._fill(t)  # leak: only the digest leaves, the slab is dropped
        return hash(bytes(slab[:n]))

    async def digest_many(self, tensors: list) -> list:
        out = []
        async with self.pool.staging() as slab:  # clean: staging puts it back
            for t in tensors:
                raw = t.detach().cpu().view(torch.uint8).flatten().numpy()
                slab[: raw.nbytes] = raw.tobytes()
                out.append(hash(bytes(slab[: raw.nbytes])))
        return out

    # queued mode ------------------------------------------------------------------------------

    async def enqueue(self, name: str, t: torch.Tensor) -> None:
        slab, n = await self._fill(t)  # clean: near miss, kept in jobs until run_jobs puts it back
        self.jobs.append(WriteJob(os.path.join(self.root, name), slab, n))

    async def run_jobs(self) -> int:
        done = 0
        while self.jobs:
            job = self.jobs.pop(0)
            job.slot = self.slots.book()  # leak: dropped with the job, nothing unbooks the slot
            await asyncio.to_thread(self._dump, job.path, job.slab, job.nbytes)
            self.pool.put(job.slab)
            done += 1
        return done

    async def defer(self, name: str, t: torch.Tensor) -> None:
        slab, n = await self._fill(t)  # leak: cancel_deferred and flush_deferred both only clear the dict's entries
        self.deferred[name] = WriteJob(os.path.join(self.root, name), slab, n)

    def cancel_deferred(self, name: str) -> bool:
        return self.deferred.pop(name, None) is not None

    async def flush_deferred(self) -> None:
        for job in list(self.deferred.values()):
            await asyncio.to_thread(self._dump, job.path, job.slab, job.nbytes)
        self.deferred.clear()

    async def write_sharded(self, step: int, parts: list) -> int:
        wrote = 0
        for i, t in enumerate(parts):
            slot = self.slots.book()  # clean: unbooked on both branches
            if slot is None:
                await asyncio.sleep(0.05)
                continue
            slab = self.pool.get_nowait()  # clean: put back after the dump
            if slab is None:
                self.slots.unbook(slot)
                continue
            raw = t.cpu().numpy().tobytes()
            slab[: len(raw)] = raw
            await asyncio.to_thread(self._dump, f"{self.root}/{step}.{i}.{slot}", slab, len(raw))
            self.pool.put(slab)
            self.slots.unbook(slot)
            wrote += 1
        return wrote

    async def write_mirrored(self, t: torch.Tensor, name: str, mirrors: list) -> bool:
        slot = self.slots.book()  # leak: kept by the return when the slab pool is dry
        if slot is None:
            return False
        slab = self.pool.get_nowait()  # clean: put back after the last mirror
        if slab is None:
            return False
        raw = t.cpu().numpy().tobytes()
        slab[: len(raw)] = raw
        for m in mirrors:
            await asyncio.to_thread(self._dump, os.path.join(m, name), slab, len(raw))
        self.pool.put(slab)
        self.slots.unbook(slot)
        return True

    async def close(self) -> None:
        if self.tasks:
            await asyncio.gather(*list(self.tasks))
        await self.run_jobs()
        if self._journal is not None:
            self._journal.close()
            self._journal = None
