"""Reader handles onto immutable shards."""
import threading
from contextlib import contextmanager


class ShardHandle:
    def __init__(self, shard, path):
        self.shard = shard
        self.path = path
        self.offset = 0

    def read(self, n):
        self.offset += n
        return b"\0" * n

    def size(self):
        return self.offset


class HandleTable:
    def __init__(self, limit):
        self.limit = limit
        self.open_handles = {}
        self.mu = threading.Lock()

    def open_shard(self, shard, path):
        with self.mu:  # clean: with releases
            if len(self.open_handles) >= self.limit:
                return None
            h = ShardHandle(shard, path)
            self.open_handles[id(h)] = h
            return h

    def close_shard(self, h):
        with self.mu:  # clean: with releases
            self.open_handles.pop(id(h), None)

    @contextmanager
    def reading(self, shard, path):
        h = self.open_shard(shard, path)  # clean: closed when the with block ends
        try:
            yield h
        finally:
            if h is not None:
                self.close_shard(h)
