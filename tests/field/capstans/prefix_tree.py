"""Radix prefix cache over a flat token-slot pool, with pins on the path to the root."""
from __future__ import annotations

import functools
import heapq
import itertools
from concurrent.futures import Future
from typing import Callable, Iterator

import torch


class TokenSlots:
    def __init__(self, size: int, device: str = "cuda") -> None:
        self.device = device
        self.free_slots = torch.arange(size, dtype=torch.int64, device=device)

    def available(self) -> int:
        return int(self.free_slots.numel())

    def carve(self, n: int) -> torch.Tensor | None:
        if n > self.free_slots.numel():
            return None
        picked = self.free_slots[:n]
        self.free_slots = self.free_slots[n:]
        return picked

    def put_back(self, idx: torch.Tensor) -> None:
        if idx.numel():
            self.free_slots = torch.cat([self.free_slots, idx])


class Node:
    _ids = itertools.count()

    def __init__(self, parent: "Node | None", key: tuple[int, ...], value: torch.Tensor | None) -> None:
        self.uid = next(Node._ids)
        self.parent = parent
        self.key = key
        self.value = value
        self.children: dict[int, Node] = {}
        self.pins = 0
        self.stamp = 0


class Req:
    def __init__(self, rid: str, tokens: list[int]) -> None:
        self.rid = rid
        self.tokens = tokens
        self.slots: torch.Tensor | None = None
        self.node: Node | None = None
        self.chunked = False


class PrefixTree:
    def __init__(self, slots: TokenSlots) -> None:
        self.slots = slots
        self.root = Node(None, (), None)
        self.clock = itertools.count()

    def match(self, tokens: list[int]) -> tuple[int, Node]:
        node, pos = self.root, 0
        while pos < len(tokens):
            child = node.children.get(tokens[pos])
            if child is None or tuple(tokens[pos:pos + len(child.key)]) != child.key:
                break
            pos += len(child.key)
            node = child
            node.stamp = next(self.clock)
        return pos, node

    def pin(self, node: Node) -> Node:
        cur: Node | None = node
        while cur is not None:
            cur.pins += 1
            cur = cur.parent
        return node

    def unpin(self, node: Node) -> None:
        cur: Node | None = node
        while cur is not None:
            cur.pins -= 1
            cur = cur.parent

    def match_and_pin(self, tokens: list[int]) -> tuple[int, Node]:
        hit, node = self.match(tokens)
        self.pin(node)  # clean: returned pinned to the caller
        return hit, node

    def graft(self, node: Node, key: list[int], value: torch.Tensor) -> bool:
        """Takes over value; the slots belong to the tree afterwards unless False."""
        if not key or key[0] in node.children:
            return False
        node.children[key[0]] = Node(node, tuple(key), value)
        return True

    def evict(self, want: int) -> int:
        leaves: list[tuple[int, int, Node]] = []
        stack = [self.root]
        while stack:
            n = stack.pop()
            stack.extend(n.children.values())
            if not n.children and n.pins == 0 and n is not self.root:
                leaves.append((n.stamp, n.uid, n))
        heapq.heapify(leaves)
        got = 0
        while leaves and got < want:
            _, _, n = heapq.heappop(leaves)
            self.slots.put_back(n.value)
            got += len(n.key)
            del n.parent.children[n.key[0]]
        return got


class PrefillPlanner:
    def __init__(self, tree: PrefixTree, slots: TokenSlots, submit: Callable[..., Future]) -> None:
        self.tree = tree
        self.slots = slots
        self.submit = submit
        self.running: dict[str, Req] = {}

    def admit(self, req: Req) -> bool:
        if req.rid in self.running:
            return True
        hit, node = self.tree.match_and_pin(req.tokens)  # leak: stays pinned when no slots are available
        need = len(req.tokens) - hit
        fresh = self.slots.carve(need)  # clean: moved into req.slots, given back by finish()
        if fresh is None:
            return False
        req.slots, req.node = fresh, node
        self.running[req.rid] = req
        return True

    def admit_evicting(self, req: Req) -> bool:
        if req.rid in self.running:
            return True
        hit, node = self.tree.match_and_pin(req.tokens)  # clean: unpinned on failure, else moved into req.node
        need = len(req.tokens) - hit
        fresh = self.slots.carve(need)  # clean: near miss, rebound below only when it is None
        if fresh is None:
            self.tree.evict(need)
            fresh = self.slots.carve(need)  # clean: moved into req.slots
        if fresh is None:
            self.tree.unpin(node)
            return False
        req.slots, req.node = fresh, node
        self.running[req.rid] = req
        return True

    def finish(self, req: Req) -> None:
        self.running.pop(req.rid, None)
        if req.slots is not None:
            tail = req.tokens[-req.slots.numel():] if req.slots.numel() else []
            if not self.tree.graft(req.node, tail, req.slots):
                self.slots.put_back(req.slots)
            req.slots = None
        if req.node is not None:
            self.tree.unpin(req.node)
            req.node = None

    def next_chunk(self, req: Req, chunk: int) -> bool:
        part = self.slots.carve(chunk)  # leak: dropped when the request was aborted in the meantime
        if part is None:
            return False
        if req.rid not in self.running:
            return False
        req.slots = torch.cat([req.slots, part])
        req.chunked = True
        return True

    def warm(self, prompts: list[list[int]], fill: Callable[[list[int], torch.Tensor], bool]) -> int:
        done = 0
        for toks in prompts:
            hit, node = self.tree.match(toks)
            rest = toks[hit:]
            if not rest:
                continue
            idx = self.slots.carve(len(rest))  # leak: continue after a failed fill skips put_back
            if idx is None:
                break
            if not fill(rest, idx):
                continue
            if not self.tree.graft(node, rest, idx):
                self.slots.put_back(idx)
                continue
            done += 1
        return done

    def score_prompt(self, toks: list[int], run: Callable[[torch.Tensor], float]) -> float | None:
        idx = self.slots.carve(len(toks))  # clean: given back in finally once checked
        if idx is None:
            return None
        try:
            return run(idx)
        finally:
            self.slots.put_back(idx)

    def prefetch(self, req: Req) -> Future:
        node = self.tree.pin(self.tree.match(req.tokens)[1])  # clean: near miss, unpinned by the future's callback
        fut = self.submit(node)
        fut.add_done_callback(functools.partial(self._prefetched, node))
        return fut

    def _prefetched(self, node: Node, _fut: Future) -> None:
        self.tree.unpin(node)

    def prefetch_host(self, req: Req, host_len: int) -> Future | None:
        hit, node = self.tree.match_and_pin(req.tokens)  # leak: not unpinned when the host tier has nothing more
        if host_len <= hit:
            return None
        fut = self.submit(node, hit, host_len)
        fut.add_done_callback(lambda _f: self.tree.unpin(node))
        return fut

    def walk_pinned(self, batch: list[Req]) -> Iterator[Node]:
        for req in batch:
            _, node = self.tree.match_and_pin(req.tokens)  # clean: unpinned in finally after each yield
            try:
                yield node
            finally:
                self.tree.unpin(node)

    def longest_shared(self, batch: list[Req]) -> int:
        best = 0
        for req in batch:
            hit, node = self.tree.match_and_pin(req.tokens)  # leak: a hit of zero returns at once with the root pinned
            if hit == 0:
                return 0
            best = max(best, hit)
            self.tree.unpin(node)
        return best
