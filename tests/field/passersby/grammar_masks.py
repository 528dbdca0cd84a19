"""Structured output: token bitmasks for grammar-constrained requests."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import Deque, Dict, Iterable, List, Mapping, Optional

import torch

logger = logging.getLogger(__name__)


@dataclass
class GrammarState:
    rule: str
    position: int = 0
    terminated: bool = False

    def allowed(self, vocab: int) -> List[int]:
        return [(self.position * 31 + i) % vocab for i in range(8)]

    def advance(self, token: int) -> bool:
        self.position += 1
        self.terminated = token == 0
        return True


class MaskPool:
    def __init__(self, vocab: int, capacity: int) -> None:
        self.vocab = vocab
        self.words = (vocab + 31) // 32
        self._ring: Deque[torch.Tensor] = deque(
            torch.full((self.words,), -1, dtype=torch.int32) for _ in range(capacity)
        )

    def get_mask(self) -> torch.Tensor:
        if not self._ring:
            raise IndexError("mask pool is empty")
        mask = self._ring.popleft()  # clean: handed to the caller
        mask.fill_(0)
        return mask

    def put_mask(self, mask: torch.Tensor) -> None:
        self._ring.append(mask)

    def __len__(self) -> int:
        return len(self._ring)


class GrammarBackend:
    def __init__(self, pool: MaskPool, strict: bool = False) -> None:
        self.pool = pool
        self.strict = strict
        self.states: Dict[str, GrammarState] = {}
        self.masks: Dict[str, torch.Tensor] = {}
        self._all: Optional[torch.Tensor] = None

    def _fill(self, mask: torch.Tensor, tokens: Iterable[int]) -> torch.Tensor:
        for t in tokens:
            mask[t // 32] |= 1 << (t % 32 if t % 32 < 31 else 30)
        return mask

    def add(self, rid: str, rule: str) -> None:
        self.states[rid] = GrammarState(rule)

    def build(self, rid: str) -> torch.Tensor:
        """The caller gives the mask back."""
        state = self.states[rid]
        return self._fill(self.pool.get_mask(), state.allowed(self.pool.vocab))  # clean: _fill returns its argument, the caller owns it

    def allow_everything(self) -> torch.Tensor:
        if self._all is None:
            self._all = self.pool.get_mask()  # clean: near miss, taken once and given back by shutdown
            self._all.fill_(-1)
        return self._all

    def prepare(self, rid: str) -> None:
        old = self.masks.pop(rid, None)
        if old is not None:
            self.pool.put_mask(old)
        self.masks[rid] = self.build(rid)  # clean: near miss, the entry's former mask was put back two lines above

    def refresh(self, rids: List[str]) -> int:
        n = 0
        for rid in rids:
            state = self.states.get(rid)
            if state is None:
                continue
            self.masks[rid] = self.build(rid)  # leak: replaces the prepared mask of the request without putting it back
            n += 1
        return n

    def batch_mask(self, rids: List[str]) -> torch.Tensor:
        rows = [self.build(r) for r in rids]  # leak: stack copies the rows, none of them is put back
        return torch.stack(rows)

    def batch_mask_into(self, rids: List[str], out: torch.Tensor) -> None:
        for i, r in enumerate(rids):
            row = self.build(r)  # clean: put back after the copy
            out[i].copy_(row)
            self.pool.put_mask(row)

    def check(self, rid: str, token: int) -> bool:
        mask = self.build(rid)  # leak: in strict mode the violation is raised while the mask is out
        ok = bool(mask[token // 32] >> (token % 32) & 1)
        if not ok and self.strict:
            raise ValueError(f"{rid}: token {token} violates {self.states[rid].rule}")
        self.pool.put_mask(mask)
        return ok

    def allowed_count(self, rid: str) -> int:
        mask = self.build(rid)  # clean: near miss, the loop has no way past put_mask
        total = 0
        for word in mask.tolist():
            if word == 0:
                continue
            total += bin(word & 0xFFFFFFFF).count("1")
        self.pool.put_mask(mask)
        return total

    def intersect(self, a: str, b: str) -> torch.Tensor:
        ma = self.build(a)  # clean: near miss, the in-place result is what the caller gets
        mb = self.build(b)  # clean: put back
        ma &= mb
        self.pool.put_mask(mb)
        return ma

    def union(self, a: str, b: str) -> torch.Tensor:
        ma = self.build(a)  # leak: the result is a new tensor and only mb is put back
        mb = self.build(b)  # clean: put back
        both = ma | mb
        self.pool.put_mask(mb)
        return both

    def forced_token(self, pairs: Mapping[str, str]) -> Dict[str, int]:
        forced: Dict[str, int] = {}
        for a, b in pairs.items():
            m = self.intersect(a, b)  # leak: a pair without any token in common breaks out with its mask
            if not bool(m.any()):
                logger.info("no token satisfies both %s and %s", a, b)
                break
            forced[a] = int(m.nonzero()[0])
            self.pool.put_mask(m)
        return forced

    def advance(self, rid: str, token: int) -> None:
        state = self.states[rid]
        if not state.advance(token) or state.terminated:
            self.remove(rid)

    def remove(self, rid: str) -> None:
        self.states.pop(rid, None)
        mask = self.masks.pop(rid, None)
        if mask is not None:
            self.pool.put_mask(mask)

    def shutdown(self) -> None:
        for rid in list(self.states):
            self.remove(rid)
        if self._all is not None:
            self.pool.put_mask(self._all)
            self._all = None
