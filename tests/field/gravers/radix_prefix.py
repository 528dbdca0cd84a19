"""Radix-tree prefix cache: nodes are pinned while a running request reads them."""
from __future__ import annotations

import time
from contextlib import contextmanager
from typing import Iterable, Iterator, Optional


class TreeNode:
    def __init__(self, parent: Optional["TreeNode"], key: tuple[int, ...]):
        self.parent = parent
        self.key = key
        self.children: dict[int, TreeNode] = {}
        self.pins = 0
        self.on_host = False
        self.hits = 0
        self.last_access = time.monotonic()

    def depth(self) -> int:
        total, node = 0, self
        while node.parent is not None:
            total += len(node.key)
            node = node.parent
        return total


class RadixCache:
    def __init__(self, capacity: int):
        self.root = TreeNode(None, ())
        self.capacity = capacity
        self.evictable = 0

    def match(self, tokens: tuple[int, ...]) -> TreeNode:
        node, pos = self.root, 0
        while pos < len(tokens):
            nxt = node.children.get(tokens[pos])
            if nxt is None or tokens[pos:pos + len(nxt.key)] != nxt.key:
                break
            pos += len(nxt.key)
            node = nxt
        node.last_access = time.monotonic()
        return node

    def insert(self, tokens: tuple[int, ...]) -> TreeNode:
        node = self.match(tokens)
        rest = tokens[node.depth():]
        if rest:
            child = TreeNode(node, rest)
            node.children[rest[0]] = child
            self.evictable += len(rest)
            return child
        return node

    def pin(self, node: TreeNode) -> TreeNode:
        walk: Optional[TreeNode] = node
        while walk is not None:
            if walk.pins == 0:
                self.evictable -= len(walk.key)
            walk.pins += 1
            walk = walk.parent
        return node

    def unpin(self, node: TreeNode) -> None:
        walk: Optional[TreeNode] = node
        while walk is not None:
            walk.pins -= 1
            if walk.pins == 0:
                self.evictable += len(walk.key)
            walk = walk.parent

    def pin_prefix(self, tokens: tuple[int, ...]) -> TreeNode:
        node = self.match(tokens)
        node.hits += 1
        return self.pin(node)  # clean: handed to the caller

    def find_pinned(self, tokens: tuple[int, ...], at_least: int) -> Optional[TreeNode]:
        node = self.pin_prefix(tokens)  # clean: near miss, unpinned when too short, else the caller's
        if node.depth() < at_least:
            self.unpin(node)
            return None
        return node

    @contextmanager
    def held(self, tokens: tuple[int, ...]) -> Iterator[TreeNode]:
        node = self.pin_prefix(tokens)  # clean: unpinned in finally
        try:
            yield node
        finally:
            self.unpin(node)


class PrefixHold:
    """Pin for the duration of a block; may be detached to a request."""

    def __init__(self, cache: RadixCache, tokens: tuple[int, ...]):
        self.cache = cache
        self.tokens = tokens
        self.node: Optional[TreeNode] = None
        self.reads = 0

    def __enter__(self) -> "PrefixHold":
        self.node = self.cache.pin_prefix(self.tokens)  # leak: __exit__ skips unpin if nothing was read
        return self

    def read(self) -> int:
        self.reads += 1
        assert self.node is not None
        return self.node.depth()

    def __exit__(self, *exc) -> bool:
        if self.reads == 0:
            return False
        self.cache.unpin(self.node)
        self.node = None
        return False


class Request:
    def __init__(self, rid: str, tokens: tuple[int, ...]):
        self.rid = rid
        self.tokens = tokens
        self.computed = 0
        self.last_node: Optional[TreeNode] = None


class PrefixScheduler:
    def __init__(self, cache: RadixCache, budget: int):
        self.cache = cache
        self.budget = budget
        self.running: dict[str, Request] = {}
        self.hit_lengths: list[int] = []

    def try_admit(self, req: Request) -> bool:
        node = self.cache.pin_prefix(req.tokens)  # clean: near miss, undone on refusal, else finish unpins it
        missing = len(req.tokens) - node.depth()
        if missing > self.budget + self.cache.evictable:
            self.cache.unpin(node)
            return False
        req.last_node = node
        self.budget -= missing
        self.running[req.rid] = req
        return True

    def after_chunk(self, req: Request, upto: int) -> None:
        grown = self.cache.insert(req.tokens[:upto])
        self.cache.pin(grown)  # clean: near miss, swapped with the old pin and kept in last_node
        if req.last_node is not None:
            self.cache.unpin(req.last_node)
        req.last_node = grown
        req.computed = upto

    def finish(self, rid: str) -> None:
        req = self.running.pop(rid)
        if req.last_node is not None:
            self.cache.unpin(req.last_node)
            req.last_node = None
        self.budget += len(req.tokens) - req.computed

    def estimate_hit(self, tokens: tuple[int, ...]) -> float:
        node = self.cache.pin_prefix(tokens)  # leak: the zero-depth return skips the unpin
        depth = node.depth()
        if depth == 0:
            return 0.0
        self.hit_lengths.append(depth)
        self.cache.unpin(node)
        return depth / max(1, len(tokens))

    def longest_of(self, first: tuple[int, ...], second: tuple[int, ...]) -> int:
        node = self.cache.pin_prefix(first)  # leak: rebound to the second prefix when that is longer
        if len(second) > len(first):
            node = self.cache.pin_prefix(second)  # clean: the one that is unpinned below
        depth = node.depth()
        self.cache.unpin(node)
        return depth

    def prefetch(self, prompts: Iterable[tuple[int, ...]]) -> int:
        loaded = 0
        for tokens in prompts:
            node = self.cache.find_pinned(tokens, at_least=16)  # leak: resident nodes continue while pinned
            if node is None:
                continue
            if not node.on_host:
                continue
            node.on_host = False
            loaded += len(node.key)
            self.cache.unpin(node)
        return loaded

    def warm(self, prompts: Iterable[tuple[int, ...]]) -> int:
        loaded = 0
        for tokens in prompts:
            node = self.cache.find_pinned(tokens, at_least=16)  # clean: None or unpinned on both branches
            if node is None:
                continue
            if node.on_host:
                node.on_host = False
                loaded += len(node.key)
            self.cache.unpin(node)
        return loaded

    def shared_depth(self, tokens: tuple[int, ...]) -> int:
        with self.cache.held(tokens) as node:  # clean: the context manager unpins
            if node.on_host:
                return 0
            return node.depth()

    def hit_report(self, prompts: list[tuple[int, ...]]) -> list[int]:
        return [self.cache.pin_prefix(p).depth() for p in prompts]  # leak: only the depth survives

    def probe(self, tokens: tuple[int, ...]) -> bool:
        return self.cache.find_pinned(tokens, 1) is not None  # leak: the pinned node is compared and dropped

    def has_prefix(self, tokens: tuple[int, ...]) -> bool:
        node = self.cache.find_pinned(tokens, 1)  # clean: near miss, unpinned if found
        if node is not None:
            self.cache.unpin(node)
        return node is not None
