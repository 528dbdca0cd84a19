"""Encoder output cache for image and audio items.

Two things are rationed here: rows of the encoder budget (a counter, refunded
when the features leave the cache) and feature buffers (bucketed by rows).
"""
from __future__ import annotations

import logging
from collections import defaultdict
from typing import Callable, Dict, List, Optional, Sequence

import torch

logger = logging.getLogger(__name__)


class RowBudget:
    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.left = rows

    def reserve(self, n: int) -> bool:
        if n > self.left:
            return False
        self.left -= n
        return True

    def refund(self, n: int) -> None:
        self.left = min(self.rows, self.left + n)


class FeatureBuffers:
    """Feature tensors bucketed by the next power of two of their rows."""

    def __init__(self, hidden: int, device: str = "cuda") -> None:
        self.hidden = hidden
        self.device = device
        self._idle: Dict[int, List[torch.Tensor]] = defaultdict(list)

    @staticmethod
    def bucket(rows: int) -> int:
        return 1 << max(0, rows - 1).bit_length()

    def borrow(self, rows: int) -> torch.Tensor:
        b = self.bucket(rows)
        if self._idle[b]:
            return self._idle[b].pop()  # clean: returned to the caller
        return torch.empty(b, self.hidden, device=self.device)

    def hand_in(self, t: torch.Tensor) -> None:
        self._idle[t.shape[0]].append(t)


class MMItem:
    def __init__(self, mm_hash: str, pixels: torch.Tensor, rows: int) -> None:
        self.mm_hash = mm_hash
        self.pixels = pixels
        self.rows = rows


class Entry:
    def __init__(self, feats: torch.Tensor, rows: int) -> None:
        self.feats = feats
        self.rows = rows
        self.users: set = set()


class EncoderCache:
    def __init__(self, budget: RowBudget, buffers: FeatureBuffers, tower: Callable) -> None:
        self.budget = budget
        self.buffers = buffers
        self.tower = tower
        self.entries: Dict[str, Entry] = {}

    def _encode(self, item: MMItem) -> torch.Tensor:
        out = self.buffers.borrow(item.rows)  # clean: returned to the caller
        self.tower(item.pixels, out=out[: item.rows])
        return out

    def _encode_checked(self, item: MMItem) -> Optional[torch.Tensor]:
        out = self.buffers.borrow(item.rows)  # leak: features with a NaN make it return None without the buffer
        self.tower(item.pixels, out=out[: item.rows])
        if torch.isnan(out[: item.rows]).any():
            logger.error("tower gave NaN for %s", item.mm_hash)
            return None
        return out

    def ensure(self, rid: str, item: MMItem) -> bool:
        ent = self.entries.get(item.mm_hash)
        if ent is not None:
            ent.users.add(rid)
            return True
        if not self.budget.reserve(item.rows):  # leak: an item that could not be encoded keeps its rows
            return False
        feats = self._encode_checked(item)  # clean: kept in the entry until drop()
        if feats is None:
            return False
        ent = Entry(feats, item.rows)
        ent.users.add(rid)
        self.entries[item.mm_hash] = ent
        return True

    def ensure_all(self, rid: str, items: Sequence[MMItem]) -> bool:
        fresh = [it for it in items if it.mm_hash not in self.entries]
        fresh = list({it.mm_hash: it for it in fresh}.values())
        need = sum(it.rows for it in fresh)
        if not self.budget.reserve(need):  # clean: the rows go with the entries, drop() refunds them
            return False
        for it in fresh:
            self.entries[it.mm_hash] = Entry(self._encode(it), it.rows)  # clean: kept in the entry until drop()
        for it in items:
            self.entries[it.mm_hash].users.add(rid)
        return True

    def drop(self, rid: str) -> None:
        for key in list(self.entries):
            ent = self.entries[key]
            ent.users.discard(rid)
            if not ent.users:
                self.buffers.hand_in(ent.feats)
                self.budget.refund(ent.rows)
                del self.entries[key]

    def gather(self, items: Sequence[MMItem], dst: torch.Tensor) -> int:
        """Writes the features of the items one after another into dst."""
        at = 0
        for it in items:
            ent = self.entries.get(it.mm_hash)
            if ent is not None:
                dst[at : at + it.rows].copy_(ent.feats[: it.rows])
            else:
                dst[at : at + it.rows].copy_(self._encode(it)[: it.rows])  # leak: the callee's buffer is copied from and dropped
            at += it.rows
        return at

    def mean_feature(self, item: MMItem) -> torch.Tensor:
        ent = self.entries.get(item.mm_hash)
        borrowed = ent is None
        feats = self._encode(item) if borrowed else ent.feats  # clean: near miss, the flag says whether there is a buffer to hand in
        mean = feats[: item.rows].mean(dim=0)
        if borrowed:
            self.buffers.hand_in(feats)
        return mean

    def interpolate(self, item: MMItem, rows: int) -> torch.Tensor:
        """Resampled features in a buffer that the caller hands in."""
        feats = self._encode(item)  # leak: when the sizes agree a clone is returned and the buffer forgotten
        if rows == item.rows:
            return feats[:rows].clone()
        out = self.buffers.borrow(rows)  # clean: returned to the caller
        out[:rows] = torch.nn.functional.interpolate(feats[: item.rows].t()[None], size=rows)[0].t()
        self.buffers.hand_in(feats)
        return out

    def resize_entry(self, mm_hash: str, rows: int) -> bool:
        ent = self.entries.get(mm_hash)
        if ent is None or rows <= ent.rows:
            return False
        if not self.budget.reserve(rows - ent.rows):  # clean: near miss, ent.rows grows by them and drop() refunds
            return False
        bigger = self.buffers.borrow(rows)  # clean: takes the old one's place in the entry
        bigger[: ent.rows] = ent.feats[: ent.rows]
        self.buffers.hand_in(ent.feats)
        ent.feats, ent.rows = bigger, rows
        return True

    def refresh(self, item: MMItem) -> None:
        """Encodes again, with the same tower, after a weight update."""
        ent = self.entries.get(item.mm_hash)
        if ent is None:
            return
        stale = ent.feats
        ent.feats = self._encode(item)  # clean: near miss, the overwritten buffer is handed in below
        self.buffers.hand_in(stale)

    def close(self) -> None:
        for ent in self.entries.values():
            self.buffers.hand_in(ent.feats)
            self.budget.refund(ent.rows)
        self.entries.clear()
