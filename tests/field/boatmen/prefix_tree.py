"""Radix tree over token prefixes; nodes own KV pages and can be locked by requests."""
from __future__ import annotations

import heapq
import time
from typing import Iterable, Optional, Sequence

PAGE = 32


class PageError(Exception):
    pass


class PageAllocator:
    def __init__(self, total: int):
        self.total = total
        self._next = 0
        self._returned: list[int] = []

    def free_pages(self) -> int:
        return self.total - self._next + len(self._returned)

    def get_page(self) -> int:
        if self._returned:
            return heapq.heappop(self._returned)  # clean: the caller owns it
        if self._next == self.total:
            raise PageError("no pages")
        page = self._next
        self._next += 1
        return page

    def get_pages(self, n: int) -> Optional[list[int]]:
        """All or nothing."""
        if n > self.free_pages():
            return None
        return [self.get_page() for _ in range(n)]  # clean: near miss, the number was checked, so that get_page cannot fail half way

    def put_pages(self, pages: Iterable[int]) -> None:
        for p in pages:
            heapq.heappush(self._returned, p)


class Node:
    def __init__(self, tokens: tuple, pages: list[int], parent: Optional["Node"]):
        self.tokens = tokens
        self.pages = pages
        self.parent = parent
        self.children: dict[tuple, Node] = {}
        self.locks = 0
        self.touched = time.monotonic()

    def is_leaf(self) -> bool:
        return not self.children

    def __lt__(self, other: "Node") -> bool:
        return self.touched < other.touched


class Handle:
    """What a request keeps of the tree: the deepest locked node and its own tail."""

    def __init__(self, node: Node, tail: list[int], cached: int):
        self.node = node
        self.tail = tail
        self.cached = cached
        self.finished = False


