"""Async browser contexts: checkout, checkin, or discard of a broken one."""
import asyncio


class ContextGarage:
    def __init__(self, make, limit):
        self._make = make
        self._limit = limit
        self._parked = []
        self._total = 0
        self._changed = asyncio.Condition()

    async def checkout(self):
        async with self._changed:
            while not self._parked and self._total >= self._limit:
                await self._changed.wait()
            if self._parked:
                return self._parked.pop()
            self._total += 1
        return await self._make()

    async def checkin(self, ctx):
        async with self._changed:
            self._parked.append(ctx)
            self._changed.notify()

    async def discard(self, ctx):
        async with self._changed:
            self._total -= 1
            self._changed.notify()
        await ctx.shutdown()


async def screenshot(garage, url):
    ctx = await garage.checkout()  # clean: checked in or discarded
    shot = await ctx.capture(url)
    if ctx.crashed:
        await garage.discard(ctx)
        return None
    await garage.checkin(ctx)
    return shot


async def title(garage, url):
    ctx = await garage.checkout()  # leak: neither checked in nor discarded on a bad status
    status = await ctx.open(url)
    if status != 200:
        return ""
    text = await ctx.title()
    await garage.checkin(ctx)
    return text


async def crawl(garage, urls):
    ctx = await garage.checkout()  # clean: checked in by finally
    try:
        return [await ctx.open(u) for u in urls]
    finally:
        await garage.checkin(ctx)


async def health(garage):
    ctx = await garage.checkout()  # leak: a crashed context is not discarded
    if not ctx.crashed:
        await garage.checkin(ctx)
    return not ctx.crashed
