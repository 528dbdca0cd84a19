"""Radix prefix cache over a token-granular KV pool."""
from __future__ import annotations

import time
from typing import Dict, List, Optional, Tuple


class TokenKVPool:
    def __init__(self, size: int) -> None:
        self.size = size
        self._free: List[int] = list(range(size))

    def available(self) -> int:
        return len(self._free)

    def alloc(self, n: int) -> Optional[List[int]]:
        if n > len(self._free):
            return None
        out, self._free = self._free[:n], self._free[n:]
        return out

    def free(self, indices: List[int]) -> None:
        self._free.extend(indices)


class TreeNode:
    def __init__(self, parent: Optional["TreeNode"] = None) -> None:
        self.parent = parent
        self.children: Dict[int, "TreeNode"] = {}
        self.key: int = -1
        self.value: int = -1
        self.lock_ref = 0
        self.last_access = time.monotonic()


class RadixCache:
    """One token per node; locked paths are not evicted."""

    def __init__(self, pool: TokenKVPool) -> None:
        self.pool = pool
        self.root = TreeNode()
        self.root.lock_ref = 1

    def match_prefix(self, tokens: List[int]) -> Tuple[List[int], TreeNode]:
        node, hit = self.root, []
        for tok in tokens:
            child = node.children.get(tok)
            if child is None:
                break
            child.last_access = time.monotonic()
            hit.append(child.value)
            node = child
        return hit, node

    def inc_lock_ref(self, node: TreeNode) -> None:
        while node is not self.root:
            node.lock_ref += 1
            node = node.parent

    def dec_lock_ref(self, node: TreeNode) -> None:
        while node is not self.root:
            node.lock_ref -= 1
            node = node.parent

    def insert(self, tokens: List[int], indices: List[int]) -> int:
        """Adds the path, returns how many tokens were there already."""
        node, known = self.root, 0
        for tok, idx in zip(tokens, indices):
            child = node.children.get(tok)
            if child is None:
                child = TreeNode(node)
                child.key, child.value = tok, idx
                node.children[tok] = child
            else:
                known += 1
            node = child
        return known

    def evict(self, n: int) -> int:
        done = 0
        while done < n:
            leaves = [x for x in self._leaves(self.root) if x.lock_ref == 0]
            if not leaves:
                break
            victim = min(leaves, key=lambda x: x.last_access)
            del victim.parent.children[victim.key]
            self.pool.free([victim.value])
            done += 1
        return done

    def _leaves(self, node: TreeNode) -> List[TreeNode]:
        if not node.children and node is not self.root:
            return [node]
        return [leaf for c in node.children.values() for leaf in self._leaves(c)]


class Req:
    def __init__(self, rid: str, tokens: List[int]) -> None:
        self.rid = rid
        self.tokens = tokens
        self.kv_indices: List[int] = []
        self.prefix_len = 0
        self.last_node: Optional[TreeNode] = None
        self.aborted = False


