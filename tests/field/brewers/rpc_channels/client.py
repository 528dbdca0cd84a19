"""Unary and streaming calls on pooled channels."""
from __future__ import annotations

import logging
import time
from typing import Callable, Dict, Iterable, Iterator, List, Optional

from .pool import Channel, ChannelPool, PoolClosed, RpcError

log = logging.getLogger(__name__)


class Client:
    def __init__(self, pool: ChannelPool) -> None:
        self.pool = pool
        self.pinned: Dict[str, Channel] = {}

    def _open(self) -> Channel:
        chan = self.pool.checkout()  # clean: handed to the caller, raises when there is none
        if chan is None:
            raise PoolClosed(self.pool.address)
        return chan

    def _close(self, chan: Channel) -> None:
        self.pool.checkin(chan)

    def unary(self, method: str, payload: bytes) -> bytes:
        chan = self._open()  # clean: closed in finally
        try:
            return chan.call(method, payload)
        finally:
            self._close(chan)

    def unary_or_none(self, method: str, payload: bytes) -> Optional[bytes]:
        chan = self._open()  # leak: other codes are re-raised but NOT_FOUND returns None without _close
        try:
            reply = chan.call(method, payload)
        except RpcError as err:
            if err.code == "NOT_FOUND":
                return None
            self._close(chan)
            raise
        self._close(chan)
        return reply

    def unary_retry(self, method: str, payload: bytes, tries: int) -> bytes:
        last: Optional[RpcError] = None
        for i in range(tries):
            chan = self._open()  # clean: near miss, the handler's continue passes through finally
            try:
                return chan.call(method, payload)
            except RpcError as err:
                last = err
                time.sleep(0.001 * i)
                continue
            finally:
                self._close(chan)
        raise last or RpcError("INTERNAL")

    def unary_redial(self, method: str, payload: bytes) -> bytes:
        chan = self._open()  # leak: on RpcError the name is rebound to a fresh channel, the first stays out
        try:
            reply = chan.call(method, payload)
        except RpcError:
            chan = self.pool.checkout_fresh()  # clean: near miss, closed below as the rebound chan
            reply = b""
        self._close(chan)
        return reply

    def chunks(self, method: str, parts: Iterable[bytes]) -> Iterator[bytes]:
        chan = self._open()  # clean: generator with finally
        try:
            for part in parts:
                yield chan.call(method, part)
        finally:
            self._close(chan)

    def first_chunk(self, method: str, parts: Iterable[bytes]) -> Optional[bytes]:
        for reply in self.chunks(method, parts):
            return reply
        return None

    def pin(self, key: str) -> Channel:
        chan = self.pinned.get(key)
        if chan is not None and not chan.broken:
            return chan
        self.pinned[key] = self._open()  # leak: a broken pinned channel is overwritten and never checked in
        return self.pinned[key]

    def unpin_all(self) -> None:
        for chan in self.pinned.values():
            self._close(chan)
        self.pinned.clear()


class Stub:
    """Bound to one method; wraps the client's wrapper once more."""

    def __init__(self, client: Client, method: str) -> None:
        self.client = client
        self.method = method

    def channel(self) -> Channel:
        return self.client._open()  # clean: handed to the caller

    def done(self, chan: Channel) -> None:
        self.client._close(chan)

    def call_all(self, payloads: List[bytes]) -> List[bytes]:
        chan = self.channel()  # leak: an empty payload breaks off with return
        out: List[bytes] = []
        for payload in payloads:
            if not payload:
                return out
            out.append(chan.call(self.method, payload))
        self.done(chan)
        return out

    def call_until(self, payloads: List[bytes], stop: bytes) -> List[bytes]:
        chan = self.channel()  # clean: near miss, both breaks end at done
        out: List[bytes] = []
        for payload in payloads:
            if not payload:
                break
            out.append(chan.call(self.method, payload))
            if stop in out[-1]:
                break
        self.done(chan)
        return out

    def call_then(self, payload: bytes, then: Callable[[bytes, Callable[[], None]], None]) -> None:
        chan = self.channel()  # clean: passed to the continuation as its finish callback
        then(chan.call(self.method, payload), lambda: self.done(chan))
