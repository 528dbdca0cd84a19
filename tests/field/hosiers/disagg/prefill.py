"""Prefill side: computes KV, pushes it to the decode engine, then lets go of its regions."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Callable, Optional

from .buffers import MetaSlots, Region, RegisteredPool


@dataclass
class Transfer:
    room: int
    layers: int
    meta: int
    regions: list[Region] = field(default_factory=list)
    sent: int = 0
    on_done: Optional[Callable[["Transfer"], None]] = None

    def advance(self, n: int) -> bool:
        self.sent += n
        if self.sent < self.layers:
            return False
        if self.on_done is not None:
            self.on_done(self)
        return True


class PrefillQueue:
    def __init__(self, pool: RegisteredPool, metas: MetaSlots) -> None:
        self.pool = pool
        self.metas = metas
        self.inflight: dict[int, Transfer] = {}
        self.bounce: Optional[Region] = None

    def open_transfer(self, room: int, layers: int) -> Optional[Transfer]:
        meta = self.metas.acquire()  # clean: kept in the transfer or released
        if meta is None:
            return None
        regions = self.pool.register_n(layers)  # clean: kept in the transfer, empty list holds nothing
        if not regions:
            self.metas.release(meta)
            return None
        tr = Transfer(room, layers, meta, regions, on_done=self._drained)
        self.inflight[room] = tr
        return tr

    def open_small(self, room: int) -> Optional[Transfer]:
        """One region for all the layers, for short prompts."""
        meta = self.metas.acquire()  # leak: kept on the way out when no region is ready
        if meta is None:
            return None
        region = self.pool.register()  # clean: kept in the transfer
        if region is None:
            return None
        tr = Transfer(room, 1, meta, [region], on_done=self._drained)
        self.inflight[room] = tr
        return tr

    def _drained(self, tr: Transfer) -> None:
        for r in tr.regions:
            r.deregister()
        tr.regions.clear()
        self.metas.release(tr.meta)
        self.inflight.pop(tr.room, None)

    def fail(self, room: int) -> None:
        tr = self.inflight.get(room)
        if tr is not None:
            self._drained(tr)

    def send_now(self, payloads: list[bytes], push: Callable[[Region, bytes], bool]) -> int:
        sent = 0
        for data in payloads:
            region = self.pool.register()  # leak: break on a refused push keeps the region
            if region is None:
                break
            if not push(region, data):
                break
            sent += 1
            region.deregister()
        return sent

    def send_via_bounce(self, data: bytes, push: Callable[[Region, bytes], bool]) -> bool:
        if self.bounce is None:
            self.bounce = self.pool.register()  # clean: near miss, kept for reuse until close
        if self.bounce is None:
            return False
        return push(self.bounce, data)

    def close(self) -> None:
        for tr in list(self.inflight.values()):
            self._drained(tr)
        if self.bounce is not None:
            self.bounce.deregister()
            self.bounce = None
