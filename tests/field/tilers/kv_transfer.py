"""Moves KV pages between prefill and decode workers: channels, registered memory, retries."""
from __future__ import annotations

import logging
import random
from contextlib import contextmanager
from typing import Dict, Iterator, List, Optional, Sequence, Tuple

log = logging.getLogger(__name__)


class TransferError(RuntimeError):
    pass


class PeerBusy(TransferError):
    pass


class Channel:
    def __init__(self, peer: str, cid: int) -> None:
        self.peer = peer
        self.cid = cid
        self.healthy = True
        self.sent = 0

    def ping(self) -> bool:
        return self.healthy

    def send(self, payload: bytes) -> int:
        if not self.healthy:
            raise TransferError(f"channel {self.cid} is down")
        self.sent += len(payload)
        return len(payload)


class ChannelPool:
    def __init__(self, per_peer: int, flaky: float = 0.0) -> None:
        self.per_peer = per_peer
        self.flaky = flaky
        self._idle: Dict[str, List[Channel]] = {}
        self._open: Dict[str, int] = {}
        self._rng = random.Random(0)
        self._next = 0

    def dial(self, peer: str) -> Channel:
        idle = self._idle.setdefault(peer, [])
        if idle:
            return idle.pop()
        if self._open.get(peer, 0) >= self.per_peer:
            raise PeerBusy(peer)
        self._open[peer] = self._open.get(peer, 0) + 1
        self._next += 1
        ch = Channel(peer, self._next)
        ch.healthy = self._rng.random() >= self.flaky
        return ch

    def hang_up(self, ch: Channel) -> None:
        if not ch.healthy:
            self._open[ch.peer] -= 1
            return
        self._idle[ch.peer].append(ch)

    def busy(self, peer: str) -> int:
        return self._open.get(peer, 0) - len(self._idle.get(peer, []))


