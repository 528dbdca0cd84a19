"""Hands KV layers from prefill nodes to decode nodes: staging buffers, peer links, one drain thread."""
import logging
import queue
import threading
import time
from collections import defaultdict
from contextlib import contextmanager

LOG = logging.getLogger("kvtransfer")
PING = b"PING"
WIRE_VERSION = 7


class ProtocolError(Exception):
    pass


class Buffer:
    __slots__ = ("ident", "view", "used")

    def __init__(self, ident, nbytes):
        self.ident = ident
        self.view = memoryview(bytearray(nbytes))
        self.used = 0


class StagingPool:
    """Buffers of a few sizes that senders and receivers share."""

    def __init__(self, sizes):
        self._cond = threading.Condition()
        self._idle = [Buffer(i, n) for i, n in enumerate(sizes)]
        self._busy = set()

    def acquire(self, nbytes, timeout=1.0):
        deadline = time.monotonic() + timeout
        with self._cond:
            while True:
                while not self._idle:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        return None
                    self._cond.wait(left)
                buf = self._idle.pop()  # leak: a buffer that is too small is dropped by the continue
                if len(buf.view) < nbytes:
                    continue
                self._busy.add(buf.ident)
                return buf

    def release(self, buf):
        buf.used = 0
        with self._cond:
            self._busy.discard(buf.ident)
            self._idle.append(buf)
            self._cond.notify()

    @contextmanager
    def borrowed(self, nbytes):
        buf = self.acquire(nbytes, timeout=5.0)  # clean: None raises before anything is held, else the finally releases
        if buf is None:
            raise TimeoutError("no staging buffer")
        try:
            yield buf
        finally:
            self.release(buf)


class LinkTable:
    def __init__(self, dial, per_peer=2):
        self._dial = dial
        self._per_peer = per_peer
        self._lock = threading.Lock()
        self._idle = defaultdict(list)

    def checkout(self, peer):
        with self._lock:
            if self._idle[peer]:
                return self._idle[peer].pop()  # clean: handed to the caller
        link = self._dial(peer)  # leak: the version mismatch raises without closing the new link
        if link.version != WIRE_VERSION:
            raise ProtocolError(f"{peer} speaks version {link.version}")
        LOG.debug("dialled %s", peer)
        return link

    def checkin(self, link):
        with self._lock:
            idle = self._idle[link.peer]
            if len(idle) < self._per_peer:
                idle.append(link)
                return
        link.close()

    def discard(self, link):
        link.close()

    def close(self):
        with self._lock:
            links = [l for idle in self._idle.values() for l in idle]
            self._idle.clear()
        for link in links:
            link.close()


class Transport:
    def __init__(self, links):
        self.links = links
        self._queue = queue.Queue()
        self._gone = set()
        self._stopping = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._drain, daemon=True)
        self._thread.start()

    def submit(self, peer, buf, on_done):
        with self._lock:
            if self._stopping or peer in self._gone:
                return False
            self._queue.put((peer, buf, on_done))
            return True

    def _drain(self):
        while True:
            item = self._queue.get()
            if item is None:
                return
            peer, buf, on_done = item
            try:
                link = self.links.checkout(peer)  # clean: near miss, discarded after OSError and checked in otherwise
            except (ProtocolError, OSError) as exc:
                LOG.error("%s", exc)
                self._gone.add(peer)
                on_done(buf)
                continue
            try:
                link.send(buf.view[:buf.used])
            except OSError:
                self._gone.add(peer)
                self.links.discard(link)
            else:
                self.links.checkin(link)
            finally:
                on_done(buf)

    def stop(self):
        with self._lock:
            self._stopping = True
            self._queue.put(None)
        self._thread.join()


def pack_into(view, layers):
    offset = 0
    for layer in layers:
        data = layer.tobytes()
        view[offset:offset + len(data)] = data
        offset += len(data)
    return offset


class PrefillSender:
    def __init__(self, pool, transport):
        self.pool = pool
        self.transport = transport
        self.sent = 0

    def send(self, job):
        buf = self.pool.acquire(job.nbytes)  # leak: submit() refuses a peer that is gone without calling on_done
        if buf is None:
            return False
        buf.used = pack_into(buf.view, job.layers)
        accepted = self.transport.submit(job.peer, buf, on_done=self.pool.release)
        self.sent += accepted
        return accepted

    def send_chunked(self, job, groups):
        held = []
        for layers in groups:
            buf = self.pool.acquire(sum(l.nbytes for l in layers), timeout=0.2)  # clean: near miss, released on shortage or refusal, else by the transport
            if buf is None:
                for b in held:
                    self.pool.release(b)
                return False
            buf.used = pack_into(buf.view, layers)
            held.append(buf)
        for i, buf in enumerate(held):
            if not self.transport.submit(job.peer, buf, on_done=self.pool.release):
                for b in held[i:]:
                    self.pool.release(b)
                return False
        self.sent += 1
        return True


class DecodeReceiver:
    def __init__(self, pool, links):
        self.pool = pool
        self.links = links
        self._inbound = {}
        self._control = pool.acquire(4096)  # clean: held for the life of the receiver and released by close()

    def announce(self, req_id, nbytes):
        buf = self.pool.acquire(nbytes)  # leak: a second announcement of a request overwrites its entry
        if buf is None:
            return False
        self._inbound[req_id] = buf
        return True

    def complete(self, req_id, scatter):
        buf = self._inbound.pop(req_id, None)
        if buf is None:
            return False
        try:
            scatter(buf.view[:buf.used])
        finally:
            self.pool.release(buf)
        return True

    def verify(self, payload):
        with self.pool.borrowed(len(payload)) as buf:  # clean: the context manager releases
            buf.view[:len(payload)] = payload
            return sum(buf.view[:len(payload)]) & 0xFFFF

    def ping(self, peer):
        link = self.links.checkout(peer)  # leak: a failed ping returns without discarding the link
        started = time.perf_counter()
        try:
            link.send(PING)
            link.recv(4)
        except OSError:
            return None
        self.links.checkin(link)
        return time.perf_counter() - started

    def locate(self, peer, req_id):
        link = self.links.checkout(peer)  # clean: near miss, checked in before the name is bound again
        try:
            for _ in range(3):
                link.send(b"WHERE " + req_id.encode())
                reply = link.recv(64)
                if not reply.startswith(b"MOVED "):
                    break
                self.links.checkin(link)
                link = None
                link = self.links.checkout(reply[6:].decode())  # clean: near miss, checked in by the next turn or after the loop
        except OSError:
            if link is not None:
                self.links.discard(link)
            raise
        self.links.checkin(link)
        return reply

    def close(self):
        for buf in self._inbound.values():
            self.pool.release(buf)
        self._inbound.clear()
        if self._control is not None:
            self.pool.release(self._control)
            self._control = None
