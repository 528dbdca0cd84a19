"""Asynchronous checkpoint writer with a bounded set of staging chunks."""
import os
import queue
import threading
from concurrent.futures import ThreadPoolExecutor


class ChunkPool:
    def __init__(self, count, size):
        self.size = size
        self._sem = threading.BoundedSemaphore(count)
        self._spare = [bytearray(size) for _ in range(count)]
        self._lock = threading.Lock()

    def obtain(self):
        self._sem.acquire()  # clean: near miss, the permit goes out with the chunk and recycle returns both
        with self._lock:
            return self._spare.pop()  # clean: handed to the caller

    def obtain_if(self, wanted):
        if not self._sem.acquire(blocking=False):  # leak: the permit is kept when the chunk turns out too small
            return None
        if wanted > self.size:
            return None
        with self._lock:
            return self._spare.pop()  # clean: handed to the caller

    def recycle(self, chunk):
        with self._lock:
            self._spare.append(chunk)
        self._sem.release()


class WriteTask:
    def __init__(self, fd, offset, chunk, used):
        self.fd = fd
        self.offset = offset
        self.chunk = chunk
        self.used = used

    def run(self):
        view = memoryview(self.chunk)[: self.used]
        try:
            return os.pwrite(self.fd, view, self.offset)
        finally:
            view.release()


class Writer:
    def __init__(self, pool, threads=4):
        self._pool = pool
        self._exec = ThreadPoolExecutor(threads)
        self._errors = []

    def _finish(self, chunk, fut):
        if fut.exception() is not None:
            self._errors.append(fut.exception())
        self._pool.recycle(chunk)

    def _finish_logged(self, chunk, fut):
        exc = fut.exception()
        if exc is not None:
            self._errors.append(exc)
            return
        self._pool.recycle(chunk)

    def write(self, fd, offset, data):
        chunk = self._pool.obtain()  # clean: near miss, _finish recycles it whatever the outcome
        chunk[: len(data)] = data
        fut = self._exec.submit(WriteTask(fd, offset, chunk, len(data)).run)
        fut.add_done_callback(lambda f: self._finish(chunk, f))

    def write_logged(self, fd, offset, data):
        chunk = self._pool.obtain()  # leak: the callback leaves early on an error
        chunk[: len(data)] = data
        fut = self._exec.submit(WriteTask(fd, offset, chunk, len(data)).run)
        fut.add_done_callback(lambda f: self._finish_logged(chunk, f))

    def write_all(self, fd, pieces):
        held = []
        offset = 0
        for piece in pieces:
            chunk = self._pool.obtain()  # clean: near miss, held with its future and recycled after the wait
            chunk[: len(piece)] = piece
            fut = self._exec.submit(WriteTask(fd, offset, chunk, len(piece)).run)
            held.append((fut, chunk))
            offset += len(piece)
        failed = 0
        for fut, chunk in held:
            if fut.exception() is not None:
                failed += 1
            self._pool.recycle(chunk)
        return failed

    def crc(self, piece, table):
        chunk = self._pool.obtain_if(len(piece))  # leak: a piece that is in the table is answered without recycling
        if chunk is None or piece in table:
            return table.get(piece, 0)
        chunk[: len(piece)] = piece
        table[piece] = sum(memoryview(chunk)[: len(piece)])
        self._pool.recycle(chunk)
        return table[piece]

    def write_until_error(self, fd, pieces):
        held = []
        for n, piece in enumerate(pieces):
            chunk = self._pool.obtain()  # leak: the break on the first failure skips the later chunks
            chunk[: len(piece)] = piece
            fut = self._exec.submit(WriteTask(fd, n * self._pool.size, chunk, len(piece)).run)
            held.append((fut, chunk))
        written = 0
        for fut, chunk in held:
            if fut.exception() is not None:
                self._pool.recycle(chunk)
                break
            written += fut.result()
            self._pool.recycle(chunk)
        return written


class Pipeline:
    def __init__(self, pool, fd):
        self._pool = pool
        self._fd = fd
        self._q = queue.Queue()
        self._pos = 0
        self._thread = threading.Thread(target=self._flush_loop, daemon=True)
        self._thread.start()

    def push(self, data):
        chunk = self._pool.obtain()  # clean: near miss, the flusher recycles what it takes off the queue
        chunk[: len(data)] = data
        self._q.put((chunk, len(data)))

    def push_small(self, data):
        chunk = self._pool.obtain_if(len(data))  # clean: None writes inline, otherwise queued
        if chunk is None:
            os.pwrite(self._fd, data, self._pos)
            self._pos += len(data)
            return
        chunk[: len(data)] = data
        self._q.put((chunk, len(data)))

    def push_header(self, fields):
        chunk = self._pool.obtain()  # leak: with no fields nothing is queued and nothing recycled
        n = 0
        for name, value in fields.items():
            line = f"{name}={value}\n".encode()
            chunk[n : n + len(line)] = line
            n += len(line)
        if n:
            self._q.put((chunk, n))

    def _flush_loop(self):
        while True:
            item = self._q.get()
            if item is None:
                return
            chunk, used = item
            task = WriteTask(self._fd, self._pos, chunk, used)
            try:
                self._pos += task.run()
            except OSError:
                self._pos += used
            self._pool.recycle(chunk)

    def close(self):
        self._q.put(None)
        self._thread.join()
