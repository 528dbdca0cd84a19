"""Page granular radix cache for shared prompts."""
from __future__ import annotations

import heapq
import itertools
import time
from dataclasses import dataclass, field
from typing import Dict, Iterable, List, Optional, Tuple

PAGE = 16
_tick = itertools.count()


class SlotAllocator:
    """Hands out KV token slots."""

    def __init__(self, total: int) -> None:
        self._free = list(range(total))

    def take(self, n: int) -> Optional[List[int]]:
        if n > len(self._free):
            return None
        out, self._free = self._free[:n], self._free[n:]
        return out

    def put_back(self, slots: Iterable[int]) -> None:
        self._free.extend(slots)


class Node:
    def __init__(self, parent: Optional["Node"], key: Tuple[int, ...], slots: List[int]) -> None:
        self.parent = parent
        self.key = key
        self.slots = slots
        self.children: Dict[Tuple[int, ...], Node] = {}
        self.refs = 0
        self.last_use = time.monotonic()


class PrefixHandle:
    """A pinned path from the root down to one node."""

    def __init__(self, cache: "RadixCache", node: Node, length: int) -> None:
        self.cache = cache
        self.node: Optional[Node] = node
        self.length = length

    def release(self) -> None:
        if self.node is not None:
            self.cache.unlock(self.node)
            self.node = None

    def __enter__(self) -> "PrefixHandle":
        return self

    def __exit__(self, *exc) -> None:
        self.release()


class RadixCache:
    def __init__(self, alloc: SlotAllocator) -> None:
        self.alloc = alloc
        self.root = Node(None, (), [])

    def match(self, tokens: List[int]) -> Tuple[Node, int]:
        node, pos = self.root, 0
        while pos + PAGE <= len(tokens):
            nxt = node.children.get(tuple(tokens[pos:pos + PAGE]))
            if nxt is None:
                break
            nxt.last_use = time.monotonic()
            node, pos = nxt, pos + PAGE
        return node, pos

    def lock(self, node: Node) -> Node:
        walk: Optional[Node] = node
        while walk is not None:
            walk.refs += 1
            walk = walk.parent
        return node

    def unlock(self, node: Node) -> None:
        walk: Optional[Node] = node
        while walk is not None:
            walk.refs -= 1
            walk = walk.parent

    def acquire_prefix(self, tokens: List[int]) -> PrefixHandle:
        node, length = self.match(tokens)
        self.lock(node)  # clean: goes to the caller in the handle, unlocked by its release
        return PrefixHandle(self, node, length)

    def insert(self, tokens: List[int], matched: int, slots: List[int]) -> None:
        """The tree becomes the owner of slots; duplicates and the unaligned tail go back."""
        node, _ = self.match(tokens[:matched])
        pos, used = matched, 0
        while pos + PAGE <= len(tokens):
            key = tuple(tokens[pos:pos + PAGE])
            page = slots[used:used + PAGE]
            nxt = node.children.get(key)
            if nxt is None:
                nxt = Node(node, key, page)
                node.children[key] = nxt
            else:
                self.alloc.put_back(page)
            node, pos, used = nxt, pos + PAGE, used + PAGE
        self.alloc.put_back(slots[used:])

    def evict(self, want: int) -> int:
        heap = [(n.last_use, next(_tick), n) for n in self._leaves(self.root) if n.refs == 0]
        heapq.heapify(heap)
        got = 0
        while heap and got < want:
            _, _, node = heapq.heappop(heap)
            if node.parent is None:
                continue
            self.alloc.put_back(node.slots)
            got += len(node.slots)
            del node.parent.children[node.key]
            if not node.parent.children and node.parent.refs == 0:
                heapq.heappush(heap, (node.parent.last_use, next(_tick), node.parent))
        return got

    def _leaves(self, node: Node) -> Iterable[Node]:
        if not node.children:
            yield node
        for child in node.children.values():
            yield from self._leaves(child)


