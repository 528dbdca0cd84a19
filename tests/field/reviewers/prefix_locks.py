"""A radix-like prefix cache whose nodes are locked while requests use them."""
from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Node:
    tokens: tuple[int, ...] = ()
    parent: "Node | None" = None
    children: dict[int, "Node"] = field(default_factory=dict)
    lock_ref: int = 0
    slots: list[int] = field(default_factory=list)


class PrefixTree:
    def __init__(self):
        self.root = Node(lock_ref=1)

    def find(self, tokens: list[int]) -> Node:
        node, i = self.root, 0
        while i < len(tokens):
            child = node.children.get(tokens[i])
            if child is None or tuple(tokens[i : i + len(child.tokens)]) != child.tokens:
                break
            node, i = child, i + len(child.tokens)
        return node

    def insert(self, tokens: list[int], slots: list[int]) -> Node:
        node = self.find(tokens)
        depth = self.depth(node)
        if depth == len(tokens):
            return node
        leaf = Node(tuple(tokens[depth:]), node, slots=slots[depth:])
        node.children[tokens[depth]] = leaf
        return leaf

    def depth(self, node: Node) -> int:
        n = 0
        while node.parent is not None:
            n += len(node.tokens)
            node = node.parent
        return n

    def inc_lock(self, node: Node) -> None:
        while node is not None:
            node.lock_ref += 1
            node = node.parent

    def dec_lock(self, node: Node) -> None:
        while node is not None:
            node.lock_ref -= 1
            node = node.parent

    def match_and_lock(self, tokens: list[int]) -> Node:
        """Find the longest prefix; the caller unlocks it with dec_lock()."""
        node = self.find(tokens)
        self.inc_lock(node)  # clean: near miss, the locked node is returned to the caller
        return node


@dataclass
class Req:
    rid: int
    tokens: list[int]
    last_node: Node | None = None
    no_cache: bool = False
    slots: list[int] = field(default_factory=list)


class PrefixScheduler:
    def __init__(self, tree: PrefixTree, max_running: int):
        self.tree = tree
        self.max_running = max_running
        self.running: list[Req] = []

    def start(self, req: Req) -> bool:
        req.last_node = self.tree.match_and_lock(req.tokens)  # leak: a full batch returns False, the next start() overwrites the locked node
        if len(self.running) >= self.max_running:
            return False
        self.running.append(req)
        return True

    def start_checked(self, req: Req) -> bool:
        if req.last_node is not None:
            return False
        node = self.tree.match_and_lock(req.tokens)  # clean: near miss, unlocked when the batch is full
        if len(self.running) >= self.max_running:
            self.tree.dec_lock(node)
            return False
        req.last_node = node
        self.running.append(req)
        return True

    def cache_unfinished(self, req: Req) -> None:
        """After a prefill chunk: move the request's lock to the longer prefix."""
        new = self.tree.insert(req.tokens, req.slots)
        self.tree.inc_lock(new)  # clean: near miss, the old lock is dropped and finish() drops this one
        if req.last_node is not None:
            self.tree.dec_lock(req.last_node)
        req.last_node = new

    def extend(self, req: Req, more: list[int]) -> None:
        req.tokens = req.tokens + more
        new = self.tree.insert(req.tokens, req.slots)
        self.tree.inc_lock(new)  # leak: replaces req.last_node, whose lock is never dropped
        req.last_node = new

    def finish(self, req: Req) -> None:
        self.running.remove(req)
        if req.last_node is None:
            return
        self.tree.dec_lock(req.last_node)
        req.last_node = None

    def cached_len(self, tokens: list[int]) -> int:
        node = self.tree.match_and_lock(tokens)  # leak: a pure query which never unlocks
        return self.tree.depth(node)

    def cached_ratio(self, tokens: list[int]) -> float:
        node = self.tree.match_and_lock(tokens)  # clean: unlocked before the return
        n = self.tree.depth(node)
        self.tree.dec_lock(node)
        return n / max(1, len(tokens))

    def order_by_prefix(self, waiting: list[Req]) -> list[Req]:
        scored = []
        for req in waiting:
            node = self.tree.match_and_lock(req.tokens)  # clean: every locked node is in `scored` and unlocked below
            scored.append((self.tree.depth(node), req, node))
        scored.sort(key=lambda s: -s[0])
        for _, _, node in scored:
            self.tree.dec_lock(node)
        return [req for _, req, _ in scored]

    def pick(self, waiting: list[Req]) -> Req | None:
        for req in waiting:
            node = self.tree.match_and_lock(req.tokens)  # leak: requests with no_cache go round the loop with the node locked
            if req.no_cache:
                continue
            if node is self.tree.root:
                self.tree.dec_lock(node)
                continue
            req.last_node = node
            self.running.append(req)
            return req
        return None

    def hold(self, req: Req, seconds: float, wait) -> bool:
        node = self.tree.match_and_lock(req.tokens)  # clean: near miss, both arms unlock
        if wait(seconds):
            self.tree.dec_lock(node)
            return True
        else:
            self.tree.dec_lock(node)
        return False
