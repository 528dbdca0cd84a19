"""Queries. Snapshots keep segments alive, pins keep pages in memory."""
import logging

from .cursor import Cursor
from .frames import NoFrames, ReadError

log = logging.getLogger(__name__)


class Searcher:
    def __init__(self, store, cache, scorer, enough=20):
        self.store = store
        self.cache = cache
        self.scorer = scorer
        self.enough = enough
        self._cursors = {}

    def search(self, query, k):
        snap = self.store.snapshot()  # leak: a query without terms returns before a cursor owns it
        if self.scorer.norm(query) == 0.0:
            log.debug("empty query")
            return []
        cursor = Cursor(snap, self.cache)
        hits = []
        try:
            for key, data in cursor:
                cursor.peek()
                hits.extend(self.scorer.score(query, key, data))
                if len(hits) >= self.enough * k:
                    break
        except ReadError as exc:
            log.error("partial result: %s", exc)
        finally:
            cursor.close()
        return sorted(hits, reverse=True)[:k]

    def count(self):
        with self.store.snapshot() as snap:  # clean: released with the block
            return len(snap.page_keys())

    def rescore(self, query, keys):
        """Pins all pages first so that none is read twice."""
        frames = []
        try:
            for key in keys:
                frames.append(self.cache.pin(key))  # clean: near miss, NoFrames midway still unpins those in the list
            return [self.scorer.score(query, f.key, f.data) for f in frames]
        except NoFrames:
            return None
        finally:
            for f in frames:
                self.cache.unpin(f)

    def best_of(self, query, keys, bound):
        """First page that scores at least bound."""
        for key in keys:
            try:
                frame = self.cache.pin(key)  # leak: the break for a good page skips the unpin
            except (ReadError, NoFrames):
                continue
            top = max(self.scorer.score(query, key, frame.data), default=0.0)
            if top >= bound:
                break
            self.cache.unpin(frame)
        else:
            return None
        return key

    # paging: the cursor stays open between two calls of a client

    def open_page(self, client, i=0):
        if client in self._cursors:
            self._cursors[client].close()
        snap = self.store.snapshot()  # clean: near miss, the cursor in the table owns it, done() or the next open closes that
        self._cursors[client] = Cursor(snap, self.cache)
        return i < len(self._cursors[client].keys)

    def page(self, client, i):
        cursor = self._cursors[client]
        try:
            cursor.seek(i)
        except (ReadError, NoFrames):
            return None
        return self.scorer.summary(cursor.frame.key, cursor.frame.data)

    def done(self, client):
        cursor = self._cursors.pop(client, None)
        if cursor is not None:
            cursor.close()

    def diff(self, query, before):
        """What a query finds now and did not find in an older snapshot."""
        now = self.store.snapshot()  # clean: released here; the older one stays with its owner
        try:
            old = set(before.page_keys())
            fresh = [key for key in now.page_keys() if key not in old]
            return self.rescore(query, fresh) or []
        finally:
            now.release()
