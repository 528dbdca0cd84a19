"""Key/value blocks for a growing sequence, lent as a list."""
from collections import deque


class BlockStore:
    def __init__(self, n, block_size):
        self.block_size = block_size
        self._free = deque(range(n))
        self._refs = [0] * n

    def blocks_for(self, tokens):
        need = -(-tokens // self.block_size)
        if need > len(self._free):
            return []
        blocks = [self._free.popleft() for _ in range(need)]
        for b in blocks:
            self._refs[b] = 1
        return blocks

    def fork(self, blocks):
        for b in blocks:
            self._refs[b] += 1
        return list(blocks)

    def drop_blocks(self, blocks):
        for b in reversed(blocks):
            self._refs[b] -= 1
            if self._refs[b] == 0:
                self._free.appendleft(b)


class Beam:
    def __init__(self, store, model):
        self.store = store
        self.model = model
        self.branches = {}

    def open(self, bid, tokens):
        self.branches[bid] = self.store.blocks_for(len(tokens))  # clean: stored, dropped by prune

    def split(self, bid, new_bid):
        self.branches[new_bid] = self.store.fork(self.branches[bid])  # clean: stored, see prune

    def prune(self, bid):
        self.store.drop_blocks(self.branches.pop(bid))

    def try_branch(self, bid, token):
        copy = self.store.fork(self.branches[bid])  # leak: a bad score keeps the references
        score = self.model.score(copy, token)
        if score < -10.0:
            return None
        self.store.drop_blocks(copy)
        return score


def perplexity(store, model, texts):
    total = 0.0
    for text in texts:
        blocks = store.blocks_for(len(text))  # leak: too short texts leave by continue
        if not blocks:
            break
        if len(text) < 2:
            continue
        total += model.loss(text, blocks)
        store.drop_blocks(blocks)
    return total
