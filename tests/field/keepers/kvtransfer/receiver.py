"""Decode side: landing regions announced per room, links counted per prefill peer."""
from __future__ import annotations

from typing import Dict, List, Optional, Tuple

from .memory import Region, RegionTable
from .transport import Transport


class DecodeReceiver:
    def __init__(self, table: RegionTable, transport: Transport) -> None:
        self.table = table
        self.transport = transport
        self.landing: Dict[int, Tuple[str, List[Region]]] = {}
        self.spare: Optional[Region] = None

    def announce(self, room: int, peer: str, sizes: List[int]) -> bool:
        self.transport.connect(peer)  # leak: the link is still counted when the regions are refused
        regions = self.table.register_layers(sizes)  # clean: kept in landing, complete deregisters them
        if regions is None:
            return False
        self.landing[room] = (peer, regions)
        return True

    def complete(self, room: int) -> int:
        entry = self.landing.pop(room, None)
        if entry is None:
            return 0
        peer, regions = entry
        for region in regions:
            self.table.deregister(region)
        self.transport.disconnect(peer)
        return len(regions)

    def handshake(self, peer: str, nbytes: int) -> bool:
        self.transport.connect(peer)  # clean: near miss, disconnected in the finally with or without a region
        try:
            region = self.table.register(nbytes)  # clean: deregistered unless None
            if region is None:
                return False
            self.table.deregister(region)
            return True
        finally:
            self.transport.disconnect(peer)

    def set_spare(self, nbytes: int) -> bool:
        self.spare = self.table.register(nbytes)  # leak: a spare that is still set is written over
        return self.spare is not None

    def drop_spare(self) -> None:
        if self.spare is not None:
            self.table.deregister(self.spare)
            self.spare = None
