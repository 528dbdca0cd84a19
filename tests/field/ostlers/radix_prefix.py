"""Radix tree over prompt prefixes: token slots, lock references on nodes, and the requests that use both."""
from __future__ import annotations

import heapq
import time
from dataclasses import dataclass, field
from typing import Dict, Iterator, List, Optional, Tuple


class TokenSlots:
    """Slots of the key/value store, one for a token."""

    def __init__(self, size: int):
        self._free: List[int] = list(range(size))

    def available(self) -> int:
        return len(self._free)

    def alloc(self, n: int) -> Optional[List[int]]:
        if n > len(self._free):
            return None
        picked, self._free = self._free[:n], self._free[n:]
        return picked

    def free(self, slots: List[int]) -> None:
        self._free.extend(slots)


class Node:
    def __init__(self, parent: Optional["Node"], key: Tuple[int, ...], slots: List[int]):
        self.parent = parent
        self.key = key
        self.slots = slots
        self.children: Dict[int, Node] = {}
        self.lock_ref = 0
        self.used_at = time.monotonic()


class PrefixTree:
    def __init__(self, slots: TokenSlots):
        self.slots = slots
        self.root = Node(None, (), [])
        self.protected = 0

    def match(self, tokens: Tuple[int, ...]) -> Tuple[Node, int]:
        """The deepest node that is a prefix of the tokens, and how many it covers."""
        node, pos = self.root, 0
        while pos < len(tokens):
            child = node.children.get(tokens[pos])
            if child is None or child.key != tokens[pos : pos + len(child.key)]:
                break
            node, pos = child, pos + len(child.key)
            node.used_at = time.monotonic()
        return node, pos

    def lock(self, node: Node) -> Node:
        """Protects the path up to the root from eviction until unlock."""
        at: Optional[Node] = node
        while at is not None and at is not self.root:
            if at.lock_ref == 0:
                self.protected += len(at.slots)
            at.lock_ref += 1
            at = at.parent
        return node

    def unlock(self, node: Node) -> None:
        at: Optional[Node] = node
        while at is not None and at is not self.root:
            at.lock_ref -= 1
            if at.lock_ref == 0:
                self.protected -= len(at.slots)
            at = at.parent

    def _leaves(self) -> Iterator[Node]:
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            if node.children:
                stack.extend(node.children.values())
            elif node.lock_ref == 0:
                yield node

    def evict(self, want: int) -> int:
        heap = [(leaf.used_at, id(leaf), leaf) for leaf in self._leaves()]
        heapq.heapify(heap)
        gone = 0
        while heap and gone < want:
            _, _, leaf = heapq.heappop(heap)
            self.slots.free(leaf.slots)
            gone += len(leaf.slots)
            del leaf.parent.children[leaf.key[0]]
        return gone

    def alloc_evicting(self, n: int) -> Optional[List[int]]:
        got = self.slots.alloc(n)  # clean: returned, or None
        if got is None and self.evict(n - self.slots.available()) > 0:
            got = self.slots.alloc(n)  # clean: near miss, the first one gave None; returned
        return got


@dataclass
class Request:
    tokens: Tuple[int, ...]
    node: Optional[Node] = None
    matched: int = 0
    own: List[int] = field(default_factory=list)
    grammar_slots: List[int] = field(default_factory=list)


class PrefixScheduler:
    def __init__(self, tree: PrefixTree, max_running: int):
        self.tree = tree
        self.max_running = max_running
        self.running: List[Request] = []
        self._hot: Dict[str, Node] = {}
        self._pinned: Dict[str, Node] = {}

    def start(self, req: Request) -> bool:
        node, matched = self.tree.match(req.tokens)
        self.tree.lock(node)  # clean: near miss, unlocked without slots; kept in req.node, finish unlocks
        own = self.tree.alloc_evicting(len(req.tokens) - matched)  # clean: None or moved to req.own
        if own is None:
            self.tree.unlock(node)
            return False
        req.node, req.matched, req.own = node, matched, own
        self.running.append(req)
        return True

    def start_constrained(self, req: Request, states: int) -> bool:
        node, matched = self.tree.match(req.tokens)
        self.tree.lock(node)  # leak: a full batch returns with the path locked
        if len(self.running) >= self.max_running:
            return False
        own = self.tree.alloc_evicting(len(req.tokens) - matched)  # clean: None or moved to req.own
        if own is None:
            self.tree.unlock(node)
            return False
        grammar = self.tree.slots.alloc(states)  # leak: grammar_slots, not freed by finish or retract
        req.node, req.matched, req.own = node, matched, own
        req.grammar_slots = grammar or []
        self.running.append(req)
        return True

    def decode_slot(self, req: Request, token: int) -> bool:
        got = self.tree.alloc_evicting(1)  # clean: joins req.own
        if got is None:
            return False
        req.own += got
        req.tokens += (token,)
        return True

    def finish(self, req: Request) -> None:
        self.running.remove(req)
        fresh = req.tokens[req.matched :]
        if fresh:
            self._graft(req.node, fresh, req.own)
        req.own = []
        self.tree.unlock(req.node)
        req.node = None

    def _graft(self, node: Node, tokens: Tuple[int, ...], slots: List[int]) -> None:
        if tokens[0] in node.children:
            self.tree.slots.free(slots)
            return
        node.children[tokens[0]] = Node(node, tokens, slots)

    def retract(self, req: Request) -> None:
        self.running.remove(req)
        self.tree.slots.free(req.own)
        req.own = []
        self.tree.unlock(req.node)
        req.node = None

    def mark_hot(self, name: str, tokens: Tuple[int, ...]) -> None:
        """The prefix of a tenant that shall stay in the tree; a later call replaces it."""
        node, _ = self.tree.match(tokens)
        self._hot[name] = self.tree.lock(node)  # leak: the node that the tenant had before stays locked

    def drop_hot(self, name: str) -> None:
        node = self._hot.pop(name, None)
        if node is not None:
            self.tree.unlock(node)

    def pin_session(self, name: str, tokens: Tuple[int, ...]) -> None:
        node, _ = self.tree.match(tokens)
        self.tree.lock(node)  # clean: near miss, the one before is unlocked, this one by end_session
        before = self._pinned.get(name)
        if before is not None:
            self.tree.unlock(before)
        self._pinned[name] = node

    def end_session(self, name: str) -> None:
        if name in self._pinned:
            self.tree.unlock(self._pinned.pop(name))

    def scratch_tokens(self, n: int) -> List[int]:
        """Slots for draft tokens, with fewer when there are not enough; the caller frees them."""
        while n > 0:
            got = self.tree.alloc_evicting(n)  # clean: returned to the caller
            if got is not None:
                return got
            n //= 2
        return []

    def verify_draft(self, req: Request, draft: Tuple[int, ...], accepted: int) -> int:
        slots = self.scratch_tokens(len(draft))  # leak: the slots of the rejected tokens are dropped
        keep = min(accepted, len(slots))
        req.own += slots[:keep]
        req.tokens += draft[:keep]
        return keep


def longest_shared(tree: PrefixTree, prompts: List[Tuple[int, ...]], enough: int) -> int:
    best = 0
    for tokens in prompts:
        node, matched = tree.match(tokens)
        tree.lock(node)  # leak: break at enough leaves the path locked
        best = max(best, matched)
        if best >= enough:
            break
        tree.unlock(node)
    return best
