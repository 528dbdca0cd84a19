"""Ping-pong buffers for layer-wise offload: two halves, each ready or busy."""
import threading


class PingPong:
    def __init__(self, make):
        self._bufs = (make(), make())
        self._ready = [threading.Event(), threading.Event()]
        for e in self._ready:
            e.set()
        self._turn = 0

    def next_buffer(self):
        side = self._turn
        self._turn ^= 1
        self._ready[side].wait()
        self._ready[side].clear()
        return self._bufs[side]

    def done_with(self, buf):
        self._ready[self._bufs.index(buf)].set()


class LayerStreamer:
    def __init__(self, pingpong: PingPong, host, gpu):
        self.pingpong = pingpong
        self.host = host
        self.gpu = gpu
        self.current = None

    def run_layer(self, i, x):
        buf = self.pingpong.next_buffer()  # clean: done_with in finally
        try:
            self.host.load(i, buf)
            return self.gpu.layer(buf, x)
        finally:
            self.pingpong.done_with(buf)

    def run_all(self, n, x):
        for i in range(n):
            buf = self.pingpong.next_buffer()  # leak: a skipped layer continues with the buffer busy
            if self.host.skipped(i):
                continue
            self.host.load(i, buf)
            x = self.gpu.layer(buf, x)
            self.pingpong.done_with(buf)
        return x

    def prefetch(self, i):
        self.current = self.pingpong.next_buffer()  # clean: consume() is done with it
        self.host.load_async(i, self.current)

    def consume(self, x):
        buf, self.current = self.current, None
        y = self.gpu.layer(buf, x)
        self.pingpong.done_with(buf)
        return y

    def peek(self, i, name):
        buf = self.pingpong.next_buffer()  # leak: a name found is returned without done_with
        self.host.load(i, buf)
        if name in buf.names:
            return buf.tensor(name).mean()
        self.pingpong.done_with(buf)
        return None
