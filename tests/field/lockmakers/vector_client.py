"""Client for the vector store: sessions, server-side cursors, query buffers."""

import logging
import threading
from contextlib import contextmanager

import torch

logger = logging.getLogger(__name__)

DIM = 768


class StoreError(Exception):
    pass


class Session:
    def __init__(self, endpoint):
        self.endpoint = endpoint
        self.cursors = {}
        self._next = 0
        self.healthy = True

    # cursors live on the server until closed
    def open_cursor(self, collection, vec, k):
        self._next += 1
        self.cursors[self._next] = (collection, vec.tolist(), k, 0)
        return self._next

    def fetch(self, cursor, n):
        collection, vec, k, at = self.cursors[cursor]
        self.cursors[cursor] = (collection, vec, k, at + n)
        return [] if at >= k else list(range(at, min(k, at + n)))

    def close_cursor(self, cursor):
        self.cursors.pop(cursor, None)

    def reset(self):
        self.healthy = True


class SessionPool:
    def __init__(self, endpoint, size):
        self._spare = [Session(endpoint) for _ in range(size)]
        self._cv = threading.Condition()

    def rent(self, timeout=None):
        with self._cv:
            if not self._cv.wait_for(lambda: self._spare, timeout):
                raise StoreError("no session within %s s" % timeout)
            return self._spare.pop()  # clean: returned to the caller

    def give(self, session):
        with self._cv:
            self._spare.append(session)
            self._cv.notify()

    @contextmanager
    def session(self, timeout=None):
        s = self.rent(timeout)  # leak: the generator has no try, so an exception in the with body skips give
        yield s
        self.give(s)

    @contextmanager
    def guarded(self, timeout=None):
        s = self.rent(timeout)  # clean: given back in finally
        try:
            yield s
        finally:
            self.give(s)


class QueryBuffers:
    """Float matrices cached by row count."""

    def __init__(self, device="cpu"):
        self.device = device
        self._by_rows = {}

    def matrix(self, rows):
        stack = self._by_rows.get(rows)
        if stack:
            return stack.pop()  # clean: returned to the caller
        return torch.empty(rows, DIM, device=self.device)

    def put(self, m):
        self._by_rows.setdefault(m.shape[0], []).append(m)

    def trim(self, keep):
        for rows, stack in self._by_rows.items():
            del stack[keep:]


class VectorClient:
    def __init__(self, pool, buffers):
        self.pool = pool
        self.buffers = buffers
        self.pinned = None
        self.scrolls = {}

    def search(self, collection, vec, k):
        s = self.pool.rent(1.0)  # clean: given back in the outer finally
        try:
            cur = s.open_cursor(collection, vec, k)  # clean: closed in the inner finally
            try:
                return s.fetch(cur, k)
            finally:
                s.close_cursor(cur)
        finally:
            self.pool.give(s)

    def search_first(self, collection, vec):
        with self.pool.guarded(1.0) as s:  # clean: context manager
            cur = s.open_cursor(collection, vec, 1)  # leak: an empty answer returns None without close_cursor
            hits = s.fetch(cur, 1)
            if not hits:
                return None
            s.close_cursor(cur)
            return hits[0]

    def iter_hits(self, collection, vec, k, page=64):
        s = self.pool.rent()  # leak: a consumer that stops early closes the generator before give
        cur = s.open_cursor(collection, vec, k)  # leak: a consumer that stops early closes the generator before close_cursor
        hits = s.fetch(cur, page)
        while hits:
            yield from hits
            hits = s.fetch(cur, page)
        s.close_cursor(cur)
        self.pool.give(s)

    # scrolls: a session and cursor kept between calls

    def begin_scroll(self, token, collection, vec, k):
        s = self.pool.rent()  # clean: near miss, moved into self.scrolls, which end_scroll empties
        cur = s.open_cursor(collection, vec, k)  # clean: kept with its session in self.scrolls
        self.end_scroll(token)
        self.scrolls[token] = (s, cur)

    def next_page(self, token, n):
        s, cur = self.scrolls[token]
        hits = s.fetch(cur, n)
        if not hits:
            self.end_scroll(token)
        return hits

    def end_scroll(self, token):
        entry = self.scrolls.pop(token, None)
        if entry is not None:
            s, cur = entry
            s.close_cursor(cur)
            self.pool.give(s)

    # a pinned session for transactions

    def pin(self):
        if self.pinned is None:
            self.pinned = self.pool.rent()  # clean: near miss, taken only when none is pinned and unpin gives it back
        return self.pinned

    def unpin(self):
        if self.pinned is not None:
            self.pool.give(self.pinned)
            self.pinned = None

    # buffers

    def normalise(self, vecs):
        m = self.buffers.matrix(len(vecs))  # clean: the copy is returned and the matrix put back first
        torch.stack(vecs, out=m)
        m.div_(m.norm(dim=1, keepdim=True).clamp_min(1e-12))
        out = m.clone()
        self.buffers.put(m)
        return out

    def _stacked(self, vecs):
        m = self.buffers.matrix(len(vecs))  # clean: returned to the caller, who owns it
        torch.stack(vecs, out=m)
        return m

    def centroid(self, vecs):
        return self._stacked(vecs).mean(dim=0)  # leak: the stacked matrix is dropped once its mean is taken

    def upsert(self, collection, vecs, retries=3):
        m = self._stacked(vecs)  # leak: when the retries run out StoreError is raised before put
        for attempt in range(retries):
            try:
                with self.pool.guarded(0.5) as s:  # clean: context manager
                    s.reset()
                    rows = m.tolist()
                break
            except StoreError:
                logger.info("upsert to %s, attempt %d", collection, attempt)
        else:
            raise StoreError("upsert to %s failed" % collection)
        self.buffers.put(m)
        return len(rows)
