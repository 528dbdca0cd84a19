"""The prefill side: fill regions with KV layers, tell the decode side, let go when it has read them."""
import logging
import struct
import threading
import time

from .regions import OutOfRegions
from .wire import PeerGone

log = logging.getLogger("kvship.prefill")
HEADER = struct.Struct("<QII")


class Shipment:
    """All regions of one request, and the peer they go to."""

    def __init__(self, rid, peer, regions):
        self.rid = rid
        self.peer = peer
        self.regions = regions
        self.left = len(regions)
        self.born = time.monotonic()


class PrefillSide:
    def __init__(self, table, wire, exporter):
        self.table = table
        self.wire = wire
        self.exporter = exporter
        self.shipments = {}
        self.kept = {}
        self.lock = threading.Lock()

    def ship(self, rid, peer, layers):
        """Export the layers of a request and announce them. False: try another time."""
        if rid in self.shipments:
            return True
        try:
            regions = self.table.claim_n(len(layers))  # leak: a dead peer is caught below and the regions of the shipment stay pinned
        except OutOfRegions:
            return False
        try:
            sock = self.wire.open(peer)  # clean: near miss, PeerGone of open() itself leaves nothing open; on_read() or expire() calls done()
        except PeerGone:
            log.warning("%s is gone", peer)
            return False
        for layer, region in zip(layers, regions):
            self.exporter.export(layer, region)
        shipment = Shipment(rid, peer, regions)
        with self.lock:
            self.shipments[rid] = shipment
        try:
            for i, region in enumerate(regions):
                self.wire.send(sock, HEADER.pack(rid, i, region.nbytes), region)
        except PeerGone:
            self.cancel(rid)
            return False
        return True

    def _drop(self, shipment):
        for region in shipment.regions:
            region.unpin()
        self.wire.done(shipment.peer)

    def on_read(self, rid, index):
        """The peer has read one region of a shipment."""
        with self.lock:
            shipment = self.shipments.get(rid)
            if shipment is None:
                return
            shipment.left -= 1
            if shipment.left:
                return
            del self.shipments[rid]
        self._drop(shipment)

    def cancel(self, rid):
        with self.lock:
            shipment = self.shipments.pop(rid, None)
        if shipment is not None:
            self._drop(shipment)

    def expire(self, age):
        cut = time.monotonic() - age
        with self.lock:
            old = [rid for rid, s in self.shipments.items() if s.born < cut]
        for rid in old:
            log.warning("shipment %d was never read", rid)
            self.cancel(rid)

    def keep_prefix(self, key, rid):
        """Pin the first region of a shipment as a shared prefix."""
        with self.lock:
            shipment = self.shipments.get(rid)
            if shipment is None or key in self.kept:
                return False
            self.kept[key] = shipment.regions[0].pin()  # clean: near miss, a key is never overwritten and forget() unpins
        return True

    def forget(self, key):
        with self.lock:
            region = self.kept.pop(key, None)
        if region is not None:
            region.unpin()

    def ship_prefix(self, key, peer):
        """Send a kept prefix to one more peer."""
        with self.lock:
            region = self.kept.get(key)
            if region is None:
                return False
            region.pin()  # leak: PeerGone from open() or send() goes up past the unpin
        sock = self.wire.open(peer)  # leak: PeerGone from send() goes up past done()
        self.wire.send(sock, HEADER.pack(0, 0, region.nbytes), region)
        self.wire.done(peer)
        region.unpin()
        return True
