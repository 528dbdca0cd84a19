"""Stages: each is an async generator over cells."""
from __future__ import annotations

import asyncio
import json
import logging
from typing import AsyncIterator, Awaitable, Callable

from .cells import Cell, CellBank

log = logging.getLogger("feedline")


class SkipSample(Exception):
    """Raised by user functions for samples that are not wanted."""


class DecodeError(Exception):
    pass


def decode(line: bytes) -> dict:
    try:
        doc = json.loads(line)
    except ValueError as exc:
        raise DecodeError(str(exc)) from exc
    if "text" not in doc:
        raise SkipSample("no text")
    return doc


async def source(bank: CellBank, lines: AsyncIterator[bytes]) -> AsyncIterator[Cell]:
    async for line in lines:
        cell = await bank.acquire()  # leak: the SkipSample handler continues, only the one for DecodeError frees
        try:
            cell.payload = decode(line)
        except DecodeError as exc:
            log.warning("line dropped: %s", exc)
            cell.free()
            continue
        except SkipSample:
            continue
        yield cell


async def source_eager(bank: CellBank, lines: AsyncIterator[bytes]) -> AsyncIterator[Cell]:
    """Decodes first, so that bad lines do not occupy a cell."""
    async for line in lines:
        try:
            doc = decode(line)
        except (DecodeError, SkipSample):
            continue
        cell = await bank.acquire()  # clean: handed downstream by the yield and nothing can fail before
        cell.payload = doc
        yield cell


async def mapped(cells: AsyncIterator[Cell], fn: Callable[[dict], Awaitable[dict]]) -> AsyncIterator[Cell]:
    async for cell in cells:
        try:
            cell.payload = await fn(cell.payload)
        except SkipSample:
            cell.free()
            continue
        yield cell


async def tee(cells: AsyncIterator[Cell], spy: asyncio.Queue) -> AsyncIterator[Cell]:
    """A copy of the reference goes to the spy, which frees it."""
    async for cell in cells:
        try:
            spy.put_nowait(cell.share())  # leak: for a full queue the handler passes without freeing the second reference
        except asyncio.QueueFull:
            log.debug("spy is slow")
        yield cell


async def tee_blocking(cells: AsyncIterator[Cell], spy: asyncio.Queue) -> AsyncIterator[Cell]:
    async for cell in cells:
        if not spy.full():
            spy.put_nowait(cell.share())  # clean: near miss, full() was asked in the same tick, and watch() frees it
        yield cell


async def watch(spy: asyncio.Queue, show: Callable[[dict], None]) -> None:
    """Consumer of the tee; None ends it."""
    while True:
        cell = await spy.get()
        if cell is None:
            return
        with cell:
            show(cell.payload)
