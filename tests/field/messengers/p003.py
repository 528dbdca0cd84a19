"""Broker that shares a few upstream database connections between coroutines."""
import asyncio
import logging

log = logging.getLogger("broker")


class UpstreamError(Exception):
    pass


class ConnectionBroker:
    def __init__(self, conns):
        self._idle = asyncio.Queue()
        for conn in conns:
            self._idle.put_nowait(conn)

    async def borrow(self):
        return await self._idle.get()

    def give_back(self, conn):
        self._idle.put_nowait(conn)


class Gateway:
    def __init__(self, broker, schema):
        self.broker = broker
        self.schema = schema
        self.failures = 0

    async def prepared(self, role):
        conn = await self.broker.borrow()  # clean: handed to the caller
        await conn.execute(f"set role {role}")
        await conn.execute(f"set search_path to {self.schema}")
        return conn

    async def count(self, table):
        conn = await self.prepared("reader")  # clean: finally
        try:
            return await conn.fetchval(f"select count(*) from {table}")
        finally:
            self.broker.give_back(conn)

    async def lookup(self, table, key):
        conn = await self.prepared("reader")  # leak: the swallowed error returns without giving back
        try:
            row = await conn.fetchrow(f"select * from {table} where id = $1", key)
        except UpstreamError as err:
            self.failures += 1
            log.warning("lookup in %s failed: %s", table, err)
            return None
        self.broker.give_back(conn)
        return dict(row) if row else {}

    async def insert(self, table, values):
        conn = await self.prepared("writer")  # clean: given back after error and after success
        try:
            await conn.executemany(f"insert into {table} values ($1, $2)", values)
            done = True
        except UpstreamError:
            self.failures += 1
            done = False
        self.broker.give_back(conn)
        return done

    async def vacuum(self, tables):
        for table in tables:
            conn = await self.prepared("owner")  # leak: continue on an empty table
            live = await conn.fetchval(f"select count(*) from {table}")
            if live == 0:
                log.info("%s is empty", table)
                continue
            await conn.execute(f"vacuum {table}")
            self.broker.give_back(conn)
