"""A client of a model API that meters its tokens and borrows its keys."""
import asyncio
import contextlib
import heapq
import itertools
import logging
from collections import deque

log = logging.getLogger("client")


class Refused(Exception):
    pass


class ServerError(Exception):
    pass


class Grant:
    __slots__ = ("tokens", "open")

    def __init__(self, tokens):
        self.tokens = tokens
        self.open = True


class Meter:
    """So many tokens under way at a time, first come first served within a priority."""

    def __init__(self, capacity):
        self.capacity = capacity
        self._left = capacity
        self._queue = []
        self._seq = itertools.count()

    def _take(self, tokens):
        self._left -= tokens

    def _put(self, tokens):
        self._left += tokens
        self._wake()

    async def reserve(self, tokens, priority=0):
        if tokens > self.capacity:
            raise Refused(f"{tokens} tokens, {self.capacity} at most")
        if not self._queue and self._left >= tokens:
            self._take(tokens)  # clean: leaves in the Grant
            return Grant(tokens)
        fut = asyncio.get_running_loop().create_future()
        heapq.heappush(self._queue, (priority, next(self._seq), tokens, fut))
        try:
            await fut
        except asyncio.CancelledError:
            if fut.done() and not fut.cancelled():
                self._put(tokens)
            raise
        return Grant(tokens)

    def _wake(self):
        while self._queue and self._queue[0][2] <= self._left:
            _, _, tokens, fut = heapq.heappop(self._queue)
            self._take(tokens)  # leak: a waiter that was cancelled meanwhile gets nothing, and its tokens aren't put back
            if not fut.done():
                fut.set_result(None)

    def refund(self, grant):
        if grant.open:
            grant.open = False
            self._put(grant.tokens)

    @contextlib.asynccontextmanager
    async def metered(self, tokens):
        grant = await self.reserve(tokens)  # clean: refunded when the block ends
        try:
            yield grant
        finally:
            self.refund(grant)


class KeyRing:
    def __init__(self, keys):
        self._keys = deque(keys)
        self.dry = 0

    def borrow(self):
        if not self._keys:
            self.dry += 1
            return None
        return self._keys.popleft()  # clean: goes to the caller

    def hand_back(self, key):
        self._keys.append(key)


class Client:
    def __init__(self, http, meter, ring):
        self.http = http
        self.meter = meter
        self.ring = ring

    async def complete(self, prompt, max_tokens=512):
        grant = await self.meter.reserve(len(prompt) // 4 + max_tokens)  # leak: with no key to borrow the return leaves the grant open
        key = self.ring.borrow()  # clean: handed back in the finally
        if key is None:
            log.warning("no key for a prompt of %d characters", len(prompt))
            return None
        try:
            reply = await self.http.post("/complete", key, {"prompt": prompt, "max_tokens": max_tokens})
            return reply["text"]
        finally:
            self.ring.hand_back(key)
            self.meter.refund(grant)

    async def score(self, item, cache):
        hit = cache.get(item.key)
        grant = None
        if hit is None or item.refresh:
            grant = await self.meter.reserve(item.tokens)  # leak: a refresh of an item that's in the cache isn't refunded by the guard below
            hit_now = await self.http.post("/score", item.api_key, {"text": item.text})
            cache[item.key] = hit_now["score"]
        if hit is None:
            self.meter.refund(grant)
        return cache[item.key]

    async def stream(self, prompt, tokens):
        async with self.meter.metered(tokens):  # clean: refunded by the context manager
            async for piece in self.http.stream("/complete", {"prompt": prompt}):
                yield piece

    async def post_with_key(self, path, body, tries=3):
        """Another key for every try."""
        for n in range(tries):
            key = self.ring.borrow()  # clean: near miss, handed back in the finally also when the loop goes on
            if key is None:
                await asyncio.sleep(0.2 * (n + 1))
                continue
            try:
                return await self.http.post(path, key, body)
            except ServerError as e:
                log.info("%s: %s", path, e)
                continue
            finally:
                self.ring.hand_back(key)
        return None


async def _one(client, item, grant, results):
    try:
        results[item.key] = await client.http.post("/embed", item.api_key, {"text": item.text})
    finally:
        client.meter.refund(grant)


async def sweep(client, items):
    results, tasks = {}, []
    for item in items:
        grant = await client.meter.reserve(item.tokens)  # clean: near miss, the task refunds it
        tasks.append(asyncio.create_task(_one(client, item, grant, results)))
    await asyncio.gather(*tasks)
    return results


async def sweep_until(client, items, deadline):
    loop = asyncio.get_running_loop()
    results, tasks = {}, set()
    for item in items:
        grant = await client.meter.reserve(item.tokens)  # leak: a task cancelled before its first step never enters the try that refunds
        task = asyncio.create_task(_one(client, item, grant, results))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        if loop.time() > deadline:
            for t in list(tasks):
                t.cancel()
            break
    if tasks:
        await asyncio.wait(tasks)
    return results


class BatchApi:
    """Batches that are answered hours later by a webhook."""

    def __init__(self, client):
        self._client = client
        self._open = {}

    async def send(self, batch_id, items):
        grant = await self._client.meter.reserve(sum(i.tokens for i in items))  # leak: on_expired() pops the entry and doesn't refund
        self._open[batch_id] = (grant, items)
        await self._client.http.post("/batches", None, {"id": batch_id, "items": [i.text for i in items]})

    def on_result(self, batch_id, rows):
        grant, items = self._open.pop(batch_id)
        self._client.meter.refund(grant)
        return dict(zip((i.key for i in items), rows))

    def on_expired(self, batch_id):
        grant, items = self._open.pop(batch_id)
        log.warning("batch %s of %d items expired", batch_id, len(items))
        return items


async def embed_many(client, items):
    grants = []
    try:
        for item in items:
            grants.append(await client.meter.reserve(item.tokens, priority=1))  # clean: near miss, also when a later one is refused
        return await client.http.post("/embed_many", None, {"texts": [i.text for i in items]})
    except Refused as e:
        log.warning("not sent: %s", e)
        return None
    finally:
        for g in grants:
            client.meter.refund(g)


async def probe(meter, tokens):
    """Whether so many tokens are free within a second."""
    try:
        grant = await asyncio.wait_for(meter.reserve(tokens), 1.0)  # clean: refunded at once
    except asyncio.TimeoutError:
        return False
    meter.refund(grant)
    return True
