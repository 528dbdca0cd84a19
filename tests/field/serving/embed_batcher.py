# Embedding endpoint: collects texts into batches, one thread produces, one consumes.
import logging
import queue
import threading

import torch

log = logging.getLogger(__name__)

HIDDEN = 128
_POOL = None


class PinPool:
    def __init__(self, n, rows):
        self.rows = rows
        self.free = queue.Queue()
        for _ in range(n):
            self.free.put(torch.zeros(rows, HIDDEN))

    def borrow(self, block=True):
        return self.free.get(block=block)

    def give_back(self, t):
        self.free.put(t)


def init_pool(n=8, rows=32):
    global _POOL
    if _POOL is None:
        _POOL = PinPool(n, rows)
    return _POOL


def borrow_batch():
    return _POOL.borrow()  # clean: handed to the caller


def try_borrow_batch():
    try:
        return _POOL.borrow(block=False)  # clean: handed to the caller
    except queue.Empty:
        return None


def return_batch(t):
    _POOL.give_back(t)


class Batcher:
    def __init__(self, model, maxsize=4):
        self.model = model
        self.q = queue.Queue(maxsize)
        self.results = {}
        self.stop = threading.Event()
        self.open_batch = None
        self.fill = 0

    # producer -----------------------------------------------------------
    def add(self, vec):
        if self.open_batch is None:
            self.open_batch = borrow_batch()  # clean: sealed into the queue or returned by discard
            self.fill = 0
        self.open_batch[self.fill].copy_(vec)
        self.fill += 1
        if self.fill == self.open_batch.shape[0]:
            self.seal()

    def seal(self):
        if self.open_batch is None:
            return
        b, self.open_batch = self.open_batch, None
        self.q.put((b, self.fill))

    def discard(self):
        if self.open_batch is not None:
            return_batch(self.open_batch)
            self.open_batch = None

    def add_rows(self, rows):
        batch = borrow_batch()  # leak: too many rows are refused with the batch in hand
        if len(rows) > batch.shape[0]:
            log.error("%d rows do not fit", len(rows))
            return False
        for i, r in enumerate(rows):
            batch[i].copy_(r)
        self.q.put((batch, len(rows)))
        return True

    def add_rows_split(self, rows):
        while rows:
            batch = borrow_batch()  # clean: near miss, each one borrowed in the loop goes into the queue
            head, rows = rows[: batch.shape[0]], rows[batch.shape[0] :]
            for i, r in enumerate(head):
                batch[i].copy_(r)
            self.q.put((batch, len(head)))

    def offer(self, rows):
        batch = try_borrow_batch()  # leak: a full queue is swallowed by the handler
        if batch is None:
            return False
        for i, r in enumerate(rows[: batch.shape[0]]):
            batch[i].copy_(r)
        try:
            self.q.put_nowait((batch, len(rows)))
        except queue.Full:
            return False
        return True

    def offer2(self, rows):
        batch = try_borrow_batch()  # clean: near miss, sent stays false when the queue is full and the finally returns it
        if batch is None:
            return False
        sent = False
        try:
            for i, r in enumerate(rows[: batch.shape[0]]):
                batch[i].copy_(r)
            self.q.put_nowait((batch, len(rows)))
            sent = True
        except queue.Full:
            pass
        finally:
            if not sent:
                return_batch(batch)
        return sent

    # consumer -----------------------------------------------------------
    def consume(self):
        while not (self.stop.is_set() and self.q.empty()):
            try:
                batch, n = self.q.get(timeout=0.1)
            except queue.Empty:
                continue
            out = self.model(batch[:n])
            self.results[len(self.results)] = out.clone()
            return_batch(batch)

    # one-off ------------------------------------------------------------
    def embed(self, vec):
        b = borrow_batch()  # clean: returned after the model has run
        b[0].copy_(vec)
        out = self.model(b[:1])
        return_batch(b)
        return out[0]

    def embed_normed(self, vec):
        b = borrow_batch()  # leak: divided out of place, so another tensor is returned to the pool
        b[0].copy_(vec)
        b = b / b[0].norm().clamp_min(1e-6)
        out = self.model(b[:1])
        return_batch(b)
        return out[0]

    def embed_head(self, vec):
        b = borrow_batch()  # leak: narrowed to its first row, the whole batch never comes back
        b = b[:1]
        b.copy_(vec)
        return self.model(b)[0]

    def similarity(self, a, b):
        x, y = borrow_batch(), None  # clean: near miss, returned by the loop over both
        try:
            y = borrow_batch()  # clean: near miss, returned by the loop over both
            x[0].copy_(a)
            y[0].copy_(b)
            return float((self.model(x[:1]) * self.model(y[:1])).sum())
        finally:
            for t in (x, y):
                if t is not None:
                    return_batch(t)

    def nearest(self, vec, corpus):
        best, best_i = None, -1
        buf = borrow_batch()  # leak: a perfect match inside the loop returns
        for i, c in enumerate(corpus):
            buf[0].copy_(c)
            s = float(buf[0] @ vec)
            if s >= 1.0:
                return i
            if best is None or s > best:
                best, best_i = s, i
        return_batch(buf)
        return best_i
