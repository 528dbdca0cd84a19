"""Radix prefix cache with node locks, and the scheduler that holds them for requests."""
from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Dict, List, Optional, Tuple


class Node:
    _ids = itertools.count()

    def __init__(self, parent: Optional["Node"], key: int):
        self.nid = next(self._ids)
        self.parent = parent
        self.key = key
        self.children: Dict[int, "Node"] = {}
        self.lock_ref = 0
        self.slots: List[int] = []


class TokenSlots:
    """Flat table of KV token slots."""

    def __init__(self, size: int):
        self._free = list(range(size))

    def available(self) -> int:
        return len(self._free)

    def alloc(self, n: int) -> Optional[List[int]]:
        if n > len(self._free):
            return None
        out, self._free = self._free[:n], self._free[n:]
        return out

    def free(self, slots: List[int]) -> None:
        self._free.extend(slots)


class RadixCache:
    def __init__(self, slots: TokenSlots):
        self.root = Node(None, -1)
        self.slots = slots

    def inc_lock_ref(self, node: Node) -> int:
        delta = 0
        while node is not self.root:
            if node.lock_ref == 0:
                delta += len(node.slots)
            node.lock_ref += 1
            node = node.parent
        return delta

    def dec_lock_ref(self, node: Node) -> int:
        delta = 0
        while node is not self.root:
            node.lock_ref -= 1
            if node.lock_ref == 0:
                delta += len(node.slots)
            node = node.parent
        return delta

    def match_prefix(self, tokens: List[int]) -> Tuple[List[int], Node]:
        node, out = self.root, []
        for tok in tokens:
            child = node.children.get(tok)
            if child is None:
                break
            out.extend(child.slots)
            node = child
        return out, node

    def match_and_lock(self, tokens: List[int]) -> Tuple[List[int], Node]:
        slots, node = self.match_prefix(tokens)
        self.inc_lock_ref(node)  # clean: the caller gets the locked node
        return slots, node

    def insert(self, tokens: List[int], slots: List[int]) -> Node:
        """Takes over the slots past the cached prefix; frees duplicates."""
        have, node = self.match_prefix(tokens)
        self.slots.free([s for s, h in zip(slots, have) if s != h])
        for tok, slot in zip(tokens[len(have):], slots[len(have):]):
            child = Node(node, tok)
            child.slots = [slot]
            node.children[tok] = child
            node = child
        return node

    def evict(self, want: int) -> int:
        freed = 0
        stack, leaves = [self.root], []
        while stack:
            n = stack.pop()
            stack.extend(n.children.values())
            if not n.children and n is not self.root:
                leaves.append(n)
        while leaves and freed < want:
            leaf = leaves.pop()
            if leaf.lock_ref > 0:
                continue
            self.slots.free(leaf.slots)
            freed += len(leaf.slots)
            parent = leaf.parent
            del parent.children[leaf.key]
            if not parent.children and parent is not self.root:
                leaves.append(parent)
        return freed


@dataclass
class Req:
    rid: int
    tokens: List[int]
    max_new: int = 4
    prefix: List[int] = field(default_factory=list)
    own: List[int] = field(default_factory=list)
    node: Optional[Node] = None
    output: List[int] = field(default_factory=list)
    aborted: bool = False


