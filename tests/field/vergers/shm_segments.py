"""Numbered shared memory segments, one bit each, and the threads that move data through them."""
import multiprocessing
import queue
import threading
from concurrent.futures import ThreadPoolExecutor

SEGMENTS = 64
_taken = 0
_changed = threading.Condition()


def reserve_segment():
    """The lowest free segment; waits until there is one."""
    global _taken
    with _changed:
        while _taken == (1 << SEGMENTS) - 1:
            _changed.wait()
        index = 0
        while _taken >> index & 1:
            index += 1
        _taken |= 1 << index
        return index


def return_segment(index):
    global _taken
    with _changed:
        _taken &= ~(1 << index)
        _changed.notify()


class RingWriter:
    def __init__(self, shm, length):
        self.shm = shm
        self.segments = [reserve_segment() for _ in range(length + 1)]  # leak: close() goes over the data segments from the second on and leaves the header out
        self.shm.write_header(self.segments[0], self.segments[1:])
        self.position = 0

    def write(self, payload):
        data = self.segments[1:]
        self.shm.write(data[self.position % len(data)], payload)
        self.position += 1

    def close(self):
        for segment in self.segments[1:]:
            return_segment(segment)
        self.segments = []


def copy_files(shm, sink, paths):
    jobs = queue.Queue()

    def consume():
        while (segment := jobs.get()) is not None:
            try:
                sink.write(shm.view(segment))
            except OSError:
                return
            finally:
                return_segment(segment)

    worker = threading.Thread(target=consume)
    worker.start()
    for path in paths:
        segment = reserve_segment()  # leak: the consumer leaves at its first OSError and what is queued behind is in a local queue
        shm.read_file(segment, path)
        jobs.put(segment)
    jobs.put(None)
    worker.join()


class FrameSink:
    def __init__(self, shm, encoder):
        self.shm = shm
        self.encoder = encoder
        self.jobs = queue.Queue(maxsize=16)
        self.skipped = 0

    def offer(self, frame):
        segment = reserve_segment()  # leak: a full queue counts the frame as skipped and forgets its segment
        self.shm.write(segment, frame)
        try:
            self.jobs.put_nowait(segment)
        except queue.Full:
            self.skipped += 1

    def run(self):
        while (segment := self.jobs.get()) is not None:
            try:
                self.encoder.encode(self.shm.view(segment))
            finally:
                return_segment(segment)


class AudioSink:
    def __init__(self, shm, encoder):
        self.shm = shm
        self.encoder = encoder
        self.jobs = queue.Queue(maxsize=16)

    def offer(self, chunk):
        segment = reserve_segment()  # clean: on a full queue the handler returns it, otherwise run() does
        self.shm.write(segment, chunk)
        try:
            self.jobs.put_nowait(segment)
        except queue.Full:
            return_segment(segment)
            return False
        return True

    def run(self):
        while (segment := self.jobs.get()) is not None:
            try:
                self.encoder.encode(self.shm.view(segment))
            finally:
                return_segment(segment)


class Flusher:
    def __init__(self, shm, store, limit):
        self.shm = shm
        self.store = store
        self.limit = limit
        self.threads = []

    def flush(self, block):
        segment = reserve_segment()  # leak: over the limit the thread that would return it is built and not started
        self.shm.write(segment, block)
        thread = threading.Thread(target=self._write, args=(segment,))
        self.threads = [t for t in self.threads if t.is_alive()]
        if len(self.threads) < self.limit:
            thread.start()
            self.threads.append(thread)

    def _write(self, segment):
        try:
            self.store.append(self.shm.view(segment))
        finally:
            return_segment(segment)


class Mirror:
    def __init__(self, shm, remote):
        self.shm = shm
        self.remote = remote

    def mirror(self, block):
        segment = reserve_segment()  # clean: the started thread carries it in its arguments and returns it in the finally
        self.shm.write(segment, block)
        thread = threading.Thread(target=self._send, args=(segment,), daemon=True)
        thread.start()

    def _send(self, segment):
        try:
            self.remote.send(self.shm.view(segment))
        except ConnectionError:
            self.remote.reconnect()
        finally:
            return_segment(segment)


class Tokenizers:
    def __init__(self, shm, tokenizer):
        self.shm = shm
        self.tokenizer = tokenizer
        self.executor = ThreadPoolExecutor(4)

    def submit(self, text):
        segment = reserve_segment()  # leak: stop() cancels the jobs that wait in the executor, and only a job that runs returns its segment
        self.shm.write(segment, text)
        return self.executor.submit(self._tokenize, segment)

    def _tokenize(self, segment):
        try:
            return self.tokenizer.encode(self.shm.view(segment))
        finally:
            return_segment(segment)

    def stop(self):
        self.executor.shutdown(wait=True, cancel_futures=True)


class SampleFeed:
    def __init__(self, shm):
        self.shm = shm
        self.ready = queue.Queue()

    def push(self, sample):
        segment = reserve_segment()  # leak: reset() puts a new queue in the place of the one with unread segments in it
        self.shm.write(segment, sample)
        self.ready.put(segment)

    def pop(self):
        segment = self.ready.get()
        try:
            return self.shm.read(segment)
        finally:
            return_segment(segment)

    def reset(self, epoch):
        self.shm.set_epoch(epoch)
        self.ready = queue.Queue()


def broadcast(shm, peers, tensors):
    cleanups = []
    try:
        for tensor in tensors:
            segment = reserve_segment()  # leak: every lambda reads the variable when it is called, so all of them return the last segment
            cleanups.append(lambda: return_segment(segment))
            shm.write(segment, tensor)
        for peer in peers:
            peer.notify(len(tensors))
    finally:
        for cleanup in cleanups:
            cleanup()


def all_gather(shm, peers, tensors):
    cleanups = []
    try:
        for tensor in tensors:
            segment = reserve_segment()  # clean: the default argument binds the segment of this turn
            cleanups.append(lambda index=segment: return_segment(index))
            shm.write(segment, tensor)
        return [peer.collect() for peer in peers]
    finally:
        for cleanup in cleanups:
            cleanup()


def _preprocess(shm, segment, path):
    try:
        shm.read_file(segment, path)
        shm.normalize(segment)
    finally:
        return_segment(segment)


def preprocess_all(shm, paths):
    processes = []
    for path in paths:
        segment = reserve_segment()  # leak: the child clears the bit in its own copy of the module, the bit in this process stays set
        process = multiprocessing.Process(target=_preprocess, args=(shm, segment, path))
        process.start()
        processes.append(process)
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


class LogShipper:
    def __init__(self, shm, remote):
        self.shm = shm
        self.remote = remote
        self.jobs = queue.Queue()
        self.lock = threading.Lock()
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self._ship)
        self.thread.start()

    def log(self, line):
        with self.lock:
            if self.stopping.is_set():
                raise RuntimeError("log after stop")
            segment = reserve_segment()  # clean: the thread returns what it ships, and stop() empties the queue after the join
            self.shm.write(segment, line)
            self.jobs.put(segment)

    def _ship(self):
        while not self.stopping.is_set():
            try:
                segment = self.jobs.get(timeout=0.2)
            except queue.Empty:
                continue
            try:
                self.remote.send(self.shm.view(segment))
            finally:
                return_segment(segment)

    def stop(self):
        with self.lock:
            self.stopping.set()
        self.thread.join()
        while not self.jobs.empty():
            return_segment(self.jobs.get())
