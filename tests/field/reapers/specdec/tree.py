"""Token trees whose nodes live in flat arrays, so that they can be sent to the device as they are."""
from typing import Dict, Iterable, List, Optional, Tuple

import numpy as np


class ArenaFull(RuntimeError):
    pass


class NodeArena:
    """A node is an index. A node is owned by its parent, a root by the tree object."""

    def __init__(self, capacity: int) -> None:
        self.token = np.full(capacity, -1, dtype=np.int32)
        self.logp = np.zeros(capacity, dtype=np.float32)
        self.kids: List[List[int]] = [[] for _ in range(capacity)]
        self._free = list(range(capacity - 1, -1, -1))

    def __len__(self) -> int:
        return len(self.kids) - len(self._free)

    def new(self, token: int, logp: float = 0.0, parent: int = -1) -> int:
        if not self._free:
            raise ArenaFull(f"{len(self)} nodes in use")
        nid = self._free.pop()  # clean: handed to the caller, or hung below its parent
        self.token[nid], self.logp[nid] = token, logp
        self.kids[nid] = []
        if parent >= 0:
            self.kids[parent].append(nid)
        return nid

    def free_subtree(self, nid: int) -> int:
        stack, n = [nid], 0
        while stack:
            cur = stack.pop()
            stack.extend(self.kids[cur])
            self.kids[cur] = []
            self.token[cur] = -1
            self._free.append(cur)
            n += 1
        return n


class TokenTree:
    def __init__(self, arena: NodeArena, token: int, root: Optional[int] = None) -> None:
        self.arena = arena
        self.root = arena.new(token) if root is None else root  # clean: owned by the tree, close() frees it
        self.depth = 0

    def extend(self, proposals: Dict[int, List[Tuple[int, float]]]) -> List[int]:
        """proposals: node -> candidate tokens. Returns the new frontier."""
        frontier = []
        for parent, candidates in proposals.items():
            for token, logp in candidates:
                frontier.append(self.arena.new(token, logp, parent))  # clean: near miss, hangs below its parent also when a later one raises
        self.depth += 1
        return frontier

    def advance(self, token: int) -> bool:
        """Make the child with this token the root; the siblings go."""
        for kid in self.arena.kids[self.root]:
            if self.arena.token[kid] == token:
                self.arena.kids[self.root].remove(kid)
                self.arena.free_subtree(self.root)
                self.root = kid
                return True
        for kid in list(self.arena.kids[self.root]):
            self.arena.free_subtree(kid)
        self.arena.kids[self.root] = []
        self.arena.token[self.root] = token
        return False

    def graft(self, other: "TokenTree") -> None:
        """Take over all branches of another tree with the same root token."""
        self.arena.kids[self.root].extend(self.arena.kids[other.root])
        self.arena.kids[other.root] = []
        self.depth = max(self.depth, other.depth)

    def fork(self) -> "TokenTree":
        root = self.arena.new(int(self.arena.token[self.root]))  # leak: when the arena runs full further down, the copy so far has no owner
        todo = [(self.root, root)]
        while todo:
            src, dst = todo.pop()
            for kid in self.arena.kids[src]:
                copy = self.arena.new(int(self.arena.token[kid]), float(self.arena.logp[kid]), dst)  # leak: hangs below a root that nobody owns when a later node raises
                todo.append((kid, copy))
        return TokenTree(self.arena, -1, root)

    def best_path(self) -> List[int]:
        path, cur = [], self.root
        while self.arena.kids[cur]:
            cur = max(self.arena.kids[cur], key=lambda k: self.arena.logp[k])
            path.append(int(self.arena.token[cur]))
        return path

    def close(self) -> None:
        if self.root >= 0:
            self.arena.free_subtree(self.root)
            self.root = -1


def prune(tree: TokenTree, keep: Iterable[int]) -> None:
    wanted = set(keep)
    for kid in list(tree.arena.kids[tree.root]):
        if kid not in wanted:
            tree.arena.kids[tree.root].remove(kid)
            tree.arena.free_subtree(kid)
