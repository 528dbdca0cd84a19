"""Prefix cache of an inference server: entries pinned by reference count."""
from collections import OrderedDict


class PrefixCache:
    def __init__(self, limit):
        self.limit = limit
        self._entries = OrderedDict()
        self._refs = {}

    def insert(self, key, blocks):
        self._entries[key] = blocks
        self._refs.setdefault(key, 0)
        self._shrink()

    def pin(self, key):
        blocks = self._entries.get(key)
        if blocks is None:
            return None
        self._entries.move_to_end(key)
        self._refs[key] += 1
        return blocks

    def unpin(self, key):
        self._refs[key] -= 1

    def _shrink(self):
        for key in list(self._entries):
            if len(self._entries) <= self.limit:
                return
            if self._refs[key] == 0:
                del self._entries[key], self._refs[key]


class Prefill:
    def __init__(self, cache, runner):
        self.cache = cache
        self.runner = runner

    def run(self, key, tokens):
        blocks = self.cache.pin(key)  # clean: unpinned in finally
        if blocks is None:
            return self.runner.full(tokens)
        try:
            return self.runner.resume(blocks, tokens)
        finally:
            self.cache.unpin(key)

    def reuse_length(self, key, tokens):
        blocks = self.cache.pin(key)  # leak: stays pinned when there are fewer tokens
        if blocks is None:
            return 0
        if len(tokens) < len(blocks) * 16:
            return len(tokens)
        self.cache.unpin(key)
        return len(blocks) * 16

    def copy_out(self, key, target):
        if self.cache.pin(key) is not None:  # clean: unpinned after the copy
            target.write(self.runner.export(key))
            self.cache.unpin(key)


def hit_rate(cache, keys):
    hits = 0
    for key in keys:
        if cache.pin(key) is not None:  # leak: pinned by the count and never unpinned
            hits += 1
    return hits / max(len(keys), 1)
