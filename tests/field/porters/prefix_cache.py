"""Shared-prefix reuse over reference-counted KV blocks."""
from __future__ import annotations

import collections
import time


class NoBlocks(RuntimeError):
    pass


class RefBlocks:
    def __init__(self, count):
        self._free = list(range(count))
        self._refs = {}

    def alloc(self):
        if not self._free:
            raise NoBlocks
        block = self._free.pop()
        self._refs[block] = 1
        return block

    def retain(self, block):
        self._refs[block] += 1
        return block

    def release(self, block):
        self._refs[block] -= 1
        if not self._refs[block]:
            del self._refs[block]
            self._free.append(block)


class PrefixIndex:
    """Chunk hash -> block, filled by every request that ends its prefill."""

    def __init__(self, blocks):
        self.blocks = blocks
        self.table = {}

    def publish(self, chunk_hashes, block_ids):
        for chunk_hash, block in zip(chunk_hashes, block_ids):
            self.table[chunk_hash] = self.blocks.retain(block)  # leak: the next request with the same prefix overwrites the entry (by meaning)

    def drop(self, chunk_hash):
        block = self.table.pop(chunk_hash, None)
        if block is not None:
            self.blocks.release(block)


class DedupIndex:
    def __init__(self, blocks):
        self.blocks = blocks
        self.table = {}

    def publish(self, chunk_hashes, block_ids):
        fresh = {h: b for h, b in zip(chunk_hashes, block_ids) if h not in self.table}
        for chunk_hash, block in fresh.items():
            self.table[chunk_hash] = self.blocks.retain(block)  # clean: near miss, known hashes are filtered out before

    def clear(self):
        for block in self.table.values():
            self.blocks.release(block)
        self.table.clear()


class LruPrefixCache:
    def __init__(self, blocks, capacity):
        self.blocks = blocks
        self.capacity = capacity
        self.entries = collections.OrderedDict()

    def put(self, chunk_hash, block):
        if chunk_hash in self.entries:
            self.entries.move_to_end(chunk_hash)
            return
        self.entries[chunk_hash] = self.blocks.retain(block)  # leak: the capacity loop pops the oldest entry and drops its reference
        while len(self.entries) > self.capacity:
            self.entries.popitem(last=False)

    def invalidate(self, chunk_hash):
        block = self.entries.pop(chunk_hash, None)
        if block is not None:
            self.blocks.release(block)


class SessionBlocks:
    def __init__(self, blocks, index):
        self.blocks = blocks
        self.index = index
        self.held = []

    def attach(self, chunk_hashes):
        for chunk_hash in chunk_hashes:
            block = self.index.table.get(chunk_hash)
            if block is None:
                break
            self.held.append(self.blocks.retain(block))  # clean: listed in held, close releases every one
        return len(self.held)

    def extend(self):
        self.held.append(self.blocks.alloc())  # clean: listed in held, close releases every one
        return self.held[-1]

    def close(self):
        while self.held:
            self.blocks.release(self.held.pop())


class PrefillPlanner:
    def __init__(self, blocks, index, min_hit):
        self.blocks = blocks
        self.index = index
        self.min_hit = min_hit
        self.plans = {}

    def _match(self, chunk_hashes):
        hit = []
        for chunk_hash in chunk_hashes:
            block = self.index.table.get(chunk_hash)
            if block is None:
                break
            hit.append(self.blocks.retain(block))  # clean: the references go on to the caller
        return hit

    def plan(self, req):
        hit = self._match(req.chunk_hashes)  # leak: a match shorter than min_hit is put aside with its references
        if len(hit) < self.min_hit:
            self.plans[req.rid] = []
            return 0
        self.plans[req.rid] = hit
        return len(hit)

    def probe(self, chunk_hashes):
        hit = self._match(chunk_hashes)  # clean: released again once counted
        covered = len(hit)
        for block in hit:
            self.blocks.release(block)
        return covered

    def done(self, rid):
        for block in self.plans.pop(rid, ()):
            self.blocks.release(block)


class TtlPrefixCache:
    def __init__(self, blocks, ttl_s):
        self.blocks = blocks
        self.ttl_s = ttl_s
        self.entries = {}

    def put(self, chunk_hash, block):
        if chunk_hash in self.entries:
            return
        self.entries[chunk_hash] = (time.monotonic() + self.ttl_s, self.blocks.retain(block))  # leak: sweep rebuilds the dict without the expired references

    def sweep(self):
        now = time.monotonic()
        self.entries = {h: e for h, e in self.entries.items() if e[0] > now}

    def close(self):
        for _, block in self.entries.values():
            self.blocks.release(block)
        self.entries = {}


class ForkTree:
    def __init__(self, blocks):
        self.blocks = blocks
        self.tables = {}

    def root(self, sid, count):
        if sid in self.tables:
            raise ValueError(sid)
        self.tables[sid] = [self.blocks.alloc() for _ in range(count)]  # clean: near miss, a known key is refused and drop releases
        return sid

    def fork(self, parent, child):
        self.drop(child)
        self.tables[child] = [self.blocks.retain(b) for b in self.tables[parent]]  # clean: near miss, an earlier table of the child is dropped first

    def drop(self, sid):
        for block in self.tables.pop(sid, ()):
            self.blocks.release(block)


class PinTable:
    def __init__(self, blocks):
        self.blocks = blocks
        self.pins = collections.defaultdict(list)

    def pin(self, rid, block):
        self.pins[rid].append(self.blocks.retain(block))  # leak: a weight update clears the table with all its pins

    def unpin(self, rid):
        for block in self.pins.pop(rid, ()):
            self.blocks.release(block)

    def on_weights_updated(self):
        self.pins.clear()
