"""Prefix tree over token ids with lock counts, backed by a flat token-slot pool and a host tier."""
from __future__ import annotations

import time
from contextlib import contextmanager
from typing import Dict, Iterator, List, Optional, Sequence, Tuple


class TokenSlotPool:
    def __init__(self, size: int):
        self.size = size
        self._free = list(range(size))

    def alloc(self, n: int) -> Optional[List[int]]:
        if n > len(self._free):
            return None
        out, self._free = self._free[:n], self._free[n:]
        return out

    def free(self, slots: Sequence[int]) -> None:
        self._free.extend(slots)


class TreeNode:
    __slots__ = ("children", "parent", "key", "value", "host_value", "lock_ref", "last_access")

    def __init__(self, parent: Optional["TreeNode"], key: Tuple[int, ...] = (), value: Optional[List[int]] = None):
        self.children: Dict[Tuple[int, ...], "TreeNode"] = {}
        self.parent = parent
        self.key = key
        self.value = value or []
        self.host_value: Optional[List[int]] = None
        self.lock_ref = 0
        self.last_access = time.monotonic()


class Req:
    def __init__(self, rid: str, tokens: Sequence[int]):
        self.rid = rid
        self.tokens = list(tokens)
        self.prefix: List[int] = []
        self.slots: List[int] = []
        self.last_node: Optional[TreeNode] = None


class RadixCache:
    def __init__(self, device: TokenSlotPool, host: TokenSlotPool):
        self.device = device
        self.host = host
        self.root = TreeNode(None)
        self.ongoing_write: Dict[int, TreeNode] = {}
        self.ongoing_prefetch: Dict[str, TreeNode] = {}

    def inc_lock_ref(self, node: TreeNode) -> None:
        cur: Optional[TreeNode] = node
        while cur is not None:
            cur.lock_ref += 1
            cur = cur.parent

    def dec_lock_ref(self, node: TreeNode) -> None:
        cur: Optional[TreeNode] = node
        while cur is not None:
            cur.lock_ref -= 1
            cur = cur.parent

    def match_prefix(self, tokens: Sequence[int]) -> Tuple[List[int], TreeNode]:
        node, slots, pos = self.root, [], 0
        while pos < len(tokens):
            child = next((c for k, c in node.children.items() if tuple(tokens[pos:pos + len(k)]) == k), None)
            if child is None:
                break
            slots.extend(child.value)
            pos += len(child.key)
            node = child
            node.last_access = time.monotonic()
        return slots, node

    def insert(self, tokens: Sequence[int], slots: List[int]) -> int:
        """Takes over ``slots`` past the existing prefix; returns the length of that prefix."""
        have, node = self.match_prefix(tokens)
        rest = tuple(tokens[len(have):])
        if rest:
            node.children[rest] = TreeNode(node, rest, list(slots[len(have):]))
        return len(have)

    def evict(self, n: int) -> int:
        done = 0
        stack = [self.root]
        leaves: List[TreeNode] = []
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if not node.children and node.lock_ref == 0 and node is not self.root:
                leaves.append(node)
        for leaf in sorted(leaves, key=lambda x: x.last_access):
            if done >= n:
                break
            self.device.free(leaf.value)
            done += len(leaf.value)
            self.drop_host(leaf)
            del leaf.parent.children[leaf.key]
        return done

    @contextmanager
    def locked(self, node: TreeNode) -> Iterator[TreeNode]:
        self.inc_lock_ref(node)  # clean: dropped in finally
        try:
            yield node
        finally:
            self.dec_lock_ref(node)

    # -- host tier ---------------------------------------------------------

    def write_back(self, node: TreeNode) -> bool:
        if node.host_value is not None:
            return True
        slots = self.host.alloc(len(node.value))  # clean: None or moved onto the node, drop_host frees it
        if slots is None:
            return False
        node.host_value = slots
        self.inc_lock_ref(node)  # clean: parked in ongoing_write until the ack
        self.ongoing_write[id(node)] = node
        return True

    def on_write_ack(self, node_id: int) -> None:
        node = self.ongoing_write.pop(node_id)
        self.dec_lock_ref(node)

    def drop_host(self, node: TreeNode) -> None:
        if node.host_value is not None:
            self.host.free(node.host_value)
            node.host_value = None

    def load_back(self, node: TreeNode) -> Optional[List[int]]:
        if node.value:
            return node.value
        self.inc_lock_ref(node)  # clean: near miss, dropped on the refusal and after the copy
        need = len(node.host_value or [])
        slots = self.device.alloc(need)  # clean: near miss, a refused try leaves nothing behind
        if slots is None:
            self.evict(need)
            slots = self.device.alloc(need)  # clean: becomes the node's value
        if slots is None:
            self.dec_lock_ref(node)
            return None
        node.value = slots
        self.dec_lock_ref(node)
        return slots

    def start_prefetch(self, rid: str, node: TreeNode) -> None:
        self.inc_lock_ref(node)  # leak: cancel_prefetch forgets the entry without dropping the lock
        self.ongoing_prefetch[rid] = node

    def finish_prefetch(self, rid: str) -> None:
        node = self.ongoing_prefetch.pop(rid)
        self.dec_lock_ref(node)

    def cancel_prefetch(self, rid: str) -> None:
        self.ongoing_prefetch.pop(rid, None)


