"""Fan-out of training metrics and generated tokens to browsers and other hubs."""
import asyncio
import contextlib
import logging
from collections import deque
from typing import Any, AsyncIterator, Callable, Optional

logger = logging.getLogger("hub")


class HubFull(Exception):
    pass


class UnknownTopic(KeyError):
    pass


class Subscription:
    __slots__ = ("seat", "topic", "inbox", "lagged")

    def __init__(self, seat: int, topic: str, depth: int):
        self.seat = seat
        self.topic = topic
        self.inbox: asyncio.Queue = asyncio.Queue(depth)
        self.lagged = False

    async def next(self, timeout: Optional[float] = None) -> Any:
        return await asyncio.wait_for(self.inbox.get(), timeout)


class Hub:
    def __init__(self, seats: int, history: int = 100):
        self._seats = list(range(seats))
        self._rooms: dict[str, set[Subscription]] = {}
        self._history: dict[str, deque] = {}
        self._keep = history

    def create(self, topic: str):
        self._rooms.setdefault(topic, set())
        self._history.setdefault(topic, deque(maxlen=self._keep))

    def join(self, topic: str, depth: int = 64) -> Subscription:
        if not self._seats:
            raise HubFull(topic)
        seat = self._seats.pop()  # leak: an unknown topic raises after the seat was popped
        room = self._rooms.get(topic)
        if room is None:
            raise UnknownTopic(topic)
        sub = Subscription(seat, topic, depth)
        room.add(sub)
        return sub

    def leave(self, sub: Subscription):
        room = self._rooms.get(sub.topic, set())
        if sub in room:
            room.remove(sub)
            self._seats.append(sub.seat)

    def publish(self, topic: str, message: Any):
        self._history[topic].append(message)
        for sub in self._rooms[topic]:
            try:
                sub.inbox.put_nowait(message)
            except asyncio.QueueFull:
                sub.lagged = True

    def backlog(self, topic: str, after: int) -> list:
        return [m for m in self._history.get(topic, ()) if m["id"] > after]

    @contextlib.contextmanager
    def seat(self, topic: str, depth: int = 64):
        sub = self.join(topic, depth)  # clean: finally
        try:
            yield sub
        finally:
            self.leave(sub)


async def sse(hub: Hub, topic: str, after: int) -> AsyncIterator[str]:
    """Body of a server-sent-events response; the server closes it on disconnect."""
    sub = hub.join(topic)  # clean: near miss, closing the generator runs the finally
    try:
        for message in hub.backlog(topic, after):
            yield f"data: {message}\n\n"
        while True:
            try:
                message = await sub.next(timeout=15)
            except asyncio.TimeoutError:
                yield ": keep-alive\n\n"
                continue
            if message is None:
                return
            yield f"data: {message}\n\n"
    finally:
        hub.leave(sub)


async def long_poll(hub: Hub, topic: str, after: int, wait: float) -> list:
    sub = hub.join(topic)  # leak: a backlog is answered at once, without leaving
    missed = hub.backlog(topic, after)
    if missed:
        return missed
    try:
        return [await sub.next(timeout=wait)]
    except asyncio.TimeoutError:
        return []
    finally:
        hub.leave(sub)


class Relay:
    """Websocket clients by their id; browsers reconnect with the same id."""

    def __init__(self, hub: Hub):
        self._hub = hub
        self._clients: dict[str, Subscription] = {}

    def connect(self, client: str, topic: str) -> bool:
        try:
            self._clients[client] = self._hub.join(topic)  # leak: a reconnect overwrites the subscription before it
        except HubFull:
            logger.warning("no seat for %s", client)
            return False
        return True

    def disconnect(self, client: str):
        sub = self._clients.pop(client, None)
        if sub is not None:
            self._hub.leave(sub)

    async def pump(self, client: str, send: Callable):
        while (sub := self._clients.get(client)) is not None:
            try:
                await send(await sub.next(timeout=5))
            except asyncio.TimeoutError:
                logger.debug("%s idle", client)
            except ConnectionError:
                self.disconnect(client)


