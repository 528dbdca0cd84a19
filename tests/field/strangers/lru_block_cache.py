"""LRU caches over device blocks: evicted entries must give their block back."""
from collections import OrderedDict, deque


class BlockStore:
    def __init__(self, n):
        self.vacant = deque(range(n))

    def get_block(self):
        if not self.vacant:
            return None
        return self.vacant.popleft()

    def put_block(self, block):
        self.vacant.append(block)


class LRUCache:
    def __init__(self, store, limit):
        self.store = store
        self.limit = limit
        self.entries = OrderedDict()

    def insert(self, key):
        if key in self.entries:
            self.entries.move_to_end(key)
            return self.entries[key]
        while len(self.entries) >= self.limit:
            self._evict_one()
        block = self.store.get_block()  # clean: near miss, the evicting helper and clear put it back
        if block is None:
            return None
        self.entries[key] = block
        return block

    def _evict_one(self):
        _, block = self.entries.popitem(last=False)
        self.store.put_block(block)

    def clear(self):
        while self.entries:
            self._evict_one()


class CarelessCache:
    def __init__(self, store, limit):
        self.store = store
        self.limit = limit
        self.entries = OrderedDict()

    def insert(self, key):
        if key in self.entries:
            return self.entries[key]
        block = self.store.get_block()  # leak: popitem drops the evicted block
        if block is None:
            return None
        self.entries[key] = block
        if len(self.entries) > self.limit:
            self.entries.popitem(last=False)
        return block

    def clear(self):
        for block in self.entries.values():
            self.store.put_block(block)
        self.entries.clear()


class RecentBlocks:
    def __init__(self, store, limit):
        self.store = store
        self.recent = deque(maxlen=limit)
        self.window = deque()
        self.limit = limit

    def remember(self):
        block = self.store.get_block()  # leak: the bounded deque pushes old blocks out silently
        if block is not None:
            self.recent.append(block)
        return len(self.recent)

    def slide(self):
        block = self.store.get_block()  # clean: near miss, the deque is trimmed by hand
        if block is None:
            return len(self.window)
        self.window.append(block)
        if len(self.window) > self.limit:
            self.store.put_block(self.window.popleft())
        return len(self.window)

    def close(self):
        for queue in (self.recent, self.window):
            while queue:
                self.store.put_block(queue.pop())
