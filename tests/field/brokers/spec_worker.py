"""Speculative decoding worker: draft KV slots, tree masks and draft-model request rows."""
from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Callable, Iterator

import torch


class SlotAllocator:
    def __init__(self, size: int) -> None:
        self.free_slots = torch.arange(size)

    def alloc(self, need: int) -> torch.Tensor | None:
        if need > self.free_slots.numel():
            return None
        out = self.free_slots[:need]
        self.free_slots = self.free_slots[need:]
        return out

    def free(self, idx: torch.Tensor) -> None:
        if idx.numel():
            self.free_slots = torch.cat([self.free_slots, idx])


class RowTable:
    def __init__(self, rows: int) -> None:
        self._free = list(range(rows))
        self.owner: dict[int, str] = {}

    def open_row(self, rid: str) -> int | None:
        if not self._free:
            return None
        row = self._free.pop()
        self.owner[row] = rid
        return row

    def close_row(self, row: int) -> None:
        self.owner.pop(row, None)
        self._free.append(row)


class MaskPool:
    def __init__(self, n: int, width: int) -> None:
        self._masks = [torch.zeros(width, width, dtype=torch.bool) for _ in range(n)]

    def checkout(self) -> torch.Tensor:
        return self._masks.pop()

    def checkin(self, mask: torch.Tensor) -> None:
        mask.zero_()
        self._masks.append(mask)


@dataclass
class Seq:
    rid: str
    tokens: list[int]
    row: int | None = None
    slots: list[torch.Tensor] = field(default_factory=list)
    finished: bool = False


@dataclass
class Draft:
    seq: Seq
    tokens: list[int]
    slots: torch.Tensor
    mask: torch.Tensor | None = None


class SpecWorker:
    def __init__(
        self, slots: SlotAllocator, rows: RowTable, masks: MaskPool, k: int, verify: Callable[[Seq, list[int]], int]
    ) -> None:
        self.slots = slots
        self.rows = rows
        self.masks = masks
        self.k = k
        self.verify = verify

    def start(self, seq: Seq) -> bool:
        row = self.rows.open_row(seq.rid)  # leak: an empty slot pool rejects the sequence with its row still open
        if row is None:
            return False
        prompt = self.slots.alloc(len(seq.tokens))  # clean: filed in seq.slots which stop frees
        if prompt is None:
            return False
        seq.row = row
        seq.slots.append(prompt)
        return True

    def draft(self, seq: Seq, use_tree: bool) -> Draft | None:
        slots = self.slots.alloc(self.k)  # clean: near miss, the draft carries it and settle splits it between sequence and pool
        if slots is None:
            return None
        toks = [random.randrange(32000) for _ in range(self.k)]
        mask = self.masks.checkout() if use_tree else None  # clean: near miss, settle checks it in whenever it is set
        return Draft(seq, toks, slots, mask)

    def settle(self, d: Draft) -> int:
        n = self.verify(d.seq, d.tokens)
        if d.mask is not None:
            self.masks.checkin(d.mask)
            d.mask = None
        self.slots.free(d.slots[n:])
        d.seq.slots.append(d.slots[:n])
        d.seq.tokens.extend(d.tokens[:n])
        return n

    def discard(self, d: Draft) -> None:
        if d.mask is not None:
            self.masks.checkin(d.mask)
        self.slots.free(d.slots)

    def step(self, seqs: list[Seq]) -> int:
        produced = 0
        for seq in seqs:
            d = self.draft(seq, use_tree=len(seqs) < 4)  # leak: a sequence that is already finished is passed over with its draft
            if d is None:
                break
            if seq.finished:
                continue
            produced += self.settle(d)
        return produced

    def step_checked(self, seqs: list[Seq]) -> int:
        produced = 0
        for seq in seqs:
            d = self.draft(seq, use_tree=False)  # clean: near miss, a finished sequence discards its draft
            if d is None:
                break
            if seq.finished:
                self.discard(d)
                continue
            produced += self.settle(d)
        return produced

    def bonus(self, seq: Seq, token: int) -> None:
        extra = self.slots.alloc(1)  # clean: near miss, nothing is held when None and the sequence keeps it otherwise
        if extra is None:
            seq.finished = True
            return
        seq.slots.append(extra)
        seq.tokens.append(token)

    def score_tree(self, seq: Seq, paths: list[list[int]]) -> list[int] | None:
        mask = self.masks.checkout()  # leak: no slots for the paths returns None before the checkin
        slots = self.slots.alloc(sum(len(p) for p in paths))  # clean: near miss, a scratch range freed after scoring
        if slots is None:
            return None
        best: list[int] = []
        for i, path in enumerate(paths):
            mask[i, : len(path)] = True
            n = self.verify(seq, path)
            if n > len(best):
                best = path[:n]
        self.slots.free(slots)
        self.masks.checkin(mask)
        return best

    def drafts(self, seqs: list[Seq]) -> Iterator[Draft]:
        for seq in seqs:
            d = self.draft(seq, use_tree=True)  # clean: near miss, yielded to a consumer that settles every draft
            if d is None:
                return
            yield d

    def refill(self, seq: Seq, need: int) -> bool:
        got = self.slots.alloc(need)  # leak: the smaller second allocation rebinds the name and the first range is lost
        if got is not None and got.numel() > self.k:
            got = self.slots.alloc(self.k)  # clean: kept in seq.slots
        if got is None:
            return False
        seq.slots.append(got)
        return True

    def stop(self, seq: Seq) -> None:
        for s in seq.slots:
            self.slots.free(s)
        seq.slots.clear()
        if seq.row is not None:
            self.rows.close_row(seq.row)
            seq.row = None


def run(worker: SpecWorker, seqs: list[Seq], rounds: int) -> int:
    live = [s for s in seqs if worker.start(s)]
    total = 0
    for _ in range(rounds):
        total += worker.step(live)
        for d in worker.drafts(live):  # clean: near miss, every yielded draft is settled in the body
            total += worker.settle(d)
            worker.bonus(d.seq, d.tokens[-1])
    for s in live:
        worker.stop(s)
    return total
