"""Speculative decoding: draft slots, verification and rollback."""
from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Callable, Generator, Iterator, Optional


class SlotTable:
    """Draft-model KV slots. reserve() answers None when full."""

    def __init__(self, size: int) -> None:
        self._free = set(range(size))
        self._owner: dict[int, str] = {}

    def reserve(self, owner: str) -> Optional[int]:
        if not self._free:
            return None
        slot = self._free.pop()
        self._owner[slot] = owner
        return slot

    def unreserve(self, slot: int) -> None:
        del self._owner[slot]
        self._free.add(slot)

    def reserve_n(self, owner: str, n: int) -> list[int]:
        """All or nothing."""
        slots: list[int] = []
        while len(slots) < n:
            s = self.reserve(owner)  # clean: near miss, the partial set is returned to the table when it runs out
            if s is None:
                for t in slots:
                    self.unreserve(t)
                return []
            slots.append(s)
        return slots

    def __len__(self) -> int:
        return len(self._free)


@dataclass
class Draft:
    tokens: list[int]
    slots: list[int] = field(default_factory=list)

    def drop(self, table: SlotTable) -> None:
        for s in self.slots:
            table.unreserve(s)
        self.slots.clear()


class DraftModel:
    def __init__(self, table: SlotTable, seed: int = 0) -> None:
        self.table = table
        self.rng = random.Random(seed)

    def next_token(self, ctx: list[int]) -> int:
        return (sum(ctx) + self.rng.randrange(7)) % 97

    def propose(self, rid: str, ctx: list[int], k: int) -> Optional[Draft]:
        slots = self.table.reserve_n(rid, k)  # clean: moves into the Draft that is returned
        if not slots:
            return None
        toks: list[int] = []
        for _ in slots:
            toks.append(self.next_token(ctx + toks))
        return Draft(toks, slots)

    def propose_tree(self, rid: str, ctx: list[int], width: int, depth: int) -> list[Draft]:
        branches: list[Draft] = []
        for _ in range(width):
            d = self.propose(rid, ctx, depth)  # leak: a duplicate branch is skipped with its slots
            if d is None:
                break
            if any(b.tokens == d.tokens for b in branches):
                continue
            branches.append(d)
        return branches

    def propose_incremental(self, rid: str, ctx: list[int], k: int) -> Generator[int, Optional[bool], None]:
        """Yields tokens one by one; the consumer may close() it at any time."""
        held: list[int] = []
        try:
            for _ in range(k):
                s = self.table.reserve(rid)  # clean: collected in held, the finally runs on close too
                if s is None:
                    return
                held.append(s)
                yield self.next_token(ctx)
        finally:
            for s in held:
                self.table.unreserve(s)

    def stream(self, rid: str, ctx: list[int]) -> Iterator[int]:
        slot = self.table.reserve(rid)  # leak: the stop token's return ends the generator without unreserve
        if slot is None:
            return
        while True:
            tok = self.next_token(ctx)
            if tok == 0:
                return
            yield tok
            ctx = ctx + [tok]
            if len(ctx) > 4096:
                break
        self.table.unreserve(slot)


class Verifier:
    def __init__(self, accept: Callable[[int], bool]) -> None:
        self.accept = accept

    def accepted(self, d: Draft) -> int:
        n = 0
        for t in d.tokens:
            if not self.accept(t):
                break
            n += 1
        return n


class SpecDecoder:
    def __init__(self, table: SlotTable, verifier: Verifier, k: int = 4) -> None:
        self.table = table
        self.draft = DraftModel(table)
        self.verifier = verifier
        self.k = k
        self.pending: dict[str, Draft] = {}
        self.bonus: dict[str, int] = {}

    def step(self, rid: str, ctx: list[int]) -> list[int]:
        d = self.draft.propose(rid, ctx, self.k)  # leak: the way on which all tokens are rejected returns without drop
        if d is None:
            return []
        n = self.verifier.accepted(d)
        if n == 0:
            return []
        out = d.tokens[:n]
        d.drop(self.table)
        return out

    def step_tree(self, rid: str, ctx: list[int], width: int = 2) -> list[int]:
        branches = self.draft.propose_tree(rid, ctx, width, self.k)  # clean: every branch is dropped in the loop
        best: list[int] = []
        for d in branches:
            n = self.verifier.accepted(d)
            if n > len(best):
                best = d.tokens[:n]
            d.drop(self.table)
        return best

    def step_best_of(self, rid: str, ctx: list[int], tries: int) -> list[int]:
        best: Optional[Draft] = None
        best_n = -1
        for _ in range(tries):
            d = self.draft.propose(rid, ctx, self.k)  # leak: the former best is overwritten by a better draft
            if d is None:
                break
            n = self.verifier.accepted(d)
            if n > best_n:
                best, best_n = d, n
            else:
                d.drop(self.table)
        if best is None:
            return []
        out = best.tokens[:max(best_n, 0)]
        best.drop(self.table)
        return out

    def step_ranked(self, rid: str, ctx: list[int], tries: int) -> list[int]:
        best: Optional[Draft] = None
        for _ in range(tries):
            cand = self.draft.propose(rid, ctx, self.k)  # clean: near miss, the loser of each comparison is dropped
            if cand is None:
                break
            if best is None:
                best = cand
                continue
            if self.verifier.accepted(cand) > self.verifier.accepted(best):
                best, cand = cand, best
            cand.drop(self.table)
        if best is None:
            return []
        toks = best.tokens[:self.verifier.accepted(best)]
        best.drop(self.table)
        return toks

    def begin(self, rid: str, ctx: list[int]) -> bool:
        if rid in self.pending:
            return True
        d = self.draft.propose(rid, ctx, self.k)  # clean: kept in pending under a free key, commit and cancel drop it
        if d is None:
            return False
        self.pending[rid] = d
        return True

    def commit(self, rid: str) -> list[int]:
        d = self.pending.pop(rid)
        try:
            return d.tokens[:self.verifier.accepted(d)]
        finally:
            d.drop(self.table)

    def cancel(self, rid: str) -> None:
        d = self.pending.pop(rid, None)
        if d is not None:
            d.drop(self.table)
        slot = self.bonus.pop(rid, None)
        if slot is not None:
            self.table.unreserve(slot)

    def reserve_bonus(self, rid: str) -> bool:
        """One extra slot for the bonus token of a fully accepted draft."""
        slot = self.table.reserve(rid)  # leak: setdefault keeps the older slot and this one is lost when rid has one
        if slot is None:
            return False
        self.bonus.setdefault(rid, slot)
        return True

    def take_first(self, rid: str, ctx: list[int]) -> Optional[int]:
        gen = self.draft.propose_incremental(rid, ctx, self.k)  # clean: near miss, close() runs the generator's finally
        try:
            for tok in gen:
                if self.verifier.accept(tok):
                    return tok
            return None
        finally:
            gen.close()
