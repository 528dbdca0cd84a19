from __future__ import annotations

from typing import Callable, Dict, Iterator, List, Optional

from .fabric import Fabric, QueuePair
from .memory import BouncePool, MemoryRegistry, Region


class Transfer:
    def __init__(self, rid: str, peer: str, region: Region) -> None:
        self.rid = rid
        self.peer = peer
        self.region: Optional[Region] = region
        self.done = False


class KVReceiver:
    def __init__(self, fabric: Fabric, registry: MemoryRegistry, bounce: BouncePool) -> None:
        self.fabric = fabric
        self.registry = registry
        self.bounce = bounce
        self.transfers: Dict[str, Transfer] = {}

    def begin(self, rid: str, peer: str, addr: int, length: int) -> Transfer:
        self.fabric.attach(peer)  # clean: one reference per transfer, complete detaches
        region = self.registry.register(addr, length)  # leak: abort forgets the region, only complete deregisters it
        transfer = Transfer(rid, peer, region)
        self.transfers[rid] = transfer
        return transfer

    def complete(self, rid: str) -> None:
        transfer = self.transfers.pop(rid)
        transfer.done = True
        self.registry.deregister(transfer.region)
        self.fabric.detach(transfer.peer)

    def abort(self, rid: str) -> bool:
        transfer = self.transfers.pop(rid, None)
        if transfer is None:
            return False
        self.fabric.detach(transfer.peer)
        return True

    def probe_peer(self, peer: str, want: int) -> bool:
        qp = self.fabric.attach(peer)  # leak: an idle pair answers early without detach
        if not qp.posted:
            return False
        ready = len(qp.posted) >= want
        self.fabric.detach(peer)
        return ready

    def drain(self, peer: str) -> Iterator[bytes]:
        qp = self.fabric.attach(peer)  # clean: finally also runs when the generator is closed
        try:
            while qp.posted:
                yield qp.posted.pop(0)
        finally:
            self.fabric.detach(peer)

    def read_header(self, qp: QueuePair, parse: Callable[[bytes], Optional[int]]) -> Optional[int]:
        buf = self.bounce.lease()  # clean: given back before the result is looked at
        if buf is None:
            return None
        buf.payload = qp.posted[0] if qp.posted else b""
        value = parse(buf.payload)
        self.bounce.give_back(buf)
        if value is None:
            return None
        return value
