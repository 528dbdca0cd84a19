import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from shardgate.links import ShardDown
from shardgate.results import Recent, ResultSet, merge

log = logging.getLogger(__name__)


class Router:
    def __init__(self, links, shelf, shards, threads=16):
        self.links = links
        self.shelf = shelf
        self.shards = list(shards)
        self.recent = Recent(32)
        self.errors = 0
        self.pool = ThreadPoolExecutor(threads)
        self.feeds = {}
        self._mutex = threading.Lock()

    def ask(self, shard, vector):
        """One shard, one result set. The caller closes it."""
        link = self.links.checkout(shard)  # clean: near miss, destroyed in the handler or restored
        buf = self.shelf.grab()  # leak: the handler for a shard that fails destroys the link and raises again, the buffer is not stowed
        try:
            link.query(vector.astype(np.float32).tobytes())
            n = link.receive_into(memoryview(buf))
        except (OSError, ShardDown):
            self.errors += 1
            self.links.destroy(link)
            raise
        self.links.restore(link)
        return ResultSet(self.shelf, buf, n)

    def search(self, vector, k):
        sets = []
        for shard in self.shards:
            try:
                sets.append(self.ask(shard, vector))  # clean: merge() closes every set in the list
            except (OSError, ShardDown) as exc:
                log.warning("without shard %s: %s", shard, exc)
        return merge(sets, k)

    def search_strict(self, vector, k):
        """All shards or nothing."""
        sets = []
        for shard in self.shards:
            try:
                sets.append(self.ask(shard, vector))  # leak: when a later shard fails the None is returned with the earlier sets open
            except (OSError, ShardDown):
                return None
        return merge(sets, k)

    def search_parallel(self, vector, k):
        futures = [self.pool.submit(self.ask, s, vector) for s in self.shards]
        sets = []
        for f in futures:
            exc = f.exception()
            if exc is None:
                sets.append(f.result())  # clean: near miss, closed by merge(), a future with an exception has no set
        return merge(sets, k)

    def best(self, shard, vector):
        """The best hit of a shard, or None if nothing is near."""
        rs = self.ask(shard, vector)  # leak: an empty set is not closed before the return, it has a buffer all the same
        if not len(rs):
            return None
        hit = rs.hits[0].copy()
        rs.close()
        return hit

    def explain(self, shard, vector):
        with self.ask(shard, vector) as rs:  # clean: with
            return [(int(h["id"]), float(h["score"])) for h in rs.hits]

    def remember(self, qid, shard, vector):
        rs = self.ask(shard, vector)  # clean: near miss, Recent closes it when it is replaced, pushed out or cleared
        self.recent.remember(qid, rs)
        return len(rs)

    def ask_later(self, shard, vector, on_hits, on_error):
        """Send now, receive on a thread; one of the two callbacks is called."""
        link = self.links.checkout(shard)  # leak: a reply that fails goes to on_error() and returns without the link being destroyed
        link.query(vector.astype(np.float32).tobytes())

        def receive():
            buf = self.shelf.grab()  # clean: stowed in the finally, the hits are copied before
            try:
                n = link.receive_into(memoryview(buf))
                hits = np.frombuffer(buf, np.uint8, count=n).tobytes()
            except (OSError, ShardDown) as exc:
                on_error(exc)
                return
            finally:
                self.shelf.stow(buf)
            self.links.restore(link)
            on_hits(hits)

        self.pool.submit(receive)

    def follow(self, shard):
        """Subscribe to the change feed of a shard on a link of its own."""
        with self._mutex:
            if shard in self.feeds:
                return self.feeds[shard]
            link = self.links.fresh(shard, epoch=1)  # clean: near miss, in the table of feeds, unfollow() and close() destroy it
            self.feeds[shard] = link
        link.query(b"FEED")
        return link

    def unfollow(self, shard):
        with self._mutex:
            link = self.feeds.pop(shard, None)
        if link is not None:
            self.links.destroy(link)

    def barrier(self, epoch):
        """Count the shards that have reached an epoch."""
        reached = 0
        for shard in self.shards:
            try:
                link = self.links.fresh(shard, epoch)  # clean: restored whatever its epoch is
            except ShardDown:
                continue
            if link.epoch >= epoch:
                reached += 1
            self.links.restore(link)
        return reached

    def close(self):
        self.pool.shutdown(wait=True)
        for shard in list(self.feeds):
            self.unfollow(shard)
        self.recent.clear()
