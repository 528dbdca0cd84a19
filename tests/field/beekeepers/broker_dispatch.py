"""Push-mode dispatch of a message broker: every delivery in flight spends a prefetch credit."""
from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Awaitable, Callable, Iterable

log = logging.getLogger("broker.dispatch")
MAX_REDELIVERY = 5


@dataclass
class Message:
    routing_key: str
    body: bytes
    expires_at: float = float("inf")
    redelivered: int = 0
    headers: dict = field(default_factory=dict)

    def expired(self) -> bool:
        return time.monotonic() > self.expires_at


@dataclass
class Credit:
    serial: int
    drawn_at: float
    spent: bool = False


class CreditWindow:
    """Prefetch credits of one consumer. A drawn credit comes back through refund()."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._left = size
        self._serial = itertools.count(1)
        self._waiters: deque[asyncio.Future] = deque()

    def left(self) -> int:
        return self._left

    def try_draw(self) -> Credit | None:
        if self._left == 0:
            return None
        self._left -= 1
        return Credit(next(self._serial), time.monotonic())

    async def draw(self) -> Credit:
        while self._left == 0:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter
        self._left -= 1
        return Credit(next(self._serial), time.monotonic())

    def refund(self, credit: Credit) -> None:
        if credit.spent:
            return
        credit.spent = True
        self._left += 1
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                break


class Router:
    def __init__(self) -> None:
        self.dead: list[Message] = []
        self.again: list[Message] = []

    def dead_letter(self, message: Message) -> None:
        self.dead.append(message)

    def requeue(self, message: Message) -> None:
        message.redelivered += 1
        self.again.append(message)


class Channel:
    """One consumer channel. The peer settles each delivery by its tag."""

    def __init__(self, window: CreditWindow, router: Router, send: Callable[[int, bytes], Awaitable]) -> None:
        self.window = window
        self.router = router
        self._send = send
        self._tags = itertools.count(1)
        self._unacked: dict[int, tuple[Message, Credit]] = {}

    async def push(self, message: Message) -> int:
        credit = await self.window.draw()  # clean: kept under its tag, settle() and close() refund it
        tag = next(self._tags)
        self._unacked[tag] = (message, credit)
        await self._send(tag, message.body)
        return tag

    def settle(self, tag: int, requeue: bool = False) -> bool:
        entry = self._unacked.pop(tag, None)
        if entry is None:
            log.warning("unknown delivery tag %d", tag)
            return False
        message, credit = entry
        if requeue:
            self.router.requeue(message)
        self.window.refund(credit)
        return True

    def close(self) -> None:
        while self._unacked:
            _, (message, credit) = self._unacked.popitem()
            self.router.requeue(message)
            self.window.refund(credit)


class StreamChannel:
    """Cumulative acknowledgement: the peer confirms everything up to a tag."""

    def __init__(self, window: CreditWindow, router: Router) -> None:
        self.window = window
        self.router = router
        self._tags = itertools.count(1)
        self._pending: deque[tuple[int, Message, Credit]] = deque()

    async def push_all(self, messages: Iterable[Message]) -> int:
        tag = 0
        for message in messages:
            credit = await self.window.draw()  # leak: reject() takes the head off and refunds nothing
            tag = next(self._tags)
            self._pending.append((tag, message, credit))
        return tag

    def confirm(self, tag: int) -> int:
        settled = 0
        while self._pending and self._pending[0][0] <= tag:
            _, _, credit = self._pending.popleft()
            self.window.refund(credit)
            settled += 1
        return settled

    def reject(self, tag: int) -> bool:
        if not self._pending or self._pending[0][0] != tag:
            return False
        _, message, _credit = self._pending.popleft()
        self.router.dead_letter(message)
        return True

    def close(self) -> None:
        for _, message, credit in self._pending:
            self.router.requeue(message)
            self.window.refund(credit)
        self._pending.clear()


async def deliver_one(window: CreditWindow, message: Message, handler) -> str:
    credit = await window.draw()  # leak: the expired path returns without the refund
    if message.expired():
        log.info("message on %s expired before delivery", message.routing_key)
        return "expired"
    try:
        await handler(message)
    except ValueError:
        return "rejected"
    finally:
        if not credit.spent:
            window.refund(credit)
    return "done"


def drain_backlog(window: CreditWindow, backlog: list[Message], router: Router, sink: list[bytes]) -> int:
    moved = 0
    while backlog:
        credit = window.try_draw()  # leak: the dead-letter branch continues with the credit drawn
        if credit is None:
            break
        message = backlog.pop(0)
        if message.redelivered >= MAX_REDELIVERY:
            router.dead_letter(message)
            continue
        sink.append(message.body)
        moved += 1
        window.refund(credit)
    return moved


def drain_urgent(window: CreditWindow, backlog: list[Message], sink: list[bytes]) -> int:
    moved = 0
    for message in list(backlog):
        credit = window.try_draw()  # clean: refunded before every continue
        if credit is None:
            return moved
        if message.headers.get("priority", 0) < 5:
            window.refund(credit)
            continue
        backlog.remove(message)
        sink.append(message.body)
        moved += 1
        window.refund(credit)
    return moved


def consumer_ready(window: CreditWindow, minimum: int) -> bool:
    """Health endpoint: can this consumer take another message at once?"""
    if window.left() < minimum:
        return False
    return window.try_draw() is not None  # leak: the probe draws a real credit and drops it


async def draw_within(window: CreditWindow, seconds: float) -> Credit | None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        credit = window.try_draw()  # clean: handed to the caller when there is one
        if credit is not None:
            return credit
        await asyncio.sleep(0.01)
    return None


async def relay(window: CreditWindow, upstream: asyncio.Queue, handler) -> int:
    relayed = 0
    while True:
        message = await upstream.get()
        if message is None:
            break
        credit = await draw_within(window, 2.0)  # clean: near miss, refunded unless None
        if credit is None:
            await upstream.put(message)
            continue
        task = asyncio.ensure_future(handler(message))
        task.add_done_callback(lambda _t, c=credit: window.refund(c))
        relayed += 1
    return relayed


async def mirror(window: CreditWindow, primary, shadow, message: Message) -> bool:
    first = await draw_within(window, 1.0)  # leak: kept when the shadow gets no credit
    if first is None:
        return False
    second = await draw_within(window, 1.0)  # clean: refunded below once it is there
    if second is None:
        log.info("no credit for shadow delivery of %s", message.routing_key)
        return False
    await asyncio.gather(primary(message), shadow(message))
    window.refund(second)
    window.refund(first)
    return True