class PrefixTree:
    def __init__(self, alloc: PageAllocator):
        self.alloc = alloc
        self.root = Node((), [], None)

    def lock_path(self, node: Node) -> Node:
        n = node
        while n is not None:
            n.locks += 1
            n = n.parent
        return node

    def unlock_path(self, node: Node) -> None:
        n = node
        while n is not None:
            n.locks -= 1
            n = n.parent

    def _chunks(self, tokens: Sequence[int]):
        whole = len(tokens) - len(tokens) % PAGE
        for i in range(0, whole, PAGE):
            yield tuple(tokens[i : i + PAGE])

    def find(self, tokens: Sequence[int]) -> tuple[Node, int]:
        node, n = self.root, 0
        for chunk in self._chunks(tokens):
            child = node.children.get(chunk)
            if child is None:
                break
            child.touched = time.monotonic()
            node = child
            n += PAGE
        return node, n

    def begin(self, tokens: Sequence[int]) -> Optional[Handle]:
        node, n = self.find(tokens)
        need = -(-(len(tokens) - n) // PAGE) + 1
        self.lock_path(node)  # leak: the return for a full allocator does not unlock the path again
        tail = self._pages_or_evict(need)  # clean: in the handle, which commit() or drop() gives back or moves into the tree
        if tail is None:
            return None
        return Handle(node, tail, n)

    def extend(self, handle: Handle) -> bool:
        try:
            page = self.alloc.get_page()  # clean: near miss, appended to the handle's tail by the else branch
        except PageError:
            more = self._pages_or_evict(1)  # clean: None or put into the tail
            if more is None:
                return False
            handle.tail.extend(more)
        else:
            handle.tail.append(page)
        return True

    def _pages_or_evict(self, n: int) -> Optional[list[int]]:
        pages = self.alloc.get_pages(n)  # clean: None or returned
        if pages is None:
            self.evict(n - self.alloc.free_pages())
            pages = self.alloc.get_pages(n)  # clean: it is rebound only where it was None
        return pages

    def commit(self, handle: Handle, tokens: Sequence[int]) -> None:
        """Moves the pages of a finished request into the tree."""
        if handle.finished:
            return
        handle.finished = True
        node = handle.node
        pages = list(handle.tail)
        for chunk in self._chunks(tokens[handle.cached :]):
            page = pages.pop(0)
            child = node.children.get(chunk)
            if child is None:
                child = Node(chunk, [page], node)
                node.children[chunk] = child
            else:
                self.alloc.put_pages([page])
            node = child
        self.alloc.put_pages(pages)
        self.unlock_path(handle.node)

    def drop(self, handle: Handle) -> None:
        if handle.finished:
            return
        handle.finished = True
        self.alloc.put_pages(handle.tail)
        self.unlock_path(handle.node)

    def _leaves(self) -> list[Node]:
        stack, leaves = [self.root], []
        while stack:
            n = stack.pop()
            stack.extend(n.children.values())
            if n.is_leaf() and n is not self.root:
                leaves.append(n)
        return leaves

    def evict(self, want: int) -> int:
        heap = [n for n in self._leaves() if n.locks == 0]
        heapq.heapify(heap)
        freed = 0
        while heap and freed < want:
            n = heapq.heappop(heap)
            self.alloc.put_pages(n.pages)
            freed += len(n.pages)
            parent = n.parent
            del parent.children[n.tokens]
            if parent.is_leaf() and parent is not self.root and parent.locks == 0:
                heapq.heappush(heap, parent)
        return freed

    def insert_static(self, tokens: Sequence[int], compute) -> Node:
        """Puts a prompt that never changes into the tree and keeps it locked."""
        node, n = self.find(tokens)
        for chunk in self._chunks(tokens[n:]):
            page = self.alloc.get_page()  # leak: a chunk that compute() refuses ends the loop with the page in hand
            if not compute(chunk, page):
                break
            child = Node(chunk, [page], node)
            node.children[chunk] = child
            node = child
        return self.lock_path(node)  # clean: the caller gets the locked node


class PromptLibrary:
    """Named static prompts. A name may be given a new text."""

    def __init__(self, tree: PrefixTree, compute):
        self.tree = tree
        self.compute = compute
        self.nodes: dict[str, Node] = {}

    def register(self, name: str, tokens: Sequence[int]) -> None:
        self.nodes[name] = self.tree.insert_static(tokens, self.compute)  # leak: the node of an earlier text under this name stays locked

    def remove(self, name: str) -> None:
        node = self.nodes.pop(name, None)
        if node is not None:
            self.tree.unlock_path(node)

    def close(self) -> None:
        for name in list(self.nodes):
            self.remove(name)


def run_request(tree: PrefixTree, tokens: list[int], model, limit: int = 512) -> Optional[list[int]]:
    handle = tree.begin(tokens)  # leak: without a page for the next token the function returns and neither commits nor drops
    if handle is None:
        return None
    out = list(tokens)
    for _ in range(limit):
        if len(out) - handle.cached >= len(handle.tail) * PAGE and not tree.extend(handle):
            return out
        token = model.next(out, handle)
        if token == model.eos:
            break
        out.append(token)
    tree.commit(handle, out)
    return out


def score_prompts(tree: PrefixTree, prompts: list[list[int]], model) -> list[float]:
    scores = []
    for tokens in prompts:
        handle = tree.begin(tokens)  # leak: the handler of OverflowError scores zero and leaves the handle as it is
        if handle is None:
            scores.append(float("nan"))
            continue
        try:
            scores.append(model.logprob(tokens, handle))
        except OverflowError:
            scores.append(0.0)
            continue
        tree.drop(handle)
    return scores


def compare_prefix(tree: PrefixTree, a: list[int], b: list[int], model) -> Optional[bool]:
    ha = tree.begin(a)  # clean: near miss, the try around b drops it however it ends
    if ha is None:
        return None
    try:
        hb = tree.begin(b)  # clean: dropped by the inner finally
        if hb is None:
            return None
        try:
            return model.logprob(a, ha) > model.logprob(b, hb)
        finally:
            tree.drop(hb)
    finally:
        tree.drop(ha)
