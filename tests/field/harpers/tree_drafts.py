"""Speculative decoding: draft token slots, tree masks and verification windows."""
from __future__ import annotations

import enum
import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Callable, Sequence

import torch

log = logging.getLogger(__name__)


class Outcome(enum.Enum):
    ACCEPTED = "accepted"
    PARTIAL = "partial"
    REJECTED = "rejected"


class MaskBank:
    """Bit masks of draft trees; issue() gives a row, reclaim() takes it."""

    def __init__(self, rows: int, width: int):
        self.bits = torch.zeros(rows, width, dtype=torch.bool, device="cuda")
        self._idle = deque(range(rows))

    def issue(self) -> int:
        """A row number, or -1."""
        return self._idle.popleft() if self._idle else -1

    def reclaim(self, row: int) -> None:
        self.bits[row].zero_()
        self._idle.append(row)


@dataclass
class Window:
    serial: int
    start: int
    length: int


class TokenRing:
    """Draft tokens live in windows of a ring."""

    def __init__(self, size: int):
        self.tokens = [0] * size
        self._head = 0
        self._serial = 0
        self._busy: dict[int, Window] = {}

    def claim_window(self, length: int) -> Window | None:
        if sum(w.length for w in self._busy.values()) + length > len(self.tokens):
            return None
        self._serial += 1
        window = Window(self._serial, self._head, length)
        self._busy[window.serial] = window
        self._head = (self._head + length) % len(self.tokens)
        return window

    def retire_window(self, window: Window) -> None:
        self._busy.pop(window.serial, None)

    def write(self, window: Window, tokens: Sequence[int]) -> None:
        for i, token in enumerate(tokens[: window.length]):
            self.tokens[(window.start + i) % len(self.tokens)] = token


@dataclass
class Draft:
    rid: str
    tokens: list[int]
    parents: list[int]
    window: Window | None = None
    mask: int = -1
    children: list["Draft"] = field(default_factory=list)


class DraftBuilder:
    def __init__(self, ring: TokenRing, masks: MaskBank):
        self.ring, self.masks = ring, masks

    def build(self, rid: str, tokens: list[int], parents: list[int]) -> Draft | None:
        window = self.ring.claim_window(len(tokens))  # clean: retired when no mask is left, else in the draft
        if window is None:
            return None
        mask = self.masks.issue()  # clean: near miss, -1 is not a row; else in the draft
        if mask < 0:
            self.ring.retire_window(window)
            return None
        self.ring.write(window, tokens)
        for i, parent in enumerate(parents):
            self.masks.bits[mask, i] = parent >= 0
        return Draft(rid, tokens, parents, window, mask)

    def build_chain(self, rid: str, tokens: list[int]) -> Draft | None:
        mask = self.masks.issue()  # leak: not reclaimed when there is no window
        if mask < 0:
            return None
        window = self.ring.claim_window(len(tokens))  # clean: in the draft
        if window is None:
            log.debug("ring full for %s", rid)
            return None
        self.ring.write(window, tokens)
        self.masks.bits[mask, : len(tokens)] = True
        return Draft(rid, tokens, list(range(-1, len(tokens) - 1)), window, mask)

    def discard(self, draft: Draft) -> None:
        if draft.window is not None:
            self.ring.retire_window(draft.window)
            draft.window = None
        if draft.mask >= 0:
            self.masks.reclaim(draft.mask)
            draft.mask = -1
        for child in draft.children:
            self.discard(child)
        draft.children.clear()


def accepted_prefix(draft: Draft, target: Sequence[int]) -> int:
    n = 0
    for mine, theirs in zip(draft.tokens, target):
        if mine != theirs:
            break
        n += 1
    return n


