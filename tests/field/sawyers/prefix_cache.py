"""Radix prefix cache over a flat token-slot pool, with pinned nodes for live requests."""
from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field
from typing import Optional


class AddResult(enum.Enum):
    CONTINUE = 0
    NO_TOKEN = 1
    OTHER = 2


class TokenSlotPool:
    """Slots are integers; slot 0 is a real slot."""

    def __init__(self, size: int) -> None:
        self._free_slots = list(range(size))

    def available(self) -> int:
        return len(self._free_slots)

    def alloc(self, n: int) -> Optional[list[int]]:
        if n > len(self._free_slots):
            return None
        taken, self._free_slots = self._free_slots[:n], self._free_slots[n:]
        return taken

    def free(self, slots: list[int]) -> None:
        self._free_slots.extend(slots)


class TreeNode:
    __slots__ = ("key", "slots", "children", "parent", "pins", "last_access")

    def __init__(self, key: tuple[int, ...], slots: list[int], parent: Optional["TreeNode"]) -> None:
        self.key = key
        self.slots = slots
        self.children: dict[int, TreeNode] = {}
        self.parent = parent
        self.pins = 0
        self.last_access = time.monotonic()


@dataclass
class Req:
    rid: str
    tokens: list[int]
    slots: list[int] = field(default_factory=list)
    last_node: Optional[TreeNode] = None
    priority: int = 0


class RadixCache:
    def __init__(self, pool: TokenSlotPool) -> None:
        self.pool = pool
        self.root = TreeNode((), [], None)

    def lookup(self, tokens: list[int]) -> tuple[TreeNode, int]:
        node, depth = self.root, 0
        while depth < len(tokens):
            child = node.children.get(tokens[depth])
            if child is None or tuple(tokens[depth: depth + len(child.key)]) != child.key:
                break
            node = child
            depth += len(child.key)
            node.last_access = time.monotonic()
        return node, depth

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

    def match_and_pin(self, tokens: list[int]) -> tuple[TreeNode, int]:
        node, depth = self.lookup(tokens)
        self.pin(node)  # clean: handed to the caller with the node
        return node, depth

    def insert(self, parent: TreeNode, key: list[int], slots: list[int]) -> TreeNode:
        """The tree takes the slots over; they come back through evict()."""
        existing = parent.children.get(key[0])
        if existing is not None:
            self.pool.free(slots)
            return existing
        child = TreeNode(tuple(key), slots, parent)
        parent.children[key[0]] = child
        return child

    def evict(self, want: int) -> int:
        freed = 0
        stack = [self.root]
        leaves: list[TreeNode] = []
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if not node.children and node.pins == 0 and node.parent is not None:
                leaves.append(node)
        for leaf in sorted(leaves, key=lambda n: n.last_access):
            if freed >= want:
                break
            self.pool.free(leaf.slots)
            freed += len(leaf.slots)
            assert leaf.parent is not None
            del leaf.parent.children[leaf.key[0]]
        return freed


class PrefillAdder:
    def __init__(self, cache: RadixCache, pool: TokenSlotPool, budget: int) -> None:
        self.cache = cache
        self.pool = pool
        self.budget = budget
        self.picked: list[Req] = []

    def add_one(self, req: Req) -> AddResult:
        node, hit = self.cache.match_and_pin(req.tokens)  # leak: the over-budget return leaves the node pinned
        need = len(req.tokens) - hit
        if need > self.budget:
            return AddResult.OTHER
        slots = self.pool.alloc(need)  # clean: stored on the request, finish() frees it
        if slots is None:
            self.cache.unpin(node)
            return AddResult.NO_TOKEN
        req.last_node, req.slots = node, slots
        self.budget -= need
        self.picked.append(req)
        return AddResult.CONTINUE

    def add_chunked(self, req: Req, chunk: int) -> AddResult:
        if req.last_node is not None:
            return AddResult.OTHER
        node, hit = self.cache.match_and_pin(req.tokens[:chunk])  # clean: unpinned on refusal, else on the request
        slots = None
        if chunk - hit <= self.budget:
            slots = self.pool.alloc(chunk - hit)  # clean: near miss, the None test below covers both branches
        if slots is None:
            self.cache.unpin(node)
            return AddResult.NO_TOKEN
        req.last_node, req.slots = node, slots
        self.budget -= chunk - hit
        self.picked.append(req)
        return AddResult.CONTINUE

    def finish(self, req: Req) -> None:
        self.pool.free(req.slots)
        req.slots = []
        if req.last_node is not None:
            self.cache.unpin(req.last_node)
            req.last_node = None
        if req in self.picked:
            self.picked.remove(req)


