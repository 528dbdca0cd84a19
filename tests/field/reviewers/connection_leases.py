"""RPC channels to remote KV stores: a channel pool and the clients which use it."""
from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict, deque
from typing import Any, Iterator


class Channel:
    def __init__(self, host: str, serial: int):
        self.host = host
        self.serial = serial
        self.broken = False

    async def call(self, op: str, *args: Any) -> Any:
        await asyncio.sleep(0)
        return None if self.broken else (op, args)

    def call_sync(self, op: str, *args: Any) -> Any:
        return None if self.broken else (op, args)


class ChannelPool:
    def __init__(self, hosts: list[str], per_host: int):
        self._ready: dict[str, deque[Channel]] = defaultdict(deque)
        for host in hosts:
            for i in range(per_host):
                self._ready[host].append(Channel(host, i))

    def checkout(self, host: str) -> Channel | None:
        ready = self._ready[host]
        if not ready:
            return None
        ch = ready.popleft()  # clean: near miss, a broken channel is replaced by a new one before it is returned
        if ch.broken:
            ch = Channel(host, ch.serial)
        return ch

    def checkout_healthy(self, host: str) -> Channel | None:
        ready = self._ready[host]
        for _ in range(len(ready)):
            ch = ready.popleft()  # leak: broken channels are dropped and not replaced, the host loses capacity
            if not ch.broken:
                return ch
        return None

    def checkin(self, ch: Channel) -> None:
        self._ready[ch.host].append(ch)

    @contextlib.contextmanager
    def session(self, host: str) -> Iterator[Channel | None]:
        ch = self.checkout(host)  # clean: checked in by the finally
        try:
            yield ch
        finally:
            if ch is not None:
                self.checkin(ch)

    @contextlib.contextmanager
    def quick_session(self, host: str) -> Iterator[Channel | None]:
        ch = self.checkout(host)  # leak: channels with an odd serial skip the checkin after the yield
        yield ch
        if ch is None or ch.serial % 2:
            return
        self.checkin(ch)


class RemoteKV:
    def __init__(self, pool: ChannelPool, hosts: list[str]):
        self.pool = pool
        self.hosts = hosts
        self.sticky: dict[str, Channel] = {}

    async def exists(self, host: str, key: str) -> bool:
        ch = self.pool.checkout(host)  # leak: a None reply returns early without the checkin
        if ch is None:
            return False
        reply = await ch.call("exists", key)
        if reply is None:
            return False
        self.pool.checkin(ch)
        return bool(reply[1])

    async def get(self, host: str, key: str) -> Any:
        ch = self.pool.checkout(host)  # clean: checked in whatever the reply
        if ch is None:
            return None
        try:
            return await ch.call("get", key)
        finally:
            self.pool.checkin(ch)

    async def get_any(self, key: str) -> Any:
        for host in self.hosts:
            ch = self.pool.checkout(host)  # clean: near miss, the checkin comes before the continue
            if ch is None:
                continue
            reply = await ch.call("get", key)
            self.pool.checkin(ch)
            if reply is None:
                continue
            return reply
        return None

    def put_with_retry(self, host: str, key: str, value: bytes, tries: int = 3) -> bool:
        for _ in range(tries):
            ch = self.pool.checkout(host)  # leak: each failed try swallows the error and takes a new channel without returning the old one
            if ch is None:
                return False
            try:
                ch.call_sync("put", key, value)
            except ConnectionError:
                ch.broken = True
                continue
            self.pool.checkin(ch)
            return True
        return False

    def put_once(self, host: str, key: str, value: bytes) -> bool:
        ch = self.pool.checkout(host)  # clean: near miss, the handler falls through to the checkin
        if ch is None:
            return False
        ok = True
        try:
            ch.call_sync("put", key, value)
        except ConnectionError:
            ch.broken = True
            ok = False
        self.pool.checkin(ch)
        return ok

    def bind(self, user: str, host: str) -> bool:
        if user in self.sticky:
            return True
        ch = self.pool.checkout(host)  # clean: near miss, kept in `sticky` until unbind() or close()
        if ch is None:
            return False
        self.sticky[user] = ch
        return True

    def prefers(self, host: str) -> bool:
        return host in self.hosts[:2]

    def unbind(self, user: str) -> None:
        ch = self.sticky.pop(user, None)
        if ch is not None:
            self.pool.checkin(ch)

    def failover(self, first: str, second: str, key: str) -> Any:
        ch = self.pool.checkout(first)  # leak: when the first host is not preferred its channel is rebound to the second host's
        if ch is None or ch.call_sync("ping") is None or not self.prefers(first):
            ch = self.pool.checkout(second)  # clean: checked in at the end
        if ch is None:
            return None
        reply = ch.call_sync("get", key)
        self.pool.checkin(ch)
        return reply

    def close(self) -> None:
        for user in list(self.sticky):
            self.unbind(user)
