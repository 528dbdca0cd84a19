"""The prefill rank's half of a transfer."""
from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Dict, Iterable, List, Optional, Tuple

from .regions import Channel, CreditWindow, MemoryKey, QueuePairs, RegionRegistry

log = logging.getLogger(__name__)


@dataclass
class Handoff:
    room: int
    peer: str
    layers: List[Tuple[int, int]]
    keys: List[MemoryKey] = field(default_factory=list)
    channel: Optional[Channel] = None
    credits: int = 0
    sent: int = 0


class PrefillSender:
    def __init__(self, regions: RegionRegistry, pairs: QueuePairs, window: CreditWindow) -> None:
        self.regions = regions
        self.pairs = pairs
        self.window = window
        self.open: Dict[int, Handoff] = {}

    def begin(self, handoff: Handoff) -> bool:
        channel = self.pairs.connect(handoff.peer)  # clean: disconnected on failure, else by both ends
        if channel is None:
            return False
        for address, length in handoff.layers:
            key = self.regions.register(address, length)  # clean: in handoff.keys, _unregister drops them
            if key is None:
                self._unregister(handoff)
                channel.disconnect()
                return False
            handoff.keys.append(key)
        handoff.channel = channel
        handoff.credits = self.window.take(len(handoff.keys))  # leak: cancel does not refund handoff.credits
        self.open[handoff.room] = handoff
        return True

    def _unregister(self, handoff: Handoff) -> None:
        for key in handoff.keys:
            self.regions.deregister(key)
        handoff.keys.clear()

    def push_layer(self, room: int, index: int, payload: bytes) -> int:
        handoff = self.open[room]
        handoff.sent += handoff.channel.post_write(handoff.keys[index], payload)
        return handoff.sent

    def complete(self, room: int) -> int:
        handoff = self.open.pop(room)
        handoff.channel.disconnect()
        self._unregister(handoff)
        self.window.refund(handoff.credits)
        return handoff.sent

    def cancel(self, room: int) -> None:
        handoff = self.open.pop(room, None)
        if handoff is None:
            return
        log.info("room %d cancelled after %d bytes", room, handoff.sent)
        handoff.channel.disconnect()
        self._unregister(handoff)

    def send_aux(self, peer: str, blob: bytes) -> bool:
        """Sampling parameters and the first token, in one small write."""
        key = self.regions.register(id(blob), len(blob))  # leak: not deregistered when there is no channel
        if key is None:
            return False
        channel = self.pairs.connect(peer)  # clean: disconnected after the write
        if channel is None:
            log.warning("no channel to %s for aux data", peer)
            return False
        channel.post_write(key, blob)
        channel.poll()
        channel.disconnect()
        self.regions.deregister(key)
        return True

    def broadcast(self, peers: Iterable[str], blob: bytes) -> int:
        reached = 0
        for peer in peers:
            if not self.window.try_take():  # leak: continue for a peer without a channel keeps the credit
                break
            channel = self.pairs.connect(peer)  # clean: disconnected in the same turn
            if channel is None:
                continue
            key = self.regions.register(id(blob), len(blob))  # clean: deregistered when there was one
            if key is not None:
                channel.post_write(key, blob)
                self.regions.deregister(key)
                reached += 1
            channel.disconnect()
            self.window.refund()
        return reached

    def heartbeat(self, peers: Iterable[str]) -> List[str]:
        dead = []
        for peer in peers:
            took = self.window.try_take()  # clean: near miss, refunded if and only if taken
            channel = self.pairs.connect(peer) if took else None  # clean: disconnected when not None
            if channel is None:
                dead.append(peer)
            else:
                channel.poll()
                channel.disconnect()
            if took:
                self.window.refund()
        return dead
