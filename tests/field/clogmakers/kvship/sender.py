"""The prefill side."""
import logging
import struct
import threading

from .conn import PeerGone

logger = logging.getLogger(__name__)

OFFER, ACCEPT, REFUSE, DONE = range(4)


class Transfer:
    """A finished prompt on its way to its decode instance."""

    def __init__(self, rid, region, conn):
        self.rid = rid
        self.region = region
        self.conn = conn
        self.sent = 0

    def close(self, sender):
        sender.memory.unregister(self.region)
        self.region = None


class Sender:
    def __init__(self, memory, pool, copy):
        self.memory = memory
        self.pool = pool
        self.copy = copy
        self.transfers = {}
        self.lock = threading.Lock()

    def offer(self, rid, addr, blocks):
        """Asks a decode instance whether it has room, True when the transfer has begun."""
        region = self.memory.register(blocks)  # leak: PeerGone of get, send or recv is caught by offer_any, the region stays registered
        conn = self.pool.get(addr)  # leak: a transfer that was accepted keeps it, close() of the transfer forgets it
        conn.send(OFFER, struct.pack("<QII", region.key, region.start, blocks))
        kind, _ = conn.recv()
        if kind == REFUSE:
            self.pool.put(conn)
            self.memory.unregister(region)
            return False
        with self.lock:
            self.transfers[rid] = Transfer(rid, region, conn)
        return True

    def offer_any(self, rid, addrs, blocks):
        for addr in addrs:
            try:
                if self.offer(rid, addr, blocks):
                    return addr
            except PeerGone as exc:
                logger.warning("%s: %s", rid, exc)
        return None

    def push(self, rid):
        t = self.transfers[rid]
        for block in range(t.region.start + t.sent, t.region.start + t.region.blocks):
            self.copy(t.region.key, block)
            t.sent += 1
        t.conn.send(DONE, struct.pack("<Q", t.region.key))

    def complete(self, rid):
        with self.lock:
            t = self.transfers.pop(rid)
        t.close(self)

    def share(self, rid, addr):
        """Lets a second peer read a region that is being sent to the first one."""
        with self.lock:
            t = self.transfers.get(rid)
        if t is None:
            return False
        region = self.memory.ref(t.region.key)  # clean: None or given back in finally
        if region is None:
            return False
        try:
            with self.pool.to(addr) as conn:  # clean: context manager
                conn.send(OFFER, struct.pack("<QII", region.key, region.start, region.blocks))
                kind, _ = conn.recv()
                if kind == ACCEPT:
                    for block in range(region.start, region.start + region.blocks):
                        self.copy(region.key, block)
                    conn.send(DONE, struct.pack("<Q", region.key))
                return kind == ACCEPT
        finally:
            self.memory.unregister(region)

    def ping(self, addrs):
        alive = []
        for addr in addrs:
            try:
                conn = self.pool.get(addr)  # clean: inner finally, nothing is held when get raises
            except OSError:
                continue
            try:
                conn.send(DONE, b"")
                alive.append(addr)
            except PeerGone:
                pass
            finally:
                self.pool.put(conn)
        return alive
