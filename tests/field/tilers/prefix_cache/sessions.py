from __future__ import annotations

from typing import List, Optional, Sequence

from .manager import PrefixCacheManager, Request
from .radix import RadixNode, RadixTree


def fork_request(tree: RadixTree, req: Request, n: int, limit: int) -> List[Request]:
    """Parallel sampling: children share the prompt's node."""
    children: List[Request] = []
    for i in range(n):
        tree.retain(req.node)  # leak: raised before the limit check breaks out
        if len(children) >= limit:
            break
        child = Request(req.rid * 100 + i, req.tokens)
        child.node = req.node
        children.append(child)
    return children


def fork_beam(tree: RadixTree, req: Request, width: int) -> List[Request]:
    children: List[Request] = []
    for i in range(width):
        child = Request(req.rid * 100 + i, req.tokens)
        child.node = req.node
        children.append(child)
    for child in children:
        tree.retain(child.node)  # clean: near miss, one reference per child, detach() drops each
    return children


class Session:
    """A multi-turn chat; keeps the deepest node of its history alive between turns."""

    def __init__(self, manager: PrefixCacheManager) -> None:
        self.manager = manager
        self.history: List[int] = []
        self.node: Optional[RadixNode] = None
        self.system_node: Optional[RadixNode] = None

    def extend(self, tokens: Sequence[int]) -> int:
        self.history.extend(tokens)
        self.manager.tree.insert(self.history)
        self.node = self.manager.tree.match_prefix(self.history)  # leak: the previous turn's node is overwritten
        return self.node.depth

    def set_system(self, tokens: Sequence[int]) -> None:
        tree = self.manager.tree
        if self.system_node is not None:
            tree.drop_ref(self.system_node)
        self.system_node = tree.match_prefix(tokens)  # clean: near miss, the previous one is dropped above
        self.history = list(tokens)

    def close(self) -> None:
        for node in (self.node, self.system_node):
            if node is not None:
                self.manager.tree.drop_ref(node)
        self.node = self.system_node = None


def replay(session_manager: PrefixCacheManager, turns: Sequence[Sequence[int]]) -> int:
    s = Session(session_manager)
    try:
        return max(s.extend(t) for t in turns)
    finally:
        s.close()
