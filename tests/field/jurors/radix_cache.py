"""Radix prefix cache with lock references and a token slot allocator."""
from __future__ import annotations

import heapq
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Optional


class TokenSlots:
    def __init__(self, size: int) -> None:
        self._free = list(range(1, size + 1))

    def available(self) -> int:
        return len(self._free)

    def alloc(self, n: int) -> Optional[list[int]]:
        if n > len(self._free):
            return None
        picked, self._free = self._free[:n], self._free[n:]
        return picked

    def free(self, slots: Iterable[int]) -> None:
        self._free.extend(slots)


@dataclass(eq=False)
class Node:
    key: tuple[int, ...] = ()
    slots: list[int] = field(default_factory=list)
    parent: Optional["Node"] = None
    children: dict[int, "Node"] = field(default_factory=dict)
    lock_ref: int = 0
    last_access: float = 0.0

    def __lt__(self, other: "Node") -> bool:
        return self.last_access < other.last_access


class RadixCache:
    def __init__(self, slots: TokenSlots) -> None:
        self.slots = slots
        self.root = Node()

    def match(self, tokens: list[int]) -> tuple[list[int], Node]:
        node, found, pos = self.root, [], 0
        while pos < len(tokens):
            child = node.children.get(tokens[pos])
            if child is None or tuple(tokens[pos: pos + len(child.key)]) != child.key:
                break
            child.last_access = time.monotonic()
            found.extend(child.slots)
            pos += len(child.key)
            node = child
        return found, node

    def lock(self, node: Node) -> None:
        cur: Optional[Node] = node
        while cur is not None:
            cur.lock_ref += 1
            cur = cur.parent

    def unlock(self, node: Node) -> None:
        cur: Optional[Node] = node
        while cur is not None:
            cur.lock_ref -= 1
            cur = cur.parent

    def insert(self, tokens: list[int], slots: list[int]) -> int:
        """Takes the slots over; duplicates of what the tree has already go back at once."""
        found, node = self.match(tokens)
        self.slots.free(slots[: len(found)])
        rest = tuple(tokens[len(found):])
        if not rest:
            return len(found)
        if rest[0] in node.children:
            self.slots.free(slots[len(found):])
            return len(found)
        node.children[rest[0]] = Node(rest, slots[len(found):], node, last_access=time.monotonic())
        return len(found)

    def evict(self, wanted: int) -> int:
        leaves = [n for n in self._walk(self.root) if not n.children and n.lock_ref == 0 and n is not self.root]
        heapq.heapify(leaves)
        done = 0
        while leaves and done < wanted:
            leaf = heapq.heappop(leaves)
            self.slots.free(leaf.slots)
            done += len(leaf.slots)
            parent = leaf.parent
            assert parent is not None
            del parent.children[leaf.key[0]]
            if not parent.children and parent.lock_ref == 0 and parent is not self.root:
                heapq.heappush(leaves, parent)
        return done

    def _walk(self, node: Node) -> Iterable[Node]:
        yield node
        for child in node.children.values():
            yield from self._walk(child)


@dataclass(eq=False)
class Req:
    rid: str
    tokens: list[int]
    last_node: Optional[Node] = None
    own_slots: list[int] = field(default_factory=list)
    prefix_len: int = 0


