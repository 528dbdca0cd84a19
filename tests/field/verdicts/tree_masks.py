# Mask arena for tree attention. Rows of a [N, L, L] bool tensor are lent by index;
# lending is tracked in a torch stack so that the arena itself may live on device.
import typing as tp

import torch


class MaskArena:
    def __init__(self, n: int, length: int):
        self.masks = torch.zeros(n, length, length, dtype=torch.bool)
        self.stack = torch.arange(n)
        self.sp = n

    def lend_mask(self) -> int:
        if self.sp == 0:
            raise RuntimeError("mask arena is empty")
        self.sp -= 1
        return int(self.stack[self.sp])

    def reclaim_mask(self, i: int) -> None:
        self.masks[i].zero_()
        self.stack[self.sp] = i
        self.sp += 1

    def lend_many(self, n: int) -> tp.List[int]:
        if n > self.sp:
            return []
        return [self.lend_mask() for _ in range(n)]  # clean: near miss, the count was tested before, the list is returned


class TreeNode(tp.NamedTuple):
    token: int
    parent: int
    depth: int


class TreeMaskBuilder:
    def __init__(self, arena: MaskArena, reuse: bool):
        self.arena = arena
        self.reuse = reuse
        self.current: int = -1
        self.history: tp.List[int] = []

    def _fill(self, i: int, nodes: tp.Sequence[TreeNode]) -> None:
        m = self.arena.masks[i]
        for n, node in enumerate(nodes):
            m[n, n] = True
            if node.parent >= 0:
                m[n] |= m[node.parent]

    def build(self, nodes: tp.Sequence[TreeNode]) -> torch.Tensor:
        if not self.reuse or self.current < 0:
            if self.current >= 0:
                self.arena.reclaim_mask(self.current)
            self.current = self.arena.lend_mask()  # clean: near miss, whatever was current is reclaimed, reset takes the last
        self._fill(self.current, nodes)
        return self.arena.masks[self.current]

    def build_logged(self, nodes: tp.Sequence[TreeNode]) -> torch.Tensor:
        i = self.arena.lend_mask()  # leak: prune_history cuts the head of the list off without reclaiming
        self._fill(i, nodes)
        self.history.append(i)
        return self.arena.masks[i]

    def prune_history(self, keep: int) -> None:
        self.history = self.history[-keep:]

    def reset(self) -> None:
        if self.current >= 0:
            self.arena.reclaim_mask(self.current)
            self.current = -1
        for i in self.history:
            self.arena.reclaim_mask(i)
        self.history = []

    def width(self, nodes: tp.Sequence[TreeNode]) -> int:
        i = self.arena.lend_mask()  # leak: an empty tree returns zero before the reclaim
        if not nodes:
            return 0
        self._fill(i, nodes)
        w = int(self.arena.masks[i].sum(-1).max())
        self.arena.reclaim_mask(i)
        return w

    def depth(self, nodes: tp.Sequence[TreeNode]) -> int:
        if not nodes:
            return 0
        i = self.arena.lend_mask()  # clean: near miss, lent after the early return
        self._fill(i, nodes)
        d = int(self.arena.masks[i].any(0).sum())
        self.arena.reclaim_mask(i)
        return d

    def merge(self, trees: tp.Sequence[tp.Sequence[TreeNode]]) -> tp.Optional[torch.Tensor]:
        ids = self.arena.lend_many(len(trees))  # clean: near miss, empty list means nothing lent, otherwise all reclaimed
        if not ids:
            return None
        for i, t in zip(ids, trees):
            self._fill(i, t)
        merged = torch.stack([self.arena.masks[i] for i in ids]).any(0)
        for i in ids:
            self.arena.reclaim_mask(i)
        return merged

    def intersect(self, trees: tp.Sequence[tp.Sequence[TreeNode]]) -> torch.Tensor:
        ids = self.arena.lend_many(len(trees))  # leak: the first id is popped off and not reclaimed with the others
        out = self.arena.masks[ids.pop(0)].clone()
        for i, t in zip(ids, trees[1:]):
            self._fill(i, t)
            out &= self.arena.masks[i]
            self.arena.reclaim_mask(i)
        return out

    def equal(self, a: tp.Sequence[TreeNode], b: tp.Sequence[TreeNode]) -> bool:
        i, j = self.arena.lend_mask(), self.arena.lend_mask()  # clean: both reclaimed before the result
        self._fill(i, a)
        self._fill(j, b)
        same = bool((self.arena.masks[i] == self.arena.masks[j]).all())
        self.arena.reclaim_mask(j)
        self.arena.reclaim_mask(i)
        return same
