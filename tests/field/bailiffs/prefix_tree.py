"""Prefix tree over prompt tokens with pinned nodes, and the schedulers that use it."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Optional


@dataclass(eq=False)
class Node:
    key: tuple[int, ...]
    parent: Optional["Node"] = None
    children: dict[int, "Node"] = field(default_factory=dict)
    pins: int = 0
    depth: int = 0


class PrefixTree:
    def __init__(self) -> None:
        self.root = Node(())
        self.protected = 0

    def pin(self, node: Node) -> Node:
        node.pins += 1
        self.protected += len(node.key)
        return node

    def unpin(self, node: Node) -> None:
        node.pins -= 1
        self.protected -= len(node.key)

    def walk(self, tokens: Sequence[int]) -> Node:
        node, pos = self.root, 0
        while pos < len(tokens):
            child = node.children.get(tokens[pos])
            if child is None or tuple(tokens[pos:pos + len(child.key)]) != child.key:
                break
            node, pos = child, pos + len(child.key)
        return node

    def match_pinned(self, tokens: Sequence[int]) -> Optional[Node]:
        node = self.walk(tokens)
        if node is self.root:
            return None
        return self.pin(node)  # clean: handed to the caller

    def pin_path(self, node: Node) -> list[Node]:
        path: list[Node] = []
        while node.parent is not None:
            path.append(self.pin(node))  # clean: the path is handed to the caller
            node = node.parent
        return path

    def evict(self, want: int) -> int:
        freed, stack = 0, [self.root]
        while stack and freed < want:
            node = stack.pop()
            for first, child in list(node.children.items()):
                if not child.children and child.pins == 0:
                    freed += len(child.key)
                    del node.children[first]
                else:
                    stack.append(child)
        return freed


@dataclass
class Request:
    rid: str
    tokens: list[int]
    n: int = 1
    path: list[Node] = field(default_factory=list)
    node: Optional[Node] = None
    output: list[int] = field(default_factory=list)
    done: int = 0


class PathScheduler:
    def __init__(self, tree: PrefixTree) -> None:
        self.tree = tree
        self.running: dict[str, Request] = {}

    def admit(self, req: Request) -> int:
        node = self.tree.walk(req.tokens)
        req.path = self.tree.pin_path(node)  # leak: finish unpins the deepest node only, its parents stay pinned
        self.running[req.rid] = req
        return node.depth

    def finish(self, rid: str) -> list[int]:
        req = self.running.pop(rid)
        if req.path:
            self.tree.unpin(req.path[0])
            req.path = []
        return req.output


class ChunkScheduler:
    def __init__(self, tree: PrefixTree) -> None:
        self.tree = tree
        self.running: dict[str, Request] = {}

    def admit(self, req: Request) -> int:
        node = self.tree.walk(req.tokens)
        req.path = self.tree.pin_path(node)  # clean: near miss, finish unpins the head and then the tail
        self.running[req.rid] = req
        return node.depth

    def finish(self, rid: str) -> list[int]:
        req = self.running.pop(rid)
        if req.path:
            leaf, *parents = req.path
            self.tree.unpin(leaf)
            for node in parents:
                self.tree.unpin(node)
            req.path = []
        return req.output


class SingleNodeScheduler:
    """Pins the deepest matching node for the life of the request."""

    def __init__(self, tree: PrefixTree) -> None:
        self.tree = tree
        self.table: dict[str, Request] = {}
        self.empty = 0

    def admit(self, req: Request) -> bool:
        req.node = self.tree.match_pinned(req.tokens)  # leak: finish unpins only where some output was produced
        self.table[req.rid] = req
        return req.node is not None

    def finish(self, rid: str) -> None:
        req = self.table.pop(rid)
        if not req.output:
            self.empty += 1
            return
        if req.node is not None:
            self.tree.unpin(req.node)


class SampleGroups:
    def __init__(self, tree: PrefixTree) -> None:
        self.tree = tree
        self.groups: dict[str, Request] = {}
        self.beams: dict[str, Request] = {}

    def start(self, req: Request) -> None:
        req.node = self.tree.walk(req.tokens)
        for _ in range(req.n):
            self.tree.pin(req.node)  # clean: near miss, one unpin with each finished sample
        self.groups[req.rid] = req

    def sample_done(self, rid: str) -> bool:
        req = self.groups[rid]
        self.tree.unpin(req.node)
        req.done += 1
        if req.done == req.n:
            del self.groups[rid]
            return True
        return False

    def start_beams(self, req: Request, width: int) -> None:
        req.n = width
        req.node = self.tree.walk(req.tokens)
        for _ in range(width):
            self.tree.pin(req.node)  # leak: pinned once per beam, unpinned once per request
        self.beams[req.rid] = req

    def beams_done(self, rid: str) -> list[int]:
        req = self.beams.pop(rid)
        self.tree.unpin(req.node)
        return req.output


def estimate_hit(tree: PrefixTree, tokens: Sequence[int], min_hit: int) -> int:
    node = tree.match_pinned(tokens)  # leak: a hit shorter than min_hit returns with the pin
    if node is None:
        return 0
    if node.depth < min_hit:
        return 0
    hit = min(node.depth, len(tokens) - 1)
    tree.unpin(node)
    return hit


def estimate_hits(tree: PrefixTree, prompts: Sequence[Sequence[int]], min_hit: int) -> list[int]:
    hits: list[int] = []
    for tokens in prompts:
        if (node := tree.match_pinned(tokens)) is None:  # clean: near miss, unpinned before the short hit is skipped
            hits.append(0)
            continue
        depth = node.depth
        tree.unpin(node)
        if depth < min_hit:
            hits.append(0)
            continue
        hits.append(min(depth, len(tokens) - 1))
    return hits


def hold_while_evicting(tree: PrefixTree, prompts: list[list[int]], want: int, limit: int) -> int:
    held = [n for p in prompts if (n := tree.match_pinned(p)) is not None]  # leak: those beyond limit keep the pin
    freed = tree.evict(want)
    for node, _ in zip(held, range(limit)):
        tree.unpin(node)
    return freed


def hold_first_while_evicting(tree: PrefixTree, prompts: list[list[int]], want: int, limit: int) -> int:
    held = [n for p in prompts[:limit] if (n := tree.match_pinned(p)) is not None]  # clean: near miss, all unpinned
    freed = tree.evict(want)
    for node, _ in zip(held, range(limit)):
        tree.unpin(node)
    return freed
