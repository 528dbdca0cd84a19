"""Moves tensors between peers through spans of the registered arena."""
from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from .credits import CreditLine, TwoLines
from .regions import RegionBook, Span
from .staging import gather_rows, stage, stage_rows

log = logging.getLogger(__name__)


@dataclass
class Transfer:
    tag: int
    span: Span
    credits: int


class Mover:
    def __init__(self, book: RegionBook, arena: torch.Tensor, line: CreditLine, wire) -> None:
        self.book = book
        self.arena = arena
        self.line = line
        self.wire = wire
        self._open: dict[int, Transfer] = {}

    def post(self, tag: int, t: torch.Tensor) -> bool:
        span = stage(self.book, self.arena, t)  # clean: relinquished without credit, else held by the transfer
        if span is None:
            return False
        if not self.line.spend(1, wait=0.5):  # clean: earned back in complete()
            self.book.relinquish(span)
            return False
        self._open[tag] = Transfer(tag, span, 1)
        self.wire.post(tag, span.start, span.size)
        return True

    def post_many(self, tag: int, rows: list[torch.Tensor]) -> bool:
        if not self.line.spend(len(rows), wait=0.5):  # leak: the credits are lost when staging fails
            return False
        span = stage_rows(self.book, self.arena, rows)  # clean: held by the transfer until complete()
        if span is None:
            return False
        self._open[tag] = Transfer(tag, span, len(rows))
        self.wire.post(tag, span.start, span.size)
        return True

    def complete(self, tag: int) -> None:
        tr = self._open.pop(tag, None)
        if tr is None:
            log.debug("tag %d completed twice", tag)
            return
        self.line.earn(tr.credits)
        self.book.relinquish(tr.span)

    def control(self, lines: TwoLines, payload: bytes) -> bool:
        if not lines.spend_both(1):  # clean: earned back in finally
            return False
        try:
            return self.wire.control(payload)
        finally:
            lines.earn_both(1)

    def mirror(self, peers: list, t: torch.Tensor) -> int:
        done = 0
        for peer in peers:
            span = stage(self.book, self.arena, t)  # leak: a peer that is not ready is skipped with the span claimed
            if span is None:
                break
            if not peer.ready():
                continue
            peer.write(span.start, self.arena[span.start:span.stop])
            self.book.relinquish(span)
            done += 1
        return done

    def digest(self, rows: list[torch.Tensor]) -> float:
        span, flat = gather_rows(self.book, self.arena, rows)  # leak: only the flat view is used
        return float(flat.to(torch.float32).mean())
