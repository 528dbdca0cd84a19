"""A small synchronous engine over paged attention with prefix reuse."""
from __future__ import annotations

from typing import Callable, Dict, List, Optional

from .pool import PagePool
from .prefix import PrefixTree
from .sequence import Sequence


class Engine:
    def __init__(self, pool: PagePool, tree: PrefixTree, step_fn: Callable[[Sequence], Optional[int]]) -> None:
        self.pool = pool
        self.tree = tree
        self.step_fn = step_fn
        self.live: Dict[int, Sequence] = {}

    def _alloc(self, n: int) -> Optional[List[int]]:
        pages = self.pool.alloc(n)  # clean: returned unless None
        if pages is None and self.tree.evict(n):
            pages = self.pool.alloc(n)  # clean: near miss, nothing was held from the first try
        return pages

    def start(self, seq: Sequence) -> bool:
        node = self.tree.match(seq.tokens)
        reuse = 0
        if node is not None:
            seq.node = self.tree.lock(node)  # clean: near miss, unlocked below without pages, else by _retire
            reuse = len(node.key)
        need = -(-(len(seq.tokens) + 1 - reuse) // self.tree.page_size)
        pages = self._alloc(need)  # clean: the sequence's pages, given up in _retire
        if pages is None:
            if seq.node is not None:
                self.tree.unlock(seq.node)
                seq.node = None
            return False
        seq.pages = pages
        self.live[seq.sid] = seq
        return True

    def _retire(self, seq: Sequence) -> None:
        if seq.node is not None:
            self.tree.unlock(seq.node)
            seq.node = None
        self.pool.free(seq.pages)
        seq.pages = []

    def step(self) -> List[int]:
        finished: List[int] = []
        for sid, seq in list(self.live.items()):
            token = self.step_fn(seq)
            if token is None:
                del self.live[sid]
                self._retire(seq)
                finished.append(sid)
                continue
            seq.tokens.append(token)
            if len(seq.tokens) % self.tree.page_size == 0:
                more = self._alloc(1)  # clean: near miss, added to the sequence's pages unless None
                if more is None:
                    self.abort(sid)
                    continue
                seq.pages.extend(more)
        return finished

    def abort(self, sid: int) -> bool:
        seq = self.live.pop(sid, None)
        if seq is None:
            return False
        self._retire(seq)
        return True

    def seed_prefix(self, tokens: List[int]) -> bool:
        pages = self._alloc(-(-len(tokens) // self.tree.page_size))  # clean: near miss, the tree takes its part, the rest is freed
        if pages is None:
            return False
        rest = self.tree.insert(tokens, pages)
        self.pool.free(rest)
        return True

    def seed_many(self, prompts: List[List[int]]) -> int:
        seeded = 0
        for tokens in prompts:
            pages = self._alloc(-(-len(tokens) // self.tree.page_size))  # leak: what insert hands back is counted and dropped
            if pages is None:
                break
            seeded += len(pages) - len(self.tree.insert(tokens, pages))
        return seeded

    def hit_length(self, tokens: List[int], minimum: int) -> int:
        node = self.tree.match(tokens)
        if node is None:
            return 0
        self.tree.lock(node)  # leak: a hit below the minimum returns with the lock on
        if len(node.key) < minimum:
            return 0
        length = len(node.pages) * self.tree.page_size
        self.tree.unlock(node)
        return length

    def rebase(self, sid: int) -> bool:
        seq = self.live[sid]
        node = self.tree.match(seq.tokens)
        if node is None or node is seq.node:
            return False
        seq.node = self.tree.lock(node)  # leak: the lock on the shorter node the sequence had is not taken off
        return True

    def score(self, prompts: List[List[int]]) -> List[Optional[int]]:
        scores: List[Optional[int]] = []
        for sid, tokens in enumerate(prompts):
            seq = Sequence(-1 - sid, list(tokens))
            if not self.start(seq):  # leak: taken out of live for scoring without _retire when there is no token
                scores.append(None)
                continue
            token = self.step_fn(seq)
            self.live.pop(seq.sid)
            if token is None:
                scores.append(None)
                continue
            self._retire(seq)
            scores.append(token)
        return scores
