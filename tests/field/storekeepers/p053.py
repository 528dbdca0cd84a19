import threading


class HostBuffer:
    def __init__(self, nbytes):
        self.data = bytearray(nbytes)
        self.length = 0


class HostBuffers:
    def __init__(self, count, nbytes):
        self._free = [HostBuffer(nbytes) for _ in range(count)]
        self._cv = threading.Condition()

    def acquire(self):
        with self._cv:
            self._cv.wait_for(lambda: len(self._free) > 0)
            return self._free.pop()

    def release(self, buf):
        with self._cv:
            buf.length = 0
            self._free.append(buf)
            self._cv.notify()


class CheckpointWriter:
    """Front buffer is filled while the back buffer is written out."""

    def __init__(self, buffers, sink):
        self.buffers = buffers
        self.sink = sink
        self.front = None
        self.back = None
        self.meta = None
        self.written = 0

    def open(self):
        if self.front is None:
            self.front = self.buffers.acquire()  # leak: swap puts it over a back buffer not yet written
        if self.meta is None:
            self.meta = self.buffers.acquire()  # clean: close releases it

    def append(self, payload):
        end = self.front.length + len(payload)
        if end > len(self.front.data):
            self.swap()
            end = len(payload)
        self.front.data[end - len(payload):end] = payload
        self.front.length = end

    def swap(self):
        self.back = self.front
        self.front = self.buffers.acquire()  # leak: becomes the back buffer and is overwritten there

    def write_back(self):
        if self.back is None:
            return 0
        count = self.sink(memoryview(self.back.data)[:self.back.length])
        self.buffers.release(self.back)
        self.back = None
        self.written += count
        return count

    def write_meta(self, text):
        raw = text.encode()
        self.meta.data[:len(raw)] = raw
        self.meta.length = len(raw)

    def close(self):
        self.write_back()
        for buf in (self.front, self.meta):
            if buf is not None:
                self.sink(memoryview(buf.data)[:buf.length])
                self.buffers.release(buf)
        self.front = self.meta = None


def digest(buffers, chunks, hasher):
    buf = buffers.acquire()  # clean: released after the loop
    for chunk in chunks:
        buf.data[:len(chunk)] = chunk
        hasher.update(memoryview(buf.data)[:len(chunk)])
    buffers.release(buf)
    return hasher.hexdigest()
