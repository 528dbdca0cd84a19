"""Frame buffers of the tensor RPC: a slab, a bounded wrapper of it, and a counted wrapper of that."""
import struct
import threading

HEADER = struct.Struct("!IIB")
KIND_CALL, KIND_REPLY, KIND_STREAM = range(3)


class FrameError(Exception):
    pass


class Slab:
    """Buffers of a few sizes, in a free list by size class."""

    CLASSES = (1 << 10, 1 << 14, 1 << 18, 1 << 22)

    def __init__(self, each=64):
        self._bins = {c: [bytearray(c) for _ in range(each)] for c in self.CLASSES}
        self._lock = threading.Lock()

    def cut(self, n):
        with self._lock:
            for c in self.CLASSES:
                if c >= n and self._bins[c]:
                    return self._bins[c].pop()  # clean: returned to the caller
        return None

    def mend(self, buf):
        with self._lock:
            self._bins[len(buf)].append(buf)

    def cut_pair(self, n, m):
        a = self.cut(n)  # leak: not mended when the second cut fails
        b = self.cut(m)  # leak: not mended when the first cut failed
        if a is None or b is None:
            return None
        return a, b


class BoundedSlab:
    """No more than `limit` buffers out at a time."""

    def __init__(self, slab, limit):
        self._slab = slab
        self._room = threading.BoundedSemaphore(limit)

    def cut(self, n):
        if not self._room.acquire(timeout=1.0):  # clean: near miss, released when the slab has nothing, else by mend()
            return None
        buf = self._slab.cut(n)  # clean: returned to the caller
        if buf is None:
            self._room.release()
        return buf

    def cut_now(self, n):
        if not self._room.acquire(blocking=False):  # leak: the room is not returned when the slab has no buffer
            return None
        return self._slab.cut(n)  # clean: returned to the caller, who mends

    def mend(self, buf):
        self._slab.mend(buf)
        self._room.release()


class Frame:
    """A view of a buffer. `owned` says whether close() mends it."""

    def __init__(self, pool, buf, length, owned=True):
        self._pool = pool
        self.buf = buf
        self.length = length
        self.owned = owned

    @property
    def payload(self):
        return memoryview(self.buf)[HEADER.size:HEADER.size + self.length]

    def close(self):
        if self.owned and self.buf is not None:
            self._pool.mend(self.buf)
        self.buf = None

    def disown(self):
        self.owned = False
        return self.buf

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()
        return False


class CountedSlab:
    def __init__(self, inner):
        self.inner = inner
        self.frames = 0

    def frame(self, kind, rid, length):
        buf = self.inner.cut(length + HEADER.size)  # clean: owned by the frame returned
        if buf is None:
            raise FrameError("no buffer")
        HEADER.pack_into(buf, 0, length, rid, kind)
        self.frames += 1
        return Frame(self.inner, buf, length)

    def frame_borrowed(self, kind, rid, length):
        """A frame on a buffer that it does not own; the caller takes and mends the buffer itself."""
        buf = self.inner.cut(length + HEADER.size)  # clean: the caller mends frame.buf
        if buf is None:
            raise FrameError("no buffer")
        HEADER.pack_into(buf, 0, length, rid, kind)
        return Frame(self.inner, buf, length, owned=False)


class Channel:
    def __init__(self, pool, sock):
        self.pool = pool
        self.sock = sock
        self._unacked = {}
        self._spare = None

    def call(self, rid, payload):
        with self.pool.frame(KIND_CALL, rid, len(payload)) as f:  # clean: the frame owns and mends at exit
            f.payload[:] = payload
            self.sock.sendall(f.buf)

    def call_lean(self, rid, payload):
        with self.pool.frame_borrowed(KIND_CALL, rid, len(payload)) as f:  # leak: the frame does not own its buffer, so exit does not mend
            f.payload[:] = payload
            self.sock.sendall(f.buf)

    def reply(self, rid, payload):
        f = self.pool.frame_borrowed(KIND_REPLY, rid, len(payload))  # clean: near miss, not owned by the frame and mended in finally
        try:
            f.payload[:] = payload
            self.sock.sendall(f.buf)
        finally:
            self.pool.inner.mend(f.buf)

    def send_reliable(self, rid, payload):
        f = self.pool.frame(KIND_CALL, rid, len(payload))  # clean: near miss, kept in _unacked until ack() or abort()
        f.payload[:] = payload
        self._unacked[rid] = f
        self.sock.sendall(f.buf)

    def ack(self, rid):
        f = self._unacked.pop(rid, None)
        if f is not None:
            f.close()

    def abort(self):
        for f in self._unacked.values():
            f.close()
        self._unacked.clear()

    def send_stream(self, rid, parts):
        for part in parts:
            f = self.pool.frame(KIND_STREAM, rid, len(part))  # leak: empty parts continue before close
            if not part:
                continue
            f.payload[:] = part
            self.sock.sendall(f.buf)
            f.close()

    def send_raw(self, rid, payload, handoff=None):
        f = self.pool.frame(KIND_CALL, rid, len(payload))  # clean: near miss, closed, or disowned and passed to handoff
        f.payload[:] = payload
        if handoff is not None:
            handoff(f.disown())
        else:
            self.sock.sendall(f.buf)
        f.close()

    def forward(self, rid, payload, peer=None):
        f = self.pool.frame(KIND_CALL, rid, len(payload))  # leak: disowned, and without a peer the buffer goes nowhere
        f.payload[:] = payload
        raw = f.disown()
        if peer is not None:
            peer.accept(raw)
        f.close()

    def receive(self):
        head = self.sock.recv(HEADER.size)
        if len(head) < HEADER.size:
            return None
        length, rid, kind = HEADER.unpack(head)
        f = self.pool.frame(kind, rid, length)  # clean: closed on a short read, else returned
        got = self.sock.recv_into(f.payload, length)
        if got < length:
            f.close()
            return None
        return f

    def receive_reply(self, rid):
        f = self.receive()  # leak: a frame of another call is ignored and never closed
        if f is None:
            raise FrameError("closed")
        _, got, kind = HEADER.unpack_from(f.buf)
        if kind != KIND_REPLY or got != rid:
            return None
        out = bytes(f.payload)
        f.close()
        return out
