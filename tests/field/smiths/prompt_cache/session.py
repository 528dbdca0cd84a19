from __future__ import annotations

from typing import Dict, List, Optional, Sequence

from .radix import Node, PrefixTree


class ChatSession:
    """Holds one locked node: the cached prefix of the conversation so far."""

    def __init__(self, tree: PrefixTree, system: Sequence[int]) -> None:
        self.tree = tree
        self.tokens: List[int] = list(system)
        self.node: Optional[Node] = tree.match(system)  # clean: close or extend unlocks it

    def extend(self, new: Sequence[int]) -> int:
        self.tokens.extend(new)
        node = self.tree.match(self.tokens)  # clean: near miss, swapped in after the old one is unlocked
        if self.node is not None:
            self.tree.unlock_path(self.node)
        self.node = node
        return node.depth

    def commit(self) -> None:
        leaf = self.tree.insert(self.tokens)
        if leaf is self.node:
            return
        self.tree.lock_path(leaf)  # clean: becomes the session's node
        if self.node is not None:
            self.tree.unlock_path(self.node)
        self.node = leaf

    def fork(self) -> Optional["ChatSession"]:
        if self.node is None:
            return None
        child = ChatSession.__new__(ChatSession)
        child.tree, child.tokens = self.tree, list(self.tokens)
        child.node = self.tree.lock_path(self.node)  # clean: near miss, the child unlocks its own count on close
        return child

    def close(self) -> None:
        if self.node is not None:
            self.tree.unlock_path(self.node)
            self.node = None


class FewShotBank:
    """Prefixes of prompt templates kept warm by name."""

    def __init__(self, tree: PrefixTree) -> None:
        self.tree = tree
        self.warm: Dict[str, Node] = {}
        self.pending: Dict[str, Node] = {}

    def keep(self, name: str, tokens: Sequence[int]) -> None:
        node = self.tree.match(tokens)  # leak: keeping the name a second time overwrites the locked node
        self.warm[name] = node

    def stage(self, name: str, tokens: Sequence[int]) -> bool:
        node = self.tree.match_min(tokens, 4)  # clean: near miss, what the table held before is unlocked
        if node is None:
            return False
        old = self.pending.get(name)
        self.pending[name] = node
        if old is not None:
            self.tree.unlock_path(old)
        return True

    def promote(self, name: str) -> bool:
        node = self.pending.pop(name, None)
        if node is None:
            return False
        self.tree.unlock_path(node)
        return True

    def close(self) -> None:
        for table in (self.warm, self.pending):
            while table:
                _, node = table.popitem()
                self.tree.unlock_path(node)
