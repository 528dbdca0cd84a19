"""Radix tree over token prefixes, with pinned paths for running requests."""
from __future__ import annotations

import heapq
import itertools
import time
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


class TokenSlots:
    """Flat KV slots, handed out as index tensors."""

    def __init__(self, size: int, device: str = "cpu"):
        self.size = size
        self.free_slots = torch.arange(size, dtype=torch.int64, device=device)

    def alloc(self, n: int) -> torch.Tensor | None:
        if n > self.free_slots.numel():
            return None
        head, self.free_slots = self.free_slots[:n], self.free_slots[n:]
        return head

    def free(self, idx: torch.Tensor) -> None:
        if idx.numel():
            self.free_slots = torch.cat((self.free_slots, idx))


class Node:
    __slots__ = ("key", "value", "children", "parent", "pins", "touched")

    def __init__(self, key: tuple, value: torch.Tensor, parent: "Node | None"):
        self.key = key
        self.value = value
        self.parent = parent
        self.children: dict[int, Node] = {}
        self.pins = 0
        self.touched = time.monotonic()


def _common(a: tuple, b: tuple) -> int:
    n = 0
    for x, y in zip(a, b):
        if x != y:
            break
        n += 1
    return n


class PrefixTree:
    def __init__(self, slots: TokenSlots):
        self.slots = slots
        self.root = Node((), torch.empty(0, dtype=torch.int64), None)

    def _walk(self, tokens: list[int]) -> tuple[list[torch.Tensor], Node, int]:
        node, pos, values = self.root, 0, []
        while pos < len(tokens):
            child = node.children.get(tokens[pos])
            if child is None:
                break
            n = _common(child.key, tuple(tokens[pos:]))
            if n < len(child.key):
                child = self._split(child, n)
            child.touched = time.monotonic()
            values.append(child.value)
            pos += n
            node = child
        return values, node, pos

    def _split(self, child: Node, n: int) -> Node:
        upper = Node(child.key[:n], child.value[:n], child.parent)
        upper.pins = child.pins
        upper.children[child.key[n]] = child
        child.parent.children[child.key[0]] = upper
        child.key, child.value, child.parent = child.key[n:], child.value[n:], upper
        return upper

    def pin(self, tokens: list[int]) -> tuple[torch.Tensor, Node]:
        """Longest stored prefix; its path is safe from eviction until unpin()."""
        values, node, _ = self._walk(tokens)
        cur = node
        while cur is not self.root:
            cur.pins += 1
            cur = cur.parent
        return (torch.cat(values) if values else self.root.value), node

    def unpin(self, node: Node) -> None:
        while node is not self.root:
            node.pins -= 1
            node = node.parent

    def insert(self, tokens: list[int], values: torch.Tensor) -> int:
        """Store what is not there yet; returns how many leading tokens were there."""
        _, node, pos = self._walk(tokens)
        if pos < len(tokens):
            node.children[tokens[pos]] = Node(tuple(tokens[pos:]), values[pos:].clone(), node)
        return pos

    def evict(self, want: int) -> int:
        tie = itertools.count()
        heap = [(n.touched, next(tie), n) for n in self._leaves() if n.pins == 0]
        heapq.heapify(heap)
        done = 0
        while heap and done < want:
            _, _, leaf = heapq.heappop(heap)
            self.slots.free(leaf.value)
            done += leaf.value.numel()
            parent = leaf.parent
            del parent.children[leaf.key[0]]
            if parent is not self.root and not parent.children and parent.pins == 0:
                heapq.heappush(heap, (parent.touched, next(tie), parent))
        return done

    def _leaves(self):
        stack = list(self.root.children.values())
        while stack:
            n = stack.pop()
            if n.children:
                stack.extend(n.children.values())
            else:
                yield n


@dataclass
class Request:
    rid: str
    tokens: list[int]
    slots: torch.Tensor | None = None
    node: Node | None = None
    hit_len: int = 0
    filled: int = 0
    meta: dict = field(default_factory=dict)


