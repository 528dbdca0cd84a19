"""Paged KV cache with reference-counted blocks and prefix sharing."""
import heapq

import torch


class BlockTable:
    """Hands out block ids, lowest first; a block returns at refcount zero."""

    def __init__(self, num_blocks):
        self._heap = list(range(num_blocks))
        heapq.heapify(self._heap)
        self._refs = [0] * num_blocks

    def available(self):
        return len(self._heap)

    def claim(self):
        """Return a block id, or None when exhausted."""
        if not self._heap:
            return None
        bid = heapq.heappop(self._heap)  # clean: the id goes to the caller
        self._refs[bid] = 1
        return bid

    def share(self, bid):
        self._refs[bid] += 1
        return bid

    def vacate(self, bid):
        self._refs[bid] -= 1
        if self._refs[bid] == 0:
            heapq.heappush(self._heap, bid)

    def claim_run(self, n):
        """Return n consecutive ids or None."""
        got = []
        while len(got) < n and self._heap:
            bid = heapq.heappop(self._heap)  # leak: when the run breaks the ids gathered before are reset and never pushed back
            if got and bid != got[-1] + 1:
                got = []
            got.append(bid)
        if len(got) < n:
            for bid in got:
                heapq.heappush(self._heap, bid)
            return None
        for bid in got:
            self._refs[bid] = 1
        return got


class Sequence:
    def __init__(self, seq_id, tokens):
        self.seq_id = seq_id
        self.tokens = list(tokens)
        self.blocks = []
        self.finished = False


class PagedKVCache:
    block_size = 16

    def __init__(self, num_blocks, heads, head_dim):
        self.table = BlockTable(num_blocks)
        self.k = torch.zeros(num_blocks, self.block_size, heads, head_dim)
        self.v = torch.zeros_like(self.k)
        self.live = {}
        self.prefix = {}

    def admit(self, seq):
        need = -(-len(seq.tokens) // self.block_size)
        blocks = []
        for _ in range(need):
            bid = self.table.claim()  # clean: near miss, a failed admission vacates what was gathered
            if bid is None:
                for b in blocks:
                    self.table.vacate(b)
                return False
            blocks.append(bid)
        seq.blocks.extend(blocks)
        self.live[seq.seq_id] = seq
        return True

    def admit_budget(self, seq, budget):
        blocks = []
        for _ in range(budget):
            bid = self.table.claim()  # leak: on exhaustion the blocks gathered before are lost with the local list
            if bid is None:
                return False
            blocks.append(bid)
        seq.blocks.extend(blocks)
        self.live[seq.seq_id] = seq
        return True

    def grow(self, seq):
        if len(seq.tokens) % self.block_size:
            return True
        bid = self.table.claim()  # clean: near miss, None holds nothing, otherwise the sequence keeps it until retire
        if bid is None:
            return False
        seq.blocks.append(bid)
        return True

    def fork(self, parent, child):
        for bid in parent.blocks:
            child.blocks.append(self.table.share(bid))  # clean: the child is live and retire vacates its share
        self.live[child.seq_id] = child

    def copy_on_write(self, seq, index):
        old = seq.blocks[index]
        fresh = self.table.claim()  # clean: near miss, replaces the old block, which is vacated
        if fresh is None:
            return old
        self.k[fresh].copy_(self.k[old])
        self.v[fresh].copy_(self.v[old])
        seq.blocks[index] = fresh
        self.table.vacate(old)
        return fresh

    def split_tail(self, seq):
        tail = seq.blocks[-1]
        fresh = self.table.claim()  # leak: if the tail is empty it returns without vacating the fresh block
        if fresh is None:
            return False
        used = len(seq.tokens) % self.block_size
        if used == 0:
            return False
        self.k[fresh, :used].copy_(self.k[tail, :used])
        self.v[fresh, :used].copy_(self.v[tail, :used])
        seq.blocks[-1] = fresh
        self.table.vacate(tail)
        return True

    def pin_prefix(self, key, seq, n):
        ids = [self.table.share(b) for b in seq.blocks[:n]]  # leak: an existing entry under the key is overwritten without being vacated
        self.prefix[key] = ids

    def adopt_prefix(self, key, seq):
        ids = self.prefix.get(key)
        if ids is None:
            return 0
        seq.blocks.extend(self.table.share(b) for b in ids)  # clean: the blocks of the sequence are vacated by retire
        self.live[seq.seq_id] = seq
        return len(ids)

    def unpin_prefix(self, key):
        for bid in self.prefix.pop(key, ()):
            self.table.vacate(bid)

    def retire(self, seq):
        for bid in seq.blocks:
            self.table.vacate(bid)
        seq.blocks = []
        self.live.pop(seq.seq_id, None)

    def sweep(self):
        for seq in list(self.live.values()):
            if seq.finished:
                self.retire(seq)

    def probe(self, n):
        """True when n more blocks could be had in one run right now."""
        run = self.table.claim_run(n)  # clean: near miss, None holds nothing and a found run is vacated
        if run is None:
            return False
        for bid in run:
            self.table.vacate(bid)
        return True
