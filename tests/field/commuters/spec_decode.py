"""Speculative decoding with draft scratchpads kept in a fixed ring of pads."""
from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Callable, Optional

import torch


@dataclass
class DraftPad:
    slot: int
    tokens: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)

    def wipe(self) -> None:
        self.tokens.clear()
        self.logits.clear()


class PadRing:
    """`_free[i]` says whether pad i may be claimed; the cursor moves round."""

    def __init__(self, size: int) -> None:
        self._pads = [DraftPad(i) for i in range(size)]
        self._free = [True] * size
        self._cursor = 0

    def claim(self) -> Optional[DraftPad]:
        for _ in range(len(self._pads)):
            i = self._cursor
            self._cursor = (self._cursor + 1) % len(self._pads)
            if self._free[i]:
                self._free[i] = False  # clean: the pad is returned in the next line
                return self._pads[i]
        return None

    def unclaim(self, pad: DraftPad) -> None:
        pad.wipe()
        self._free[pad.slot] = True


class DraftScope(AbstractContextManager):
    """Claims on entry; a pad may be kept alive with `keep()`."""

    def __init__(self, ring: PadRing) -> None:
        self.ring = ring
        self.pad: Optional[DraftPad] = None
        self._kept = False

    def __enter__(self) -> "DraftScope":
        self.pad = self.ring.claim()  # clean: near miss, __exit__ skips it only when keep() has given it away
        return self

    def keep(self) -> Optional[DraftPad]:
        self._kept = True
        return self.pad

    def __exit__(self, et: Optional[type[BaseException]], ev: Optional[BaseException], tb: Optional[TracebackType]) -> None:
        if self.pad is not None and not self._kept:
            self.ring.unclaim(self.pad)
        self.pad = None


class QuietScope(AbstractContextManager):
    def __init__(self, ring: PadRing) -> None:
        self.ring = ring
        self.pad: Optional[DraftPad] = None

    def __enter__(self) -> Optional[DraftPad]:
        self.pad = self.ring.claim()  # leak: __exit__ swallows a StopIteration and returns before the unclaim
        return self.pad

    def __exit__(self, et: Optional[type[BaseException]], ev: Optional[BaseException], tb: Optional[TracebackType]) -> bool:
        if et is StopIteration:
            return True
        if self.pad is not None:
            self.ring.unclaim(self.pad)
        return False


DraftFn = Callable[[list[int]], tuple[int, torch.Tensor]]
VerifyFn = Callable[[list[int], list[int]], int]


class SpeculativeDecoder:
    def __init__(self, ring: PadRing, draft: DraftFn, verify: VerifyFn, k: int) -> None:
        self.ring = ring
        self.draft = draft
        self.verify = verify
        self.k = k
        self.carry: dict[str, DraftPad] = {}

    def _propose(self, prefix: list[int]) -> Optional[DraftPad]:
        pad = self.ring.claim()  # clean: filled and returned
        if pad is None:
            return None
        for _ in range(self.k):
            token, logits = self.draft(prefix + pad.tokens)
            pad.tokens.append(token)
            pad.logits.append(logits)
        return pad

    def step(self, prefix: list[int]) -> list[int]:
        pad = self._propose(prefix)  # leak: a full rejection returns early with the pad claimed
        if pad is None:
            return [self.draft(prefix)[0]]
        accepted = self.verify(prefix, pad.tokens)
        if accepted == 0:
            return []
        out = pad.tokens[:accepted]
        self.ring.unclaim(pad)
        return out

    def best_of(self, prefix: list[int], tries: int) -> list[int]:
        best: list[int] = []
        for _ in range(tries):
            pad = self._propose(prefix)  # clean: near miss, unclaimed whether or not it wins
            if pad is None:
                break
            n = self.verify(prefix, pad.tokens)
            if n > len(best):
                best = pad.tokens[:n]
            self.ring.unclaim(pad)
            if n == self.k:
                break
        return best

    def best_pad(self, prefix: list[int], tries: int) -> Optional[DraftPad]:
        best: Optional[DraftPad] = None
        score = -1
        for _ in range(tries):
            pad = self._propose(prefix)  # leak: a beaten winner is replaced without being unclaimed
            if pad is None:
                break
            n = self.verify(prefix, pad.tokens)
            if n > score:
                best, score = pad, n
            else:
                self.ring.unclaim(pad)
        return best

    def prefetch(self, rid: str, prefix: list[int]) -> None:
        if rid in self.carry:
            return
        pad = self._propose(prefix)  # clean: carried for the next step, consume unclaims
        if pad is not None:
            self.carry[rid] = pad

    def consume(self, rid: str) -> list[int]:
        pad = self.carry.pop(rid, None)
        if pad is None:
            return []
        tokens = list(pad.tokens)
        self.ring.unclaim(pad)
        return tokens

    def peek_entropy(self, prefix: list[int]) -> float:
        pad = self._propose(prefix)  # leak: the entropy is taken from the logits and the pad is left claimed
        if pad is None or not pad.logits:
            return 0.0
        p = torch.softmax(pad.logits[0], -1)
        return float(-(p * p.log()).sum())


def draft_and_keep(ring: PadRing, decoder: SpeculativeDecoder, prefix: list[int]) -> list[int]:
    with DraftScope(ring) as scope:  # clean: near miss, the kept pad is unclaimed after the block
        if scope.pad is None:
            return []
        scope.pad.tokens.append(decoder.draft(prefix)[0])
        pad = scope.keep()
    tokens = list(pad.tokens) if pad else []
    if pad is not None:
        ring.unclaim(pad)
    return tokens


def draft_quick(ring: PadRing, decoder: SpeculativeDecoder, prefix: list[int]) -> Optional[int]:
    with DraftScope(ring) as scope:  # clean: unclaimed on the way out
        if scope.pad is None:
            return None
        return decoder.draft(prefix)[0]
