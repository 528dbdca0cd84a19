from __future__ import annotations

from typing import Dict, List, Optional

from .fabric import Fabric, LinkDown, QueuePair
from .memory import BounceBuffer, BouncePool, MemoryRegistry, Region, RegistrationError


class KVSender:
    def __init__(self, fabric: Fabric, registry: MemoryRegistry, bounce: BouncePool) -> None:
        self.fabric = fabric
        self.registry = registry
        self.bounce = bounce
        self.pending: Dict[str, List[BounceBuffer]] = {}
        self.links: Dict[str, QueuePair] = {}
        self.standby: Dict[str, QueuePair] = {}

    def link(self, peer: str) -> Optional[QueuePair]:
        if peer not in self.links:
            qp = self.fabric.connect_once(peer)  # clean: cached in links, close_all closes it
            if qp is None:
                return None
            self.links[peer] = qp
        return self.links[peer]

    def close_all(self) -> None:
        for table in (self.links, self.standby):
            for qp in table.values():
                self.fabric.close_qp(qp)
            table.clear()

    def prepare_standby(self, peer: str) -> bool:
        """A second path for a peer that reported errors."""
        qp = self.fabric.connect_once(peer)  # leak: the standby of a second report is written over the first, which is never closed
        if qp is None:
            return False
        self.standby[peer] = qp
        return True

    def send_pages(self, peer: str, pages: List[bytes]) -> int:
        qp = self.link(peer)
        if qp is None:
            return 0
        sent = 0
        for page in pages:
            buf = self.bounce.lease()  # leak: a link error ends the loop with the buffer out
            if buf is None:
                break
            buf.payload = page
            try:
                qp.post(buf.payload)
            except LinkDown:
                break
            sent += 1
            self.bounce.give_back(buf)
        return sent

    def send_layerwise(self, rid: str, peer: str, layers: List[bytes]) -> bool:
        """Buffers stay out until the peer acknowledges the request."""
        qp = self.fabric.attach(peer)  # clean: finally detaches
        try:
            held = self.pending.setdefault(rid, [])
            for layer in layers:
                buf = self.bounce.lease()  # clean: near miss, a partial list is kept under rid and on_ack returns it
                if buf is None:
                    return False
                held.append(buf)
                buf.payload = layer
                qp.post(layer)
            return True
        finally:
            self.fabric.detach(peer)

    def on_ack(self, rid: str) -> None:
        for buf in self.pending.pop(rid, []):
            self.bounce.give_back(buf)

    def send_zero_copy(self, peer: str, addr: int, length: int) -> bool:
        region = self.registry.register(addr, length)  # leak: no link, no deregister
        qp = self.link(peer)
        if qp is None:
            return False
        qp.post(length.to_bytes(8, "little"))
        self.registry.deregister(region)
        return True

    def regions_for(self, addrs: List[int], n: int) -> List[Region]:
        out: List[Region] = []
        try:
            for addr in addrs:
                out.append(self.registry.register(addr, n))  # clean: rolled back on a full table, else the caller's
        except RegistrationError:
            while out:
                self.registry.deregister(out.pop())
        return out
