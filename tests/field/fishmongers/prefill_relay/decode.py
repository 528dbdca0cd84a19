"""Destination side: sequences that arrive with their blocks filled."""
from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass

from .blocks import BlockPool, PoolEmpty
from .relay import BLOCK, Request

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Sequence:
    request: Request
    blocks: list[int]
    stalled: int = 0


class DecodeWorker:
    def __init__(self, pool: BlockPool, step, eos: int, max_prefixes: int = 64) -> None:
        self.pool = pool
        self._step = step
        self._eos = eos
        self.running: list[Sequence] = []
        self.parked: deque[Sequence] = deque()
        self._prefixes: dict[tuple[int, ...], list[int]] = {}
        self._max_prefixes = max_prefixes

    def adopt(self, request: Request, blocks: list[int]) -> None:
        self.running.append(Sequence(request, blocks))

    def adopt_prefix(self, tokens: list[int], blocks: list[int]) -> None:
        key = tuple(tokens)
        if (old := self._prefixes.pop(key, None)) is not None:
            self.pool.give(old)
        self._prefixes[key] = blocks
        if len(self._prefixes) > self._max_prefixes:
            oldest = next(iter(self._prefixes))
            self.pool.give(self._prefixes.pop(oldest))

    def _grow(self, seq: Sequence) -> bool:
        if len(seq.request.tokens) < len(seq.blocks) * BLOCK:
            return True
        try:
            seq.blocks.append(self.pool.grab_urgent())  # clean: one of the sequence's blocks now, given back in _finish()
        except PoolEmpty:
            seq.stalled += 1
            return False
        return True

    def tick(self) -> int:
        for seq in list(self.running):
            if seq.request.cancelled:
                self._finish(seq)
                continue
            if not self._grow(seq):
                self.running.remove(seq)
                self.parked.append(seq)
                continue
            token = self._step(seq.request.tokens, seq.blocks)
            seq.request.tokens.append(token)
            if token == self._eos:
                self._finish(seq)
        while self.parked and self._grow(self.parked[0]):
            self.running.append(self.parked.popleft())
        return len(self.running)

    def _finish(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.pool.give(seq.blocks)
        seq.blocks = []

    async def migrate(self, seq: Sequence, other: DecodeWorker, copy) -> bool:
        try:
            blocks = other.pool.grab(len(seq.blocks))  # clean: near miss, adopted by the other worker or given back
        except PoolEmpty:
            return False
        copied = await copy(seq.blocks, blocks)
        if not copied or seq not in self.running:
            other.pool.give(blocks)
            return False
        self._finish(seq)
        other.adopt(seq.request, blocks)
        return True

    async def rescore(self, seq: Sequence, score) -> float | None:
        """Runs the sequence again in other blocks and compares."""
        blocks = await self.pool.grab_wait(len(seq.blocks), patience=0.5)  # leak: a sequence that was finished meanwhile returns None
        if seq not in self.running:
            log.debug("%s finished before the rescore", seq.request.id)
            return None
        try:
            return await score(seq.request.tokens, blocks)
        finally:
            self.pool.give(blocks)
