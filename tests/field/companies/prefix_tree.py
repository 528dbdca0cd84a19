"""Radix cache. Nodes hold token pages; a node with lock_ref > 0 may not be evicted."""
from __future__ import annotations

import heapq
import time
from typing import Dict, List, Optional, Tuple

import torch


class PageAllocator:
    def __init__(self, size: int):
        self.free_pages = torch.arange(size, dtype=torch.int64)

    def available(self) -> int:
        return int(self.free_pages.numel())

    def alloc(self, need: int) -> Optional[torch.Tensor]:
        if need > self.available():
            return None
        out = self.free_pages[:need]  # clean: the head of the free pages is the result
        self.free_pages = self.free_pages[need:]
        return out

    def alloc_aligned(self, need: int, align: int) -> Optional[torch.Tensor]:
        if need > self.available():
            return None
        out = self.free_pages[:need]  # leak: misaligned pages are cut from the free list, then refused
        self.free_pages = self.free_pages[need:]
        if int(out[0]) % align:
            return None
        return out

    def dealloc(self, pages: torch.Tensor) -> None:
        self.free_pages = torch.cat([self.free_pages, pages])


class Node:
    def __init__(self, key: Tuple[int, ...] = (), value: Optional[torch.Tensor] = None, parent: Optional["Node"] = None):
        self.children: Dict[int, Node] = {}
        self.key, self.value, self.parent = key, value, parent
        self.lock_ref = 0
        self.last_access = time.monotonic()

    def __lt__(self, other: "Node") -> bool:
        return self.last_access < other.last_access


class RadixTree:
    def __init__(self, allocator: PageAllocator):
        self.allocator = allocator
        self.root = Node()

    def match(self, tokens: List[int]) -> Tuple[List[torch.Tensor], Node]:
        node, got, i = self.root, [], 0
        while i < len(tokens) and tokens[i] in node.children:
            child = node.children[tokens[i]]
            if tuple(tokens[i : i + len(child.key)]) != child.key:
                break
            got.append(child.value)
            i += len(child.key)
            node = child
        return got, node

    def inc_lock_ref(self, node: Node) -> Node:
        cur = node
        while cur is not None:
            cur.lock_ref += 1
            cur = cur.parent
        return node

    def dec_lock_ref(self, node: Node) -> None:
        while node is not None:
            node.lock_ref -= 1
            node = node.parent

    def insert(self, node: Node, tokens: List[int]) -> Optional[Node]:
        pages = self.allocator.alloc(len(tokens))  # clean: near miss, an empty insert gives the pages back, else the node has them
        if pages is None:
            return None
        if not tokens or tokens[0] in node.children:
            self.allocator.dealloc(pages)
            return None
        child = Node(tuple(tokens), pages, node)
        node.children[tokens[0]] = child
        return child

    def insert_or_get(self, node: Node, tokens: List[int]) -> Optional[Node]:
        pages = self.allocator.alloc(len(tokens))  # leak: an existing child is returned and the pages are lost
        if pages is None:
            return None
        existing = node.children.get(tokens[0])
        if existing is not None:
            return existing
        child = Node(tuple(tokens), pages, node)
        node.children[tokens[0]] = child
        return child

    def evict(self, want: int) -> int:
        leaves = [n for n in self._walk(self.root) if not n.children and n.lock_ref == 0]
        heapq.heapify(leaves)
        done = 0
        while leaves and done < want:
            n = heapq.heappop(leaves)
            self.allocator.dealloc(n.value)
            done += len(n.key)
            del n.parent.children[n.key[0]]
        return done

    def _walk(self, node: Node):
        for c in node.children.values():
            yield c
            yield from self._walk(c)


class PrefillAdder:
    def __init__(self, tree: RadixTree, budget: int):
        self.tree = tree
        self.budget = budget
        self.can_run: List[Tuple[List[int], Node, torch.Tensor]] = []

    def add(self, tokens: List[int]) -> bool:
        got, node = self.tree.match(tokens)
        self.tree.inc_lock_ref(node)  # clean: near miss, each refusal drops the lock, the run list keeps it for done()
        rest = len(tokens) - sum(v.numel() for v in got)
        if rest > self.budget:
            self.tree.dec_lock_ref(node)
            return False
        pages = self.tree.allocator.alloc(rest)  # clean: kept in the run list for done()
        if pages is None:
            self.tree.dec_lock_ref(node)
            return False
        self.budget -= rest
        self.can_run.append((tokens, node, pages))
        return True

    def add_chunked(self, tokens: List[int], chunk: int) -> int:
        _, node = self.tree.match(tokens)
        self.tree.inc_lock_ref(node)  # leak: stays locked when there are no pages for the chunk
        take = min(chunk, len(tokens), self.budget)
        pages = self.tree.allocator.alloc(take)  # clean: kept in the run list for done()
        if pages is None:
            return 0
        self.budget -= take
        self.can_run.append((tokens[:take], node, pages))
        return take

    def done(self) -> None:
        while self.can_run:
            _, node, pages = self.can_run.pop()
            self.tree.dec_lock_ref(node)
            self.tree.allocator.dealloc(pages)

    def estimate(self, tokens: List[int]) -> int:
        _, node = self.tree.match(tokens)
        locked = self.tree.inc_lock_ref(node)  # clean: dropped by the finally
        try:
            if locked is self.tree.root:
                return len(tokens)
            return len(tokens) - len(locked.key)
        finally:
            self.tree.dec_lock_ref(locked)

    def retract(self, n: int) -> None:
        for _ in range(min(n, len(self.can_run))):
            _, node, pages = self.can_run.pop()
            self.tree.dec_lock_ref(node)
            self.tree.allocator.dealloc(pages)

    def reprobe(self, tokens: List[int]) -> Optional[torch.Tensor]:
        pages = self.tree.allocator.alloc_aligned(len(tokens), 4)  # clean: near miss, the second one is only tried when this failed
        if pages is None:
            self.tree.evict(len(tokens))
            pages = self.tree.allocator.alloc_aligned(len(tokens), 1)  # clean: handed to the caller
        return pages

    def extend(self, tokens: List[int]) -> torch.Tensor:
        pages = self.reprobe(tokens)  # leak: sorted into a new tensor, and the pages are never deallocated
        if pages is None:
            raise RuntimeError("out of pages")
        return torch.sort(pages).values.float()
