"""Speculative decoding: draft blocks, trees and their verification."""
from __future__ import annotations

import collections
import enum


class DraftBlocks:
    def __init__(self, count):
        self._free = list(range(count))

    def alloc(self):
        return self._free.pop() if self._free else None

    def alloc_many(self, n):
        if len(self._free) < n:
            return None
        taken, self._free = self._free[:n], self._free[n:]
        return taken

    def free(self, block):
        self._free.append(block)

    def free_many(self, blocks):
        self._free.extend(blocks)


class Outcome(enum.Enum):
    ACCEPT = 1
    REJECT = 2
    PARTIAL = 3


class LinearProposer:
    def __init__(self, blocks, depth):
        self.blocks = blocks
        self.depth = depth
        self.proposals = {}
        self.tables = collections.defaultdict(list)

    def propose(self, rid):
        if rid in self.proposals:
            return True
        drafted = self.blocks.alloc_many(self.depth)  # clean: near miss, the accepted part moves to the table and the rest is freed
        if drafted is None:
            return False
        self.proposals[rid] = drafted
        return True

    def verify(self, rid, accepted):
        drafted = self.proposals.pop(rid)
        self.tables[rid] += drafted[:accepted]
        self.blocks.free_many(drafted[accepted:])

    def finish(self, rid):
        self.blocks.free_many(self.proposals.pop(rid, []))
        self.blocks.free_many(self.tables.pop(rid, []))


class Node:
    def __init__(self, token, block):
        self.token = token
        self.block = block
        self.children = []


class TreeDrafter:
    def __init__(self, blocks, branching):
        self.blocks = blocks
        self.branching = branching
        self.roots = {}

    def start(self, rid, token):
        block = self.blocks.alloc()  # leak: verify cuts the tree down to the accepted node, the root above it is lost
        if block is None:
            return False
        self.finish(rid)
        self.roots[rid] = Node(token, block)
        return True

    def expand(self, rid, tokens):
        parent = self.roots[rid]
        for token in tokens[:self.branching]:
            block = self.blocks.alloc()  # leak: verify keeps the accepted child, its siblings are lost
            if block is None:
                break
            parent.children.append(Node(token, block))

    def verify(self, rid, token):
        for child in self.roots[rid].children:
            if child.token == token:
                self.roots[rid] = child
                return True
        return False

    def finish(self, rid):
        root = self.roots.pop(rid, None)
        todo = [root] if root else []
        while todo:
            node = todo.pop()
            todo.extend(node.children)
            self.blocks.free(node.block)


class OutcomeTracker:
    def __init__(self, blocks):
        self.blocks = blocks
        self.open = {}

    def draft(self, rid, n):
        drafted = self.blocks.alloc_many(n)  # leak: a partial outcome is popped, its rejected part is neither kept nor freed
        if drafted is None:
            return None
        self.open[rid] = drafted
        return drafted

    def settle(self, req, outcome, accepted):
        drafted = self.open.pop(req.rid)
        if outcome is Outcome.ACCEPT:
            req.blocks.extend(drafted)
        elif outcome is Outcome.REJECT:
            self.blocks.free_many(drafted)
        elif outcome is Outcome.PARTIAL:
            req.blocks.extend(drafted[:accepted])

    def finish(self, req):
        self.blocks.free_many(req.blocks)
        req.blocks = []


class NgramLookahead:
    def __init__(self, blocks, n):
        self.blocks = blocks
        self.n = n
        self.by_gram = {}

    def observe(self, tokens):
        gram = tuple(tokens[-self.n:])
        block = self.blocks.alloc()  # leak: an n-gram that occurs again overwrites its block (by meaning)
        if block is None:
            return
        self.by_gram[gram] = block

    def flush(self):
        self.blocks.free_many(self.by_gram.values())
        self.by_gram.clear()


class BonusToken:
    def __init__(self, blocks):
        self.blocks = blocks

    def step(self, req, scores, threshold):
        bonus = self.blocks.alloc()  # clean: near miss, goes to the request or back on each branch
        if bonus is None:
            return False
        if scores[-1] < threshold:
            self.blocks.free(bonus)
            return False
        req.blocks.append(bonus)
        return True

    def finish(self, req):
        self.blocks.free_many(req.blocks)
        req.blocks = []


class DraftWorker:
    def __init__(self, blocks):
        self.blocks = blocks
        self.state = {}

    def begin(self, rid):
        if self.state.get(rid) is None:
            self.state[rid] = self.blocks.alloc()  # clean: near miss, filled only when empty, preempt and finish free it
        return self.state[rid] is not None

    def preempt(self, rid):
        block = self.state.get(rid)
        if block is not None:
            self.blocks.free(block)
            self.state[rid] = None

    def finish(self, rid):
        self.preempt(rid)
        self.state.pop(rid, None)


class AdaptiveDrafting:
    """Turns drafting off while the acceptance rate is poor."""

    def __init__(self, blocks, floor):
        self.blocks = blocks
        self.floor = floor
        self.enabled = True
        self.outstanding = {}

    def draft(self, rid, n):
        if not self.enabled or rid in self.outstanding:
            return []
        drafted = self.blocks.alloc_many(n)  # leak: once drafting is off, results return early and what is outstanding stays
        if drafted is None:
            return []
        self.outstanding[rid] = drafted
        return drafted

    def on_result(self, rid, rate):
        if not self.enabled:
            return
        self.blocks.free_many(self.outstanding.pop(rid, []))
        if rate < self.floor:
            self.enabled = False


class HeadBuffers:
    def __init__(self, blocks, heads):
        self.blocks = blocks
        self.per_head = {}
        for head in range(heads):
            self.per_head[head] = blocks.alloc()  # clean: near miss, every head has a key of its own and close frees them

    def close(self):
        self.blocks.free_many(b for b in self.per_head.values() if b is not None)
        self.per_head.clear()
