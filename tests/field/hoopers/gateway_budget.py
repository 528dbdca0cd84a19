"""Admission for an LLM gateway: token budgets per tenant and for the whole
cluster, a gate of upstream permits and a circuit breaker with probe tokens."""
import asyncio
import contextlib
import hashlib
import logging
import time
from collections import OrderedDict

logger = logging.getLogger("gateway")

class BudgetTimeout(Exception): ...
class Overloaded(Exception): ...
class UpstreamError(Exception): ...

class Grant:
    """Tokens taken from a budget.  settle() returns what was not spent."""

    def __init__(self, budget, amount):
        self.budget, self.amount, self.open = budget, amount, True

    async def settle(self, used=0):
        if not self.open:
            return
        self.open = False
        await self.budget._credit(self.amount - min(used, self.amount), spent=used)

    async def extend(self, extra, timeout):
        more = await self.budget.reserve(extra, timeout)  # clean: near miss, its amount is taken over by this grant and settled with it
        more.open = False
        self.amount += more.amount

class Budget:
    def __init__(self, name, capacity, window=60.0):
        self.name, self.capacity, self.window = name, capacity, window
        self._left = capacity
        self._cond = asyncio.Condition()
        self._spent = []

    async def reserve(self, n, timeout=10.0):
        if n > self.capacity:
            raise BudgetTimeout(f"{self.name}: {n} tokens can never be granted")
        async with self._cond:
            try:
                await asyncio.wait_for(self._cond.wait_for(lambda: self._left >= n), timeout)
            except asyncio.TimeoutError:
                raise BudgetTimeout(f"{self.name}: {n} tokens in {timeout}s") from None
            self._left -= n
        return Grant(self, n)

    async def _credit(self, n, spent):
        async with self._cond:
            self._left += n
            self._spent.append((time.monotonic(), spent))
            self._cond.notify_all()

    async def refill_forever(self):
        while True:
            await asyncio.sleep(1.0)
            edge = time.monotonic() - self.window
            async with self._cond:
                while self._spent and self._spent[0][0] < edge:
                    _, n = self._spent.pop(0)
                    self._left = min(self.capacity, self._left + n)
                self._cond.notify_all()

async def reserve_both(tenant, cluster, n):
    mine = await tenant.reserve(n)  # leak: the cluster may answer BudgetTimeout and the tenant's tokens are gone
    theirs = await cluster.reserve(n)  # clean: returned
    return mine, theirs

async def settle_all(grants, used=0):
    for g in grants:
        await g.settle(used)

class Breaker:
    """After `limit` failures only one probe at a time may pass."""

    def __init__(self, limit=5):
        self.limit, self.failures = limit, 0
        self._probe = asyncio.Semaphore(1)
        self._holders = set()

    async def enter(self, who):
        if self.failures >= self.limit:
            if self._probe.locked():
                raise Overloaded("circuit is open")
            await self._probe.acquire()  # clean: leave() looks the holder up
            self._holders.add(who)

    def leave(self, who, ok):
        self.failures = 0 if ok else self.failures + 1
        if who in self._holders:
            self._holders.discard(who)
            self._probe.release()

class SSEBody:
    """Response body that is iterated by the web server and closed by it at the end."""

    def __init__(self, source, grants, gate):
        self._source, self._grants, self._gate = source, grants, gate
        self.tokens = 0
        self._closed = False

    async def __aiter__(self):
        async for tok in self._source:
            self.tokens += 1
            yield f"data: {tok}\n\n"
        yield "data: [DONE]\n\n"

    async def aclose(self):
        if not self._closed:
            self._closed = True
            self._gate.release()
            await settle_all(self._grants, self.tokens)

