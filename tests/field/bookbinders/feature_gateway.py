"""Feature gateway: reads feature rows from several backends over pooled connections."""
import asyncio
import contextlib
import json
import logging
import random
import time

log = logging.getLogger("features.gateway")

MAX_AGE = 300.0


class BackendDown(Exception):
    pass


class StaleRead(Exception):
    pass


class Conn:
    def __init__(self, reader, writer):
        self.reader = reader
        self.writer = writer
        self.born = time.monotonic()
        self.broken = False

    def age(self):
        return time.monotonic() - self.born

    async def call(self, op, min_epoch=0, **args):
        self.writer.write(json.dumps({"op": op, **args}).encode() + b"\n")
        await self.writer.drain()
        reply = json.loads(await self.reader.readline())
        if reply.get("epoch", 0) < min_epoch:
            raise StaleRead(op)
        return reply

    async def close(self):
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()


class BackendPool:
    def __init__(self, host, port, size):
        self.host = host
        self.port = port
        self._slots = asyncio.Semaphore(size)
        self._idle = []
        self.dialled = 0

    async def _dial(self):
        try:
            reader, writer = await asyncio.open_connection(self.host, self.port)  # clean: both go into the Conn that is returned
        except OSError as e:
            raise BackendDown(self.host) from e
        self.dialled += 1
        return Conn(reader, writer)

    async def checkout(self):
        await self._slots.acquire()  # leak: _dial() raises BackendDown and nobody releases the slot
        while self._idle:
            conn = self._idle.pop()  # clean: handed out, or closed when it is too old
            if conn.age() < MAX_AGE:
                return conn
            await conn.close()
        return await self._dial()  # clean: goes to the caller

    def checkin(self, conn):
        if conn.broken:
            conn.writer.close()
        else:
            self._idle.append(conn)
        self._slots.release()

    @contextlib.asynccontextmanager
    async def session(self):
        conn = await self.checkout()  # clean: checked in when the block ends
        try:
            yield conn
        finally:
            self.checkin(conn)

    async def close(self):
        while self._idle:
            await self._idle.pop().close()  # clean: closed on the spot


async def fetch_row(pool, key, min_epoch=0, attempts=3):
    """One row, read again for as long as the replica lags behind."""
    for attempt in range(attempts):
        conn = await pool.checkout()  # leak: a stale read goes round the loop without the checkin
        try:
            row = await conn.call("get", key=key, min_epoch=min_epoch)
        except StaleRead:
            log.debug("stale %s, attempt %d", key, attempt)
            await asyncio.sleep(0.01 * 2 ** attempt + random.random() * 0.01)
            continue
        except ConnectionError:
            conn.broken = True
            pool.checkin(conn)
            continue
        pool.checkin(conn)
        return row
    return None


async def fetch_rows(pool, keys, conn=None):
    owned = conn is None
    if owned:
        conn = await pool.checkout()  # clean: near miss, the flag makes the finally check it in
    try:
        out = {}
        for key in keys:
            reply = await conn.call("get", key=key)
            if reply.get("missing"):
                continue
            out[key] = reply["row"]
        return out
    finally:
        if owned:
            pool.checkin(conn)


async def _from_replica(pool, key):
    conn = await pool.checkout()  # clean: near miss, the finally runs also when the race cancels this task
    try:
        return await conn.call("get", key=key)
    except asyncio.CancelledError:
        conn.broken = True
        raise
    finally:
        pool.checkin(conn)


async def hedged(pools, key, delay=0.02):
    """Ask a second replica when the first does not answer at once."""
    tasks = {asyncio.create_task(_from_replica(pools[0], key))}
    done, _ = await asyncio.wait(tasks, timeout=delay)
    if not done:
        tasks.add(asyncio.create_task(_from_replica(pools[1], key)))
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for t in tasks - done:
        t.cancel()
    return done.pop().result()


class Subscription:
    """A connection on which the backend pushes the rows that change."""

    def __init__(self, pool, group, on_row):
        self._pool = pool
        self._group = group
        self._on_row = on_row
        self._conn = None
        self._task = None
        self.received = 0

    async def start(self):
        self._conn = await self._pool.checkout()  # leak: stop() of a paused subscription returns before the checkin
        await self._conn.call("subscribe", group=self._group)
        self._task = asyncio.create_task(self._pump())

    async def _pump(self):
        while True:
            line = await self._conn.reader.readline()
            if not line:
                return
            self.received += 1
            self._on_row(json.loads(line))

    async def pause(self):
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def resume(self):
        if self._task is None and self._conn is not None:
            self._task = asyncio.create_task(self._pump())

    async def stop(self):
        if self._task is None:
            return
        self._task.cancel()
        self._task = None
        self._conn.broken = True
        self._pool.checkin(self._conn)
        self._conn = None


class Gateway:
    def __init__(self, pools):
        self._pools = pools
        self._pinned = {}

    async def begin(self, session_id, group):
        """All reads of a session see the same replica."""
        pool = self._pools[group]
        conn = await pool.checkout()  # leak: a second begin() of the same session overwrites the entry
        self._pinned[session_id] = (pool, conn)
        log.debug("session %s on %s", session_id, pool.host)

    async def read(self, session_id, keys):
        pool, conn = self._pinned[session_id]
        return await fetch_rows(pool, keys, conn=conn)

    async def end(self, session_id):
        entry = self._pinned.pop(session_id, None)
        if entry is None:
            return
        pool, conn = entry
        pool.checkin(conn)


async def warm(pool, n):
    conns = []
    try:
        for _ in range(n):
            conns.append(await pool.checkout())  # clean: near miss, the finally checks in as many as there came
    except BackendDown as e:
        log.warning("warm-up of %s stopped at %d", e, len(conns))
    finally:
        for conn in conns:
            pool.checkin(conn)


async def copy_group(src, dst, group, page=500):
    a = await src.checkout()  # leak: dst.checkout() raises BackendDown while this one is held
    b = await dst.checkout()  # clean: checked in by the finally
    moved, cursor = 0, ""
    try:
        while cursor is not None:
            reply = await a.call("scan", group=group, after=cursor, limit=page)
            await b.call("put_many", group=group, rows=reply["rows"])
            moved += len(reply["rows"])
            cursor = reply.get("next")
    finally:
        dst.checkin(b)
        src.checkin(a)
    return moved


async def scan(pool, prefix, page=200):
    async with pool.session() as conn:  # clean: checked in by the context manager
        cursor = ""
        while cursor is not None:
            reply = await conn.call("scan", prefix=prefix, after=cursor, limit=page)
            for row in reply["rows"]:
                yield row
            cursor = reply.get("next")
