"""Radix prefix cache. Nodes are ref counted; a node with refs cannot be evicted."""
import heapq
import time
from typing import Dict, List, Optional, Tuple


class Node:
    __slots__ = ("key", "value", "children", "parent", "refs", "last")

    def __init__(self, key: Tuple[int, ...] = (), value: Optional[List[int]] = None, parent=None):
        self.key = key
        self.value = value or []
        self.children: Dict[int, "Node"] = {}
        self.parent = parent
        self.refs = 0
        self.last = time.monotonic()

    def inc_ref(self):
        self.refs += 1

    def dec_ref(self):
        assert self.refs > 0
        self.refs -= 1

    def __lt__(self, other):
        return self.last < other.last


class Request:
    def __init__(self, rid: str, tokens: List[int]):
        self.rid = rid
        self.tokens = tokens
        self.node: Optional[Node] = None
        self.cached = 0
        self.draft_node: Optional[Node] = None


class RadixCache:
    def __init__(self, page: int = 16):
        self.page = page
        self.root = Node()

    def lookup(self, tokens) -> Tuple[Node, int]:
        node, pos = self.root, 0
        while pos < len(tokens):
            child = node.children.get(tokens[pos])
            if child is None or tuple(tokens[pos:pos + len(child.key)]) != child.key:
                break
            node, pos = child, pos + len(child.key)
            node.last = time.monotonic()
        return node, pos

    def lock_path(self, node: Node) -> int:
        n = 0
        while node is not self.root:
            node.inc_ref()  # clean: unlock_path() walks the same way down to the root
            n += len(node.value)
            node = node.parent
        return n

    def unlock_path(self, node: Node) -> None:
        while node is not self.root:
            node.dec_ref()
            node = node.parent

    def evictable(self):
        stack, out = [self.root], []
        while stack:
            n = stack.pop()
            stack.extend(n.children.values())
            if n is not self.root and not n.children and n.refs == 0:
                out.append(n)
        heapq.heapify(out)
        return out

    # -- request side ---------------------------------------------------
    def attach(self, req: Request) -> int:
        assert req.node is None
        node, hit = self.lookup(req.tokens)
        self.lock_path(node)  # clean: the request carries the node, detach() unlocks
        req.node = node
        req.cached = hit
        return hit

    def detach(self, req: Request) -> None:
        if req.node is not None:
            self.unlock_path(req.node)
            req.node = None
        if req.draft_node is not None:
            self.unlock_path(req.draft_node)
            req.draft_node = None

    def reattach(self, req: Request) -> int:
        """Called after the request has grown."""
        node, hit = self.lookup(req.tokens)
        self.lock_path(node)  # clean: near miss, the old node is unlocked after the new one was locked
        if req.node is not None:
            self.unlock_path(req.node)
        req.node = node
        req.cached = hit
        return hit

    def fast_forward(self, req: Request, draft: List[int]) -> int:
        node, hit = self.lookup(req.tokens + draft)
        if hit <= req.cached:
            return 0
        self.lock_path(node)  # leak: the draft node of the step before is overwritten while locked
        req.draft_node = node
        return hit - req.cached

    def match_length(self, tokens: List[int], min_hit: int) -> int:
        node, hit = self.lookup(tokens)
        self.lock_path(node)  # leak: short hits return before the unlock
        if hit < min_hit:
            return 0
        usable = hit - hit % self.page
        self.unlock_path(node)
        return usable

    def copy_indices(self, tokens: List[int]) -> List[int]:
        node, hit = self.lookup(tokens)
        self.lock_path(node)  # clean: near miss, finally runs for the early return as well
        try:
            if hit == 0:
                return []
            out: List[int] = []
            cur = node
            while cur is not self.root:
                out[:0] = cur.value
                cur = cur.parent
            return out
        finally:
            self.unlock_path(node)

    def insert(self, tokens: List[int], slots: List[int]) -> Optional[Node]:
        node, pos = self.lookup(tokens)
        if pos == len(tokens):
            return None
        fresh = Node(tuple(tokens[pos:]), slots[pos:], node)
        node.children[tokens[pos]] = fresh
        return fresh

    def insert_pinned(self, tokens: List[int], slots: List[int]) -> bool:
        leaf = self.insert(tokens, slots)
        if leaf is None:
            return False
        leaf.inc_ref()  # leak: the pinned leaf is remembered by nobody who would lower its count
        return True

    def touch(self, tokens: List[int]) -> None:
        node, _ = self.lookup(tokens)
        if node is self.root:
            return
        node.inc_ref()  # clean: lowered again right below
        node.last = time.monotonic()
        node.dec_ref()


class PrefixWarmer:
    def __init__(self, cache: RadixCache):
        self.cache = cache
        self.held: Dict[str, Node] = {}

    def hold(self, name: str, tokens: List[int]) -> None:
        self.drop(name)
        node, _ = self.cache.lookup(tokens)
        self.cache.lock_path(node)  # clean: near miss, a name in use was dropped first, drop() unlocks
        self.held[name] = node

    def drop(self, name: str) -> None:
        node = self.held.pop(name, None)
        if node is not None:
            self.cache.unlock_path(node)

    def hold_all(self, prompts: List[List[int]]) -> List[Node]:
        nodes = []
        for p in prompts:
            node, hit = self.cache.lookup(p)
            self.cache.lock_path(node)  # leak: nodes without a hit are skipped while locked
            if hit == 0:
                continue
            nodes.append(node)
        for node in nodes:
            self.cache.unlock_path(node)
        return nodes
