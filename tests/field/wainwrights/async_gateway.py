"""Asyncio gateway in front of a few inference servers.

Two limits apply: tickets (how many requests we work on at all) and upstream connections (a semaphore over kept-alive
sockets, per server).  The wire format is one JSON object per line.
"""
import asyncio
import contextlib
import json
import logging
import time
from collections import deque

LOG = logging.getLogger("gateway")


class UpstreamRefused(RuntimeError):
    pass


class UpstreamBusy(RuntimeError):
    pass


class Ticket:
    def __init__(self, gate, number):
        self.gate = gate
        self.number = number

    def give_back(self):
        self.gate._return(self.number)


class Gate:
    def __init__(self, limit):
        self._numbers = deque(range(limit))
        self._waiters = deque()

    async def ticket(self):
        while not self._numbers:
            fut = asyncio.get_running_loop().create_future()
            self._waiters.append(fut)
            await fut
        number = self._numbers.popleft()  # clean: wrapped in the Ticket that is returned
        return Ticket(self, number)

    def ticket_nowait(self):
        if not self._numbers:
            return None
        return Ticket(self, self._numbers.popleft())  # clean: returned

    def _return(self, number):
        self._numbers.append(number)
        while self._waiters:
            fut = self._waiters.popleft()
            if not fut.done():
                fut.set_result(None)
                break


class Connection:
    def __init__(self, reader, writer):
        self.reader = reader
        self.writer = writer
        self.used, self.broken = time.monotonic(), False

    async def ask(self, payload):
        self.writer.write(json.dumps(payload).encode() + b"\n")
        await self.writer.drain()
        line = await self.reader.readline()
        if not line:
            self.broken = True
            raise UpstreamBusy("closed mid-request")
        reply = json.loads(line)
        if reply.get("status") == 429:
            raise UpstreamBusy(reply.get("detail", ""))
        return reply

    def alive(self, max_idle):
        return not self.broken and not self.writer.is_closing() and time.monotonic() - self.used < max_idle


class Upstream:
    def __init__(self, host, port, limit, max_idle=30.0):
        self.host, self.port, self.max_idle = host, port, max_idle
        self._room = asyncio.Semaphore(limit)
        self._idle = []

    async def checkout(self):
        await self._room.acquire()  # leak: a refused handshake raises UpstreamRefused, and only OSError gives the room back
        while self._idle:
            conn = self._idle.pop()  # clean: a stale one is closed and the loop goes on
            if conn.alive(self.max_idle):
                return conn
            conn.writer.close()
        try:
            return await self._dial()  # clean: returned to the caller
        except OSError as exc:
            self._room.release()
            LOG.warning("%s:%d: %s", self.host, self.port, exc)
            raise

    async def _dial(self):
        reader, writer = await asyncio.open_connection(self.host, self.port)  # leak: a bad greeting raises with the socket open
        greeting = await reader.readline()
        if not greeting.startswith(b"ready"):
            raise UpstreamRefused(greeting.decode(errors="replace").strip())
        return Connection(reader, writer)

    def checkin(self, conn):
        conn.used = time.monotonic()
        if conn.broken:
            conn.writer.close()
        else:
            self._idle.append(conn)
        self._room.release()

    @contextlib.asynccontextmanager
    async def connection(self):
        conn = await self.checkout()  # clean: finally
        try:
            yield conn
        finally:
            self.checkin(conn)

    def close(self):
        while self._idle:
            self._idle.pop().writer.close()  # clean: closed at once


class ChatSession:
    """Keeps one connection for a conversation, since the server caches the prefix per socket."""
    def __init__(self, gate, upstream):
        self.gate, self.upstream = gate, upstream
        self.ticket = self.conn = None
        self.turns = []

    async def open(self):
        self.ticket = await self.gate.ticket()  # leak: close() checks the connection in and never returns the ticket
        try:
            self.conn = await self.upstream.checkout()  # clean: close() checks it in
        except (OSError, UpstreamRefused):
            self.ticket.give_back()
            self.ticket = None
            raise

    async def say(self, text):
        self.turns.append({"role": "user", "content": text})
        reply = await self.conn.ask({"messages": self.turns})
        self.turns.append({"role": "assistant", "content": reply["text"]})
        return reply["text"]

    def close(self):
        conn, self.conn = self.conn, None
        if conn is not None:
            self.upstream.checkin(conn)
        self.turns.clear()


class Gateway:
    def __init__(self, upstreams, limit):
        self.upstreams = upstreams
        self.gate = Gate(limit)

    def _pick(self, key):
        return self.upstreams[hash(key) % len(self.upstreams)]

    async def complete(self, req):
        ticket = await self.gate.ticket()  # clean: finally
        try:
            async with self._pick(req["id"]).connection() as conn:  # clean: async with
                reply = await conn.ask(req)
            return reply["text"]
        finally:
            ticket.give_back()

    async def complete_or_shed(self, req):
        ticket = self.gate.ticket_nowait()  # clean: None means shed and every other path reaches the finally
        if ticket is None:
            return None
        try:
            async with self._pick(req["id"]).connection() as conn:  # clean: async with
                return (await conn.ask(req))["text"]
        except UpstreamBusy:
            return None
        finally:
            ticket.give_back()

    async def with_retries(self, req, attempts=4):
        up = self._pick(req["id"])
        for attempt in range(attempts):
            conn = await up.checkout()  # leak: the busy handler sleeps and loops without checking the connection in
            try:
                reply = await conn.ask(req)
            except UpstreamBusy as exc:
                LOG.info("attempt %d of %s: %s", attempt, req["id"], exc)
                await asyncio.sleep(0.05 * 2 ** attempt)
                continue
            up.checkin(conn)
            return reply["text"]
        raise UpstreamBusy("gave up on %s" % req["id"])

    async def stream(self, req):
        up = self._pick(req["id"])
        conn = await up.checkout()  # leak: the consumer stops at a stop word and the generator has no finally
        conn.writer.write(json.dumps(dict(req, stream=True)).encode() + b"\n")
        while True:
            line = await conn.reader.readline()
            piece = json.loads(line) if line else {"done": True}
            if piece.get("done"):
                break
            yield piece["text"]
        up.checkin(conn)

    async def until_stop(self, req, stop):
        text = ""
        async for piece in self.stream(req):
            text += piece
            if stop in text:
                return text[: text.index(stop)]
        return text

    async def hedged(self, req, wait):
        async def one(up):
            conn = await up.checkout()  # clean: near miss, the cancelled task still runs the finally
            try:
                return await conn.ask(req)
            except asyncio.CancelledError:
                conn.broken = True
                raise
            finally:
                up.checkin(conn)

        first = asyncio.ensure_future(one(self.upstreams[0]))
        done, _ = await asyncio.wait({first}, timeout=wait)
        if done:
            return first.result()
        second = asyncio.ensure_future(one(self.upstreams[-1]))
        done, pending = await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        return done.pop().result()

    async def warm(self, up, n):
        got = await asyncio.gather(*(up.checkout() for _ in range(n)), return_exceptions=True)  # clean: near miss, whatever is a connection is checked in
        for item in got:
            if isinstance(item, Connection):
                up.checkin(item)
        return len(got)

    async def probe(self, up):
        conn = await up.checkout()  # clean: checked in on both branches
        try:
            reply = await conn.ask({"op": "ping"})
        except (UpstreamBusy, ConnectionError):
            conn.broken = True
            up.checkin(conn)
            return False
        up.checkin(conn)
        return reply.get("op") == "pong"
