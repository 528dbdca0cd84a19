"""Radix cache of prompt prefixes; locked nodes are in use and not evictable."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, List, Optional, Sequence, Tuple


class Node:
    __slots__ = ("parent", "token", "children", "lock_ref", "stamp")

    def __init__(self, parent: Optional["Node"], token: int) -> None:
        self.parent = parent
        self.token = token
        self.children: Dict[int, "Node"] = {}
        self.lock_ref = 0
        self.stamp = 0


class RadixCache:
    def __init__(self, max_nodes: int) -> None:
        self.root = Node(None, -1)
        self.max_nodes = max_nodes
        self.size = 0
        self._clock = 0

    def inc_lock_ref(self, node: Node) -> Node:
        walk: Optional[Node] = node
        while walk is not None:
            walk.lock_ref += 1
            walk = walk.parent
        return node

    def dec_lock_ref(self, node: Node) -> None:
        walk: Optional[Node] = node
        while walk is not None:
            walk.lock_ref -= 1
            walk = walk.parent

    def find(self, tokens: Sequence[int]) -> Tuple[Node, int]:
        node, depth = self.root, 0
        self._clock += 1
        for token in tokens:
            child = node.children.get(token)
            if child is None:
                break
            node, depth = child, depth + 1
            node.stamp = self._clock
        return node, depth

    def match_and_lock(self, tokens: Sequence[int]) -> Tuple[Node, int]:
        node, depth = self.find(tokens)
        self.inc_lock_ref(node)  # clean: returned locked, the caller unlocks
        return node, depth

    def insert(self, tokens: Sequence[int]) -> Optional[Node]:
        """The node for the full sequence, or None when nothing can be evicted."""
        node, depth = self.find(tokens)
        self.inc_lock_ref(node)  # clean: near miss, unlocked on both returns
        head = node
        for token in tokens[depth:]:
            if self.size >= self.max_nodes and not self._evict_leaf(keep=head):
                self.dec_lock_ref(node)
                return None
            child = Node(head, token)
            child.stamp = self._clock
            head.children[token] = child
            self.size += 1
            head = child
        self.dec_lock_ref(node)
        return head

    def _leaves(self) -> List[Node]:
        out, stack = [], [self.root]
        while stack:
            node = stack.pop()
            if not node.children and node is not self.root:
                out.append(node)
            stack.extend(node.children.values())
        return out

    def _evict_leaf(self, keep: Node) -> bool:
        victims = [n for n in self._leaves() if n.lock_ref == 0 and n is not keep]
        if not victims:
            return False
        victim = min(victims, key=lambda n: n.stamp)
        del victim.parent.children[victim.token]
        self.size -= 1
        return True


@dataclass
class Generation:
    rid: int
    tokens: List[int]
    last_node: Optional[Node] = None
    aborted: bool = False


class PrefillPlanner:
    def __init__(self, cache: RadixCache) -> None:
        self.cache = cache
        self.running: Dict[int, Generation] = {}
        self.tokens_saved = 0

    def start(self, gen: Generation) -> int:
        if gen.rid in self.running:
            return 0
        node, depth = self.cache.match_and_lock(gen.tokens)  # clean: moved into the running generation, finish() unlocks
        gen.last_node = node
        self.running[gen.rid] = gen
        self.tokens_saved += depth
        return depth

    def start_within(self, gen: Generation, budget: int) -> bool:
        """Admits only if the part to be computed fits the prefill budget."""
        node, depth = self.cache.match_and_lock(gen.tokens)  # leak: over budget returns False with the path locked
        if len(gen.tokens) - depth > budget or gen.rid in self.running:
            return False
        gen.last_node = node
        self.running[gen.rid] = gen
        return True

    def chunk(self, rid: int, tokens: Sequence[int]) -> bool:
        """After a prefill chunk, the lock moves to the deeper node."""
        gen = self.running[rid]
        gen.tokens.extend(tokens)
        node = self.cache.insert(gen.tokens)
        if node is None:
            return False
        self.cache.inc_lock_ref(node)  # clean: near miss, the old node is unlocked after the new one is locked
        if gen.last_node is not None:
            self.cache.dec_lock_ref(gen.last_node)
        gen.last_node = node
        return True

    def finish(self, rid: int) -> None:
        gen = self.running.pop(rid, None)
        if gen is None or gen.last_node is None:
            return
        self.cache.dec_lock_ref(gen.last_node)
        gen.last_node = None

    def sweep_aborted(self) -> int:
        aborted = [rid for rid, gen in self.running.items() if gen.aborted]
        for rid in aborted:
            self.finish(rid)
        return len(aborted)

    def hit_ratio(self, prompts: Sequence[Sequence[int]]) -> float:
        hits = total = 0
        for prompt in prompts:
            _, depth = self.cache.match_and_lock(prompt)  # leak: the locked node is discarded in the unpacking
            hits += depth
            total += len(prompt)
        return hits / total if total else 0.0

    def shares_prefix(self, a: Sequence[int], b: Sequence[int]) -> bool:
        left, _ = self.cache.match_and_lock(a)  # clean: near miss, unlocked before either return
        right, _ = self.cache.match_and_lock(b)  # clean: unlocked with the left one
        same = left is right
        self.cache.dec_lock_ref(right)
        self.cache.dec_lock_ref(left)
        if left is self.cache.root:
            return False
        return same
