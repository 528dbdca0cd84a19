"""Attention masks for draft trees, kept in a pool of boolean planes."""
import abc
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch


class PlanePool:
    def __init__(self, n, side):
        self.planes = torch.zeros(n, side, side, dtype=torch.bool)
        self.side = side
        self._use = torch.zeros(n, dtype=torch.bool)

    def hire(self):
        free = (~self._use).nonzero().flatten()
        if free.numel() == 0:
            return None
        i = int(free[0])
        self._use[i] = True
        return i

    def dismiss(self, i):
        self.planes[i].zero_()
        self._use[i] = False

    def hired(self):
        return int(self._use.sum())


@dataclass
class Tree:
    parents: List[int]

    def depth(self, i: int) -> int:
        d = 0
        while i >= 0:
            i = self.parents[i]
            d += 1
        return d


def paint(pool: PlanePool, i: int, tree: Tree) -> torch.Tensor:
    m = pool.planes[i]
    for n in range(len(tree.parents)):
        j = n
        while j >= 0:
            m[n, j] = True
            j = tree.parents[j]
    return m


def build_mask(pool: PlanePool, tree: Tree) -> Optional[int]:
    i = pool.hire()  # clean: handed to the caller after painting
    if i is None:
        return None
    paint(pool, i, tree)
    return i


def build_small(pool: PlanePool, tree: Tree) -> Optional[int]:
    i = pool.hire()  # leak: a tree larger than the plane is answered with None while the plane is hired
    if i is None or len(tree.parents) > pool.side:
        return None
    paint(pool, i, tree)
    return i


def mask_copy(pool: PlanePool, tree: Tree) -> torch.Tensor:
    i = build_mask(pool, tree)  # clean: dismissed after cloning
    if i is None:
        n = len(tree.parents)
        return torch.eye(n, dtype=torch.bool)
    out = pool.planes[i].clone()
    pool.dismiss(i)
    return out


def mask_ratio(pool: PlanePool, tree: Tree) -> float:
    i = build_mask(pool, tree)  # leak: index zero is falsy and is treated as if nothing was hired
    if not i:
        return 0.0
    r = float(pool.planes[i].float().mean())
    pool.dismiss(i)
    return r


def mask_sum(pool: PlanePool, tree: Tree) -> int:
    i = build_mask(pool, tree)  # clean: near miss, compared with None so that index zero is dismissed as well
    s = 0
    if i is not None:
        s = int(pool.planes[i].sum())
        pool.dismiss(i)
    return s


class Expander(abc.ABC):
    def __init__(self, pool: PlanePool):
        self.pool = pool
        self.plane: Optional[int] = None

    def __enter__(self) -> "Expander":
        self.plane = self.pool.hire()  # clean: near miss, every subclass reaches the dismissal of the base
        if self.plane is None:
            raise RuntimeError("no plane")
        return self

    def __exit__(self, *exc: Any) -> None:
        self.cleanup()
        if self.plane is not None:
            self.pool.dismiss(self.plane)
            self.plane = None

    def cleanup(self) -> None:
        pass

    @abc.abstractmethod
    def expand(self, tree: Tree) -> Tree:
        ...


class GreedyExpander(Expander):
    def expand(self, tree: Tree) -> Tree:
        return Tree(tree.parents + [len(tree.parents) - 1])


class WideExpander(Expander):
    def __init__(self, pool: PlanePool, width: int):
        super().__init__(pool)
        self.width = width
        self.extra: List[int] = []

    def expand(self, tree: Tree) -> Tree:
        p = self.pool.hire()  # clean: cleanup dismisses the extra planes
        if p is not None:
            self.extra.append(p)
        leaf = len(tree.parents) - 1
        return Tree(tree.parents + [leaf] * self.width)

    def cleanup(self) -> None:
        while self.extra:
            self.pool.dismiss(self.extra.pop())


class BackupExpander(Expander):
    def __init__(self, pool: PlanePool):
        super().__init__(pool)
        self.backup: Optional[int] = None

    def expand(self, tree: Tree) -> Tree:
        if self.backup is None:
            self.backup = self.pool.hire()  # leak: cleanup sets the field to None without dismissing
        return Tree(list(tree.parents))

    def cleanup(self) -> None:
        self.backup = None


def grow(pool: PlanePool, tree: Tree, steps: int) -> Tree:
    with GreedyExpander(pool) as ex:  # clean: with statement
        for _ in range(steps):
            tree = ex.expand(tree)
    return tree


def grow_wide(pool: PlanePool, tree: Tree, width: int, limit: int) -> Tree:
    with WideExpander(pool, width) as ex:  # clean: near miss, returning from inside still leaves the block
        while True:
            tree = ex.expand(tree)
            if len(tree.parents) > limit:
                return tree


def union(pool: PlanePool, trees: List[Tree], visit: Callable[[torch.Tensor], None]) -> int:
    ids: Dict[int, Optional[int]] = {n: build_mask(pool, t) for n, t in enumerate(trees)}  # leak: the slice ends one short, the last plane visited is not dismissed
    done = 0
    for i in ids.values():
        if i is None:
            break
        visit(pool.planes[i])
        done += 1
    for i in list(ids.values())[: max(done - 1, 0)]:
        pool.dismiss(i)
    return done


def union_all(pool: PlanePool, trees: List[Tree], visit: Callable[[torch.Tensor], None]) -> int:
    ids = [build_mask(pool, t) for t in trees]  # clean: near miss, the None entries are filtered and the rest dismissed
    real = [i for i in ids if i is not None]
    for i in real:
        visit(pool.planes[i])
        pool.dismiss(i)
    return len(real)


def small_pair(pool: PlanePool, a: Tree, b: Tree) -> Tuple[int, int]:
    x = build_small(pool, a)  # clean: dismissed unless None
    y = build_small(pool, b)  # leak: only x is dismissed
    n = (0 if x is None else 1, 0 if y is None else 1)
    if x is not None:
        pool.dismiss(x)
    return n
