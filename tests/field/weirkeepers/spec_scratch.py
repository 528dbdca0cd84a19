"""Speculative decoding: draft trees in a scratch arena, verified by the target model."""
from __future__ import annotations

import contextlib
import math
import random
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Dict, Iterator, List, Optional, Tuple


class OutOfScratch(RuntimeError):
    pass


class ScratchArena:
    def __init__(self, rows: int) -> None:
        self._map = [False] * rows
        self.high = 0

    def carve(self, rows: int) -> range:
        run = 0
        for i, used in enumerate(self._map):
            run = 0 if used else run + 1
            if run == rows:
                span = range(i - rows + 1, i + 1)
                for r in span:
                    self._map[r] = True
                self.high = max(self.high, i + 1)
                return span
        raise OutOfScratch(rows)

    def reclaim(self, span: range) -> None:
        for r in span:
            self._map[r] = False

    @contextlib.contextmanager
    def borrowed(self, rows: int) -> Iterator[range]:
        span = self.carve(rows)  # clean: reclaimed in finally
        try:
            yield span
        finally:
            self.reclaim(span)

    @contextlib.contextmanager
    def borrowed_pair(self, rows: int) -> Iterator[Tuple[range, range]]:
        left = self.carve(rows)  # clean: reclaimed in finally
        right = self.carve(rows)  # leak: the finally reclaims only the left one
        try:
            yield left, right
        finally:
            self.reclaim(left)


@dataclass
class DraftTree:
    root: int
    span: range
    tokens: List[int] = field(default_factory=list)
    probs: List[float] = field(default_factory=list)


class Drafter(ABC):
    def __init__(self, arena: ScratchArena, depth: int) -> None:
        self.arena = arena
        self.depth = depth

    @abstractmethod
    def propose(self, token: int) -> Optional[DraftTree]:
        ...

    def discard(self, tree: DraftTree) -> None:
        self.arena.reclaim(tree.span)
        tree.tokens.clear()


class NGramDrafter(Drafter):
    def __init__(self, arena: ScratchArena, depth: int, history: List[int]) -> None:
        super().__init__(arena, depth)
        self.history = history

    def propose(self, token: int) -> Optional[DraftTree]:
        span = self.arena.carve(self.depth)  # leak: return None when the history has no match
        tree = DraftTree(token, span)
        positions = [i for i, t in enumerate(self.history) if t == token]
        if not positions:
            return None
        start = positions[-1] + 1
        tree.tokens = self.history[start:start + self.depth]
        tree.probs = [1.0] * len(tree.tokens)
        return tree


class HeadDrafter(Drafter):
    def propose(self, token: int) -> Optional[DraftTree]:
        if token < 0:
            return None
        tree = DraftTree(token, self.arena.carve(self.depth))  # clean: owned by the returned tree
        for i in range(self.depth):
            tree.tokens.append((token * 31 + i) % 32000)
            tree.probs.append(math.exp(-i / 2))
        return tree


class Verifier:
    def __init__(self, arena: ScratchArena, seed: int = 0) -> None:
        self.arena = arena
        self.rng = random.Random(seed)

    def accept(self, tree: DraftTree) -> int:
        with self.arena.borrowed(len(tree.tokens)) as rows:  # clean: with
            for i, _row in enumerate(rows):
                if self.rng.random() > tree.probs[i]:
                    return i
        return len(tree.tokens)

    def compare(self, a: DraftTree, b: DraftTree) -> int:
        with self.arena.borrowed_pair(max(len(a.tokens), 1)) as (x, y):  # clean: with, borrowed_pair loses
            pairs = zip(x, y)
            return sum(1 for (_, _), s, t in zip(pairs, a.tokens, b.tokens) if s == t)

    def logits_for(self, tree: DraftTree) -> range:
        span = self.arena.carve(len(tree.tokens) + 1)  # clean: handed to the caller
        self.arena.high = max(self.arena.high, span.stop)
        return span


class SpecWorker:
    def __init__(self, arena: ScratchArena, drafters: Dict[str, Drafter]) -> None:
        self.arena = arena
        self.drafters = drafters
        self.verifier = Verifier(arena)
        self.pending: Dict[int, Tuple[Drafter, DraftTree]] = {}
        self.mask: Optional[range] = None

    def best_of(self, token: int) -> List[int]:
        best: Optional[DraftTree] = None
        owner: Optional[Drafter] = None
        score = -1
        for drafter in self.drafters.values():
            tree = drafter.propose(token)  # leak: a worse tree, and a best that is beaten, are not discarded
            if tree is None:
                continue
            got = self.verifier.accept(tree)
            if got > score:
                best, owner, score = tree, drafter, got
        if best is None:
            return []
        tokens = list(best.tokens[:score])
        owner.discard(best)
        return tokens

    def best_of_two(self, token: int, first: Drafter, second: Drafter) -> List[int]:
        a = first.propose(token)  # clean: near miss, discarded when not None
        b = second.propose(token)  # clean: near miss, discarded when not None
        best: List[int] = []
        for owner, tree in ((first, a), (second, b)):
            if tree is None:
                continue
            got = self.verifier.accept(tree)
            if got > len(best):
                best = list(tree.tokens[:got])
            owner.discard(tree)
        return best

    def launch(self, rid: int, kind: str, token: int) -> bool:
        drafter = self.drafters[kind]
        tree = drafter.propose(token)  # clean: near miss, in pending until land or cancel discards it
        if tree is None:
            return False
        stale = self.pending.pop(rid, None)
        if stale is not None:
            stale[0].discard(stale[1])
        self.pending[rid] = (drafter, tree)
        return True

    def land(self, rid: int) -> int:
        drafter, tree = self.pending.pop(rid)
        count = self.verifier.accept(tree)
        drafter.discard(tree)
        return count

    def cancel(self, rid: int) -> None:
        entry = self.pending.pop(rid, None)
        if entry:
            entry[0].discard(entry[1])

    def entropy(self, tree: DraftTree) -> float:
        rows = self.verifier.logits_for(tree)  # leak: only summed over, never reclaimed
        return sum(-p * math.log(max(p, 1e-9)) for p, _ in zip(tree.probs, rows))

    def resize_mask(self, rows: int) -> None:
        if self.mask is not None and len(self.mask) >= rows:
            return
        self.mask = self.arena.carve(rows)  # leak: a mask that is too small is overwritten, not reclaimed

    def close(self) -> None:
        for rid in list(self.pending):
            self.cancel(rid)
        if self.mask is not None:
            self.arena.reclaim(self.mask)
            self.mask = None
