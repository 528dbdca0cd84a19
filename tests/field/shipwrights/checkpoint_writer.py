"""Asynchronous checkpoint writer.

Tensors are staged in bounce buffers, written by tasks, and the number of open
files is limited by permits.
"""
from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

import torch


class BounceBuffers:
    """Pinned buffers behind an asyncio condition."""

    def __init__(self, count: int, nbytes: int):
        self.nbytes = nbytes
        self._stack = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(count)]
        self._cond = asyncio.Condition()

    async def borrow(self) -> torch.Tensor:
        async with self._cond:
            await self._cond.wait_for(lambda: self._stack)
            return self._stack.pop()  # clean: returned to the caller

    def borrow_now(self) -> torch.Tensor | None:
        if not self._stack:
            return None
        return self._stack.pop()  # clean: returned to the caller

    async def repay(self, buf: torch.Tensor) -> None:
        async with self._cond:
            self._stack.append(buf)
            self._cond.notify()

    @contextlib.asynccontextmanager
    async def loan(self):
        buf = await self.borrow()  # clean: repaid in the finally
        try:
            yield buf
        finally:
            await self.repay(buf)


class FilePermits:
    """At most n files at once; a permit is an int."""

    def __init__(self, n: int):
        self._sem = asyncio.Semaphore(n)
        self._next = 0
        self.holders: dict[int, str] = {}

    async def grant(self, who: str) -> int:
        await self._sem.acquire()  # clean: released by revoke() of the permit
        self._next += 1
        self.holders[self._next] = who
        return self._next

    def revoke(self, permit: int) -> None:
        del self.holders[permit]
        self._sem.release()


class ShardFile:
    """A file together with its permit; close() gives both back."""

    def __init__(self, fd: int, permit: int, permits: FilePermits):
        self.fd = fd
        self.permit = permit
        self.permits = permits

    @classmethod
    async def open(cls, path: Path, permits: FilePermits) -> "ShardFile":
        permit = await permits.grant(str(path))  # clean: revoked on OSError and else owned by the file
        try:
            fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)  # clean: owned by the returned object
        except OSError:
            permits.revoke(permit)
            raise
        return cls(fd, permit, permits)

    @classmethod
    async def open_fresh(cls, path: Path, permits: FilePermits) -> "ShardFile | None":
        permit = await permits.grant(str(path))  # leak: kept when the file exists already
        if path.exists():
            return None
        return cls(os.open(path, os.O_CREAT | os.O_WRONLY), permit, permits)  # clean: owned by the returned object

    def write(self, view: memoryview) -> int:
        return os.write(self.fd, view)

    def close(self) -> None:
        os.close(self.fd)
        self.permits.revoke(self.permit)


def _bytes(t: torch.Tensor) -> int:
    return t.numel() * t.element_size()


class CheckpointWriter:
    def __init__(self, root: Path, buffers: BounceBuffers, permits: FilePermits):
        self.root = root
        self.buffers = buffers
        self.permits = permits
        self.tasks: set[asyncio.Task] = set()
        self.manifest: dict[str, int] = {}

    # -- staging ----------------------------------------------------------
    async def stage(self, name: str, t: torch.Tensor) -> torch.Tensor | None:
        buf = await self.buffers.borrow()  # leak: a tensor above the buffer size returns None with buf borrowed
        n = _bytes(t)
        if n > self.buffers.nbytes:
            return None
        buf[:n].copy_(t.contiguous().view(-1).view(torch.uint8))
        self.manifest[name] = n
        return buf

    async def save(self, name: str, t: torch.Tensor) -> bool:
        buf = await self.stage(name, t)  # clean: write_out() repays it
        if buf is None:
            return False
        task = asyncio.create_task(self.write_out(name, buf, _bytes(t)))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return True

    async def write_out(self, name: str, buf: torch.Tensor, n: int) -> None:
        try:
            f = await ShardFile.open(self.root / name, self.permits)  # clean: closed in the inner finally
            try:
                f.write(memoryview(buf[:n].numpy()))
            finally:
                f.close()
        finally:
            await self.buffers.repay(buf)

    async def save_unless_same(self, name: str, t: torch.Tensor, digest) -> bool:
        f = await ShardFile.open(self.root / (name + ".tmp"), self.permits)  # leak: an equal digest returns with the file open
        async with self.buffers.loan() as buf:  # clean: repaid on leaving
            n = _bytes(t)
            buf[:n].copy_(t.contiguous().view(-1).view(torch.uint8))
            if digest(buf[:n]) == self.manifest.get(name + ".digest"):
                return False
            f.write(memoryview(buf[:n].numpy()))
        f.close()
        os.replace(self.root / (name + ".tmp"), self.root / name)
        return True

    async def drain(self) -> None:
        if self.tasks:
            await asyncio.gather(*self.tasks, return_exceptions=True)

    # -- whole state dicts --------------------------------------------------
    async def save_all(self, state: dict[str, torch.Tensor], optional: set[str]) -> list[str]:
        failed = []
        for name, t in state.items():
            f = await ShardFile.open_fresh(self.root / name, self.permits)  # leak: a tensor without a free buffer continues with f open
            if f is None:
                failed.append(name)
                continue
            buf = self.buffers.borrow_now()  # clean: repaid after the write
            if buf is None:
                failed.append(name)
                continue
            n = _bytes(t)
            buf[:n].copy_(t.contiguous().view(-1).view(torch.uint8))
            f.write(memoryview(buf[:n].numpy()))
            f.close()
            await self.buffers.repay(buf)
        return [name for name in failed if name not in optional]

    async def save_retrying(self, name: str, t: torch.Tensor, tries: int = 3) -> bool:
        n = _bytes(t)
        buf = await self.buffers.borrow()  # clean: one buffer for all tries, repaid in the finally
        try:
            buf[:n].copy_(t.contiguous().view(-1).view(torch.uint8))
            for attempt in range(tries):
                permit = await self.permits.grant(name)  # leak: a short write goes to the next try without revoke
                fd = os.open(self.root / name, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)  # clean: closed in the finally
                try:
                    wrote = os.write(fd, memoryview(buf[:n].numpy()))
                finally:
                    os.close(fd)
                if wrote < n:
                    await asyncio.sleep(0.2 * (attempt + 1))
                    continue
                self.permits.revoke(permit)
                return True
            return False
        finally:
            await self.buffers.repay(buf)


async def mirror(writer: CheckpointWriter, other: CheckpointWriter, name: str, t: torch.Tensor) -> bool:
    """Writes the same tensor through two writers."""
    a = await writer.stage(name, t)  # leak: repaid by nobody when the other writer cannot stage
    if a is None:
        return False
    b = await other.stage(name, t)  # clean: write_out() of the other writer repays it
    if b is None:
        return False
    await asyncio.gather(writer.write_out(name, a, _bytes(t)), other.write_out(name, b, _bytes(t)))
    return True
