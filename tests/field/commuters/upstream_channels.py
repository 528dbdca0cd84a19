"""Upstream channel pool for the chat gateway: keeps HTTP/2 channels to model workers warm."""
from __future__ import annotations

import collections
import logging
import time
from dataclasses import dataclass, field
from typing import Deque, Iterator, Optional

log = logging.getLogger("gateway.upstream")

IDLE_LIMIT_S = 45.0


class Overloaded(Exception):
    pass


@dataclass
class Reply:
    status: int
    body: bytes = b""
    retry_after: float = 0.0


@dataclass
class Channel:
    host: str
    serial: int
    protocol: int = 2
    last_used: float = field(default_factory=time.monotonic)

    def redial(self) -> None:
        self.last_used = time.monotonic()

    def post(self, path: str, body: bytes) -> Reply:
        return Reply(200, body)

    def stream(self, path: str, body: bytes) -> Iterator[bytes]:
        yield body


class ChannelPool:
    def __init__(self, host: str, size: int) -> None:
        self._idle: Deque[Channel] = collections.deque(Channel(host, i) for i in range(size))
        self.size = size

    def checkout(self) -> Optional[Channel]:
        if not self._idle:
            return None
        ch = self._idle.popleft()  # clean: goes to the caller, redialled first when stale
        if time.monotonic() - ch.last_used > IDLE_LIMIT_S:
            ch.redial()
        return ch

    def checkout_modern(self, protocol: int) -> Optional[Channel]:
        for _ in range(len(self._idle)):
            ch = self._idle.popleft()  # clean: near miss, a channel that does not fit goes to the back of the queue
            if ch.protocol >= protocol:
                return ch
            self._idle.append(ch)
        return None

    def checkin(self, ch: Channel) -> None:
        ch.last_used = time.monotonic()
        self._idle.append(ch)


class ChatForwarder:
    def __init__(self, pool: ChannelPool, max_attempts: int = 3) -> None:
        self.pool = pool
        self.max_attempts = max_attempts
        self.sticky: dict[str, Channel] = {}

    def complete(self, body: bytes) -> Reply:
        ch = self.pool.checkout()  # clean: checked in by the finally
        if ch is None:
            raise Overloaded("no channel")
        try:
            return ch.post("/v1/chat/completions", body)
        finally:
            self.pool.checkin(ch)

    def complete_with_retry(self, body: bytes) -> Reply:
        reply = Reply(503)
        for attempt in range(self.max_attempts):
            ch = self.pool.checkout()  # leak: the 429 continue goes round again without checkin
            if ch is None:
                time.sleep(0.05 * (attempt + 1))
                continue
            reply = ch.post("/v1/chat/completions", body)
            if reply.status == 429:
                time.sleep(reply.retry_after)
                continue
            self.pool.checkin(ch)
            if reply.status < 500:
                return reply
        return reply

    def tokenize(self, body: bytes) -> Optional[bytes]:
        ch = self.pool.checkout()  # leak: empty answer returns before the checkin
        if ch is None:
            return None
        reply = ch.post("/tokenize", body)
        if not reply.body:
            log.warning("empty tokenizer answer from %s", ch.host)
            return None
        self.pool.checkin(ch)
        return reply.body

    def stream(self, body: bytes) -> Iterator[bytes]:
        ch = self.pool.checkout_modern(2)  # clean: near miss, the fallback is used only when this gave none
        if ch is None:
            ch = self.pool.checkout()  # clean: same finally as the modern one
        if ch is None:
            raise Overloaded("no channel")
        try:
            for chunk in ch.stream("/v1/chat/stream", body):
                if chunk == b"[DONE]":
                    return
                yield chunk
        finally:
            self.pool.checkin(ch)

    def bind_session(self, session: str) -> bool:
        if session in self.sticky:
            return True
        ch = self.pool.checkout()  # clean: kept in sticky, unbind_session gives it back
        if ch is None:
            return False
        self.sticky[session] = ch
        return True

    def rebind_session(self, session: str) -> None:
        ch = self.pool.checkout_modern(3)  # leak: replaces the channel the session already held
        if ch is not None:
            self.sticky[session] = ch

    def unbind_session(self, session: str) -> None:
        ch = self.sticky.pop(session, None)
        if ch is not None:
            self.pool.checkin(ch)


def probe(pools: list[ChannelPool]) -> dict[str, bool]:
    health: dict[str, bool] = {}
    for pool in pools:
        ch = pool.checkout()  # clean: near miss, the bad-status continue comes after the checkin
        if ch is None:
            continue
        status = ch.post("/healthz", b"").status
        pool.checkin(ch)
        if status != 200:
            health[ch.host] = False
            continue
        health[ch.host] = True
    return health


def warm(pool: ChannelPool, prompts: list[bytes]) -> int:
    warmed = 0
    ch = pool.checkout()  # leak: the return on a failed prompt keeps the channel
    if ch is None:
        return 0
    for prompt in prompts:
        if ch.post("/warm", prompt).status != 200:
            return warmed
        warmed += 1
    pool.checkin(ch)
    return warmed
