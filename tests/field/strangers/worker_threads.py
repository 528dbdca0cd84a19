"""A producer fills buffers, threads consume them and put them back."""
import queue
import threading


class ByteBuffers:
    def __init__(self, n, size):
        self._q = queue.SimpleQueue()
        for _ in range(n):
            self._q.put(bytearray(size))

    def checkout_buffer(self):
        return self._q.get()

    def checkin_buffer(self, buf):
        self._q.put(buf)


class Pipeline:
    def __init__(self, buffers, sink):
        self.buffers = buffers
        self.sink = sink
        self.full = queue.Queue()
        self.failed = queue.Queue()
        self.thread = threading.Thread(target=self._consume, daemon=True)
        self.stopping = False

    def start(self):
        self.thread.start()

    def feed(self, data):
        buf = self.buffers.checkout_buffer()  # clean: near miss, the consumer thread puts it back
        buf[: len(data)] = data
        self.full.put((len(data), buf))

    def _consume(self):
        while True:
            item = self.full.get()
            if item is None:
                return
            size, buf = item
            try:
                self.sink(bytes(buf[:size]))
            finally:
                self.buffers.checkin_buffer(buf)

    def feed_all(self, chunks):
        sent = 0
        for data in chunks:
            buf = self.buffers.checkout_buffer()  # leak: stopping breaks out with a buffer in hand
            if self.stopping:
                break
            buf[: len(data)] = data
            self.full.put((len(data), buf))
            sent += 1
        return sent

    def retry(self, data):
        buf = self.buffers.checkout_buffer()  # leak: nobody reads the queue of failed buffers but to count it
        buf[: len(data)] = data
        self.failed.put(buf)

    def failures(self):
        n = 0
        while not self.failed.empty():
            self.failed.get()
            n += 1
        return n

    def run_detached(self, data):
        buf = self.buffers.checkout_buffer()  # clean: near miss, the thread's target puts it back
        buf[: len(data)] = data

        def work():
            try:
                self.sink(bytes(buf[: len(data)]))
            finally:
                self.buffers.checkin_buffer(buf)

        threading.Thread(target=work).start()

    def stop(self):
        self.stopping = True
        self.full.put(None)
        self.thread.join()