class PrefixScheduler:
    def __init__(self, cache: RadixCache) -> None:
        self.cache = cache
        self.pool = cache.pool
        self.running: List[Req] = []

    def _alloc_or_evict(self, n: int) -> Optional[List[int]]:
        out = self.pool.alloc(n)  # clean: returned when there is room
        if out is not None:
            return out
        self.cache.evict(n - self.pool.available())
        return self.pool.alloc(n)  # clean: near miss, the first try returned nothing

    def start(self, req: Req) -> bool:
        hit, node = self.cache.match_prefix(req.tokens)
        self.cache.inc_lock_ref(node)  # clean: dropped on shortage, else moved to the request
        fresh = self._alloc_or_evict(len(req.tokens) - len(hit))  # clean: moved to the request
        if fresh is None:
            self.cache.dec_lock_ref(node)
            return False
        req.prefix_len = len(hit)
        req.kv_indices = hit + fresh
        req.last_node = node
        self.running.append(req)
        return True

    def start_chunk(self, req: Req, chunk: int) -> bool:
        """First chunk of a long prompt."""
        hit, node = self.cache.match_prefix(req.tokens)
        self.cache.inc_lock_ref(node)  # leak: no room for the chunk returns with the path still locked
        take = min(chunk, len(req.tokens) - len(hit))
        fresh = self._alloc_or_evict(take)  # clean: moved to the request
        if fresh is None:
            return False
        req.prefix_len = len(hit)
        req.kv_indices = hit + fresh
        req.last_node = node
        self.running.append(req)
        return True

    def cache_chunk(self, req: Req) -> None:
        """Publishes what a running request has computed so far."""
        done = req.tokens[: len(req.kv_indices)]
        self.cache.insert(done, req.kv_indices)
        merged, node = self.cache.match_prefix(done)
        dup = [i for i, m in zip(req.kv_indices, merged) if i != m]
        self.pool.free(dup)
        req.kv_indices = merged
        if node is not req.last_node:
            self.cache.dec_lock_ref(req.last_node)
        self.cache.inc_lock_ref(node)  # leak: for an unchanged node a second lock is added to the first
        req.prefix_len = len(merged)
        req.last_node = node

    def decode_step(self, batch: List[Req]) -> List[Req]:
        kept: List[Req] = []
        for req in batch:
            slot = self._alloc_or_evict(1)  # leak: an aborted request is skipped after its slot was taken
            if slot is None:
                self.retract(req)
                continue
            if req.aborted:
                self.finish(req)
                continue
            req.kv_indices.extend(slot)
            kept.append(req)
        return kept

    def retract(self, req: Req) -> None:
        self.pool.free(req.kv_indices[req.prefix_len:])
        self.cache.dec_lock_ref(req.last_node)
        req.kv_indices, req.last_node = [], None
        self.running.remove(req)

    def finish(self, req: Req) -> None:
        n = min(len(req.tokens), len(req.kv_indices))
        known = self.cache.insert(req.tokens[:n], req.kv_indices[:n])
        self.pool.free(req.kv_indices[req.prefix_len:known])
        self.pool.free(req.kv_indices[n:])
        self.cache.dec_lock_ref(req.last_node)
        self.running.remove(req)


class CacheAwareRouter:
    """Scores workers by how much of a prompt each has cached."""

    def __init__(self, caches: Dict[str, RadixCache]) -> None:
        self.caches = caches

    def probe(self, name: str, tokens: List[int]) -> float:
        cache = self.caches[name]
        hit, node = cache.match_prefix(tokens)
        cache.inc_lock_ref(node)  # clean: near miss, unlocked in finally on every return
        try:
            if not tokens:
                return 0.0
            return len(hit) / len(tokens)
        finally:
            cache.dec_lock_ref(node)

    def pick(self, tokens: List[int], floor: float) -> Optional[Tuple[str, TreeNode]]:
        """Best worker with its matched path held for the caller."""
        best: Optional[Tuple[str, TreeNode]] = None
        best_hit = -1
        for name, cache in self.caches.items():
            hit, node = cache.match_prefix(tokens)
            if len(hit) <= best_hit:
                continue
            cache.inc_lock_ref(node)  # leak: a better worker displaces this one and its lock stays
            best, best_hit = (name, node), len(hit)
        if best is None or best_hit < floor * len(tokens):
            if best is not None:
                self.caches[best[0]].dec_lock_ref(best[1])
            return None
        return best

    def route(self, tokens: List[int], queues: Dict[str, List[List[int]]]) -> str:
        picked = self.pick(tokens, 0.5)  # clean: unlocked after queueing, None has nothing
        if picked is None:
            name = min(queues, key=lambda q: len(queues[q]))
            queues[name].append(tokens)
            return name
        name, node = picked
        queues[name].append(tokens)
        self.caches[name].dec_lock_ref(node)
        return name