class Scheduler:
    def __init__(self, cache: RadixCache, max_running: int = 4):
        self.cache = cache
        self.slots = cache.slots
        self.max_running = max_running
        self.waiting: List[Req] = []
        self.running: List[Req] = []
        self.parked: Dict[int, Req] = {}

    def _alloc_or_evict(self, n: int) -> Optional[List[int]]:
        out = self.slots.alloc(n)  # clean: near miss, rebound only when it was None
        if out is None:
            self.cache.evict(n)
            out = self.slots.alloc(n)  # clean: handed to the caller
        return out

    # -- prefill ---------------------------------------------------------
    def schedule(self) -> List[Req]:
        admitted: List[Req] = []
        while self.waiting and len(self.running) < self.max_running:
            req = self.waiting[0]
            prefix, node = self.cache.match_and_lock(req.tokens)  # clean: near miss, unlocked on the break, otherwise held by the request until finish
            own = self._alloc_or_evict(len(req.tokens) - len(prefix))  # clean: None or held by the request until finish
            if own is None:
                self.cache.dec_lock_ref(node)
                break
            self.waiting.pop(0)
            req.prefix, req.own, req.node = prefix, own, node
            self.running.append(req)
            admitted.append(req)
        return admitted

    def schedule_chunked(self, chunk: int) -> List[Req]:
        admitted: List[Req] = []
        for req in list(self.waiting):
            prefix, node = self.cache.match_and_lock(req.tokens)  # leak: the continue for a request over the chunk leaves the node locked
            if len(req.tokens) - len(prefix) > chunk:
                continue
            own = self._alloc_or_evict(len(req.tokens) - len(prefix))  # clean: None or held by the request until finish
            if own is None:
                self.cache.dec_lock_ref(node)
                break
            self.waiting.remove(req)
            req.prefix, req.own, req.node = prefix, own, node
            self.running.append(req)
            admitted.append(req)
        return admitted

    def estimate_hit(self, tokens: List[int]) -> float:
        prefix, node = self.cache.match_and_lock(tokens)  # leak: the node stays locked after the estimate of a hit
        if not prefix:
            self.cache.dec_lock_ref(node)
            return 0.0
        return len(prefix) / max(1, len(tokens))

    # -- decode ----------------------------------------------------------
    def decode(self) -> None:
        for req in list(self.running):
            slot = self._alloc_or_evict(1)  # clean: near miss, None or added to the request's own slots
            if slot is None:
                self.retract(req)
                continue
            req.own.extend(slot)
            req.output.append(len(req.output))
            if len(req.output) >= req.max_new or req.aborted:
                self.finish(req)

    def decode_speculative(self, req: Req, drafts: List[int], accepted: int) -> int:
        slots = self._alloc_or_evict(len(drafts))  # leak: the slots of the rejected drafts are neither kept nor freed
        if slots is None:
            return 0
        req.own.extend(slots[:accepted])
        req.output.extend(drafts[:accepted])
        return accepted

    def verify_tree(self, req: Req, paths: List[List[int]], best: int) -> int:
        slots = self._alloc_or_evict(sum(len(p) for p in paths))  # clean: near miss, the best path's slots go to the request, the rest is freed
        if slots is None:
            return 0
        start = sum(len(p) for p in paths[:best])
        stop = start + len(paths[best])
        req.own.extend(slots[start:stop])
        req.output.extend(paths[best])
        self.slots.free(slots[:start] + slots[stop:])
        return stop - start

    def retract(self, req: Req) -> None:
        self.running.remove(req)
        self.slots.free(req.own)
        self.cache.dec_lock_ref(req.node)
        req.own, req.prefix, req.node, req.output = [], [], None, []
        self.waiting.insert(0, req)

    def finish(self, req: Req) -> None:
        self.running.remove(req)
        all_slots = req.prefix + req.own
        tokens = (req.tokens + req.output)[: len(all_slots)]
        self.cache.insert(tokens, all_slots)
        self.cache.dec_lock_ref(req.node)
        req.node = None

    # -- parking (tool calls) ---------------------------------------------
    def park(self, req: Req) -> None:
        """Keep the cached prefix while the client runs a tool."""
        self.running.remove(req)
        all_slots = req.prefix + req.own
        node = self.cache.insert((req.tokens + req.output)[: len(all_slots)], all_slots)
        self.cache.inc_lock_ref(node)  # clean: near miss, replaces the old node's lock; unpark or expire drops it
        self.cache.dec_lock_ref(req.node)
        req.node = node
        req.own = []
        self.parked[req.rid] = req

    def unpark(self, rid: int, extra: List[int]) -> bool:
        req = self.parked.pop(rid, None)
        if req is None:
            return False
        node, req.node = req.node, None
        self.cache.dec_lock_ref(node)
        req.tokens = req.tokens + req.output + extra
        req.output = []
        self.waiting.append(req)
        return True

    def expire(self, keep: int) -> int:
        gone = 0
        while len(self.parked) > keep:
            rid = next(iter(self.parked))
            req = self.parked.pop(rid)
            self.cache.dec_lock_ref(req.node)
            gone += 1
        return gone

    def warm(self, prompts: List[List[int]]) -> int:
        """Insert prompts ahead of traffic."""
        warmed = 0
        for tokens in prompts:
            prefix, node = self.cache.match_and_lock(tokens)  # clean: near miss, the finally unlocks on continue as well
            try:
                if len(prefix) == len(tokens):
                    continue
                fresh = self.slots.alloc(len(tokens) - len(prefix))  # clean: the tree takes them over in insert
                if fresh is None:
                    break
                self.cache.insert(tokens, prefix + fresh)
                warmed += 1
            finally:
                self.cache.dec_lock_ref(node)
        return warmed


if __name__ == "__main__":
    cache = RadixCache(TokenSlots(64))
    s = Scheduler(cache)
    s.warm([[1, 2, 3], [1, 2, 3]])
    s.waiting = [Req(0, [1, 2, 3, 4, 5]), Req(1, [7, 8])]
    s.schedule()
    s.park(s.running[1])
    for _ in range(4):
        s.decode()
    s.unpark(1, [9])
    s.schedule()
    while s.running:
        s.decode()
    cache.evict(1000)
    print(cache.slots.available())
