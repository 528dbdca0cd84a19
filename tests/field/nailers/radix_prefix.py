"""Radix-tree prefix cache and the prefill planner that pins nodes while a request uses them."""
from __future__ import annotations

import time
from contextlib import contextmanager
from typing import Iterator, Optional, Sequence


class TokenSlots:
    def __init__(self, size: int) -> None:
        self._free = list(range(size))

    def alloc(self, n: int) -> Optional[list[int]]:
        if n > len(self._free):
            return None
        out, self._free = self._free[:n], self._free[n:]
        return out

    def free(self, slots: Sequence[int]) -> None:
        self._free.extend(slots)

    def available(self) -> int:
        return len(self._free)


class TreeNode:
    __slots__ = ("children", "parent", "key", "slots", "pins", "last_use")

    def __init__(self, parent: Optional["TreeNode"], key: tuple[int, ...]) -> None:
        self.children: dict[int, TreeNode] = {}
        self.parent = parent
        self.key = key
        self.slots: list[int] = []
        self.pins = 0
        self.last_use = time.monotonic()


class Request:
    def __init__(self, rid: str, tokens: list[int]) -> None:
        self.rid = rid
        self.tokens = tokens
        self.node: Optional[TreeNode] = None
        self.slots: list[int] = []
        self.cached = 0


class RadixCache:
    def __init__(self, slots: TokenSlots) -> None:
        self.slots = slots
        self.root = TreeNode(None, ())

    def pin(self, node: TreeNode) -> TreeNode:
        cur: Optional[TreeNode] = node
        while cur is not None:
            cur.pins += 1
            cur = cur.parent
        return node

    def unpin(self, node: TreeNode) -> None:
        cur: Optional[TreeNode] = node
        while cur is not None:
            cur.pins -= 1
            cur = cur.parent

    def match_and_pin(self, tokens: Sequence[int]) -> tuple[TreeNode, int]:
        node, hit = self.root, 0
        while hit < len(tokens):
            child = node.children.get(tokens[hit])
            if child is None or tuple(tokens[hit:hit + len(child.key)]) != child.key:
                break
            hit += len(child.key)
            child.last_use = time.monotonic()
            node = child
        return self.pin(node), hit  # clean: wrapper, the caller unpins

    def insert(self, tokens: Sequence[int], slots: list[int]) -> None:
        """Adopt `slots`; those of tokens already in the tree are freed."""
        node, hit = self.match_and_pin(tokens)  # clean: unpinned on the last line
        self.slots.free([s for s in slots[:hit] if s >= 0])
        if hit < len(tokens):
            leaf = TreeNode(node, tuple(tokens[hit:]))
            leaf.slots = slots[hit:]
            node.children[tokens[hit]] = leaf
        self.unpin(node)

    def evict(self, want: int) -> int:
        leaves = [n for n in self._walk(self.root) if not n.children and n.pins == 0 and n.parent]
        leaves.sort(key=lambda n: n.last_use)
        done = 0
        for leaf in leaves:
            if done >= want:
                break
            self.slots.free(leaf.slots)
            done += len(leaf.slots)
            del leaf.parent.children[leaf.key[0]]
        return done

    def _walk(self, node: TreeNode) -> Iterator[TreeNode]:
        yield node
        for child in list(node.children.values()):
            yield from self._walk(child)


@contextmanager
def pinned_prefix(cache: RadixCache, tokens: Sequence[int]) -> Iterator[tuple[TreeNode, int]]:
    node, hit = cache.match_and_pin(tokens)  # clean: unpinned in finally
    try:
        yield node, hit
    finally:
        cache.unpin(node)