class PrefillAdder:
    def __init__(self, cache: RadixCache, budget: int):
        self.cache = cache
        self.rem_tokens = budget
        self.can_run: List[Req] = []

    def add_one(self, req: Req) -> bool:
        prefix, node = self.cache.match_prefix(req.tokens)
        self.cache.inc_lock_ref(node)  # leak: over budget it returns with the path still locked
        extend = len(req.tokens) - len(prefix)
        if extend > self.rem_tokens:
            return False
        slots = self.cache.device.alloc(extend)  # clean: None or moved into the request
        if slots is None:
            self.cache.dec_lock_ref(node)
            return False
        req.prefix, req.slots, req.last_node = prefix, prefix + slots, node
        self.rem_tokens -= extend
        self.can_run.append(req)
        return True


def cache_finished(cache: RadixCache, req: Req) -> None:
    shared = cache.insert(req.tokens, req.slots)
    cache.device.free(req.slots[len(req.prefix):shared])
    cache.dec_lock_ref(req.last_node)
    req.last_node = None
    req.slots = []


def warm_prefix(cache: RadixCache, tokens: Sequence[int]) -> bool:
    """Pre-populate a system prompt."""
    slots = cache.device.alloc(len(tokens))  # leak: slots of a prefix already in the tree are neither inserted nor freed
    if slots is None:
        return False
    cache.insert(tokens, slots)
    return True


class ChunkedSession:
    """Keeps the deepest node of a long prompt locked while chunks stream in."""

    def __init__(self, cache: RadixCache):
        self.cache = cache
        self.node: Optional[TreeNode] = None

    def advance(self, tokens: Sequence[int]) -> int:
        got, node = self.cache.match_prefix(tokens)
        self.cache.inc_lock_ref(node)  # leak: the next chunk overwrites self.node, the older lock stays
        self.node = node
        return len(got)

    def close(self) -> None:
        if self.node is not None:
            self.cache.dec_lock_ref(self.node)
            self.node = None


class TurnSession:
    def __init__(self, cache: RadixCache):
        self.cache = cache
        self.node: Optional[TreeNode] = None

    def advance(self, tokens: Sequence[int]) -> int:
        got, node = self.cache.match_prefix(tokens)
        self.cache.inc_lock_ref(node)  # clean: near miss, the old node is unlocked before the field is overwritten
        if self.node is not None:
            self.cache.dec_lock_ref(self.node)
        self.node = node
        return len(got)

    def close(self) -> None:
        if self.node is not None:
            self.cache.dec_lock_ref(self.node)
            self.node = None


def score_candidates(cache: RadixCache, prompts: List[List[int]], min_hit: int) -> List[int]:
    order: List[Tuple[int, int]] = []
    for i, tokens in enumerate(prompts):
        got, node = cache.match_prefix(tokens)
        with cache.locked(node):  # clean: with
            if len(got) < min_hit:
                continue
            order.append((len(got), i))
    return [i for _, i in sorted(order, reverse=True)]
