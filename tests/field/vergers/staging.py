"""Host staging arrays kept by shape and type."""
import queue
import threading
from collections import defaultdict, deque

import numpy as np

DIM = 1024
MAX_ROWS = 256


class StagingArena:
    def __init__(self):
        self._bins = defaultdict(list)
        self._out = {}

    def take(self, shape, dtype=np.float32):
        kept = self._bins[(tuple(shape), np.dtype(dtype).str)]
        buf = kept.pop() if kept else np.empty(shape, dtype)
        self._out[id(buf)] = buf
        return buf

    def give(self, buf):
        if self._out.pop(id(buf), None) is None:
            return
        self._bins[(buf.shape, buf.dtype.str)].append(buf)


class StepFailed(RuntimeError):
    def __init__(self, message, batch):
        super().__init__(message)
        self.batch = batch


def full_batches(arena, reader, size):
    rows = iter(reader)
    while True:
        buf = arena.take((size, DIM))  # leak: when the reader runs out the generator returns with the half-filled array in hand
        try:
            for i in range(size):
                buf[i] = next(rows)
        except StopIteration:
            return
        yield buf


def train_epoch(arena, reader, trainer):
    for buf in full_batches(arena, reader, 32):
        try:
            trainer.step(buf)
        finally:
            arena.give(buf)


def upload_ragged(arena, device, rows):
    buf = arena.take((MAX_ROWS, DIM))  # leak: the name is bound to a slice, and give() ignores an array that it did not hand out
    buf = buf[:len(rows)]
    try:
        buf[...] = rows
        device.copy(buf)
    finally:
        arena.give(buf)


def upload_padded(arena, device, rows):
    window = arena.take((MAX_ROWS, DIM))[:len(rows)]  # clean: the base of the slice is the very array that take() made
    try:
        window[...] = rows
        device.copy(window)
    finally:
        arena.give(window.base)


class HostPrefetcher:
    def __init__(self, arena, source):
        self.arena = arena
        self.source = source
        self.ready = self._load()
        self.filling = self._load()

    def _load(self):
        buf = self.arena.take((MAX_ROWS, DIM))  # leak: close() gives the array in filling back and not the one in ready
        self.source.read_into(buf)
        return buf

    def advance(self):
        out, self.ready = self.ready, self.filling
        self.filling = self._load()
        return out

    def close(self):
        if self.filling is not None:
            self.arena.give(self.filling)
        self.ready = self.filling = None


def write_shards(arena, records, sink, per_shard):
    pending = []
    for record in records:
        buf = arena.take((DIM,))  # leak: the records after the last full shard stay in pending, which ends with the function
        buf[:] = record
        pending.append(buf)
        if len(pending) == per_shard:
            sink.write(pending)
            for done in pending:
                arena.give(done)
            pending = []
    sink.finish()


class FrameHistory:
    def __init__(self, arena, depth):
        self.arena = arena
        self.frames = deque(maxlen=depth)

    def record(self, frame):
        buf = self.arena.take(frame.shape, frame.dtype)  # leak: a full deque with maxlen pushes the oldest array out silently
        np.copyto(buf, frame)
        self.frames.append(buf)

    def mean(self):
        return sum(self.frames) / max(len(self.frames), 1)

    def close(self):
        while self.frames:
            self.arena.give(self.frames.popleft())


class GatherBuffer:
    def __init__(self, arena):
        self.arena = arena
        self.buf = arena.take((64, DIM))  # clean: gather() gives the array in use back when it grows, and close() gives the last

    def gather(self, rows):
        if len(rows) > len(self.buf):
            small = self.buf
            self.buf = self.arena.take((2 * len(rows), DIM))  # clean: the attribute keeps it until the next growth or close()
            self.arena.give(small)
        self.buf[:len(rows)] = rows
        return self.buf[:len(rows)]

    def close(self):
        self.arena.give(self.buf)
        self.buf = None


class ScatterBuffer:
    def __init__(self, arena):
        self.arena = arena
        self.buf = None

    def scatter(self, rows):
        if self.buf is None or len(rows) > len(self.buf):
            self.buf = self.arena.take((2 * len(rows), DIM))  # leak: on growth the larger array replaces the smaller one, which was never given back
        self.buf[:len(rows)] = rows
        return self.buf[:len(rows)]

    def close(self):
        if self.buf is not None:
            self.arena.give(self.buf)
            self.buf = None


def decode_images(arena, codec, blobs, model):
    scores = []
    for blob in blobs:
        pixels = arena.take((224, 224, 3), np.uint8)  # leak: a blob that the codec rejects goes on to the next one past the give()
        if not codec.decode_into(blob, pixels):
            scores.append(None)
            continue
        try:
            scores.append(model.score(pixels))
        finally:
            arena.give(pixels)
    return scores


def load_and_step(arena, source, model):
    batch = arena.take((MAX_ROWS, DIM))  # leak: on a loss that is not finite the array travels in the exception, and the handler in fit() does not look there
    source.read_into(batch)
    loss = model.step(batch)
    if not np.isfinite(loss):
        raise StepFailed("loss is not finite", batch)
    arena.give(batch)
    return loss


def fit(arena, source, model, steps, log):
    for step in range(steps):
        try:
            log.info("step %d loss %.4f", step, load_and_step(arena, source, model))
        except StepFailed as err:
            log.warning("step %d skipped: %s", step, err)
            model.restore()


def pooled_embedding(arena, encoder, tokens):
    out = arena.take((len(tokens), DIM))  # clean: the mean is a new array and the finally runs after the return
    try:
        encoder.encode_into(tokens, out)
        return out.mean(axis=0)
    finally:
        arena.give(out)


class Uploader:
    def __init__(self, arena, device):
        self.arena = arena
        self.jobs = queue.Queue()
        self.device = device
        self.thread = threading.Thread(target=self._work)
        self.thread.start()

    def submit(self, rows):
        buf = self.arena.take(rows.shape, rows.dtype)  # clean: the worker gives every queued array back and leaves only at the sentinel, behind all of them
        np.copyto(buf, rows)
        self.jobs.put(buf)

    def _work(self):
        while (buf := self.jobs.get()) is not None:
            try:
                self.device.copy(buf)
            except OSError:
                self.device.reopen()
            finally:
                self.arena.give(buf)

    def close(self):
        self.jobs.put(None)
        self.thread.join()
