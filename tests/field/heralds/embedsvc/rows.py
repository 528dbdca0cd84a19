"""Rows of the input tensor, and links to the model workers."""
from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import torch


class Saturated(Exception):
    """No row is free."""


class Incompatible(Exception):
    """The worker runs an older protocol."""


class RowPool:
    def __init__(self, rows: int, length: int) -> None:
        self.ids = torch.zeros(rows, length, dtype=torch.int32, pin_memory=True)
        self._free = list(range(rows))
        self._cond = asyncio.Condition()

    def __len__(self) -> int:
        return len(self._free)

    async def claim(self) -> int:
        async with self._cond:
            await self._cond.wait_for(lambda: self._free)
            return self._free.pop()  # clean: the caller's

    def claim_nowait(self) -> int:
        if not self._free:
            raise Saturated()
        return self._free.pop()  # clean: the caller's

    async def claim_many(self, n: int) -> list[int]:
        async with self._cond:
            await self._cond.wait_for(lambda: len(self._free) >= n)
            return [self._free.pop() for _ in range(n)]  # clean: the number is awaited so that pop cannot fail half way

    async def free(self, *rows: int) -> None:
        async with self._cond:
            for row in rows:
                self.ids[row].zero_()
                self._free.append(row)
            self._cond.notify_all()

    def free_soon(self, row: int) -> None:
        """For callbacks, which cannot await."""
        self.ids[row].zero_()
        self._free.append(row)
        asyncio.ensure_future(self._wake())

    async def _wake(self) -> None:
        async with self._cond:
            self._cond.notify_all()

    @asynccontextmanager
    async def row(self):
        row = await self.claim()  # clean: the finally
        try:
            yield row
        finally:
            await self.free(row)


class WorkerLink:
    """A line protocol to a process with the model."""

    MIN_VERSION = 3

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, path: str) -> "WorkerLink":
        reader, writer = await asyncio.open_unix_connection(path)  # clean: owned by the link that is returned
        return cls(reader, writer)

    async def call(self, op: str, **args) -> dict:
        self.writer.write(json.dumps({"op": op, **args}).encode() + b"\n")
        await self.writer.drain()
        return json.loads(await self.reader.readline())

    async def version(self) -> int:
        return (await self.call("version"))["version"]

    async def close(self) -> None:
        self.writer.close()
        await self.writer.wait_closed()


async def open_checked(path: str) -> WorkerLink:
    link = await WorkerLink.open(path)  # leak: an old worker raises Incompatible and the link stays open
    if await link.version() < WorkerLink.MIN_VERSION:
        raise Incompatible(path)
    return link
