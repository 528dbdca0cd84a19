"""Radix-tree prefix cache over a page allocator (bitmap of pages)."""
from __future__ import annotations

import heapq
import time
from typing import Dict, List, Optional, Tuple

import torch


class PageAllocator:
    """Bitmap of KV pages; hands out index tensors."""

    def __init__(self, num_pages: int) -> None:
        self.used = torch.zeros(num_pages, dtype=torch.bool)
        self.num_pages = num_pages

    def room(self) -> int:
        return int((~self.used).sum())

    def alloc(self, n: int) -> Optional[torch.Tensor]:
        idx = torch.nonzero(~self.used).flatten()[:n]
        if idx.numel() < n:
            return None
        self.used[idx] = True
        return idx

    def free(self, idx: torch.Tensor) -> None:
        self.used[idx] = False


class Node:
    def __init__(self, key: Tuple[int, ...], pages: Optional[torch.Tensor], parent: Optional["Node"]) -> None:
        self.key = key
        self.pages = pages
        self.parent = parent
        self.children: Dict[int, "Node"] = {}
        self.lock_ref = 0
        self.stamp = time.monotonic()

    def __lt__(self, other: "Node") -> bool:
        return self.stamp < other.stamp


def _common(a, b) -> int:
    n = 0
    for x, y in zip(a, b):
        if x != y:
            break
        n += 1
    return n


class PrefixTree:
    def __init__(self, allocator: PageAllocator) -> None:
        self.allocator = allocator
        self.root = Node((), None, None)

    # -- pinning ---------------------------------------------------------
    def pin(self, node: Node) -> Node:
        cur: Optional[Node] = node
        while cur is not None:
            cur.lock_ref += 1
            cur = cur.parent
        return node

    def unpin(self, node: Node) -> None:
        cur: Optional[Node] = node
        while cur is not None:
            cur.lock_ref -= 1
            cur = cur.parent

    # -- lookup ----------------------------------------------------------
    def walk(self, tokens: Tuple[int, ...]) -> Tuple[Node, int]:
        node, hit = self.root, 0
        while hit < len(tokens):
            child = node.children.get(tokens[hit])
            if child is None or _common(child.key, tokens[hit:]) < len(child.key):
                break
            hit += len(child.key)
            node = child
            node.stamp = time.monotonic()
        return node, hit

    def insert(self, tokens: Tuple[int, ...], pages: torch.Tensor) -> int:
        """Takes over pages. The part that the tree already holds is freed here."""
        node, hit = self.walk(tokens)
        if hit:
            self.allocator.free(pages[:hit])
        if hit < len(tokens):
            old = node.children.get(tokens[hit])
            if old is not None:
                self.allocator.free(pages[hit:])
                return hit
            node.children[tokens[hit]] = Node(tokens[hit:], pages[hit:], node)
        return hit

    def evict(self, want: int) -> int:
        heap = [n for n in self._leaves() if n.lock_ref == 0]
        heapq.heapify(heap)
        got = 0
        while heap and got < want:
            node = heapq.heappop(heap)
            self.allocator.free(node.pages)
            got += node.pages.numel()
            del node.parent.children[node.key[0]]
        return got

    def _leaves(self) -> List[Node]:
        out, todo = [], list(self.root.children.values())
        while todo:
            n = todo.pop()
            if n.children:
                todo.extend(n.children.values())
            else:
                out.append(n)
        return out

    def alloc_or_evict(self, n: int) -> Optional[torch.Tensor]:
        pages = self.allocator.alloc(n)  # clean: returned, or it was None
        if pages is None:
            self.evict(n)
            pages = self.allocator.alloc(n)  # clean: near miss, the rebinding only follows a None
        return pages


class Req:
    def __init__(self, rid: str, tokens: List[int]) -> None:
        self.rid = rid
        self.tokens = tokens
        self.node: Optional[Node] = None
        self.pages: Optional[torch.Tensor] = None
        self.hit = 0
        self.aborted = False


class PrefixScheduler:
    def __init__(self, tree: PrefixTree, max_prefill: int) -> None:
        self.tree = tree
        self.max_prefill = max_prefill
        self.running: Dict[str, Req] = {}

    def start(self, req: Req) -> bool:
        if req.rid in self.running:
            return False
        node, hit = self.tree.walk(tuple(req.tokens))
        self.tree.pin(node)  # clean: unpinned when pages are short, else kept in req.node for finish()
        pages = self.tree.alloc_or_evict(len(req.tokens) - hit)  # clean: kept in req.pages for finish()
        if pages is None:
            self.tree.unpin(node)
            return False
        req.node, req.hit, req.pages = node, hit, pages
        self.running[req.rid] = req
        return True

    def start_chunked(self, req: Req) -> int:
        if req.rid in self.running:
            return 0
        node, hit = self.tree.walk(tuple(req.tokens))
        self.tree.pin(node)  # leak: stays pinned when there are no pages for the chunk
        chunk = min(self.max_prefill, len(req.tokens) - hit)
        pages = self.tree.alloc_or_evict(chunk)  # clean: kept in req.pages for finish()
        if pages is None:
            return 0
        req.node, req.hit, req.pages = node, hit, pages
        self.running[req.rid] = req
        return chunk

    def grow(self, req: Req, n: int) -> bool:
        more = self.tree.alloc_or_evict(n)  # leak: an aborted request returns with the new pages in hand
        if more is None:
            return False
        if req.aborted:
            return False
        req.pages = torch.cat([req.pages, more])
        return True

    def repin(self, req: Req) -> None:
        """After a chunk went into the tree the request leans on a deeper node."""
        node, hit = self.tree.walk(tuple(req.tokens))
        old = req.node
        req.node = self.tree.pin(node)  # clean: near miss, the old node is unpinned below and the new one in finish()
        req.hit = hit
        if old is not None:
            self.tree.unpin(old)

    def score(self, tokens: List[int]) -> float:
        node, hit = self.tree.walk(tuple(tokens))
        self.tree.pin(node)  # clean: unpinned in the finally
        try:
            if not tokens:
                return 0.0
            return hit / len(tokens)
        finally:
            self.tree.unpin(node)

    def longest(self, prompts: List[List[int]]) -> Optional[int]:
        best, best_hit = None, 0
        for i, p in enumerate(prompts):
            node, hit = self.tree.walk(tuple(p))
            self.tree.pin(node)  # leak: prompts without a hit continue before the unpin
            if hit == 0:
                continue
            if hit > best_hit:
                best, best_hit = i, hit
            self.tree.unpin(node)
        return best

    def warm(self, system_prompt: List[int], run_prefill) -> bool:
        tokens = tuple(system_prompt)
        pages = self.tree.alloc_or_evict(len(tokens))  # clean: freed on a failed prefill, else insert() takes them
        if pages is None:
            return False
        if not run_prefill(tokens, pages):
            self.tree.allocator.free(pages)
            return False
        self.tree.insert(tokens, pages)
        return True

    def finish(self, req: Req) -> None:
        self.running.pop(req.rid, None)
        self.tree.allocator.free(req.pages)
        self.tree.unpin(req.node)
        req.pages, req.node = None, None

    def scratch_logprobs(self, n: int, kernel) -> Optional[torch.Tensor]:
        tmp = self.tree.alloc_or_evict(n)  # leak: kernel's None answer leaves through the middle return
        if tmp is None:
            return None
        out = kernel(tmp)
        if out is None:
            return None
        self.tree.allocator.free(tmp)
        return out.clone()
