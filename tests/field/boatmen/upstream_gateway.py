"""Async gateway in front of several model servers.

Each upstream has a pool of framed TCP connections and a number of permits that
bounds the requests in flight. Requests may be hedged to a second upstream.
"""
import asyncio
import json
import logging
import random
import time

log = logging.getLogger("gateway")


class ConnectFailed(Exception):
    pass


class UpstreamBusy(Exception):
    pass


class BadFrame(Exception):
    pass


class Conn:
    def __init__(self, reader, writer):
        self.reader = reader
        self.writer = writer
        self.born = time.monotonic()
        self.broken = False

    @classmethod
    async def open(cls, host, port):
        try:
            reader, writer = await asyncio.open_connection(host, port)  # clean: both live in the Conn that is returned
        except OSError as exc:
            raise ConnectFailed(f"{host}:{port}") from exc
        return cls(reader, writer)

    async def ask(self, payload):
        body = json.dumps(payload).encode()
        self.writer.write(len(body).to_bytes(4, "big") + body)
        await self.writer.drain()
        head = await self.reader.readexactly(4)
        size = int.from_bytes(head, "big")
        if size > 1 << 26:
            self.broken = True
            raise BadFrame(size)
        return json.loads(await self.reader.readexactly(size))

    def close(self):
        self.writer.close()


class Upstream:
    def __init__(self, name, host, port, limit=32, max_age=300.0):
        self.name = name
        self.host = host
        self.port = port
        self.max_age = max_age
        self._idle = []
        self._permits = limit
        self._waiters = []
        self.closed = False

    # permits

    def try_permit(self):
        if self._permits <= 0:
            return False
        self._permits -= 1
        return True

    async def permit(self, timeout):
        if self.try_permit():  # clean: the caller has it now
            return
        fut = asyncio.get_running_loop().create_future()
        self._waiters.append(fut)
        try:
            await asyncio.wait_for(fut, timeout)
        except asyncio.TimeoutError:
            if fut in self._waiters:
                self._waiters.remove(fut)
            raise UpstreamBusy(self.name) from None

    def end_permit(self):
        while self._waiters:
            fut = self._waiters.pop(0)
            if not fut.done():
                fut.set_result(None)
                return
        self._permits += 1

    # connections

    async def checkout(self):
        while self._idle:
            conn = self._idle.pop()  # leak: a connection over its age is skipped by the continue and never closed
            if time.monotonic() - conn.born > self.max_age:
                continue
            return conn
        return await Conn.open(self.host, self.port)  # clean: returned to the caller

    def checkin(self, conn):
        if conn.broken or self.closed:
            conn.close()
        else:
            self._idle.append(conn)

    def close(self):
        self.closed = True
        for conn in self._idle:
            conn.close()
        self._idle.clear()


class Gateway:
    def __init__(self, upstreams, timeout=20.0):
        self.upstreams = list(upstreams)
        self.timeout = timeout
        self.pinned = {}
        self.counts = {"ok": 0, "busy": 0, "failed": 0}

    def _pick(self, exclude=()):
        rest = [u for u in self.upstreams if u not in exclude]
        return random.choice(rest) if rest else None

    async def complete(self, payload):
        tried = []
        while True:
            up = self._pick(tried)
            if up is None:
                self.counts["failed"] += 1
                raise UpstreamBusy("all")
            tried.append(up)
            try:
                return await self._once(up, payload)
            except (UpstreamBusy, ConnectFailed, BadFrame) as exc:
                log.warning("%s: %r, next one", up.name, exc)

    async def _once(self, up, payload):
        await up.permit(self.timeout)  # leak: ConnectFailed of checkout leaves before the try and complete() goes on with the next upstream
        conn = await up.checkout()  # clean: BadFrame marks it broken and the finally checks it in
        try:
            answer = await conn.ask(payload)
            self.counts["ok"] += 1
            return answer
        finally:
            up.checkin(conn)
            up.end_permit()

    async def embed_many(self, texts):
        """One connection for the whole list; falls back to nothing when busy."""
        up = self._pick()
        if up is None or not up.try_permit():  # clean: near miss, on False nothing is held and True goes on to the finally
            self.counts["busy"] += 1
            return None
        try:
            conn = await up.checkout()  # leak: the BadFrame handler returns without a checkin
            out = []
            for i in range(0, len(texts), 16):
                try:
                    part = await conn.ask({"op": "embed", "texts": texts[i : i + 16]})
                except BadFrame:
                    log.error("bad frame from %s", up.name)
                    return None
                out.extend(part["vectors"])
            up.checkin(conn)
            return out
        except ConnectFailed:
            return None
        finally:
            up.end_permit()

    async def hedged(self, payload, delay=0.5):
        """Starts a second request when the first one is slow."""
        first = asyncio.ensure_future(self.complete(payload))
        done, _ = await asyncio.wait({first}, timeout=delay)
        if done:
            return first.result()
        second = asyncio.ensure_future(self.complete(payload))
        done, pending = await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.add_done_callback(lambda t: t.exception())
        return done.pop().result()

    # sessions stick to one connection, since the server keeps their KV cache on it

    async def open_session(self, sid):
        up = self._pick()
        if up is None:
            raise UpstreamBusy("none configured")
        await up.permit(self.timeout)  # clean: near miss, given back in the handler or kept by the session and ended in close_session
        try:
            conn = await up.checkout()  # leak: a session that is opened again under the same id overwrites the pinned connection
        except ConnectFailed:
            up.end_permit()
            raise
        old = self.pinned.get(sid)
        if old is not None:
            log.info("session %s moved from %s to %s", sid, old[0].name, up.name)
            old[0].end_permit()
        self.pinned[sid] = (up, conn)

    async def session_turn(self, sid, payload):
        up, conn = self.pinned[sid]
        try:
            return await conn.ask(payload)
        except BadFrame:
            self.close_session(sid)
            return None

    def close_session(self, sid):
        entry = self.pinned.pop(sid, None)
        if entry is None:
            return
        up, conn = entry
        up.checkin(conn)
        up.end_permit()

    async def ping_all(self):
        health = {}
        for up in self.upstreams:
            if not up.try_permit():  # leak: a ping that gets another answer than pong continues past end_permit
                health[up.name] = "busy"
                continue
            try:
                conn = await up.checkout()  # clean: checked in before the answer is looked at
            except ConnectFailed:
                up.end_permit()
                health[up.name] = "down"
                continue
            try:
                answer = await conn.ask({"op": "ping"})
            except BadFrame:
                answer = {}
            up.checkin(conn)
            if answer.get("op") != "pong":
                health[up.name] = "odd"
                continue
            health[up.name] = "up"
            up.end_permit()
        return health

    def shutdown(self):
        for sid in list(self.pinned):
            self.close_session(sid)
        for up in self.upstreams:
            up.close()
