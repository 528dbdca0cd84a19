"""Gateway in front of the model servers: keeps upstream connections, limits the
requests per tenant, streams tokens to the client and hedges slow requests."""
import asyncio
import contextlib
import itertools
import json
import logging

logger = logging.getLogger("gateway")


class PoolTimeout(Exception):
    pass


class TenantBusy(Exception):
    pass


class UpstreamError(Exception):
    def __init__(self, status, body=b""):
        super().__init__(f"upstream said {status}")
        self.status = status
        self.body = body

    @property
    def retryable(self):
        return self.status in (429, 502, 503)


class Upstream:
    _ids = itertools.count(1)

    def __init__(self, host, reader, writer):
        self.ident = next(self._ids)
        self.host = host
        self.reader = reader
        self.writer = writer
        self.broken = False

    def healthy(self):
        return not self.broken and not self.reader.at_eof()

    async def send(self, payload):
        blob = json.dumps(payload).encode()
        self.writer.write(len(blob).to_bytes(4, "big") + blob)
        await self.writer.drain()

    async def events(self):
        while True:
            line = await self.reader.readline()
            if not line:
                raise UpstreamError(502)
            event = json.loads(line)
            if "error" in event:
                raise UpstreamError(event.get("status", 500), line)
            yield event
            if event.get("final"):
                return


class UpstreamPool:
    def __init__(self, hosts, per_host=16):
        self.hosts = list(hosts)
        self.limit = per_host * len(self.hosts)
        self._permits = asyncio.Semaphore(self.limit)
        self._idle = []
        self._turn = itertools.cycle(self.hosts)

    async def acquire(self, timeout=5.0):
        try:
            await asyncio.wait_for(self._permits.acquire(), timeout)  # clean: near miss, travels with the connection and is given back in release() or in the handlers
        except asyncio.TimeoutError:
            raise PoolTimeout(f"{self.limit} connections in use") from None
        while self._idle:
            conn = self._idle.pop()  # leak: an unhealthy connection is dropped from the list and its writer is never closed
            if conn.healthy():
                return conn
            logger.debug("connection %d to %s went away", conn.ident, conn.host)
        host = next(self._turn)
        try:
            reader, writer = await asyncio.open_connection(*host)  # clean: goes into the object that the caller gets
        except OSError:
            self._permits.release()
            raise UpstreamError(503) from None
        except asyncio.CancelledError:
            self._permits.release()
            raise
        return Upstream(host, reader, writer)

    def release(self, conn):
        if conn.broken:
            conn.writer.close()
        else:
            self._idle.append(conn)
        self._permits.release()

    async def close(self):
        while self._idle:
            conn = self._idle.pop()  # clean: closed in the next line
            conn.writer.close()


class Tenants:
    def __init__(self, limits, default=4):
        self.limits = limits
        self.default = default
        self.inflight = {}

    def enter(self, tenant):
        now = self.inflight.get(tenant, 0)
        if now >= self.limits.get(tenant, self.default):
            raise TenantBusy(tenant)
        self.inflight[tenant] = now + 1
        return Ticket(self, tenant)  # clean: goes to the caller

    def leave(self, tenant):
        self.inflight[tenant] -= 1
        if not self.inflight[tenant]:
            del self.inflight[tenant]


class Ticket:
    def __init__(self, tenants, tenant):
        self._tenants = tenants
        self.tenant = tenant

    def leave(self):
        tenants, self._tenants = self._tenants, None
        if tenants is not None:
            tenants.leave(self.tenant)


class Gateway:
    def __init__(self, pool, tenants, retries=2, hedge_after=0.8):
        self.pool = pool
        self.tenants = tenants
        self.retries = retries
        self.hedge_after = hedge_after
        self.stats = {"ok": 0, "busy": 0, "failed": 0, "hedged": 0}

    async def complete(self, tenant, payload):
        try:
            ticket = self.tenants.enter(tenant)  # leak: PoolTimeout is answered with a 503 before the ticket is left
            conn = await self.pool.acquire()  # clean: released in the finally
        except TenantBusy:
            self.stats["busy"] += 1
            return 429, None
        except PoolTimeout:
            self.stats["failed"] += 1
            return 503, None
        try:
            text = await self._collect(conn, payload)
            self.stats["ok"] += 1
            return 200, text
        except UpstreamError as exc:
            conn.broken = True
            return exc.status, None
        finally:
            self.pool.release(conn)
            ticket.leave()

    async def _collect(self, conn, payload):
        await conn.send(payload)
        parts = []
        async for event in conn.events():
            parts.append(event["text"])
        return "".join(parts)

    async def complete_with_retry(self, payload):
        conn = await self.pool.acquire()  # leak: a retry binds the name anew and the broken one is not released
        for attempt in range(self.retries + 1):
            try:
                text = await self._collect(conn, payload)
            except UpstreamError as exc:
                conn.broken = True
                if not exc.retryable or attempt == self.retries:
                    self.pool.release(conn)
                    raise
                await asyncio.sleep(0.1 * 2 ** attempt)
                conn = await self.pool.acquire()  # leak: the next retry binds the name anew, too
            else:
                self.pool.release(conn)
                return text

    async def stream(self, tenant, payload, client):
        ticket = self.tenants.enter(tenant)  # clean: left in the finally
        try:
            conn = await self.pool.acquire()  # clean: near miss, the client that went away is handled by the finally of _pump
            async with contextlib.aclosing(self._pump(conn, payload)) as pieces:
                async for piece in pieces:
                    if client.closing:
                        conn.broken = True
                        break
                    await client.write(piece)
        finally:
            ticket.leave()

    async def _pump(self, conn, payload):
        try:
            await conn.send(payload)
            async for event in conn.events():
                yield event["text"].encode()
        except UpstreamError as exc:
            conn.broken = True
            yield json.dumps({"error": exc.status}).encode()
        finally:
            self.pool.release(conn)

    async def _attempt(self, payload):
        conn = await self.pool.acquire()  # leak: hedged() cancels the loser, and there is no finally for that
        try:
            text = await self._collect(conn, payload)
        except UpstreamError:
            conn.broken = True
            self.pool.release(conn)
            raise
        self.pool.release(conn)
        return text

    async def hedged(self, payload):
        first = asyncio.create_task(self._attempt(payload))
        done, _ = await asyncio.wait({first}, timeout=self.hedge_after)
        if done:
            return first.result()
        self.stats["hedged"] += 1
        second = asyncio.create_task(self._attempt(payload))
        done, pending = await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        return done.pop().result()

    async def count_tokens(self, payload):
        conn = None
        try:
            conn = await self.pool.acquire(timeout=0.2)  # clean: near miss, the finally releases what is not None
            return len(await self._collect(conn, dict(payload, max_tokens=0)))
        except PoolTimeout:
            return None
        except UpstreamError:
            if conn is not None:
                conn.broken = True
            return None
        finally:
            if conn is not None:
                self.pool.release(conn)


async def warm(pool, n):
    """Opens n connections so that the first requests need not wait."""
    conns = []
    try:
        for _ in range(n):
            conns.append(await pool.acquire())  # clean: all of them are released in the finally
    except (PoolTimeout, UpstreamError) as exc:
        logger.info("warmed %d of %d: %s", len(conns), n, exc)
    finally:
        for conn in conns:
            pool.release(conn)
