"""Block cache with least-recently-used eviction; entries in use are held by handles."""
from collections import OrderedDict


class CacheEntry:
    def __init__(self, key, block):
        self.key = key
        self.block = block
        self.users = 0


class BlockCache:
    def __init__(self, capacity):
        self.capacity = capacity
        self.table = OrderedDict()

    def insert(self, key, block):
        entry = self.table[key] = CacheEntry(key, block)
        entry.users = 1
        self._shrink()
        return entry

    def lookup(self, key):
        entry = self.table.get(key)
        if entry is None:
            return None
        self.table.move_to_end(key)
        entry.users += 1
        return entry

    def done(self, entry):
        entry.users -= 1
        self._shrink()

    def _shrink(self):
        for key in list(self.table):
            if len(self.table) <= self.capacity:
                return
            if self.table[key].users == 0:
                del self.table[key]


class TableIterator:
    def __init__(self, cache, source):
        self.cache = cache
        self.source = source

    def _load(self, no):
        entry = self.cache.lookup(no)  # clean: handed to the caller where found
        if entry is None:
            entry = self.cache.insert(no, self.source.read(no))  # clean: handed to the caller
        return entry

    def get(self, no, key):
        entry = self._load(no)  # clean: done in finally
        try:
            return entry.block.get(key)
        finally:
            self.cache.done(entry)

    def seek(self, no, key):
        entry = self._load(no)  # leak: a key below the block's first returns None with the entry in use
        if key < entry.block.first_key():
            return None
        pos = entry.block.bisect(key)
        self.cache.done(entry)
        return pos

    def is_cached(self, no):
        return self.cache.lookup(no) is not None  # leak: a found entry stays in use after the test
