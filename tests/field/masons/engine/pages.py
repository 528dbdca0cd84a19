from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, List, Optional, Tuple


class PageAllocator:
    def __init__(self, n: int) -> None:
        self._free = list(range(n))

    def alloc(self, n: int) -> Optional[List[int]]:
        if n > len(self._free):
            return None
        out, self._free = self._free[:n], self._free[n:]
        return out

    def release(self, pages: List[int]) -> None:
        self._free.extend(pages)


@dataclass
class Node:
    key: Tuple[int, ...]
    pages: List[int]
    locks: int = 0


class PrefixTree:
    def __init__(self, alloc: PageAllocator, page: int) -> None:
        self.alloc = alloc
        self.page = page
        self.nodes: Dict[Tuple[int, ...], Node] = {}

    def match(self, tokens: List[int]) -> Optional[Node]:
        for end in range(len(tokens) // self.page * self.page, 0, -self.page):
            node = self.nodes.get(tuple(tokens[:end]))
            if node is not None:
                return node
        return None

    def inc_lock(self, node: Node) -> None:
        node.locks += 1

    def dec_lock(self, node: Node) -> None:
        node.locks -= 1

    def match_and_lock(self, tokens: List[int]) -> Optional[Node]:
        node = self.match(tokens)
        if node is not None:
            self.inc_lock(node)  # clean: the locked node is returned, the caller lowers it
        return node

    def insert(self, tokens: List[int], pages: List[int]) -> None:
        """Takes over the pages, frees them if the key is known."""
        key = tuple(tokens[:len(pages) * self.page])
        if key in self.nodes:
            self.alloc.release(pages)
            return
        self.nodes[key] = Node(key, pages)

    def evict(self, want: int) -> int:
        got = 0
        for key, node in list(self.nodes.items()):
            if got >= want:
                break
            if node.locks == 0:
                del self.nodes[key]
                self.alloc.release(node.pages)
                got += len(node.pages)
        return got
