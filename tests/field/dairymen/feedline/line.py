"""Puts a line together: source, stages, batcher."""
from __future__ import annotations

import asyncio
import logging
from typing import AsyncIterator

from .batcher import Batch, Batcher
from .cells import CellBank, LineClosed
from .stages import mapped, source_eager, tee_blocking, watch

log = logging.getLogger("feedline.line")


async def read_lines(path: str) -> AsyncIterator[bytes]:
    f = await asyncio.to_thread(open, path, "rb")  # clean: opened in a thread and closed in finally
    try:
        while True:
            line = await asyncio.to_thread(f.readline)
            if not line:
                return
            yield line
    finally:
        f.close()


async def build(path: str, tokenize, bank: CellBank, size: int, spy: asyncio.Queue) -> AsyncIterator[Batch]:
    batcher = Batcher(bank, size)
    stream = mapped(source_eager(bank, read_lines(path)), tokenize)
    step = 0
    async for batch in batcher.run(tee_blocking(stream, spy)):
        if await batcher.append_meta(batch, step):
            step += 1
        yield batch
    await spy.put(None)
    bank.close()


async def epoch(path: str, tokenize, bank: CellBank, train) -> int:
    """Train on every batch; the number of batches."""
    spy: asyncio.Queue = asyncio.Queue(8)
    watcher = asyncio.create_task(watch(spy, lambda doc: log.debug("%s", doc)))
    n = 0
    async for batch in build(path, tokenize, bank, 32, spy):
        try:
            await train(batch.arrays(2048))
        finally:
            batch.release()
        n += 1
    await watcher
    return n


async def selftest(bank: CellBank, rounds: int) -> bool:
    """Acquires and frees cells; False when the bank is closed in between."""
    for n in range(rounds):
        first = await bank.acquire()  # leak: LineClosed from the second acquire is handled and the first cell stays
        try:
            second = await bank.acquire()  # clean: freed at the end of the round
        except LineClosed:
            log.info("closed in round %d", n)
            return False
        first.payload = second.payload = n
        second.free()
        first.free()
    return True


async def reserve(bank: CellBank, n: int, timeout: float) -> list:
    """n cells at once or none."""
    got = []
    try:
        for _ in range(n):
            got.append(await asyncio.wait_for(bank.acquire(), timeout))  # clean: near miss, the handler frees what was collected
    except (LineClosed, asyncio.TimeoutError):
        for cell in got:
            cell.free()
        return []
    return got


async def with_reserve(bank: CellBank, n: int, job) -> bool:
    cells = await reserve(bank, n, 5.0)  # leak: when the job returns nothing the function leaves before the loop that frees
    if not cells:
        return False
    result = await job(cells)
    if result is None:
        return False
    for cell in cells:
        cell.free()
    return True