class PrefillPlanner:
    def __init__(self, tree: PrefixTree, slots: TokenSlots):
        self.tree = tree
        self.slots = slots
        self.running: dict[str, Request] = {}

    def _alloc(self, n: int) -> torch.Tensor | None:
        got = self.slots.alloc(n)  # clean: returned to the caller
        if got is None:
            self.tree.evict(n)
            got = self.slots.alloc(n)  # clean: near miss, it only rebinds a None
        return got

    @contextmanager
    def pinned(self, tokens: list[int]):
        hit, node = self.tree.pin(tokens)  # clean: unpinned in finally
        try:
            yield hit
        finally:
            self.tree.unpin(node)

    def admit(self, req: Request) -> bool:
        hit, node = self.tree.pin(req.tokens)  # leak: the path stays pinned when no slots are found
        tail = self._alloc(len(req.tokens) - hit.numel())  # clean: in req.slots, which finish() and abort() free
        if tail is None:
            return False
        req.slots = torch.cat((hit, tail))
        req.node, req.hit_len = node, hit.numel()
        self.running[req.rid] = req
        return True

    def extend(self, req: Request, token: int) -> bool:
        slot = self._alloc(1)  # clean: in req.slots
        if slot is None:
            return False
        req.slots = torch.cat((req.slots, slot))
        req.tokens.append(token)
        return True

    def checkpoint(self, req: Request) -> None:
        """Publish the filled part of a chunked prefill and rebase on the tree's copy."""
        done = req.tokens[:req.filled]
        dup = self.tree.insert(done, req.slots[:req.filled])
        self.slots.free(req.slots[req.hit_len:dup])
        hit, node = self.tree.pin(done)  # clean: near miss, the old node is unpinned next and the new one replaces it
        self.tree.unpin(req.node)
        req.node, req.hit_len = node, hit.numel()
        req.slots = torch.cat((hit, req.slots[hit.numel():]))

    def retarget(self, req: Request, tokens: list[int]) -> None:
        """The tool result changed the last turn; only the shared part is kept."""
        self.slots.free(req.slots[req.hit_len:])
        self.tree.unpin(req.node)
        hit, req.node = self.tree.pin(tokens)  # clean: the old node is unpinned, the new one is in the request
        req.tokens = tokens
        req.slots, req.hit_len = hit, hit.numel()

    def finish(self, req: Request) -> None:
        dup = self.tree.insert(req.tokens, req.slots)
        self.slots.free(req.slots[req.hit_len:dup])
        self.tree.unpin(req.node)
        self.running.pop(req.rid, None)

    def abort(self, req: Request) -> None:
        self.slots.free(req.slots[req.hit_len:])
        self.tree.unpin(req.node)
        self.running.pop(req.rid, None)

    def longest(self, candidates: list[list[int]]) -> Node | None:
        """The node under the best stored candidate, pinned for the caller."""
        best, best_len = None, -1
        for tokens in candidates:
            hit, node = self.tree.pin(tokens)  # leak: an earlier best stays pinned when a longer one replaces it
            if hit.numel() <= best_len:
                self.tree.unpin(node)
                continue
            best, best_len = node, hit.numel()
        return best

    def replay(self, tokens: list[int], forward) -> torch.Tensor | None:
        with self.pinned(tokens) as hit:  # clean: the context manager unpins
            tail = self.slots.alloc(len(tokens) - hit.numel())  # leak: not freed when the logits are not finite
            if tail is None:
                return None
            logits = forward(tokens, torch.cat((hit, tail)))
            if not torch.isfinite(logits).all():
                return None
            self.slots.free(tail)
            return logits

    def graft(self, tokens: list[int], load) -> int:
        """Take over KV computed by another worker."""
        slots = self.slots.alloc(len(tokens))  # leak: the part that insert() found already stored is never freed
        if slots is None:
            return 0
        load(slots)
        return len(tokens) - self.tree.insert(tokens, slots)

    def describe(self, tokens: list[int]) -> dict | None:
        hit, node = self.tree.pin(tokens)  # clean: near miss, a miss ends at the root, which pin() does not count
        if node is self.tree.root:
            return None
        info = {"tokens": hit.numel(), "pins": node.pins - 1, "age": time.monotonic() - node.touched}
        self.tree.unpin(node)
        return info


class PrefixExporter:
    """Keeps prefixes alive that other replicas are copying."""

    def __init__(self, tree: PrefixTree):
        self.tree = tree
        self.exports: dict[str, Node] = {}

    def publish(self, tag: str, tokens: list[int]) -> torch.Tensor:
        hit, node = self.tree.pin(tokens)  # leak: publishing a tag again overwrites the node pinned before
        self.exports[tag] = node
        return hit

    def withdraw(self, tag: str) -> None:
        node = self.exports.pop(tag, None)
        if node is not None:
            self.tree.unpin(node)
