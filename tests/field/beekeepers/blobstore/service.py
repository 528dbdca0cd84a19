"""Request handlers of the blob store."""
from __future__ import annotations

import zlib
from typing import AsyncIterator

from .budget import MemoryBudget, PartArena, PartBuffer
from .multipart import MultipartTable


class TooLarge(Exception):
    pass


async def read_body(arena: PartArena, body: AsyncIterator[bytes]) -> PartBuffer:
    """The body in a lent buffer, which the caller restores."""
    buffer = await arena.lend_wait()  # clean: returned, or restored before the raise
    async for piece in body:
        if buffer.fill + len(piece) > len(buffer.data):
            arena.restore(buffer)
            raise TooLarge()
        buffer.data[buffer.fill : buffer.fill + len(piece)] = piece
        buffer.fill += len(piece)
    return buffer


async def put_object(arena: PartArena, backend, key: str, body) -> str:
    buffer = await read_body(arena, body)  # clean: restored in the finally
    try:
        return await backend.store(key, bytes(buffer.data[: buffer.fill]))
    finally:
        arena.restore(buffer)


async def put_if_changed(arena: PartArena, backend, key: str, body, known_crc: int) -> str | None:
    buffer = await read_body(arena, body)  # leak: the unchanged object returns with the buffer lent
    crc = zlib.crc32(buffer.data[: buffer.fill])
    if crc == known_crc:
        return None
    etag = await backend.store(key, bytes(buffer.data[: buffer.fill]))
    arena.restore(buffer)
    return etag


async def checksum(arena: PartArena, body) -> int:
    return zlib.crc32((await read_body(arena, body)).data)  # leak: only the checksum leaves the line


async def compare(arena: PartArena, one, two) -> bool:
    left = await read_body(arena, one)  # clean: restored after the comparison
    right = await read_body(arena, two)  # clean: restored after the comparison
    same = left.fill == right.fill and left.data[: left.fill] == right.data[: right.fill]
    arena.restore(left)
    arena.restore(right)
    return same


async def admit(budget: MemoryBudget, length: int, patient: bool):
    if patient:
        return await budget.wait_for(length)  # clean: returned to the caller
    return budget.request(length)  # clean: returned to the caller


async def handle_copy(budget: MemoryBudget, backend, source: str, target: str, patient: bool) -> int:
    size = await backend.size(source)
    grant = await admit(budget, size, patient)  # clean: near miss, None means 503 and nothing is held
    if grant is None:
        return 503
    data = await backend.fetch(source)
    await backend.store(target, data)
    budget.repay(grant)
    await budget.notify()
    return 200


async def handle_append(budget: MemoryBudget, backend, key: str, data: bytes) -> int:
    grant = await admit(budget, len(data), False)  # leak: the 404 answer comes before the repayment
    if grant is None:
        return 503
    if not await backend.exists(key):
        return 404
    await backend.append(key, data)
    budget.repay(grant)
    return 200


async def handle_concat(table: MultipartTable, key: str, sources: list[str]) -> bool:
    ident = table.initiate(key)  # clean: near miss, completed or aborted by its ident
    if ident is None:
        return False
    for number, source in enumerate(sources, 1):
        if not table.copy_part(ident, number, source):
            table.abort(ident)
            return False
    return table.complete(ident)
