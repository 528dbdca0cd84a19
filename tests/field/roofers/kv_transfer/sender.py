from __future__ import annotations

import logging
from typing import Optional, Sequence

from .channel import VERSION, Channel, ChannelError, Fabric
from .registry import MemoryRegistry, Region

log = logging.getLogger(__name__)


class KVSender:
    def __init__(self, registry: MemoryRegistry, fabric: Fabric) -> None:
        self.registry = registry
        self.fabric = fabric
        self._posted: dict[int, Region] = {}
        self._next_wr = 0

    def dial(self, peer: str) -> Optional[Channel]:
        chan = self.fabric.connect(peer)  # leak: a peer of another version is turned down without disconnect
        if chan.version != VERSION:
            log.error("%s speaks version %d", peer, chan.version)
            return None
        return chan

    def dial_any(self, peers: Sequence[str]) -> Optional[Channel]:
        for peer in peers:
            try:
                chan = self.fabric.connect(peer)  # clean: near miss, returned or disconnected before the next peer
            except ChannelError:
                continue
            if chan.version == VERSION:
                return chan
            self.fabric.disconnect(chan)
        return None

    def send(self, peers: Sequence[str], bufs: Sequence[bytearray]) -> bool:
        chan = self.dial_any(peers)  # clean: disconnected in finally
        if chan is None:
            return False
        regions: list[Region] = []
        try:
            for buf in bufs:
                regions.append(self.registry.register(buf))  # clean: near miss, finally deregisters as many as there are
            return all(chan.write(r) for r in regions)
        except (MemoryError, ChannelError):
            return False
        finally:
            for r in regions:
                self.registry.deregister(r)
            self.fabric.disconnect(chan)

    def send_retrying(self, chan: Channel, buf: bytearray, tries: int = 3) -> bool:
        for attempt in range(tries):
            region = self.registry.register(buf)  # leak: a failed write registers the buffer anew
            try:
                ok = chan.write(region)
            except ChannelError as e:
                log.warning("write %d to %s: %s", attempt, chan.peer, e)
                continue
            self.registry.deregister(region)
            return ok
        return False

    def post(self, chan: Channel, buf: bytearray) -> int:
        region = self.registry.register(buf)  # clean: near miss, kept by work request, on_completion deregisters
        self._next_wr += 1
        self._posted[self._next_wr] = region
        chan.write(region)
        return self._next_wr

    def on_completion(self, wr: int, status: int) -> None:
        region = self._posted.pop(wr)
        self.registry.deregister(region)
        if status != 0:
            log.error("work request %d failed with %d", wr, status)
