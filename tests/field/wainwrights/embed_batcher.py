"""Dynamic batching for an embedding model behind a thread pool of callers.

Callers submit texts and get a Pending.  A collector thread packs texts into a HostBatch (one of a few preallocated
pinned batches), the model thread runs it and resolves the Pendings.  A per-tenant quota bounds how many texts
of a tenant are in the building.
"""
import logging
import queue
import threading
import time
from collections import Counter, OrderedDict

import numpy as np

log = logging.getLogger("embed")


class QuotaExceeded(Exception):
    def __init__(self, tenant):
        super().__init__("tenant %s has too many texts in flight" % tenant)
        self.tenant = tenant


class TooLong(Exception):
    pass


class Permit(object):
    """n texts of a tenant's quota.  May be split, for texts that finish at different times."""

    def __init__(self, quota, tenant, n):
        self._quota, self.tenant, self.n = quota, tenant, n

    def split(self, k):
        if k >= self.n:
            raise ValueError("cannot split %d off %d" % (k, self.n))
        self.n -= k
        return Permit(self._quota, self.tenant, k)  # clean: returned, taken off what this one holds

    def done(self):
        n, self.n = self.n, 0
        if n:
            self._quota._give(self.tenant, n)


class Quota(object):
    def __init__(self, default, special=None):
        self.default = default
        self.special = special or {}
        self._used = Counter()
        self._lock = threading.Lock()

    def take(self, tenant, n=1):
        with self._lock:
            if self._used[tenant] + n > self.special.get(tenant, self.default):
                raise QuotaExceeded(tenant)
            self._used[tenant] += n
        return Permit(self, tenant, n)  # clean: returned

    def _give(self, tenant, n):
        with self._lock:
            self._used[tenant] -= n
            if self._used[tenant] <= 0:
                del self._used[tenant]


class HostBatch(object):
    def __init__(self, rows, width):
        self.ids = np.zeros((rows, width), np.int32)
        self.n = 0
        self.items = []

    def add(self, tokens, item):
        self.ids[self.n, :len(tokens)] = tokens
        self.ids[self.n, len(tokens):] = 0
        self.items.append(item)
        self.n += 1

    def reset(self):
        self.n = 0
        self.items = []


class BatchPool(object):
    def __init__(self, count, rows, width):
        self._q = queue.Queue()
        for _ in range(count):
            self._q.put(HostBatch(rows, width))

    def borrow(self, timeout=None):
        try:
            batch = self._q.get(timeout=timeout)  # clean: returned
        except queue.Empty:
            return None
        batch.reset()
        return batch

    def restore(self, batch):
        self._q.put(batch)


class Pending(object):
    def __init__(self, tokens, permit, on_done=None):
        self.tokens = tokens
        self.permit = permit
        self.on_done = on_done
        self._event = threading.Event()
        self._value, self.cancelled = None, False

    def resolve(self, value):
        self._value = value
        self.permit.done()
        self._event.set()
        if self.on_done is not None:
            self.on_done(self)

    def fail(self, error):
        self._value = error
        self._event.set()
        if self.on_done is not None:
            self.on_done(self)

    def result(self, timeout=None):
        if not self._event.wait(timeout):
            self.cancelled = True
            raise TimeoutError()
        if isinstance(self._value, Exception):
            raise self._value
        return self._value