class PrefixScheduler:
    def __init__(self, cache: RadixCache, slots: TokenSlots) -> None:
        self.cache = cache
        self.slots = slots
        self.waiting: list[Req] = []
        self.running: list[Req] = []
        self._dummy = slots.alloc(1) or []  # clean: near miss, padding of idle batches, freed by close()

    def _alloc(self, n: int) -> Optional[list[int]]:
        if self.slots.available() < n:
            self.cache.evict(n - self.slots.available())
        return self.slots.alloc(n)  # clean: handed to the caller

    def prefill(self, req: Req) -> bool:
        found, node = self.cache.match(req.tokens)
        self.cache.lock(node)  # leak: when there are no slots prefill() returns False and the node stays locked
        own = self._alloc(len(req.tokens) - len(found))  # clean: kept in the request until finish(), retract() or abort()
        if own is None:
            return False
        req.last_node, req.own_slots, req.prefix_len = node, own, len(found)
        self.running.append(req)
        return True

    def prefill_batch(self, limit: int) -> list[Req]:
        batch: list[Req] = []
        for req in list(self.waiting):
            found, node = self.cache.match(req.tokens)
            if len(req.tokens) - len(found) > limit:
                continue
            self.cache.lock(node)  # clean: near miss, unlocked before the break and otherwise kept in last_node
            own = self._alloc(len(req.tokens) - len(found))  # clean: kept in the request
            if own is None:
                self.cache.unlock(node)
                break
            req.last_node, req.own_slots, req.prefix_len = node, own, len(found)
            limit -= len(own)
            self.waiting.remove(req)
            self.running.append(req)
            batch.append(req)
        return batch

    def decode(self) -> list[Req]:
        stuck: list[Req] = []
        for req in self.running:
            slot = self._alloc(1)  # clean: near miss, extended into own_slots
            if slot is None:
                stuck.append(req)
                continue
            req.own_slots.extend(slot)
        for req in stuck:
            self.retract(req)
        return stuck

    def _unlock(self, req: Req) -> None:
        if req.last_node is not None:
            self.cache.unlock(req.last_node)
            req.last_node = None

    def finish(self, req: Req, output: list[int]) -> None:
        self.running.remove(req)
        tokens = (req.tokens + output)[: req.prefix_len + len(req.own_slots)]
        prefix, _ = self.cache.match(req.tokens[: req.prefix_len])
        node = self._graft(tokens, len(prefix), req.own_slots)
        req.own_slots = []
        self._unlock(req)
        node.last_access = time.monotonic()

    def _graft(self, tokens: list[int], covered: int, own: list[int]) -> Node:
        found, node = self.cache.match(tokens)
        keep = own[len(found) - covered:]
        self.slots.free(own[: len(found) - covered])
        rest = tuple(tokens[len(found):])
        if not rest or rest[0] in node.children:
            self.slots.free(keep)
            return node
        child = Node(rest, keep, node)
        node.children[rest[0]] = child
        return child

    def retract(self, req: Req) -> None:
        self.running.remove(req)
        self.slots.free(req.own_slots)
        req.own_slots = []
        self._unlock(req)
        self.waiting.insert(0, req)

    def abort(self, rid: str) -> None:
        for req in list(self.running):
            if req.rid == rid:
                self.running.remove(req)
                self.slots.free(req.own_slots)
                req.own_slots = []
                self._unlock(req)
        self.waiting = [r for r in self.waiting if r.rid != rid]

    def score_prefix(self, prompts: list[list[int]]) -> list[int]:
        hits: list[int] = []
        for tokens in prompts:
            found, node = self.cache.match(tokens)
            self.cache.lock(node)  # leak: continue for a prompt without a hit leaves out the unlock of the root
            if not found:
                continue
            hits.append(len(found))
            self.cache.unlock(node)
        return hits

    def advance_lock(self, req: Req, tokens: list[int]) -> None:
        _, node = self.cache.match(tokens)
        self.cache.lock(node)  # clean: near miss, the old node of the request is unlocked before it is replaced
        self._unlock(req)
        req.last_node = node

    def relock(self, req: Req) -> int:
        found, node = self.cache.match(req.tokens)
        if len(found) <= req.prefix_len:
            return req.prefix_len
        self.cache.lock(node)  # leak: last_node is overwritten and the lock on the former node is never undone
        req.last_node = node
        return req.prefix_len

    def preload_chunks(self, tokens: list[int], chunk: int) -> int:
        total = 0
        for start in range(0, len(tokens), chunk):
            part = tokens[: start + chunk]
            slots = self._alloc(len(part))  # leak: a chunk that the tree has already is skipped with its slots
            if slots is None:
                break
            if len(self.cache.match(part)[0]) == len(part):
                continue
            total += self.cache.insert(part, slots)
        return total

    def close(self) -> None:
        for req in list(self.running):
            self.abort(req.rid)
        self.slots.free(self._dummy)