class Recorder:
    """Writes everything of one topic to a file until it is stopped."""

    def __init__(self, hub: Hub, topic: str, path: str):
        self._hub = hub
        self._topic = topic
        self._path = path
        self._sub: Optional[Subscription] = None
        self._task: Optional[asyncio.Task] = None

    def start(self):
        if self._sub is None:
            self._sub = self._hub.join(self._topic, depth=1024)  # clean: near miss, stop() leaves whether or not the task ever ran
            self._task = asyncio.create_task(self._write())

    async def _write(self):
        with open(self._path, "a") as out:  # clean: context manager
            while (message := await self._sub.next()) is not None:
                out.write(f"{message}\n")

    async def stop(self):
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._sub is not None:
            self._hub.leave(self._sub)
            self._sub = None


class Dashboard:
    def __init__(self, hub: Hub):
        self._hub = hub
        self._sockets: list = []
        self._draining = False

    async def add(self, ws, topic: str):
        if not await ws.accept(protocol="metrics.v2"):
            return
        sub = self._hub.join(topic)  # leak: while drain() closes the sockets, _gone() returns before leaving the hub
        self._sockets.append(ws)
        ws.on_close(lambda: self._gone(ws, sub))
        ws.pipe(sub.inbox)

    def _gone(self, ws, sub: Subscription):
        if self._draining:
            return
        self._sockets.remove(ws)
        self._hub.leave(sub)

    async def drain(self):
        self._draining = True
        await asyncio.gather(*(ws.close() for ws in self._sockets))

    async def add_readonly(self, ws, topic: str):
        sub = self._hub.join(topic, depth=8)  # clean: near miss, the callback is installed before the handshake, and a refused one closes
        ws.on_close(lambda: self._hub.leave(sub))
        if not await ws.accept(protocol="metrics.v1"):
            await ws.close()
            return
        ws.pipe(sub.inbox)


async def bridge(upstream: Hub, downstream: Hub, topic: str):
    """Couples two hubs until either of them sends the end marker."""
    left = upstream.join(topic)  # leak: the other hub may be full (HubFull) or lack the topic while this seat is held
    right = downstream.join(topic)  # clean: finally
    try:
        while True:
            getters = [asyncio.create_task(s.next()) for s in (left, right)]
            done, pending = await asyncio.wait(getters, return_when=asyncio.FIRST_COMPLETED)
            for task in pending:
                task.cancel()
            for task in done:
                if task.result() is None:
                    return
                target = downstream if task is getters[0] else upstream
                target.publish(topic, task.result())
    finally:
        downstream.leave(right)
        upstream.leave(left)


async def follow(hub: Hub, topic: str, handle: Callable[[Any], None]):
    """Starts over with a fresh inbox whenever the consumer was too slow."""
    while True:
        sub = hub.join(topic)  # leak: after a lag the loop joins again and rebinds the name
        while not sub.lagged:
            message = await sub.next()
            if message is None:
                hub.leave(sub)
                return
            handle(message)
        logger.warning("lagging on %s, joining again", topic)


async def merge(hub: Hub, topics: list[str], handle: Callable[[str, Any], None]):
    subs = []
    try:
        for topic in topics:
            try:
                subs.append(hub.join(topic))  # clean: an unknown topic is skipped and the others leave in the finally
            except UnknownTopic:
                logger.error("no topic %s", topic)
        while subs:
            for sub in list(subs):
                message = await sub.next()
                if message is None:
                    subs.remove(sub)
                    hub.leave(sub)
                else:
                    handle(sub.topic, message)
    finally:
        for sub in subs:
            hub.leave(sub)


async def tail(hub: Hub, topic: str, count: int) -> list:
    with hub.seat(topic) as sub:  # clean: context manager
        return [await sub.next() for _ in range(count)]