class DecodeBatch:
    def __init__(self, cache: RadixCache, pool: TokenSlotPool) -> None:
        self.cache = cache
        self.pool = pool
        self.reqs: list[Req] = []

    def step(self) -> bool:
        if self.pool.available() < len(self.reqs):
            self.cache.evict(len(self.reqs))
        slots = self.pool.alloc(len(self.reqs))  # clean: dealt out to the requests one by one
        if slots is None:
            return False
        for req, slot in zip(self.reqs, slots):
            req.slots.append(slot)
        return True

    def grow_one(self, req: Req) -> bool:
        got = self.pool.alloc(1)  # leak: slot 0 is falsy, so a good slot is taken for none
        slot = got[0] if got else None
        if not slot:
            return False
        req.slots.append(slot)
        return True

    def retract(self, n: int) -> list[Req]:
        victims = sorted(self.reqs, key=lambda r: r.priority)[:n]
        for req in victims:
            self.release(req)
        self.reqs = [r for r in self.reqs if r not in victims]
        return victims

    def release(self, req: Req) -> None:
        self.pool.free(req.slots)
        req.slots = []
        if req.last_node is not None:
            self.cache.unpin(req.last_node)
            req.last_node = None


class SessionCache:
    """Multi-turn chats keep the deepest node of the last turn pinned."""

    def __init__(self, cache: RadixCache, pool: TokenSlotPool) -> None:
        self.cache = cache
        self.pool = pool
        self.nodes: dict[str, TreeNode] = {}
        self.system: list[TreeNode] = []
        self.shadow: dict[str, TreeNode] = {}

    def warm(self, prompts: list[list[int]]) -> None:
        for prompt in prompts:
            node, _ = self.cache.match_and_pin(prompt)  # clean: system prompts stay pinned for the life of the process
            self.system.append(node)

    def end_turn(self, session: str, tokens: list[int]) -> None:
        node, _ = self.cache.match_and_pin(tokens)  # leak: the pin of the previous turn is overwritten
        self.nodes[session] = node

    def close(self, session: str) -> None:
        node = self.nodes.pop(session, None)
        if node is not None:
            self.cache.unpin(node)

    def set_shadow(self, session: str, tokens: list[int]) -> None:
        old = self.shadow.get(session)
        node, _ = self.cache.match_and_pin(tokens)  # clean: near miss, the old pin is dropped after the swap
        self.shadow[session] = node
        if old is not None:
            self.cache.unpin(old)

    def drop_shadow(self, session: str) -> None:
        if session in self.shadow:
            self.cache.unpin(self.shadow.pop(session))

    def hit_rate(self, tokens: list[int]) -> float:
        node, hit = self.cache.match_and_pin(tokens)  # clean: near miss, early returns run the finally
        try:
            if not tokens:
                return 0.0
            return hit / len(tokens)
        finally:
            self.cache.unpin(node)

    def preload(self, tokens: list[int]) -> int:
        node, hit = self.cache.match_and_pin(tokens)  # leak: a fully cached prompt returns with the pin held
        rest = tokens[hit:]
        if not rest:
            return 0
        slots = self.pool.alloc(len(rest))  # clean: the tree takes the slots over
        if slots is not None:
            self.cache.insert(node, rest, slots)
        self.cache.unpin(node)
        return len(rest) if slots is not None else 0
