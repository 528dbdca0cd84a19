"""Prefix cache with pinned nodes: requests hold pins on the path that they read."""
from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field


@dataclass(eq=False)
class Node:
    chunk: tuple[int, ...]
    parent: "Node | None" = None
    pins: int = 0
    hits: int = 0
    children: dict[tuple[int, ...], "Node"] = field(default_factory=dict)


class PrefixCache:
    def __init__(self, chunk: int) -> None:
        self.chunk = chunk
        self.root = Node(())

    def insert(self, tokens: list[int]) -> None:
        node = self.root
        for i in range(0, len(tokens) - self.chunk + 1, self.chunk):
            key = tuple(tokens[i: i + self.chunk])
            node = node.children.setdefault(key, Node(key, node))

    def pin_path(self, tokens: list[int]) -> list[Node]:
        path: list[Node] = []
        node = self.root
        for i in range(0, len(tokens) - self.chunk + 1, self.chunk):
            child = node.children.get(tuple(tokens[i: i + self.chunk]))
            if child is None:
                break
            child.pins += 1
            path.append(child)
            node = child
        return path

    def pin(self, node: Node) -> Node:
        node.pins += 1
        return node

    def unpin(self, node: Node) -> None:
        node.pins -= 1

    def unpin_all(self, nodes: list[Node]) -> None:
        for node in nodes:
            self.unpin(node)

    def evict(self) -> int:
        removed, stack = 0, [self.root]
        while stack:
            node = stack.pop()
            for key, child in list(node.children.items()):
                if not child.pins and not child.children:
                    del node.children[key]
                    removed += 1
                else:
                    stack.append(child)
        return removed


@dataclass
class Turn:
    prompt: list[int]
    path: list[Node]
    anchor: Node | None = None


class Conversations:
    def __init__(self, cache: PrefixCache, window: int) -> None:
        self.cache = cache
        self.window = window
        self.turns: dict[str, deque[Turn]] = {}
        self.leases: dict[str, list[Node]] = {}
        self.trail: deque[list[Node]] = deque()
        self.hot: Counter[tuple[int, ...]] = Counter()

    def begin(self, cid: str, prompt: list[int]) -> int:
        path = self.cache.pin_path(prompt)  # clean: near miss, unpinned when the turn slides out and in end
        tip = path[-1] if path else self.cache.root
        anchor = self.cache.pin(tip)  # leak: a turn that slides out has its path unpinned, not this
        turns = self.turns.setdefault(cid, deque())
        turns.append(Turn(prompt, path, anchor))
        while len(turns) > self.window:
            gone = turns.popleft()
            self.cache.unpin_all(gone.path)
        return len(path)

    def end(self, cid: str) -> int:
        turns = self.turns.pop(cid, deque())
        n = len(turns)
        while turns:
            turn = turns.pop()
            self.cache.unpin_all(turn.path)
            if turn.anchor is not None:
                self.cache.unpin(turn.anchor)
        return n

    def reuse(self, tokens: list[int], limit: int) -> list[tuple[int, ...]]:
        matched = self.cache.pin_path(tokens)  # leak: nodes behind the limit are cut off before the unpin
        matched = matched[:limit]
        chunks = [node.chunk for node in matched]
        self.cache.unpin_all(matched)
        return chunks

    def reuse_tail(self, tokens: list[int], limit: int) -> list[tuple[int, ...]]:
        matched = self.cache.pin_path(tokens)  # clean: near miss, sliced for reading, unpinned as a whole
        tail = matched[-limit:]
        chunks = [node.chunk for node in tail]
        self.cache.unpin_all(matched)
        return chunks

    def lease(self, rid: str, tokens: list[int]) -> int:
        if rid in self.leases:
            return len(self.leases[rid])
        path = self.cache.pin_path(tokens)  # clean: near miss, preempt and extend both unpin what they pop
        self.leases[rid] = path
        return len(path)

    def extend(self, rid: str, tokens: list[int]) -> int:
        longer = self.cache.pin_path(tokens)  # clean: pinned before the old path goes, kept in leases
        self.cache.unpin_all(self.leases.pop(rid, []))
        self.leases[rid] = longer
        return len(longer)

    def preempt(self, rid: str) -> list[int]:
        path = self.leases.pop(rid, [])
        self.cache.unpin_all(path)
        return [token for node in path for token in node.chunk]

    def trace(self, tokens: list[int]) -> None:
        """Pins recent paths so that they outlive an eviction; the oldest are counted."""
        self.trail.append(self.cache.pin_path(tokens))  # leak: the oldest path is popped for the count alone
        if len(self.trail) > self.window:
            oldest = self.trail.popleft()
            self.hot.update(node.chunk for node in oldest)

    def stop_trace(self) -> None:
        while self.trail:
            self.cache.unpin_all(self.trail.pop())

    def popular(self, prompts: list[list[int]]) -> list[tuple[int, ...]]:
        paths = {i: self.cache.pin_path(p) for i, p in enumerate(prompts)}  # clean: near miss, all unpinned
        best = max(paths.values(), key=len, default=[])
        chunks = [node.chunk for node in best]
        for path in paths.values():
            for node in path:
                node.hits += 1
            self.cache.unpin_all(path)
        return chunks
