"""Prefix cache whose nodes carry reference counts."""
from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Iterator, Optional


@dataclass
class PrefixNode:
    key: tuple[int, ...]
    parent: Optional["PrefixNode"] = None
    children: dict[int, "PrefixNode"] = field(default_factory=dict)
    holders: int = 0


class PrefixTree:
    """Nodes with holders > 0 survive eviction."""

    def __init__(self) -> None:
        self.root = PrefixNode(())

    def match(self, tokens: tuple[int, ...]) -> tuple[PrefixNode, int]:
        """Longest cached prefix; the node comes back held."""
        node, used = self.root, 0
        while used < len(tokens) and tokens[used] in node.children:
            node = node.children[tokens[used]]
            used += len(node.key)
        node.holders += 1
        return node, used

    def graft(self, under: PrefixNode, key: tuple[int, ...]) -> PrefixNode:
        """Add a child below a node; the child comes back held."""
        child = under.children.setdefault(key[0], PrefixNode(key, under))
        child.holders += 1
        return child

    def let_go(self, node: PrefixNode) -> None:
        node.holders -= 1

    @contextlib.contextmanager
    def holding(self, tokens: tuple[int, ...]) -> Iterator[PrefixNode]:
        node, _ = self.match(tokens)  # clean: finally lets go
        try:
            yield node
        finally:
            self.let_go(node)


@dataclass
class PrefillJob:
    tokens: tuple[int, ...]
    node: Optional[PrefixNode] = None
    cached: int = 0


class PrefillPlanner:
    """Ties jobs to the nodes they read from."""

    def __init__(self, tree: PrefixTree, min_hit: int) -> None:
        self.tree = tree
        self.min_hit = min_hit
        self.live: dict[int, PrefillJob] = {}

    def start(self, job_id: int, job: PrefillJob) -> None:
        if job_id in self.live:
            return
        job.node, job.cached = self.tree.match(job.tokens)  # clean: job goes into live, finish lets go
        self.live[job_id] = job

    def advance(self, job: PrefillJob, chunk: tuple[int, ...]) -> None:
        previous = job.node
        job.node = self.tree.graft(previous, chunk)  # clean: near miss, previous node is let go on the next line
        self.tree.let_go(previous)
        job.cached += len(chunk)

    def advance_all(self, chunks: dict[int, tuple[int, ...]]) -> None:
        for job_id, chunk in chunks.items():
            job = self.live[job_id]
            job.node = self.tree.graft(job.node, chunk)  # leak: the hold on the previous node is overwritten
            job.cached += len(chunk)

    def finish(self, job_id: int) -> None:
        job = self.live.pop(job_id)
        if job.node is not None:
            self.tree.let_go(job.node)
            job.node = None

    def cached_tokens(self, tokens: tuple[int, ...]) -> int:
        return self.tree.match(tokens)[1]  # leak: only the length is kept, the held node is dropped

    def worth_caching(self, tokens: tuple[int, ...]) -> bool:
        node, used = self.tree.match(tokens)  # clean: near miss, let go before either answer
        self.tree.let_go(node)
        if used < self.min_hit:
            return False
        return used < len(tokens)

    def batch_savings(self, prompts: list[tuple[int, ...]]) -> int:
        saved = 0
        for tokens in prompts:
            node, used = self.tree.match(tokens)  # leak: small hits continue past let_go
            if used < self.min_hit:
                continue
            saved += used
            self.tree.let_go(node)
        return saved

    def depth_of(self, tokens: tuple[int, ...]) -> int:
        with self.tree.holding(tokens) as node:  # clean: context manager lets go
            depth = 0
            while node.parent is not None:
                node, depth = node.parent, depth + 1
            return depth

    def snapshot(self, prompts: list[tuple[int, ...]]) -> list[int]:
        held: list[PrefixNode] = []
        try:
            for tokens in prompts:
                held.append(self.tree.match(tokens)[0])  # clean: near miss, the finally walks the whole list
            return [len(node.key) for node in held]
        finally:
            for node in held:
                self.tree.let_go(node)


def pick_replica(trees: list[PrefixTree], tokens: tuple[int, ...]) -> Optional[int]:
    """Index of the replica with the longest hit."""
    best, best_node, best_used = None, None, 0
    for index, tree in enumerate(trees):
        node, used = tree.match(tokens)  # leak: losing nodes and replaced bests stay held
        if used > best_used:
            best, best_node, best_used = index, node, used
    if best_node is not None:
        trees[best].let_go(best_node)
    return best


def pick_tree(trees: list[PrefixTree], tokens: tuple[int, ...]) -> Optional[tuple[PrefixTree, PrefixNode]]:
    """Tree with the longest hit, its node held for the caller."""
    best: Optional[tuple[PrefixTree, PrefixNode]] = None
    best_used = -1
    for tree in trees:
        node, used = tree.match(tokens)  # clean: near miss, loser is let go in both branches
        if used <= best_used:
            tree.let_go(node)
            continue
        if best is not None:
            best[0].let_go(best[1])
        best, best_used = (tree, node), used
    return best
