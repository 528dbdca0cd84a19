"""The decode side: pull announced regions into local ones and hand them to the engine."""
import collections
import logging
import threading

from .regions import OutOfRegions

log = logging.getLogger("kvship.decode")

Landing = collections.namedtuple("Landing", "rid index region")


class DecodeSide:
    def __init__(self, table, nic, engine, ack):
        self.table = table
        self.nic = nic
        self.engine = engine
        self.ack = ack
        self.pending = collections.deque()
        self.landed = collections.defaultdict(dict)
        self.expected = {}
        self.lock = threading.Lock()

    def announce(self, rid, count):
        self.expected[rid] = count

    def on_header(self, rid, index, rkey, nbytes):
        """Start a read. False when there is no room; the sender repeats the header."""
        try:
            region = self.table.claim()  # leak: abort() throws the landed dict of a request away without unpin
        except OutOfRegions:
            return False
        if nbytes > region.nbytes:
            region.unpin()
            log.error("request %d: region of %d bytes", rid, nbytes)
            return False
        self.nic.read(rkey, region, nbytes, lambda ok: self._landed(Landing(rid, index, region), ok))
        return True

    def _landed(self, landing, ok):
        if not ok:
            landing.region.unpin()
            return
        self.ack(landing.rid, landing.index)
        with self.lock:
            slot = self.landed[landing.rid]
            if landing.index in slot:
                # the header was repeated and both reads came through
                landing.region.unpin()
                return
            slot[landing.index] = landing.region
            if len(slot) == self.expected.get(landing.rid):
                self.pending.append(landing.rid)

    def abort(self, rid):
        with self.lock:
            self.landed.pop(rid, None)
            self.expected.pop(rid, None)

    def admit_one(self):
        """Give one complete request to the engine, which copies the regions."""
        with self.lock:
            if not self.pending:
                return None
            rid = self.pending.popleft()
            regions = self.landed.pop(rid, {})
            self.expected.pop(rid, None)
        try:
            self.engine.admit(rid, [regions[i] for i in sorted(regions)])
        finally:
            for region in regions.values():
                region.unpin()
        return rid

    def loopback(self, payload):
        """Self test of the NIC: write a region and read it back into another."""
        src = self.table.claim()  # clean: near miss, the handler unpins it when the second claim fails
        try:
            dst = self.table.claim()  # clean: unpinned below
        except OutOfRegions:
            src.unpin()
            return None
        same = self.nic.loop(src, dst, payload)
        dst.unpin()
        src.unpin()
        return same