class MemoryRegistry:
    """Registration keys for RDMA-able regions."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._regions: Dict[int, bytes] = {}
        self._key = 100

    def register(self, region: bytes) -> Optional[int]:
        if len(self._regions) >= self.limit:
            return None
        self._key += 1
        self._regions[self._key] = region
        return self._key

    def deregister(self, key: int) -> None:
        del self._regions[key]

    def __len__(self) -> int:
        return len(self._regions)


class Dialer:
    def __init__(self, pool: ChannelPool, attempts: int = 3) -> None:
        self.pool = pool
        self.attempts = attempts

    def _dial_once(self, peer: str) -> Channel:
        return self.pool.dial(peer)  # clean: returned to the caller

    def dial_healthy(self, peer: str) -> Channel:
        for _ in range(self.attempts):
            ch = self._dial_once(peer)  # leak: a channel that does not answer is replaced by the next attempt
            if ch.ping():
                return ch
            log.debug("channel %d to %s does not answer", ch.cid, peer)
        raise TransferError(f"no healthy channel to {peer}")

    def dial_retry(self, peer: str) -> Channel:
        last: Optional[Exception] = None
        for _ in range(self.attempts):
            try:
                ch = self._dial_once(peer)  # clean: near miss, hung up before the next attempt, otherwise returned
            except PeerBusy as err:
                last = err
                continue
            if ch.ping():
                return ch
            self.pool.hang_up(ch)
        raise TransferError(f"no channel to {peer}") from last

    def connect(self, peer: str, fallback: Optional[str] = None) -> Channel:
        try:
            return self.dial_retry(peer)  # clean: returned to the caller
        except TransferError:
            if fallback is None:
                raise
        return self.dial_retry(fallback)  # clean: near miss, the first dial raised and holds nothing

    @contextmanager
    def session(self, peer: str) -> Iterator[Channel]:
        ch = self.connect(peer)  # clean: hung up in finally
        try:
            yield ch
        finally:
            self.pool.hang_up(ch)


class PageSender:
    def __init__(self, dialer: Dialer, registry: MemoryRegistry) -> None:
        self.dialer = dialer
        self.registry = registry
        self._sticky: Dict[str, Channel] = {}
        self._keys: Dict[int, int] = {}

    def send_pages(self, peer: str, pages: Sequence[bytes]) -> int:
        ch = self.dialer.connect(peer)  # leak: no pages returns before the hang-up
        if not pages:
            return 0
        n = sum(ch.send(p) for p in pages)
        self.dialer.pool.hang_up(ch)
        return n

    def send_tolerant(self, peer: str, pages: Sequence[bytes]) -> bool:
        ch = self.dialer.connect(peer)  # clean: near miss, both outcomes fall through to the hang-up
        ok = True
        try:
            for p in pages:
                ch.send(p)
        except TransferError as err:
            log.warning("send to %s failed: %s", peer, err)
            ok = False
        self.dialer.pool.hang_up(ch)
        return ok

    def sticky(self, peer: str) -> Channel:
        ch = self._sticky.get(peer)
        if ch is not None and ch.ping():
            return ch
        self._sticky[peer] = self.dialer.connect(peer)  # leak: the unhealthy channel it replaces is overwritten
        return self._sticky[peer]

    def push_region(self, peer: str, region: bytes) -> bool:
        key = self.registry.register(region)  # leak: not deregistered when the peer cannot be reached
        if key is None:
            return False
        try:
            ch = self.dialer.connect(peer)  # clean: hung up below
        except TransferError:
            return False
        ch.send(region)
        self.dialer.pool.hang_up(ch)
        self.registry.deregister(key)
        return True

    def push_region_safe(self, peer: str, region: bytes) -> bool:
        key = self.registry.register(region)  # clean: near miss, the outer finally covers every return
        if key is None:
            return False
        try:
            with self.dialer.session(peer) as ch:  # clean: with block
                ch.send(region)
        except TransferError:
            return False
        finally:
            self.registry.deregister(key)
        return True

    def expose(self, layer: int, region: bytes) -> Optional[int]:
        old = self._keys.pop(layer, None)
        if old is not None:
            self.registry.deregister(old)
        key = self.registry.register(region)  # clean: near miss, in the table, the old key was deregistered
        if key is not None:
            self._keys[layer] = key
        return key

    def expose_pair(self, k: bytes, v: bytes) -> Optional[Tuple[int, int]]:
        kk = self.registry.register(k)  # clean: returned, or deregistered when v is refused
        if kk is None:
            return None
        vk = self.registry.register(v)  # clean: None-checked, returned
        if vk is None:
            self.registry.deregister(kk)
            return None
        return kk, vk

    def push_layers(self, peer: str, layers: Sequence[Tuple[bytes, bytes]]) -> int:
        moved = 0
        with self.dialer.session(peer) as ch:  # clean: with block
            for k, v in layers:
                keys = self.expose_pair(k, v)  # leak: empty keys continue past the deregistration
                if keys is None:
                    break
                if not k:
                    continue
                moved += ch.send(k) + ch.send(v)
                for key in keys:
                    self.registry.deregister(key)
        return moved

    def close(self) -> None:
        for ch in self._sticky.values():
            self.dialer.pool.hang_up(ch)
        self._sticky.clear()
        for key in self._keys.values():
            self.registry.deregister(key)
        self._keys.clear()


def broadcast(sender: PageSender, peers: Sequence[str], page: bytes) -> List[str]:
    channels = {p: sender.dialer.connect(p) for p in set(peers)}  # clean: one per peer, all hung up in the loop
    reached: List[str] = []
    for peer, ch in channels.items():
        if ch.send(page):
            reached.append(peer)
        sender.dialer.pool.hang_up(ch)
    return reached


def race(sender: PageSender, peers: Sequence[str], page: bytes) -> Optional[str]:
    channels = [sender.dialer.connect(p) for p in peers]  # leak: the first that accepts returns, the others stay open
    for ch in channels:
        sent = ch.send(page)
        sender.dialer.pool.hang_up(ch)
        if sent == len(page):
            return ch.peer
    return None


if __name__ == "__main__":
    cpool, reg = ChannelPool(4), MemoryRegistry(8)
    snd = PageSender(Dialer(cpool), reg)
    print(snd.send_pages("d0", [b"ab"]), snd.send_tolerant("d0", [b"x"]))
    print(snd.push_region("d1", b"r"), snd.push_region_safe("d1", b"r"), snd.push_layers("d1", [(b"k", b"v")]))
    snd.expose(0, b"r"), snd.expose(0, b"s"), snd.sticky("d2"), snd.close()
    print(broadcast(snd, ["d0", "d1"], b"p"), race(snd, ["d0"], b"p"), len(reg), cpool.busy("d0"))