class Gateway:
    def __init__(self, upstream, cluster, tenants, width=32):
        self.up, self.cluster, self.tenants = upstream, cluster, tenants
        self.gate = asyncio.Semaphore(width)
        self.breaker = Breaker()
        self._embed_cache = OrderedDict()
        self._prepaid = {}

    def _estimate(self, body):
        return len(body.get("prompt", "")) // 3 + int(body.get("max_tokens", 256))

    async def _send(self, path, body, tries=3):
        for i in range(tries):
            await self.gate.acquire()  # leak: a 429 goes round the loop without release
            status, reply = await self.up.post(path, body)
            if status == 429:
                await asyncio.sleep(float(reply.get("retry_after", 2 ** i)))
                continue
            self.gate.release()
            if status >= 500:
                raise UpstreamError(f"{path}: {status}")
            return reply
        raise Overloaded(path)

    async def chat(self, who, body):
        grants = await reserve_both(self.tenants[who], self.cluster, self._estimate(body))  # clean: settled in the finally
        used = 0
        try:
            reply = await self._send("/v1/chat", body)
            used = reply["usage"]["total_tokens"]
            return 200, reply
        except UpstreamError as exc:
            return 502, {"error": str(exc)}
        finally:
            await settle_all(grants, used)

    async def embed(self, who, body):
        n = self._estimate(body)
        mine, theirs = await reserve_both(self.tenants[who], self.cluster, n)  # leak: a hit in the cache returns with both grants open
        key = hashlib.sha1(body["prompt"].encode()).hexdigest()
        if key in self._embed_cache:
            self._embed_cache.move_to_end(key)
            return 200, self._embed_cache[key]
        try:
            reply = await self._send("/v1/embeddings", body)
        finally:
            await settle_all((mine, theirs), n)
        self._embed_cache[key] = reply
        while len(self._embed_cache) > 4096:
            self._embed_cache.popitem(last=False)
        return 200, reply

    async def batch(self, who, bodies):
        replies = []
        async with contextlib.AsyncExitStack() as stack:
            for body in bodies:
                grant = await self.tenants[who].reserve(self._estimate(body))  # clean: near miss, the exit stack settles it
                stack.push_async_callback(grant.settle)
                reply = await self._send("/v1/chat", body)
                await grant.settle(reply["usage"]["total_tokens"])
                replies.append(reply)
        return 200, replies

    async def stream(self, who, body):
        grants = await reserve_both(self.tenants[who], self.cluster, self._estimate(body))  # clean: near miss, moves into the SSEBody or is settled in the handlers
        try:
            await asyncio.wait_for(self.gate.acquire(), 5.0)  # clean: near miss, SSEBody.aclose or the handler below releases it
        except asyncio.TimeoutError:
            await settle_all(grants)
            return 503, {"error": "no upstream permit"}
        try:
            source = await self.up.open_stream("/v1/chat", body)
        except UpstreamError as exc:
            self.gate.release()
            await settle_all(grants)
            return 502, {"error": str(exc)}
        return 200, SSEBody(source, grants, self.gate)

    async def guarded(self, who, body):
        try:
            await self.breaker.enter(who)  # leak: UpstreamError is turned into a 502 without leave()
        except Overloaded:
            return 503, {"error": "circuit is open"}
        try:
            reply = await self.up.complete(body)
        except UpstreamError as exc:
            logger.warning("%s: %s", who, exc)
            return 502, {"error": str(exc)}
        self.breaker.leave(who, ok=True)
        return 200, reply

    async def probe(self):
        try:
            await self.breaker.enter("probe")  # clean: leave() is called on both ways out
        except Overloaded:
            return False
        ok = False
        try:
            await self.up.complete({"prompt": "ping", "max_tokens": 1})
            ok = True
        except UpstreamError:
            logger.info("probe failed")
        finally:
            self.breaker.leave("probe", ok)
        return ok

    async def prepay(self, who, conversation, n):
        """A long conversation buys its tokens up front and again when they run out."""
        self._prepaid[conversation] = await self.tenants[who].reserve(n)  # leak: the second purchase overwrites a grant that is still open
        return n

    async def hang_up(self, conversation, used):
        grant = self._prepaid.pop(conversation, None)
        if grant is not None:
            await grant.settle(used)

    async def agent_loop(self, who, body, rounds=8):
        grant = await self.tenants[who].reserve(self._estimate(body))  # clean: settled in the finally
        used = 0
        try:
            for _ in range(rounds):
                reply = await self._send("/v1/chat", body)
                used += reply["usage"]["total_tokens"]
                if not reply.get("tool_calls"):
                    return 200, reply
                if used * 2 > grant.amount:
                    await grant.extend(grant.amount, timeout=2.0)
                body = {**body, "prompt": body["prompt"] + str(reply["tool_calls"])}
            return 200, {"error": "too many rounds"}
        except BudgetTimeout as exc:
            return 429, {"error": str(exc)}
        finally:
            await settle_all((grant,), used)

    async def drain(self, width):
        for _ in range(width):
            await self.gate.acquire()  # clean: near miss, a barrier, released below in the same number
        for _ in range(width):
            self.gate.release()
