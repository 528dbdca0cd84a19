"""The decode rank's half: it prepares landing regions and waits for the writes."""
from __future__ import annotations

import time
from typing import Callable, Dict, List, Optional

from .regions import Channel, MemoryKey, QueuePairs, RegionRegistry


class Landing:
    """One region in which a prefill lands; close() ends it."""

    def __init__(self, regions: RegionRegistry, address: int, length: int) -> None:
        self._regions = regions
        self.key = regions.register(address, length)  # clean: close deregisters it
        self.filled = 0

    def ready(self) -> bool:
        return self.key is not None

    def close(self) -> None:
        if self.key is not None:
            self._regions.deregister(self.key)
            self.key = None


class DecodeReceiver:
    def __init__(self, regions: RegionRegistry, pairs: QueuePairs) -> None:
        self.regions = regions
        self.pairs = pairs
        self.landings: Dict[int, Landing] = {}
        self._control: Optional[Channel] = None
        self._callbacks: List[Callable[[int], None]] = []

    def attach(self, bootstrap: str) -> bool:
        if self._control is not None:
            self._control.disconnect()
        self._control = self.pairs.connect(bootstrap)  # clean: near miss, old one goes first
        return self._control is not None

    def prepare(self, room: int, address: int, length: int) -> Optional[MemoryKey]:
        landing = Landing(self.regions, address, length)  # clean: in landings, see release and shutdown
        if not landing.ready():
            return None
        stale = self.landings.pop(room, None)
        if stale is not None:
            stale.close()
        self.landings[room] = landing
        return landing.key

    def release(self, room: int) -> None:
        landing = self.landings.pop(room, None)
        if landing is not None:
            landing.close()

    def await_filled(self, room: int, want: int, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        landing = self.landings[room]
        while landing.filled < want:
            if time.monotonic() > deadline:
                self.release(room)
                return False
            time.sleep(0.001)
        return True

    def probe_bandwidth(self, peers: List[str], address: int) -> Dict[str, float]:
        rates: Dict[str, float] = {}
        landing = Landing(self.regions, address, 1 << 20)  # leak: return without peers leaves it open
        if not landing.ready() or not peers:
            return rates
        for peer in peers:
            channel = self.pairs.connect(peer)  # leak: break on a zero write skips disconnect
            if channel is None:
                continue
            start = time.perf_counter()
            moved = channel.post_write(landing.key, b"\0" * 4096)
            if moved == 0:
                break
            rates[peer] = moved / (time.perf_counter() - start)
            channel.disconnect()
        landing.close()
        return rates

    def shutdown(self) -> None:
        for room in list(self.landings):
            self.release(room)
        if self._control is not None:
            self._control.disconnect()
            self._control = None
