"""Speculative decoding: draft slots that are accepted into or rejected from the target sequence."""
from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Callable, Iterable, Literal, Sequence, overload

import torch

log = logging.getLogger("spec")
Token = int


@dataclass
class SpecConfig:
    k: int = 4
    max_rounds: int = 8
    reject: Literal["drop", "keep"] = "drop"


class KVSlots:
    def __init__(self, n: int) -> None:
        self._free: list[int] = list(range(n))

    @overload
    def reserve(self) -> int: ...
    @overload
    def reserve(self, n: int) -> list[int]: ...

    def reserve(self, n: int | None = None) -> int | list[int]:
        if n is None:
            return self._free.pop()  # clean: handed out
        if n > len(self._free):
            raise MemoryError(n)
        return [self._free.pop() for _ in range(n)]  # clean: handed out

    def cancel(self, slots: int | Iterable[int]) -> None:
        if isinstance(slots, int):
            self._free.append(slots)
        else:
            self._free.extend(slots)

    @property
    def left(self) -> int:
        return len(self._free)


@dataclass
class Seq:
    tokens: list[Token]
    slots: list[int] = field(default_factory=list)


Draft = Callable[[Sequence[Token], int], list[Token]]
Verify = Callable[[Sequence[Token], Sequence[Token]], int]


class SpecDecoder:
    def __init__(self, cfg: SpecConfig, kv: KVSlots, draft: Draft, verify: Verify) -> None:
        self.cfg = cfg
        self.kv = kv
        self.draft = draft
        self.verify = verify
        self.lookahead: list[int] | None = None

    def round(self, seq: Seq) -> int:
        slots = self.kv.reserve(self.cfg.k)  # clean: near miss, accepted slots go into the sequence, the rest is cancelled
        toks = self.draft(seq.tokens, self.cfg.k)
        n = self.verify(seq.tokens, toks)
        seq.tokens += toks[:n]
        seq.slots += slots[:n]
        self.kv.cancel(slots[n:])
        return n

    def round_lossy(self, seq: Seq) -> int:
        slots = self.kv.reserve(self.cfg.k)  # leak: when nothing is accepted it returns and cancels nothing
        toks = self.draft(seq.tokens, self.cfg.k)
        n = self.verify(seq.tokens, toks)
        if n == 0:
            return 0
        seq.tokens += toks[:n]
        seq.slots += slots[:n]
        self.kv.cancel(slots[n:])
        return n

    def round_mode(self, seq: Seq) -> int:
        slots = self.kv.reserve(self.cfg.k)  # leak: under "keep" the rejected slots are neither stored nor cancelled
        toks = self.draft(seq.tokens, len(slots))
        n = self.verify(seq.tokens, toks)
        seq.slots.extend(slots[:n])
        if self.cfg.reject == "drop":
            self.kv.cancel(slots[n:])
        return n

    def finish(self, seq: Seq) -> None:
        self.kv.cancel(seq.slots)
        seq.slots = []

    def one(self, seq: Seq, tok: Token) -> None:
        slot = self.kv.reserve()  # clean: appended to the sequence that finish() cancels
        seq.tokens.append(tok)
        seq.slots.append(slot)

    def one_unless_eos(self, seq: Seq, tok: Token, eos: Token) -> bool:
        slot = self.kv.reserve()  # leak: the end token returns with the slot
        if tok == eos:
            return False
        seq.tokens.append(tok)
        seq.slots.append(slot)
        return True

    def bonus(self, seq: Seq, toks: Sequence[Token], eos: Token) -> int:
        added = 0
        for t in toks:
            slot = self.kv.reserve()  # clean: near miss, break after the slot was cancelled
            if t == eos:
                self.kv.cancel(slot)
                break
            seq.slots.append(slot)
            seq.tokens.append(t)
            added += 1
        return added

    def plan(self) -> bool:
        if self.lookahead is None and self.kv.left >= self.cfg.k:
            self.lookahead = self.kv.reserve(self.cfg.k)  # clean: near miss, empty field only; unplan() or commit() empties it
        return self.lookahead is not None

    def unplan(self) -> None:
        if self.lookahead:
            self.kv.cancel(self.lookahead)
        self.lookahead = None

    def commit(self, seq: Seq) -> None:
        if self.lookahead is not None:
            seq.slots.extend(self.lookahead)
            self.lookahead = None

    def tree(self, seq: Seq, branches: list[list[Token]]) -> int:
        held: dict[int, list[int]] = {}
        for i, b in enumerate(branches):
            held[i] = self.kv.reserve(len(b))  # clean: near miss, the winner is taken out of the dict, all others are cancelled
        scores = [self.verify(seq.tokens, b) for b in branches]
        best = max(range(len(branches)), key=scores.__getitem__)
        seq.slots += held.pop(best)
        seq.tokens += branches[best]
        for slots in held.values():
            self.kv.cancel(slots)
        return best

    def tree_greedy(self, seq: Seq, branches: list[list[Token]]) -> bool:
        held: dict[int, list[int]] = {}
        for i, b in enumerate(branches):
            held[len(b)] = self.kv.reserve(len(b))  # leak: branches of one length overwrite each other's entry
        for slots in held.values():
            self.kv.cancel(slots)
        return bool(held)

    def generate(self, seq: Seq, eos: Token) -> list[Token]:
        for _ in range(self.cfg.max_rounds):
            if self.round(seq) == 0:  # clean: the sequence holds what was accepted
                break
            if eos in seq.tokens[-self.cfg.k:]:
                break
        self.finish(seq)
        return seq.tokens

    def retry(self, seq: Seq, tries: int = 3) -> bool:
        for _ in range(tries):
            slots = self.kv.reserve(2)  # leak: every failed try leaves its two slots behind
            toks = self.draft(seq.tokens, 2)
            if self.verify(seq.tokens, toks) == 2:
                seq.slots += slots
                seq.tokens += toks
                return True
        return False

    def retry_same(self, seq: Seq, tries: int = 3) -> bool:
        slots = self.kv.reserve(2)  # clean: near miss, one reservation for all tries, cancelled when none succeeds
        for _ in range(tries):
            toks = self.draft(seq.tokens, 2)
            if self.verify(seq.tokens, toks) == 2:
                seq.slots += slots
                seq.tokens += toks
                return True
        self.kv.cancel(slots)
        return False


def acceptance(dec: SpecDecoder, prompts: list[list[Token]]) -> torch.Tensor:
    rates = torch.zeros(len(prompts))
    for i, p in enumerate(prompts):
        seq = Seq(list(p))
        rates[i] = dec.round(seq) / dec.cfg.k  # leak: the local sequence with its slots is never finished
    return rates