class PrefillPlanner:
    def __init__(self, cache: RadixCache, chunk: int) -> None:
        self.cache = cache
        self.chunk = chunk
        self.active: dict[str, Request] = {}

    def start(self, req: Request) -> bool:
        node, hit = self.cache.match_and_pin(req.tokens)  # clean: unpinned on failure, else by finish()
        need = len(req.tokens) - hit
        slots = self.cache.slots.alloc(need)  # clean: near miss, retried only when it was None
        if slots is None:
            self.cache.evict(need - self.cache.slots.available())
            slots = self.cache.slots.alloc(need)  # clean: stored in the request, finish() inserts it
        if slots is None:
            self.cache.unpin(node)
            return False
        req.node, req.slots, req.cached = node, slots, hit
        self.active[req.rid] = req
        return True

    def finish(self, rid: str) -> None:
        req = self.active.pop(rid)
        self.cache.slots.free(self._adopt(req))
        if req.node is not None:
            self.cache.unpin(req.node)
            req.node = None

    def _adopt(self, req: Request) -> list[int]:
        tail = req.tokens[req.cached:]
        keep = len(tail) - len(tail) % self.chunk
        self.cache.insert(req.tokens[:req.cached + keep], [-1] * req.cached + req.slots[:keep])
        return req.slots[keep:]

    def next_chunk(self, tokens: Sequence[int], budget: int) -> Optional[tuple[int, int]]:
        node, hit = self.cache.match_and_pin(tokens)  # leak: no unpin when the budget is spent
        if hit == len(tokens):
            self.cache.unpin(node)
            return None
        take = min(self.chunk, len(tokens) - hit, budget)
        if take <= 0:
            return None
        self.cache.unpin(node)
        return hit, hit + take

    def replay(self, tokens: Sequence[int]) -> list[int]:
        """Cache hit length seen after each chunk of a recorded prompt."""
        hits: list[int] = []
        node = None
        for end in range(self.chunk, len(tokens) + 1, self.chunk):
            node, hit = self.cache.match_and_pin(tokens[:end])  # leak: rebound, only the last is unpinned
            hits.append(hit)
        if node is not None:
            self.cache.unpin(node)
        return hits

    def warm(self, prompts: Sequence[Sequence[int]]) -> int:
        added = 0
        for prompt in prompts:
            node, hit = self.cache.match_and_pin(prompt)  # clean: unpinned before both continue and insert
            if hit == len(prompt):
                self.cache.unpin(node)
                continue
            slots = self.cache.slots.alloc(len(prompt))  # clean: insert() adopts them
            self.cache.unpin(node)
            if slots is None:
                break
            self.cache.insert(prompt, slots)
            added += 1
        return added

    def best_template(self, templates: Sequence[Sequence[int]]) -> Optional[TreeNode]:
        """Pinned node of the template with the longest cached part."""
        best: Optional[TreeNode] = None
        best_hit = -1
        for tokens in templates:
            node, hit = self.cache.match_and_pin(tokens)  # clean: near miss, losers unpinned, winner returned
            if hit <= best_hit:
                self.cache.unpin(node)
                continue
            if best is not None:
                self.cache.unpin(best)
            best, best_hit = node, hit
        return best

    def render_with_template(self, templates: Sequence[Sequence[int]], body: list[int]) -> list[int]:
        node = self.best_template(templates)  # leak: only read for its key, never unpinned
        head: list[int] = []
        while node is not None:
            head[:0] = node.key
            node = node.parent
        return head + body

    def shortest_miss(self, prompts: Sequence[Sequence[int]]) -> Optional[int]:
        pick, pick_node, pick_miss = None, None, 1 << 30
        for i, prompt in enumerate(prompts):
            node, hit = self.cache.match_and_pin(prompt)  # leak: the previous pick is replaced without unpin
            miss = len(prompt) - hit
            if miss < pick_miss:
                pick, pick_node, pick_miss = i, node, miss
            else:
                self.cache.unpin(node)
        if pick_node is not None:
            self.cache.unpin(pick_node)
        return pick

    def hit_rate(self, prompts: Sequence[Sequence[int]]) -> float:
        total = hits = 0
        for prompt in prompts:
            _, hit = self.cache.match_and_pin(prompt)  # leak: the pinned node is thrown away
            hits += hit
            total += len(prompt)
        return hits / max(total, 1)

    def estimate(self, prompt: Sequence[int]) -> int:
        with pinned_prefix(self.cache, prompt) as (_, hit):  # clean: context manager unpins
            if hit == 0:
                return len(prompt)
            return len(prompt) - hit