class PinScope:
    """Keeps a prefix resident while a batch of siblings is being written."""

    def __init__(self, cache: RadixCache, tokens: List[int]) -> None:
        self.cache = cache
        self.tokens = tokens
        self.written = 0
        self.node: Optional[Node] = None

    def __enter__(self) -> "PinScope":
        node, _ = self.cache.match(self.tokens)
        self.node = self.cache.lock(node)  # leak: __exit__ returns before the unlock when nothing was written
        return self

    def __exit__(self, exc_type, exc, tb) -> bool:
        if self.written == 0:
            return False
        self.cache.unlock(self.node)
        self.node = None
        return False


@dataclass
class Req:
    rid: int
    tokens: List[int]
    handle: Optional[PrefixHandle] = None
    fresh: List[int] = field(default_factory=list)


class Prefiller:
    def __init__(self, cache: RadixCache, alloc: SlotAllocator) -> None:
        self.cache = cache
        self.alloc = alloc
        self.lookups = 0
        self.hit_tokens = 0

    def start(self, req: Req) -> bool:
        handle = self.cache.acquire_prefix(req.tokens)  # leak: stays pinned when no slots can be had
        need = len(req.tokens) - handle.length
        slots = self.alloc.take(need)  # clean: in req.fresh, given to the tree by finish or back by cancel
        if slots is None and self.cache.evict(need) > 0:
            slots = self.alloc.take(need)  # clean: near miss, only when the first attempt gave None
        if slots is None:
            return False
        self.hit_tokens += handle.length
        req.handle = handle
        req.fresh = slots
        return True

    def start_chunk(self, req: Req, chunk: int) -> bool:
        if req.handle is not None:
            self.cancel(req)
        handle = self.cache.acquire_prefix(req.tokens[:chunk])  # clean: released on failure, else in req
        need = max(0, chunk - handle.length)
        slots = self.alloc.take(need)  # clean: None on the failure path, else in req.fresh
        if slots is None:
            handle.release()
            return False
        req.handle, req.fresh = handle, slots
        return True

    def finish(self, req: Req) -> None:
        handle, req.handle = req.handle, None
        if handle is None:
            return
        self.cache.insert(req.tokens, handle.length, req.fresh)
        req.fresh = []
        handle.release()

    def cancel(self, req: Req) -> None:
        self.alloc.put_back(req.fresh)
        req.fresh = []
        if req.handle is not None:
            req.handle.release()
            req.handle = None

    def touch_all(self, prompts: List[List[int]]) -> int:
        """Refresh the use times of system prompts."""
        total = 0
        pinned = None
        for tokens in prompts:
            pinned = self.cache.acquire_prefix(tokens)  # leak: each round overwrites the last round's handle
            total += pinned.length
        if pinned is not None:
            pinned.release()
        return total

    def longest(self, variants: List[List[int]]) -> Optional[PrefixHandle]:
        best: Optional[PrefixHandle] = None
        for tokens in variants:
            cand = self.cache.acquire_prefix(tokens)  # clean: near miss, losers released, winner handed over
            if best is None:
                best = cand
            elif cand.length > best.length:
                best.release()
                best = cand
            else:
                cand.release()
        return best

    def choose_template(self, req: Req, variants: List[List[int]]) -> bool:
        best = self.longest(variants)  # leak: a prefix under two pages is left pinned
        if best is None:
            return False
        if best.length < 2 * PAGE:
            return False
        req.handle = best
        return True

    def affinity(self, tokens: List[int]) -> float:
        self.lookups += 1
        h = self.cache.acquire_prefix(tokens)  # leak: only the length is used, never released
        return h.length / max(1, len(tokens))

    def covered(self, tokens: List[int]) -> bool:
        with self.cache.acquire_prefix(tokens) as h:  # clean: released by the handle's __exit__
            return h.length >= len(tokens) - PAGE
