"""The decode side."""
import logging
import struct
import threading
import time

from .conn import PeerGone
from .memory import OutOfRegions
from .sender import ACCEPT, DONE, OFFER, REFUSE

logger = logging.getLogger(__name__)


class Incoming:
    def __init__(self, key, region):
        self.key = key
        self.region = region
        self.since = time.monotonic()
        self.complete = False


class Receiver:
    """Serves the connections of the prefill instances, one thread for each."""

    def __init__(self, memory, on_ready, timeout=30.0):
        self.memory = memory
        self.on_ready = on_ready
        self.timeout = timeout
        self.incoming = {}
        self.lock = threading.Lock()
        self.refused = 0

    def serve(self, conn):
        try:
            while True:
                kind, payload = conn.recv()
                if kind == OFFER:
                    self._offered(conn, payload)
                elif kind == DONE and payload:
                    self._done(struct.unpack("<Q", payload)[0])
        except PeerGone:
            logger.info("%s has gone", conn.addr)
        finally:
            conn.close()

    def _offered(self, conn, payload):
        key, _, blocks = struct.unpack("<QII", payload)
        try:
            region = self.memory.register(blocks)  # leak: sweep() deletes what has timed out from the table and nothing else
        except OutOfRegions:
            self.refused += 1
            conn.send(REFUSE, b"")
            return
        with self.lock:
            self.incoming[key] = Incoming(key, region)
        conn.send(ACCEPT, struct.pack("<Q", region.key))

    def _done(self, key):
        with self.lock:
            inc = self.incoming.pop(key, None)
        if inc is None:
            return
        inc.complete = True
        self.on_ready(inc.region, lambda: self.memory.unregister(inc.region))

    def sweep(self):
        now = time.monotonic()
        with self.lock:
            late = [k for k, i in self.incoming.items() if now - i.since > self.timeout]
            for k in late:
                del self.incoming[k]
        if late:
            logger.warning("%d transfers timed out", len(late))

    def pull(self, conn, key, read):
        """Reads a region of a peer into one of our own."""
        region = self.memory.register(read.blocks)  # leak: a short read returns None and the region is not given back
        got = read(conn, key, region.start)
        if got < read.blocks:
            logger.warning("%d of %d blocks of %d", got, read.blocks, key)
            return None
        return region

    def pull_all(self, conn, keys, read):
        """All regions or none."""
        out = []
        for key in keys:
            try:
                region = self.pull(conn, key, read)  # clean: near miss, listed at once, the list is returned or given back whole
            except (OutOfRegions, PeerGone):
                region = None
            if region is None:
                for r in out:
                    self.memory.unregister(r)
                return []
            out.append(region)
        return out

    def peek(self, key):
        region = self.memory.ref(key)  # clean: given back before it returns, nothing to give when it is None
        if region is None:
            return 0
        blocks = region.blocks
        self.memory.unregister(region)
        return blocks
