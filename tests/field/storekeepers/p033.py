import queue
import threading


class ChunkPool:
    def __init__(self, count, size):
        self._q = queue.Queue()
        for _ in range(count):
            self._q.put(bytearray(size))

    def receive(self):
        return self._q.get()

    def give(self, chunk):
        self._q.put(chunk)


class Loader:
    """Reader thread fills chunks, workers parse them and give them back."""

    def __init__(self, pool, paths):
        self.pool = pool
        self.paths = list(paths)
        self.work = queue.Queue(maxsize=4)
        self.errors = []
        self.header = pool.receive()  # clean: join gives it back
        self.footer = None
        self.thread = threading.Thread(target=self._read, daemon=True)

    def start(self):
        self.thread.start()

    def _read(self):
        for path in self.paths:
            chunk = self.pool.receive()  # leak: work gives nothing back for chunks that are too short
            with open(path, "rb") as fh:
                n = fh.readinto(chunk)
            self.work.put((path, chunk, n))
        self.work.put(None)

    def run_worker(self, parse):
        rows = 0
        while True:
            item = self.work.get()
            if item is None:
                self.work.put(None)
                return rows
            path, chunk, n = item
            if n < 8:
                self.errors.append(path)
                continue
            rows += parse(memoryview(chunk)[:n])
            self.pool.give(chunk)

    def read_footer(self, path):
        if self.footer is None:
            self.footer = self.pool.receive()  # leak: join gives back the header and not the footer
        with open(path, "rb") as fh:
            fh.seek(-len(self.footer), 2)
            return fh.readinto(self.footer)

    def read_header(self, path):
        with open(path, "rb") as fh:
            return fh.readinto(self.header)

    def join(self):
        self.thread.join()
        self.pool.give(self.header)
        self.header = self.footer = None
        return len(self.errors)


def sniff(pool, path):
    chunk = pool.receive()  # clean: given back below
    with open(path, "rb") as fh:
        n = fh.readinto(chunk)
    magic = bytes(chunk[:min(n, 4)])
    pool.give(chunk)
    return magic
