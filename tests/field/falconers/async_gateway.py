"""Inference gateway: token permits in front, pooled upstream connections behind."""
import asyncio
import collections
import json
import logging
import time

log = logging.getLogger("gateway")

MAX_IDLE = 30.0


class Saturated(Exception):
    pass


class BadAnswer(Exception):
    pass


class Conn:
    def __init__(self, host, reader, writer):
        self.host = host
        self.reader = reader
        self.writer = writer
        self.used = time.monotonic()

    async def call(self, body):
        self.writer.write(json.dumps(body).encode() + b"\n")
        await self.writer.drain()
        line = await self.reader.readline()
        self.used = time.monotonic()
        if not line:
            raise ConnectionResetError(self.host)
        answer = json.loads(line)
        if "error" in answer:
            raise BadAnswer(answer["error"])
        return answer


class Upstreams:
    def __init__(self, hosts, per_host=16):
        self.hosts = list(hosts)
        self.per_host = per_host
        self.idle = {h: [] for h in hosts}
        self.open = collections.Counter()
        self.turn = 0

    def pick(self):
        self.turn += 1
        return self.hosts[self.turn % len(self.hosts)]

    async def get(self, host):
        while self.idle[host]:
            conn = self.idle[host].pop()  # leak: one that idled too long is neither closed nor counted down
            if time.monotonic() - conn.used > MAX_IDLE:
                continue
            return conn
        if self.open[host] >= self.per_host:
            raise Saturated(host)
        name, port = host.rsplit(":", 1)
        self.open[host] += 1
        try:
            reader, writer = await asyncio.open_connection(name, int(port))  # clean: returned inside a Conn
        except OSError:
            self.open[host] -= 1
            raise
        return Conn(host, reader, writer)

    def put(self, conn):
        self.idle[conn.host].append(conn)

    def discard(self, conn):
        conn.writer.close()
        self.open[conn.host] -= 1

    def close(self):
        for conns in self.idle.values():
            while conns:
                self.discard(conns.pop())


class Permits:
    """Counts tokens, not requests. First come, first served."""

    def __init__(self, tokens):
        self.left = tokens
        self.waiting = collections.deque()

    async def take(self, n):
        while self.left < n:
            fut = asyncio.get_running_loop().create_future()
            self.waiting.append(fut)
            await fut
        self.left -= n

    def try_take(self, n):
        if self.left < n:
            return False
        self.left -= n
        return True

    def give(self, n):
        self.left += n
        while self.waiting:
            fut = self.waiting.popleft()
            if not fut.done():
                fut.set_result(None)


class Gateway:
    def __init__(self, hosts, tokens):
        self.ups = Upstreams(hosts)
        self.permits = Permits(tokens)
        self.queue = asyncio.Queue()
        self.served = 0
        self.retried = 0

    async def generate(self, req):
        """One request, one answer; Saturated is turned into a 503 by the caller."""
        await self.permits.take(req["tokens"])  # leak: Saturated from the connection pool leaves before the try
        conn = await self.ups.get(self.ups.pick())  # clean: put back or discarded on each way out
        try:
            answer = await conn.call(req)
        except ConnectionResetError:
            self.ups.discard(conn)
            self.permits.give(req["tokens"])
            raise
        except BadAnswer as exc:
            answer = {"error": str(exc)}
        self.ups.put(conn)
        self.permits.give(req["tokens"])
        self.served += 1
        return answer

    async def handle(self, req):
        try:
            return 200, await self.generate(req)
        except Saturated as exc:
            return 503, {"error": "saturated: %s" % exc}

    async def with_retries(self, req, tries=3):
        for attempt in range(tries):
            conn = await self.ups.get(self.ups.pick())  # leak: a reset connection is left behind by the retry
            try:
                answer = await conn.call(req)
            except ConnectionResetError:
                self.retried += 1
                await asyncio.sleep(0.1 * 2 ** attempt)
                continue
            except BadAnswer:
                self.ups.put(conn)
                raise
            self.ups.put(conn)
            return answer
        raise Saturated("no upstream answered in %d tries" % tries)

    async def stream(self, req):
        conn = await self.ups.get(self.ups.pick())  # clean: near miss, the flag only chooses between put and discard
        clean = False
        try:
            conn.writer.write(json.dumps(req).encode() + b"\n")
            await conn.writer.drain()
            while True:
                line = await conn.reader.readline()
                if line in (b"", b"[DONE]\n"):
                    clean = line != b""
                    return
                yield json.loads(line)
        finally:
            if clean:
                self.ups.put(conn)
            else:
                self.ups.discard(conn)

    async def _attempt(self, host, req):
        conn = await self.ups.get(host)  # leak: hedged() cancels the slower attempt and nothing catches a cancellation
        try:
            answer = await conn.call(req)
        except (ConnectionResetError, BadAnswer):
            self.ups.discard(conn)
            raise
        self.ups.put(conn)
        return answer

    async def hedged(self, req, delay=0.5):
        first = asyncio.create_task(self._attempt(self.ups.pick(), req))
        done, _ = await asyncio.wait([first], timeout=delay)
        if done:
            return first.result()
        second = asyncio.create_task(self._attempt(self.ups.pick(), req))
        done, late = await asyncio.wait([first, second], return_when=asyncio.FIRST_COMPLETED)
        for task in late:
            task.cancel()
        return done.pop().result()

    async def submit(self, req):
        """Queue a request for the batcher. None when the gateway is full."""
        if not self.permits.try_take(req["tokens"]):  # leak: stop() empties the queue and gives no permits back
            return None
        fut = asyncio.get_running_loop().create_future()
        await self.queue.put((req, fut))
        return await fut

    async def batcher(self, size=8):
        while True:
            items = [await self.queue.get()]
            while len(items) < size and not self.queue.empty():
                items.append(self.queue.get_nowait())
            answers = await self._batch([req for req, _ in items])
            for (req, fut), answer in zip(items, answers):
                self.permits.give(req["tokens"])
                if not fut.done():
                    fut.set_result(answer)

    async def _batch(self, reqs):
        try:
            conn = await self.ups.get(self.ups.pick())  # clean: when this raises there is no connection
        except Saturated:
            return [None] * len(reqs)
        intact = False
        try:
            answer = await conn.call({"batch": reqs})
            intact = True
            return answer["batch"]
        except (ConnectionResetError, BadAnswer) as exc:
            log.warning("batch of %d: %s", len(reqs), exc)
            return [None] * len(reqs)
        finally:
            (self.ups.put if intact else self.ups.discard)(conn)

    async def healthy(self, host):
        conn = await self.ups.get(host)  # clean: each branch gives it back
        try:
            answer = await conn.call({"health": 1})
        except (ConnectionResetError, BadAnswer):
            self.ups.discard(conn)
            return False
        self.ups.put(conn)
        return answer.get("status") == "ok"

    async def warm(self):
        """Open one connection to each host before the first request."""
        conns = []
        try:
            for host in self.ups.hosts:
                conns.append(await self.ups.get(host))  # clean: near miss, those opened so far go back in the finally
        finally:
            for conn in conns:
                self.ups.put(conn)

    def stop(self, worker):
        """Queued requests get None."""
        worker.cancel()
        while not self.queue.empty():
            _, fut = self.queue.get_nowait()
            fut.set_result(None)
        self.ups.close()
