"""Copies into the arena. What these return, the caller relinquishes."""
from __future__ import annotations

import torch

from .regions import RegionBook, Span


def _bytes(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.uint8).flatten()


def stage(book: RegionBook, arena: torch.Tensor, t: torch.Tensor) -> Span | None:
    flat = _bytes(t)
    span = book.claim(flat.numel())  # clean: returned to the caller
    if span is not None:
        arena[span.start:span.start + flat.numel()].copy_(flat)
    return span


def stage_rows(book: RegionBook, arena: torch.Tensor, rows: list[torch.Tensor]) -> Span | None:
    flats = [_bytes(r) for r in rows]
    span = book.claim(sum(f.numel() for f in flats))  # clean: returned on the one way past None
    if span is None:
        return None
    at = span.start
    for f in flats:
        arena[at:at + f.numel()].copy_(f)
        at += f.numel()
    return span


def gather_rows(book: RegionBook, arena: torch.Tensor, rows: list[torch.Tensor]) -> tuple[Span, torch.Tensor]:
    span = stage_rows(book, arena, rows)  # clean: returned to the caller with a view of it
    if span is None:
        raise MemoryError("arena full")
    return span, arena[span.start:span.stop]
