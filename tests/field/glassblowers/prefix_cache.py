"""Radix-tree prefix cache over token-granular KV slots.

Nodes are pinned by running requests (`pin`/`unpin`), slots are owned either by a
node of the tree or by the request that computed them.
"""
from __future__ import annotations

import heapq
import time
from typing import Dict, List, NamedTuple, Optional, Tuple


class SlotArena:
    """Token slots; `grab` hands out n of them or None."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._avail: List[int] = list(range(size))

    def grab(self, n: int) -> Optional[List[int]]:
        if n > len(self._avail):
            return None
        out, self._avail = self._avail[:n], self._avail[n:]
        return out

    def give(self, slots: List[int]) -> None:
        self._avail.extend(slots)

    @property
    def available(self) -> int:
        return len(self._avail)


class Node:
    __slots__ = ("key", "slots", "children", "parent", "pins", "last_used")

    def __init__(self, key: Tuple[int, ...], slots: List[int], parent: "Optional[Node]"):
        self.key = key
        self.slots = slots
        self.children: Dict[int, Node] = {}
        self.parent = parent
        self.pins = 0
        self.last_used = time.monotonic()

    def __lt__(self, other: "Node") -> bool:
        return self.last_used < other.last_used


class Match(NamedTuple):
    node: Node
    length: int
    slots: List[int]


class Request:
    def __init__(self, rid: str, tokens: List[int]) -> None:
        self.rid = rid
        self.tokens = tokens
        self.node: Optional[Node] = None
        self.own_slots: List[int] = []
        self.cached_len = 0


class RadixCache:
    def __init__(self, arena: SlotArena, page: int = 1, enabled: bool = True) -> None:
        self.arena = arena
        self.page = page
        self.enabled = enabled
        self.root = Node((), [], None)
        self.root.pins = 1

    # -- pins --------------------------------------------------------------

    def pin(self, node: Node) -> Node:
        cur: Optional[Node] = node
        while cur is not None:
            cur.pins += 1
            cur = cur.parent
        return node

    def unpin(self, node: Node) -> None:
        cur: Optional[Node] = node
        while cur is not None:
            cur.pins -= 1
            cur = cur.parent

    # -- tree --------------------------------------------------------------

    def lookup(self, tokens: List[int]) -> Match:
        node, pos, slots = self.root, 0, []
        while pos < len(tokens):
            child = node.children.get(tokens[pos])
            if child is None or tuple(tokens[pos:pos + len(child.key)]) != child.key:
                break
            slots.extend(child.slots)
            pos += len(child.key)
            child.last_used = time.monotonic()
            node = child
        return Match(node, pos, slots)

    def attach(self, node: Node, key: List[int], slots: List[int]) -> Node:
        child = Node(tuple(key), slots, node)
        node.children[key[0]] = child
        return child

    def evict(self, want: int) -> int:
        leaves = [n for n in self._walk(self.root) if not n.children and n.pins == 0]
        heapq.heapify(leaves)
        freed = 0
        while leaves and freed < want:
            node = heapq.heappop(leaves)
            self.arena.give(node.slots)
            freed += len(node.slots)
            node.parent.children.pop(node.key[0])
            if node.parent.pins == 0 and not node.parent.children:
                heapq.heappush(leaves, node.parent)
        return freed

    def _walk(self, node: Node):
        for child in node.children.values():
            yield child
            yield from self._walk(child)

    def _grab_or_evict(self, n: int) -> Optional[List[int]]:
        slots = self.arena.grab(n)  # clean: returned to the caller when there are enough
        if slots is None:
            self.evict(n - self.arena.available)
            slots = self.arena.grab(n)  # clean: near miss, only taken when the first attempt gave None
        return slots

    # -- request life cycle ------------------------------------------------

    def start(self, req: Request) -> bool:
        match = self.lookup(req.tokens)
        self.pin(match.node)  # clean: unpinned on shortage, else kept in req.node
        slots = self._grab_or_evict(len(req.tokens) - match.length)  # clean: kept in req.own_slots
        if slots is None:
            self.unpin(match.node)
            return False
        req.node = match.node
        req.own_slots = slots
        req.cached_len = match.length
        return True

    def start_many(self, reqs: List[Request]) -> List[Request]:
        started = []
        for req in reqs:
            match = self.lookup(req.tokens)
            self.pin(match.node)  # leak: still pinned when continue skips a request that does not fit
            slots = self._grab_or_evict(len(req.tokens) - match.length)  # clean: None on the skipping path, else kept in req
            if slots is None:
                continue
            req.node, req.own_slots, req.cached_len = match.node, slots, match.length
            started.append(req)
        return started

    def extend(self, req: Request, new_tokens: List[int]) -> bool:
        slots = self._grab_or_evict(len(new_tokens))  # clean: joined to req.own_slots
        if not slots:
            return False
        req.own_slots += slots
        req.tokens += new_tokens
        return True

    def publish(self, req: Request) -> None:
        """Hand the request's finished pages to the tree and keep a pin on them."""
        if not self.enabled:
            return
        tail = req.tokens[req.cached_len:]
        whole = len(tail) // self.page * self.page
        if whole == 0:
            return
        match = self.lookup(req.tokens[:req.cached_len + whole])
        if match.length > req.cached_len or tail[0] in req.node.children:
            return
        child = self.attach(req.node, tail[:whole], req.own_slots[:whole])
        old = req.node
        req.node = self.pin(child)  # clean: near miss, the old pin is dropped on the next line and finish() drops this one
        self.unpin(old)
        req.own_slots = req.own_slots[whole:]
        req.cached_len += whole

    def finish(self, req: Request) -> None:
        self.publish(req)
        if req.own_slots:
            self.arena.give(req.own_slots)
            req.own_slots = []
        if req.node is not None:
            self.unpin(req.node)
            req.node = None

    def preload(self, system_prompt: List[int]) -> bool:
        """Put a system prompt in the tree before traffic arrives."""
        slots = self._grab_or_evict(len(system_prompt))  # leak: dropped when the prompt is already in the tree
        if slots is None:
            return False
        match = self.lookup(system_prompt)
        if match.length == len(system_prompt):
            return True
        if system_prompt[match.length] in match.node.children:
            self.arena.give(slots)
            return False
        self.attach(match.node, system_prompt[match.length:], slots[match.length:])
        self.arena.give(slots[:match.length])
        return True

    def score(self, tokens: List[int]) -> float:
        """Share of `tokens` already resident; used by the cache-aware router."""
        if not tokens:
            return 0.0
        match = self.lookup(tokens)
        node = self.pin(match.node)  # leak: the early return for a root match leaves it pinned
        if node is self.root:
            return 0.0
        age = time.monotonic() - node.last_used
        value = match.length / len(tokens) / (1.0 + age)
        self.unpin(node)
        return value

    def clone(self, req: Request, rid: str) -> Optional[Request]:
        twin = Request(rid, list(req.tokens))
        own = self.arena.grab(len(req.own_slots))  # leak: not given back when the parent shares no prefix
        if own is None:
            return None
        if req.cached_len == 0:
            return None
        twin.node = self.pin(req.node)  # clean: held by the twin, finish() unpins it
        twin.own_slots, twin.cached_len = own, req.cached_len
        return twin

    def retract(self, req: Request) -> None:
        self.enabled, was = False, self.enabled
        self.finish(req)
        self.enabled = was

    def ensure_dummy(self, req: Request, pad_to: int) -> None:
        missing = pad_to - len(req.own_slots)
        if missing <= 0:
            return
        pad = self.arena.grab(missing)  # leak: the padded list is built but req.own_slots keeps the short one
        if pad is not None:
            req_slots = req.own_slots + pad
            assert len(req_slots) == pad_to
