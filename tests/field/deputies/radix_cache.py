"""Prefix cache on a radix tree: nodes own token slots, requests lock the path they use."""
from __future__ import annotations

import heapq
import time
from dataclasses import dataclass, field
from typing import Callable, Sequence


class SlotAllocator:
    """Token-granular KV slots."""

    def __init__(self, size: int) -> None:
        self._free = list(range(size))

    def alloc(self, n: int) -> list[int] | None:
        if n > len(self._free):
            return None
        taken, self._free = self._free[:n], self._free[n:]
        return taken

    def free(self, slots: Sequence[int]) -> None:
        self._free.extend(slots)

    def available(self) -> int:
        return len(self._free)


@dataclass(eq=False)
class Node:
    key: tuple[int, ...] = ()
    slots: list[int] = field(default_factory=list)
    parent: "Node | None" = None
    children: dict[int, "Node"] = field(default_factory=dict)
    locks: int = 0
    used: float = field(default_factory=time.monotonic)

    def __lt__(self, other: "Node") -> bool:
        return self.used < other.used


class RadixTree:
    def __init__(self, alloc: SlotAllocator) -> None:
        self.root = Node(locks=1)
        self.alloc = alloc

    def lock_prefix(self, tokens: Sequence[int]) -> tuple[Node, int]:
        """Longest cached prefix; every node on the path is locked until unlock(node)."""
        node, matched = self.root, 0
        while matched < len(tokens):
            child = node.children.get(tokens[matched])
            if child is None or tuple(tokens[matched : matched + len(child.key)]) != child.key:
                break
            matched += len(child.key)
            node = child
            node.locks += 1
            node.used = time.monotonic()
        return node, matched

    def unlock(self, node: Node) -> None:
        while node is not self.root:
            node.locks -= 1
            node = node.parent

    def insert(self, node: Node, key: tuple[int, ...], slots: list[int]) -> bool:
        """Hands the slots to the tree unless the same edge exists; False leaves them with the caller."""
        if not key or key[0] in node.children:
            return False
        node.children[key[0]] = Node(key, slots, node)
        return True

    def evict(self, want: int) -> int:
        leaves = [n for n in self._walk(self.root) if not n.children and n.locks == 0]
        heapq.heapify(leaves)
        got = 0
        while leaves and got < want:
            leaf = heapq.heappop(leaves)
            self.alloc.free(leaf.slots)
            got += len(leaf.slots)
            parent = leaf.parent
            del parent.children[leaf.key[0]]
            if not parent.children and parent.locks == 0:
                heapq.heappush(leaves, parent)
        return got

    def _walk(self, node: Node):
        for child in node.children.values():
            yield child
            yield from self._walk(child)


@dataclass
class Req:
    rid: str
    tokens: list[int]
    node: Node | None = None
    prefix_len: int = 0
    slots: list[int] = field(default_factory=list)
    scratch: list[int] = field(default_factory=list)


class CacheManager:
    def __init__(self, size: int) -> None:
        self.alloc = SlotAllocator(size)
        self.tree = RadixTree(self.alloc)
        self.reqs: dict[str, Req] = {}

    def _alloc_or_evict(self, n: int) -> list[int] | None:
        slots = self.alloc.alloc(n)  # clean: returned when not None
        if slots is None:
            self.tree.evict(n - self.alloc.available())
            slots = self.alloc.alloc(n)  # clean: near miss, tried again only after a None, returned to the caller
        return slots

    def start(self, rid: str, tokens: list[int]) -> Req | None:
        if rid in self.reqs:
            return None
        req = Req(rid, tokens)
        req.node, req.prefix_len = self.tree.lock_prefix(tokens)  # leak: when no slots can be had the request is dropped with its path locked
        slots = self._alloc_or_evict(len(tokens) - req.prefix_len)  # clean: near miss, None refused, else in req.slots until finish() or cancel()
        if slots is None:
            return None
        req.slots = slots
        self.reqs[rid] = req
        return req

    def start_batch(self, batch: dict[str, list[int]]) -> list[Req]:
        out: list[Req] = []
        for rid, tokens in batch.items():
            if rid in self.reqs:
                continue
            node, matched = self.tree.lock_prefix(tokens)  # clean: near miss, unlocked when slots are short, else moved into the request
            slots = self._alloc_or_evict(len(tokens) - matched)  # clean: near miss, goes into the request, whom finish() or cancel() visit
            if slots is None:
                self.tree.unlock(node)
                break
            req = Req(rid, tokens, node, matched, slots)
            self.reqs[rid] = req
            out.append(req)
        return out

    def extend(self, req: Req, token: int) -> bool:
        got = self._alloc_or_evict(1)  # clean: appended to req.slots, or None
        if got is None:
            return False
        req.slots += got
        req.tokens.append(token)
        return True

    def spec_round(self, k: int, draft: Callable[[Req, int], list[int]], verify: Callable[[Req, list[int]], int | None]) -> None:
        """One round of drafting; verify answers None when the target batch has no room this round."""
        for req in self.reqs.values():
            got = self._alloc_or_evict(k)  # leak: scratch left by a round whose verify answered None is overwritten without a free
            if got is None:
                continue
            req.scratch = got
            drafted = draft(req, k)
            n_ok = verify(req, drafted)
            if n_ok is None:
                continue
            self.accept(req, drafted, n_ok)

    def accept(self, req: Req, drafted: list[int], n_ok: int) -> None:
        req.slots += req.scratch[:n_ok]
        req.tokens += drafted[:n_ok]
        self.alloc.free(req.scratch[n_ok:])
        req.scratch = []

    def finish(self, rid: str) -> None:
        req = self.reqs.pop(rid)
        self.alloc.free(req.scratch)
        req.scratch = []
        key = tuple(req.tokens[req.prefix_len :])
        if not self.tree.insert(req.node, key, req.slots):
            self.alloc.free(req.slots)
        self.tree.unlock(req.node)

    def cancel(self, rid: str) -> None:
        req = self.reqs.pop(rid, None)
        if req is None:
            return
        self.alloc.free(req.scratch)
        self.alloc.free(req.slots)
        self.tree.unlock(req.node)

    def hit_rate(self, prompts: list[list[int]]) -> float:
        hit = total = 0
        for p in prompts:
            _, matched = self.tree.lock_prefix(p)  # leak: the node is thrown away, its path stays locked
            hit += matched
            total += len(p)
        return hit / max(total, 1)

    def seed(self, tokens: list[int]) -> bool:
        """Put a system prompt into the tree ahead of any request."""
        node, matched = self.tree.lock_prefix(tokens)  # clean: near miss, unlocked with slots and without
        rest = tuple(tokens[matched:])
        slots = self.alloc.alloc(len(rest))  # leak: a refused insert leaves the slots here, and they are not freed
        if slots is None:
            self.tree.unlock(node)
            return False
        inserted = self.tree.insert(node, rest, slots)
        self.tree.unlock(node)
        return inserted

    def relock(self, req: Req) -> int:
        """After others have inserted, a waiting request may match more."""
        node, matched = self.tree.lock_prefix(req.tokens)  # clean: near miss, either the new path or the old one is unlocked
        if matched <= req.prefix_len:
            self.tree.unlock(node)
            return 0
        gain = matched - req.prefix_len
        self.tree.unlock(req.node)
        self.alloc.free(req.slots[:gain])
        req.slots = req.slots[gain:]
        req.node, req.prefix_len = node, matched
        return gain
