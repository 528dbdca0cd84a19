"""Collation of token lists straight into ring tensors."""
from __future__ import annotations

import logging
from typing import List, Optional, Sequence, Tuple

import torch

from .ring import DeviceRing, RingTicket

log = logging.getLogger(__name__)
Docs = Sequence[Sequence[int]]


def collate(ring: DeviceRing, docs: Docs, pad: int) -> Optional[RingTicket]:
    """None if the ring has nothing left; the ticket is the caller's."""
    longest = max(len(d) for d in docs)
    t = ring.borrow(longest)  # clean: handed to the caller
    if t is None:
        return None
    t.tokens.fill_(pad)
    for r, d in enumerate(docs):
        t.tokens[r, : len(d)] = torch.tensor(d, dtype=torch.int32, device=ring.device)
    t.rows = len(docs)
    return t


def collate_filtered(ring: DeviceRing, docs: Docs, pad: int, min_rows: int) -> Optional[RingTicket]:
    t = collate(ring, docs, pad)  # leak: a batch with too few rows after the filter returns None unsettled
    if t is None:
        return None
    keep = (t.tokens != pad).sum(1) > 8
    t.rows = int(keep.sum())
    if t.rows < min_rows:
        log.debug("batch of %d rows skipped", t.rows)
        return None
    t.tokens[: t.rows] = t.tokens[keep]
    return t


def collate_preference(ring: DeviceRing, chosen: Docs, rejected: Docs, pad: int) -> Optional[Tuple[RingTicket, RingTicket]]:
    a = collate(ring, chosen, pad)  # clean: settled when the other side finds no room, else handed on
    if a is None:
        return None
    b = collate(ring, rejected, pad)  # clean: handed to the caller with the first
    if b is None:
        a.settle()
        return None
    return a, b


def split_lengths(ring: DeviceRing, docs: Docs, pad: int, edge: int) -> List[RingTicket]:
    """One ticket for the short and one for the long documents."""
    out = []
    for part in ([d for d in docs if len(d) <= edge], [d for d in docs if len(d) > edge]):
        if not part:
            continue
        t = collate(ring, part, pad)  # leak: the ticket of the short part is lost when the long part finds no room
        if t is None:
            return []
        out.append(t)
    return out