class Verifier:
    def __init__(self, builder: DraftBuilder, score: Callable[[Draft], list[int]]):
        self.builder, self.score = builder, score
        self.stats = {outcome: 0 for outcome in Outcome}

    def step(self, rid: str, tokens: list[int], parents: list[int]) -> list[int]:
        draft = self.builder.build(rid, tokens, parents)  # leak: the outcome REJECTED returns before the discard
        if draft is None:
            return []
        target = self.score(draft)
        n = accepted_prefix(draft, target)
        if n == 0:
            self.stats[Outcome.REJECTED] += 1
            return target[:1]
        outcome = Outcome.ACCEPTED if n == len(tokens) else Outcome.PARTIAL
        self.stats[outcome] += 1
        self.builder.discard(draft)
        return target[: n + 1]

    def step_chain(self, rid: str, tokens: list[int]) -> list[int]:
        draft = self.builder.build_chain(rid, tokens)  # clean: discarded before the outcomes part
        if draft is None:
            return []
        target = self.score(draft)
        n = accepted_prefix(draft, target)
        self.builder.discard(draft)
        if n == 0:
            self.stats[Outcome.REJECTED] += 1
            return target[:1]
        self.stats[Outcome.PARTIAL] += 1
        return target[: n + 1]

    def step_tree(self, rid: str, branches: list[list[int]]) -> list[int]:
        root: Draft | None = None
        for branch in branches:
            draft = self.builder.build_chain(rid, branch)  # clean: near miss, the root or one of its children, discarded together
            if draft is None:
                break
            if root is None:
                root = draft
            else:
                root.children.append(draft)
        if root is None:
            return []
        best = max([root, *root.children], key=lambda d: accepted_prefix(d, self.score(d)))
        result = self.score(best)[: accepted_prefix(best, self.score(best)) + 1]
        self.builder.discard(root)
        return result

    def step_best(self, rid: str, branches: list[list[int]]) -> list[int]:
        best: Draft | None = None
        best_len = -1
        for branch in branches:
            draft = self.builder.build_chain(rid, branch)  # leak: a draft no better than the best is dropped
            if draft is None:
                break
            n = accepted_prefix(draft, self.score(draft))
            if n > best_len:
                if best is not None:
                    self.builder.discard(best)
                best, best_len = draft, n
        if best is None:
            return []
        tokens = best.tokens[:best_len]
        self.builder.discard(best)
        return tokens


class Pipeline:
    """Drafts run one step ahead: propose() now, resolve() in the next step."""

    def __init__(self, builder: DraftBuilder):
        self.builder = builder
        self.inflight: dict[str, Draft] = {}

    def propose(self, rid: str, tokens: list[int]) -> bool:
        if rid in self.inflight:
            return False
        draft = self.builder.build_chain(rid, tokens)  # clean: near miss, one per request, discarded by resolve or drop
        if draft is None:
            return False
        self.inflight[rid] = draft
        return True

    def resolve(self, rid: str, target: Sequence[int]) -> int:
        draft = self.inflight.pop(rid)
        n = accepted_prefix(draft, target)
        self.builder.discard(draft)
        return n

    def drop(self, rids: list[str]) -> None:
        for rid in rids:
            draft = self.inflight.pop(rid, None)
            if draft is not None:
                self.builder.discard(draft)


class BatchProposer:
    """A list of drafts per step, in the order of the batch."""

    def __init__(self, builder: DraftBuilder):
        self.builder = builder
        self.batch: list[Draft] = []

    def propose(self, proposals: dict[str, list[int]]) -> int:
        for rid, tokens in proposals.items():
            draft = self.builder.build_chain(rid, tokens)  # leak: finished requests are filtered out of the batch undiscarded
            if draft is not None:
                self.batch.append(draft)
        return len(self.batch)

    def filter_finished(self, finished: set[str]) -> None:
        self.batch = [d for d in self.batch if d.rid not in finished]

    def resolve(self, targets: dict[str, list[int]]) -> dict[str, int]:
        counts = {}
        for draft in self.batch:
            counts[draft.rid] = accepted_prefix(draft, targets[draft.rid])
            self.builder.discard(draft)
        self.batch = []
        return counts


class SplitProposer:
    def __init__(self, builder: DraftBuilder):
        self.builder = builder
        self.batch: list[Draft] = []

    def propose(self, rid: str, tokens: list[int]) -> None:
        draft = self.builder.build_chain(rid, tokens)  # clean: near miss, filter_finished discards what it leaves out
        if draft is not None:
            self.batch.append(draft)

    def filter_finished(self, finished: set[str]) -> None:
        kept = []
        for draft in self.batch:
            if draft.rid in finished:
                self.builder.discard(draft)
            else:
                kept.append(draft)
        self.batch = kept

    def close(self) -> None:
        for draft in self.batch:
            self.builder.discard(draft)
        self.batch.clear()


def mask_density(masks: MaskBank, parents: list[int]) -> float:
    row = masks.issue()  # leak: row zero counts as false in the test before the reclaim
    if row < 0:
        return 0.0
    for i, parent in enumerate(parents):
        masks.bits[row, i] = parent >= 0
    density = float(masks.bits[row].float().mean())
    if row:
        masks.reclaim(row)
    return density
