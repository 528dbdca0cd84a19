"""Tensor RPC: many calls over one socket, told apart by stream numbers.

Everything runs on the thread of the selector loop, so there are no locks.
"""
import collections
import logging
import selectors
import socket
import struct
import time

log = logging.getLogger("mux")

FRAME = struct.Struct("<BHI")       # kind, stream, length
CALL, REPLY, ERROR, EVENT, TENSOR = range(5)
HELLO = b"mux1"


class HandshakeError(ConnectionError):
    pass


class PeerGone(ConnectionError):
    pass


class StreamIds:
    def __init__(self, count=1024):
        self._free = collections.deque(range(1, count))

    def take(self):
        if not self._free:
            return 0
        return self._free.popleft()  # clean: returned to the caller

    def give(self, sid):
        self._free.append(sid)


class RecvBuffers:
    def __init__(self, count, nbytes):
        self.nbytes = nbytes
        self._free = [bytearray(nbytes) for _ in range(count)]

    def lease(self):
        return self._free.pop() if self._free else None  # clean: returned to the caller

    def release(self, buf):
        self._free.append(buf)


class Call:
    def __init__(self, sid, on_reply, on_error, deadline):
        self.sid = sid
        self.on_reply = on_reply
        self.on_error = on_error
        self.deadline = deadline


class Mux:
    def __init__(self, sock, buffers, timeout=30.0):
        self.sock = sock
        self.buffers = buffers
        self.timeout = timeout
        self.ids = StreamIds()
        self.calls = {}        # stream -> Call
        self.topics = {}       # topic -> stream
        self.handlers = {}     # stream -> event callback
        self.outbox = collections.deque()
        self.closed = False

    @classmethod
    def connect(cls, address, buffers):
        sock = socket.create_connection(address, timeout=5)  # leak: a wrong greeting raises without closing it
        sock.sendall(HELLO)
        if sock.recv(len(HELLO)) != HELLO:
            raise HandshakeError("%s:%d speaks something else" % address)
        sock.setblocking(False)
        return cls(sock, buffers)

    # ---- sending

    def _enqueue(self, kind, sid, payload, on_sent=None):
        """False when the connection is closed already."""
        if self.closed:
            return False
        self.outbox.append((FRAME.pack(kind, sid, len(payload)), payload, on_sent))
        return True

    def flush(self):
        while self.outbox:
            head, payload, on_sent = self.outbox.popleft()
            try:
                self.sock.sendall(head)
                self.sock.sendall(payload)
            except OSError as exc:
                self.closed = True
                log.warning("flush: %s", exc)
            if on_sent is not None:
                on_sent()

    def call(self, payload, on_reply, on_error):
        sid = self.ids.take()  # leak: expire() deletes a late call and keeps its number
        if not sid:
            on_error("too many calls")
            return
        if not self._enqueue(CALL, sid, payload):
            self.ids.give(sid)
            on_error("closed")
            return
        self.calls[sid] = Call(sid, on_reply, on_error, time.monotonic() + self.timeout)

    def expire(self):
        now = time.monotonic()
        late = [c for c in self.calls.values() if c.deadline < now]
        for call in late:
            del self.calls[call.sid]
            call.on_error("timeout")

    def send_tensor(self, sid, tensor):
        buf = self.buffers.lease()  # leak: when the connection is closed the frame is refused and on_sent is never called
        if buf is None:
            return False
        data = tensor.numpy().tobytes()
        buf[:len(data)] = data
        return self._enqueue(TENSOR, sid, memoryview(buf)[:len(data)], lambda: self.buffers.release(buf))

    def send_pair(self, sid, left, right):
        buf = self.buffers.lease()  # clean: near miss, flush() calls on_sent also after an error, and a refusal is handled here
        if buf is None:
            return False
        data = left.numpy().tobytes() + right.numpy().tobytes()
        buf[:len(data)] = data
        if not self._enqueue(TENSOR, sid, memoryview(buf)[:len(data)], lambda: self.buffers.release(buf)):
            self.buffers.release(buf)
            return False
        return True

    def subscribe(self, topic, on_event):
        if self.closed:
            return False
        sid = self.ids.take()  # clean: near miss, in the table of topics, and the number of a former subscription is given back
        if not sid:
            return False
        self.unsubscribe(topic)
        self.topics[topic] = sid
        self.handlers[sid] = on_event
        self._enqueue(CALL, sid, topic.encode())
        return True

    def unsubscribe(self, topic):
        sid = self.topics.pop(topic, None)
        if sid is not None:
            self.handlers.pop(sid)
            self.ids.give(sid)

    def _read(self, view):
        while view:
            count = self.sock.recv_into(view)
            if not count:
                raise PeerGone("end of stream")
            view = view[count:]

    def on_readable(self):
        head = bytearray(FRAME.size)
        self._read(memoryview(head))
        kind, sid, length = FRAME.unpack(head)
        buf = self.buffers.lease()  # leak: a frame for a stream that nobody knows returns before the release
        if buf is None:
            raise PeerGone("no receive buffer for %d bytes" % length)
        try:
            self._read(memoryview(buf)[:length])
        except PeerGone:
            self.buffers.release(buf)
            raise
        body = bytes(buf[:length])
        if kind == EVENT:
            handler = self.handlers.get(sid)
            if handler is None:
                log.debug("event for unknown stream %d", sid)
                return
            handler(body)
        else:
            self._finish(kind, sid, body)
        self.buffers.release(buf)

    def _finish(self, kind, sid, body):
        call = self.calls.pop(sid, None)
        if call is None:
            return
        self.ids.give(sid)
        if kind == ERROR:
            call.on_error(body.decode())
        else:
            call.on_reply(body)

    def close(self):
        self.closed = True
        for call in list(self.calls.values()):
            self._finish(ERROR, call.sid, b"closed")
        for topic in list(self.topics):
            self.unsubscribe(topic)
        self.flush()
        self.sock.close()