class Embedder(object):
    def __init__(self, model, tokenizer, quota, pool, rows=32, width=512, linger=0.004):
        self.model, self.tokenizer = model, tokenizer
        self.quota, self.pool = quota, pool
        self.rows, self.width, self.linger = rows, width, linger
        self._in = queue.Queue()
        self._ready = queue.Queue(maxsize=2)
        self._cache = OrderedDict()
        self._threads = [threading.Thread(target=f, daemon=True) for f in (self._collect, self._execute)]
        for t in self._threads:
            t.start()

    def submit(self, tenant, text):
        permit = self.quota.take(tenant)  # leak: the failure of a batch ends in Pending.fail(), which keeps the permit
        pending = Pending(self.tokenizer(text)[:self.width], permit)
        self._in.put(pending)
        return pending

    def _encode(self, text):
        tokens = self.tokenizer(text)
        if len(tokens) > self.width:
            raise TooLong("%d tokens, at most %d" % (len(tokens), self.width))
        return tokens

    def submit_strict(self, tenant, text):
        permit = self.quota.take(tenant)  # leak: TooLong of _encode() leaves with the permit taken
        pending = Pending(self._encode(text), permit, on_done=lambda p: p.permit.done())
        self._in.put(pending)
        return pending

    def submit_quietly(self, tenant, text):
        try:
            permit = self.quota.take(tenant)  # clean: near miss, on_done is called by resolve() and by fail()
        except QuotaExceeded:
            return None
        pending = Pending(self.tokenizer(text)[:self.width], permit, on_done=lambda p: p.permit.done())
        self._in.put(pending)
        return pending

    def embed_document(self, tenant, chunks):
        whole = self.quota.take(tenant, len(chunks) + 1)  # clean: its parts go to the pendings and the rest is done in finally
        try:
            waits = []
            for chunk in chunks:
                part = whole.split(1)  # clean: near miss, on_done gives it back on success and failure
                p = Pending(self.tokenizer(chunk)[:self.width], part, on_done=lambda p: p.permit.done())
                self._in.put(p)
                waits.append(p)
            return np.mean([w.result() for w in waits], axis=0)
        finally:
            whole.done()

    def embed_cached(self, tenant, text):
        permit = self.quota.take(tenant)  # leak: a hit in the cache returns before the permit is done
        hit = self._cache.get(text)
        if hit is not None:
            self._cache.move_to_end(text)
            return hit
        pending = Pending(self.tokenizer(text)[:self.width], permit, on_done=lambda p: p.permit.done())
        self._in.put(pending)
        value = self._cache[text] = pending.result()
        while len(self._cache) > 10000:
            self._cache.popitem(last=False)
        return value

    def _collect(self):
        batch = None
        first_at = 0.0
        while True:
            try:
                pending = self._in.get(timeout=self.linger)
            except queue.Empty:
                pending = False
            if pending is None:
                if batch is not None:
                    self._ready.put(batch)
                self._ready.put(None)
                return
            if pending is not False:
                if pending.cancelled:
                    pending.fail(TimeoutError())
                    continue
                if batch is None:
                    batch = self.pool.borrow()  # clean: near miss, goes to _execute when full, when old and at the end
                    first_at = time.time()
                batch.add(pending.tokens, pending)
            if batch is not None and (batch.n == self.rows or time.time() - first_at > self.linger):
                self._ready.put(batch)
                batch = None

    def _execute(self):
        while True:
            batch = self._ready.get()
            if batch is None:
                return
            items = batch.items
            try:
                vectors = self.model(batch.ids[:batch.n])
            except (RuntimeError, ValueError) as exc:
                log.exception("batch of %d failed", batch.n)
                for item in items:
                    item.fail(exc)
                continue
            finally:
                self.pool.restore(batch)
            for item, vec in zip(items, vectors):
                item.resolve(vec)

    def warm_up(self, lengths):
        times = {}
        for n in lengths:
            batch = self.pool.borrow(timeout=5.0)  # leak: a kernel that fails is noted and the loop goes on without restoring
            if batch is None:
                break
            batch.add(np.ones(n, np.int32), None)
            t = time.perf_counter()
            try:
                self.model(batch.ids[:1, :n])
            except RuntimeError as exc:
                log.warning("length %d: %s", n, exc)
                continue
            times[n] = time.perf_counter() - t
            self.pool.restore(batch)
        return times

    def close(self):
        self._in.put(None)
        for t in self._threads:
            t.join()
