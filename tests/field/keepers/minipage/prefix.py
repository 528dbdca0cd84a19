"""Prefix nodes: pages of shared prompt heads, locked while a sequence runs on them."""
from __future__ import annotations

from typing import Dict, List, Optional, Tuple

from .pool import PagePool


class Node:
    def __init__(self, key: Tuple[int, ...], pages: List[int]) -> None:
        self.key = key
        self.pages = pages
        self.locks = 0


class PrefixTree:
    def __init__(self, pool: PagePool, page_size: int) -> None:
        self.pool = pool
        self.page_size = page_size
        self.nodes: Dict[Tuple[int, ...], Node] = {}

    def match(self, tokens: List[int]) -> Optional[Node]:
        for end in range(len(tokens) - len(tokens) % self.page_size, 0, -self.page_size):
            node = self.nodes.get(tuple(tokens[:end]))
            if node is not None:
                return node
        return None

    def lock(self, node: Node) -> Node:
        node.locks += 1
        return node

    def unlock(self, node: Node) -> None:
        node.locks -= 1

    def insert(self, tokens: List[int], pages: List[int]) -> List[int]:
        """Takes over pages of whole blocks; returns the ones the caller keeps."""
        key = tuple(tokens[:len(tokens) - len(tokens) % self.page_size])
        if not key or key in self.nodes:
            return pages
        n = len(key) // self.page_size
        self.nodes[key] = Node(key, pages[:n])
        return pages[n:]

    def evict(self, want: int) -> int:
        freed = 0
        for key, node in list(self.nodes.items()):
            if freed >= want:
                break
            if node.locks == 0:
                del self.nodes[key]
                self.pool.free(node.pages)
                freed += len(node.pages)
        return freed
