"""Async generators over pages and their consumers."""
import asyncio
from contextlib import aclosing


class AsyncPages:
    def __init__(self, n):
        self.n = n
        self.out = 0

    async def take_page(self):
        while self.out >= self.n:
            await asyncio.sleep(0)
        self.out += 1
        return bytearray(16)

    async def drop_page(self, page):
        page.clear()
        self.out -= 1


async def stream(pages, chunks):
    for chunk in chunks:
        page = await pages.take_page()  # clean: near miss, finally in an async generator that is closed by aclosing
        try:
            page[: len(chunk)] = chunk
            yield page
        finally:
            await pages.drop_page(page)


async def stream_full(pages, chunks):
    for chunk in chunks:
        page = await pages.take_page()  # leak: short chunks are skipped with the page taken
        if len(chunk) < 16:
            continue
        try:
            page[:] = chunk
            yield page
        finally:
            await pages.drop_page(page)


async def collect(pages, chunks):
    total = 0
    async with aclosing(stream(pages, chunks)) as source:
        async for page in source:
            total += sum(page)
            if total > 1000:
                break
    return total


async def collect_full(pages, chunks):
    total = 0
    async with aclosing(stream_full(pages, chunks)) as source:
        async for page in source:
            total += sum(page)
    return total


async def write_one(pages, chunk, sink):
    page = await pages.take_page()  # clean: near miss, the inner coroutine that is awaited drops it

    async def work():
        try:
            page[: len(chunk)] = chunk
            await sink(page)
        finally:
            await pages.drop_page(page)

    await work()


async def write_many(pages, chunks, sink):
    written = 0
    for chunk in chunks:
        page = await pages.take_page()  # leak: the handler counts the failure and goes on with the next
        try:
            page[: len(chunk)] = chunk
            await sink(page)
        except OSError:
            written -= 1
            continue
        await pages.drop_page(page)
        written += 1
    return written


async def write_pair(pages, a, b, sink):
    first = await pages.take_page()  # clean: near miss, the outer of two nested finally
    try:
        second = await pages.take_page()  # clean: near miss, the inner of two nested finally
        try:
            first[: len(a)] = a
            second[: len(b)] = b
            await sink(first)
            await sink(second)
        finally:
            await pages.drop_page(second)
    finally:
        await pages.drop_page(first)


async def write_newest(pages, queue, sink):
    page = None
    while not queue.empty():
        page = await pages.take_page()  # leak: only the last page taken is written and dropped
        chunk = queue.get_nowait()
        page[: len(chunk)] = chunk
    if page is None:
        return False
    try:
        await sink(page)
    finally:
        await pages.drop_page(page)
    return True
