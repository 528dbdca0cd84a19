"""Scopes that hold a channel for a block of calls."""
from __future__ import annotations

from types import TracebackType
from typing import List, Optional, Sequence, Tuple, Type

from .client import Client
from .pool import Channel, ChannelPool, RpcError


class ChannelScope:
    def __init__(self, pool: ChannelPool) -> None:
        self.pool = pool
        self.chan: Optional[Channel] = None

    def __enter__(self) -> Channel:
        self.chan = self.pool.checkout()  # clean: near miss, __exit__ returns early only when there is none
        if self.chan is None:
            raise RpcError("RESOURCE_EXHAUSTED")
        return self.chan

    def __exit__(self, et: Optional[Type[BaseException]], ev: Optional[BaseException], tb: Optional[TracebackType]) -> Optional[bool]:
        if self.chan is None:
            return None
        chan, self.chan = self.chan, None
        self.pool.checkin(chan)
        return et is not None and issubclass(et, RpcError)


class LenientScope:
    """Swallows remote errors; used for best-effort metrics."""

    def __init__(self, client: Client) -> None:
        self.client = client

    def __enter__(self) -> Channel:
        self.chan = self.client._open()  # leak: __exit__ swallows RpcError and returns before _close
        return self.chan

    def __exit__(self, et, ev, tb) -> bool:
        if et is not None and issubclass(et, RpcError):
            self.chan.shutdown()
            return True
        self.client._close(self.chan)
        return False


class ReplicaGroup:
    def __init__(self, pools: Sequence[ChannelPool]) -> None:
        self.pools = list(pools)

    def report(self, payload: bytes) -> bool:
        with ChannelScope(self.pools[0]) as chan:  # clean: with statement
            chan.call("metrics", payload)
            return True
        return False

    def quorum(self, payload: bytes, need: int) -> Optional[List[bytes]]:
        held: List[Tuple[ChannelPool, Channel]] = []
        for pool in self.pools:
            chan = pool.checkout(timeout=0.01)  # leak: without a quorum None is returned and the channels got stay out
            if chan is not None:
                held.append((pool, chan))
        if len(held) < need:
            return None
        try:
            return [c.call("vote", payload) for _, c in held]
        finally:
            for pool, chan in held:
                pool.checkin(chan)

    def both(self, payload: bytes) -> Optional[bytes]:
        left = self.pools[0].checkout()  # clean: near miss, rolled back when the right side is refused
        if left is None:
            return None
        right = self.pools[-1].checkout()  # clean: checked in in finally
        if right is None:
            self.pools[0].checkin(left)
            return None
        try:
            return left.call("get", payload) + right.call("get", payload)
        finally:
            self.pools[-1].checkin(right)
            self.pools[0].checkin(left)
