"""Encoder-output cache for multimodal requests."""
import logging
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Dict, List, Optional, Set

import torch

logger = logging.getLogger(__name__)


class EncoderBudget:
    """Counts reserved embedding rows."""

    def __init__(self, rows: int):
        self.total = rows
        self.reserved = 0

    def reserve(self, rows: int) -> bool:
        if self.reserved + rows > self.total:
            return False
        self.reserved += rows
        return True

    def unreserve(self, rows: int) -> None:
        self.reserved -= rows
        assert self.reserved >= 0


class FeatureSlots:
    def __init__(self, n: int, rows: int, dim: int):
        self.bank = torch.zeros(n, rows, dim)
        self._vacant = OrderedDict((i, None) for i in range(n))

    def claim(self) -> Optional[int]:
        if not self._vacant:
            return None
        slot, _ = self._vacant.popitem(last=False)
        return slot

    def vacate(self, slot: int) -> None:
        self._vacant[slot] = None

    def claim_clean(self) -> Optional[int]:
        while self._vacant:
            slot, _ = self._vacant.popitem()  # leak: a dirty slot is zeroed but not put back before the next one is popped
            if not self.bank[slot].any():
                return slot
            self.bank[slot].zero_()
        return None


@dataclass
class MMItem:
    digest: str
    pixels: torch.Tensor
    rows: int


@dataclass
class MMRequest:
    rid: str
    items: List[MMItem] = field(default_factory=list)
    reserved_rows: int = 0
    held: Set[int] = field(default_factory=set)


class EncoderCacheManager:
    def __init__(self, budget: EncoderBudget, slots: FeatureSlots, encoder):
        self.budget = budget
        self.slots = slots
        self.encoder = encoder
        self.cached: Dict[str, int] = {}

    def try_schedule(self, req: MMRequest) -> bool:
        rows = sum(i.rows for i in req.items)
        if not self.budget.reserve(rows):  # clean: near miss, False means nothing reserved, else noted in the request
            return False
        req.reserved_rows += rows
        return True

    def unschedule(self, req: MMRequest) -> None:
        self.budget.unreserve(req.reserved_rows)
        req.reserved_rows = 0

    def schedule_items(self, req: MMRequest) -> int:
        total = 0
        for item in req.items:
            if not self.budget.reserve(item.rows):  # leak: rows of the items before the refused one stay reserved and unrecorded
                logger.info("%s: item %s refused", req.rid, item.digest)
                return 0
            total += item.rows
        req.reserved_rows += total
        return total

    def schedule_items_partial(self, req: MMRequest) -> int:
        total = 0
        for item in req.items:
            if not self.budget.reserve(item.rows):  # clean: near miss, break still records what was reserved
                break
            total += item.rows
        req.reserved_rows += total
        return total

    def encode(self, item: MMItem) -> Optional[int]:
        if item.digest in self.cached:
            return self.cached[item.digest]
        slot = self.slots.claim()  # clean: kept in cached, drop and flush vacate it
        if slot is None:
            return None
        self.slots.bank[slot, : item.rows].copy_(self.encoder(item.pixels))
        self.cached[item.digest] = slot
        return slot

    def drop(self, digest: str) -> None:
        slot = self.cached.pop(digest, None)
        if slot is not None:
            self.slots.vacate(slot)

    def flush(self) -> None:
        for digest in tuple(self.cached):
            self.drop(digest)

    def encode_private(self, req: MMRequest, item: MMItem) -> bool:
        slot = self.slots.claim()  # leak: non-finite features return False with the slot claimed
        if slot is None:
            return False
        feats = self.encoder(item.pixels)
        if not torch.isfinite(feats).all():
            return False
        self.slots.bank[slot, : item.rows] = feats
        req.held.add(slot)
        return True

    def encode_video(self, req: MMRequest, frames: List[torch.Tensor]) -> bool:
        got: List[int] = []
        for f in frames:
            slot = self.slots.claim()  # clean: near miss, all or nothing
            if slot is None:
                for s in got:
                    self.slots.vacate(s)
                return False
            self.slots.bank[slot, :1] = self.encoder(f)
            got.append(slot)
        req.held.update(got)
        return True

    def release_request(self, req: MMRequest) -> None:
        while req.held:
            self.slots.vacate(req.held.pop())
        self.unschedule(req)

    def thumbnail(self, item: MMItem) -> Optional[torch.Tensor]:
        slot = self.slots.claim_clean()  # leak: a copy of the row is returned, the slot stays claimed
        if slot is None:
            return None
        self.slots.bank[slot, :1] = self.encoder(item.pixels).mean(0)
        return self.slots.bank[slot, 0].clone()

    def similarity(self, a: MMItem, b: MMItem) -> float:
        sa = self.slots.claim()  # clean: vacated in all three exits
        if sa is None:
            return 0.0
        sb = self.slots.claim()  # clean: None or vacated
        if sb is None:
            self.slots.vacate(sa)
            return 0.0
        self.slots.bank[sa, : a.rows] = self.encoder(a.pixels)
        self.slots.bank[sb, : b.rows] = self.encoder(b.pixels)
        sim = torch.cosine_similarity(self.slots.bank[sa].mean(0), self.slots.bank[sb].mean(0), dim=0)
        self.slots.vacate(sa)
        self.slots.vacate(sb)
        return float(sim)

    def dedupe(self, items: List[MMItem]) -> Dict[str, torch.Tensor]:
        table: Dict[str, int] = {}
        for it in items:
            slot = self.slots.claim()  # leak: a repeated digest overwrites the entry of the first one
            if slot is None:
                break
            self.slots.bank[slot, : it.rows] = self.encoder(it.pixels)
            table[it.digest] = slot
        out = {d: self.slots.bank[s].clone() for d, s in table.items()}
        for s in table.values():
            self.slots.vacate(s)
        return out

    def precompute(self, items: List[MMItem]) -> int:
        n = 0
        rows = sum(i.rows for i in items)
        if self.budget.reserve(rows):  # leak: never unreserved after the encoding
            for it in items:
                n += self.encode(it) is not None  # clean: the slot is in cached
        return n