class Server:
    def __init__(self, port, limit=64):
        self.limit = limit
        self.buffers = RecvBuffers(2 * limit, 1 << 20)
        self.peers = {}
        self.loop = selectors.DefaultSelector()  # clean: closed in stop()
        self.listener = socket.create_server(("", port))  # clean: closed in stop()
        self.loop.register(self.listener, selectors.EVENT_READ)

    def accept(self):
        sock, address = self.listener.accept()  # clean: near miss, closed when refused, else owned by the peer and closed with it
        if len(self.peers) >= self.limit:
            sock.close()
            return
        self.loop.register(sock, selectors.EVENT_READ)
        self.peers[sock] = Mux(sock, self.buffers)
        log.info("%s:%d joined", *address)

    def drop(self, sock):
        self.loop.unregister(sock)
        self.peers.pop(sock).close()

    def broadcast(self, sid, tensor):
        buf = self.buffers.lease()  # leak: it is released by the last on_sent, and without peers there is none
        if buf is None:
            return 0
        data = tensor.numpy().tobytes()
        buf[:len(data)] = data
        left = [sum(not mux.closed for mux in self.peers.values())]

        def sent():
            left[0] -= 1
            if left[0] == 0:
                self.buffers.release(buf)

        return sum(mux._enqueue(TENSOR, sid, memoryview(buf)[:len(data)], sent) for mux in self.peers.values())

    def run_once(self):
        for key, _ in self.loop.select(1.0):
            if key.fileobj is self.listener:
                self.accept()
                continue
            try:
                self.peers[key.fileobj].on_readable()
            except PeerGone as exc:
                log.info("peer gone: %s", exc)
                self.drop(key.fileobj)

    def stop(self):
        for sock in list(self.peers):
            self.drop(sock)
        self.loop.close()
        self.listener.close()
