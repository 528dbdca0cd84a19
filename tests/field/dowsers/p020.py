"""A metered pool around a plain one."""
import time


class PlainBuffers:
    def __init__(self, bufs):
        self._bufs = list(bufs)

    def pull(self):
        return self._bufs.pop() if self._bufs else None

    def push(self, buf):
        self._bufs.append(buf)


class MeteredBuffers:
    def __init__(self, inner: PlainBuffers, metrics):
        self._inner = inner
        self._metrics = metrics
        self._since = {}

    def pull(self):
        buf = self._inner.pull()  # clean: handed to the caller of the wrapper
        if buf is None:
            self._metrics.count("empty")
            return None
        self._since[id(buf)] = time.monotonic()
        return buf

    def push(self, buf):
        self._metrics.observe("held", time.monotonic() - self._since.pop(id(buf)))
        self._inner.push(buf)


class Shipper:
    def __init__(self, buffers: MeteredBuffers, wire):
        self.buffers = buffers
        self.wire = wire

    def ship(self, msg):
        buf = self.buffers.pull()  # clean: pushed in finally
        if buf is None:
            return False
        try:
            self.wire.send(msg.encode_into(buf))
            return True
        finally:
            self.buffers.push(buf)

    def ship_small(self, msg):
        buf = self.buffers.pull()  # leak: a large message goes another way and keeps the buffer
        if buf is None:
            return False
        if msg.size > len(buf):
            return self.wire.send_direct(msg)
        self.wire.send(msg.encode_into(buf))
        self.buffers.push(buf)
        return True

    def ship_all(self, msgs):
        for msg in msgs:
            buf = self.buffers.pull()  # leak: a muted message continues with the buffer
            if buf is None:
                return
            if msg.muted:
                continue
            self.wire.send(msg.encode_into(buf))
            self.buffers.push(buf)
