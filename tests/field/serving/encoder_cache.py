"""Encoder outputs of multimodal items, kept in a bounded arena until the prompt has consumed them."""
import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import Dict, List, Optional, Set, Tuple

import torch

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Region:
    start: int
    length: int


class Arena:
    def __init__(self, rows: int, hidden: int) -> None:
        self.data = torch.zeros(rows, hidden)
        self._holes: List[Region] = [Region(0, rows)]

    def alloc(self, n: int) -> Optional[Region]:
        for i, hole in enumerate(self._holes):
            if hole.length >= n:
                self._holes.pop(i)
                if hole.length > n:
                    self._holes.insert(i, Region(hole.start + n, hole.length - n))
                return Region(hole.start, n)
        return None

    def dealloc(self, r: Region) -> None:
        self._holes.append(r)
        self._holes.sort(key=lambda h: h.start)

    def defrag(self, min_len: int) -> int:
        """Join neighbouring holes."""
        joined = 0
        keep: List[Region] = []
        while self._holes:
            hole = self._holes.pop(0)  # leak: holes below min_len that have no neighbour vanish from the store
            if keep and keep[-1].start + keep[-1].length == hole.start:
                prev = keep.pop()
                keep.append(Region(prev.start, prev.length + hole.length))
                joined += 1
            elif hole.length >= min_len:
                keep.append(hole)
        self._holes = keep
        return joined


class EncoderCache:
    def __init__(self, arena: Arena, use_dedup: bool = True) -> None:
        self.arena = arena
        self.use_dedup = use_dedup
        self.by_hash: "OrderedDict[str, Region]" = OrderedDict()
        self.users: Dict[str, Set[str]] = {}
        self.private: Dict[Tuple[str, int], Region] = {}

    def get_or_compute(self, rid: str, mm_hash: str, feats: torch.Tensor) -> Optional[Region]:
        if mm_hash in self.by_hash:
            self.users[mm_hash].add(rid)
            return self.by_hash[mm_hash]
        region = self.arena.alloc(feats.shape[0])  # clean: None when full, else in the table until the last user leaves
        if region is None:
            return None
        self.arena.data[region.start : region.start + region.length] = feats
        self.by_hash[mm_hash] = region
        self.users[mm_hash] = {rid}
        return region

    def put_private(self, rid: str, idx: int, feats: torch.Tensor) -> bool:
        region = self.arena.alloc(feats.shape[0])  # leak: a repeated item returns with the new region dropped
        if region is None:
            return False
        if (rid, idx) in self.private:
            _log.debug("item %d of %s is there already", idx, rid)
            return True
        self.private[(rid, idx)] = region
        self.arena.data[region.start : region.start + region.length] = feats
        return True

    def put_many(self, rid: str, items: List[torch.Tensor]) -> bool:
        taken: List[Region] = []
        for feats in items:
            r = self.arena.alloc(feats.shape[0])  # clean: near miss, all are deallocated when one fails
            if r is None:
                break
            taken.append(r)
        if len(taken) < len(items):
            for r in taken:
                self.arena.dealloc(r)
            return False
        self.free_request(rid)
        for idx, r in enumerate(taken):
            self.private[(rid, idx)] = r
        return True

    def put_tiles(self, rid: str, tiles: List[torch.Tensor]) -> int:
        regions: List[Optional[Region]] = []
        self.free_request(rid)
        for t in tiles:
            regions.append(self.arena.alloc(t.shape[0]))  # leak: tiles after the first gap are never stored nor deallocated
        for idx, r in enumerate(regions):
            if r is None:
                return idx
            self.private[(rid, idx)] = r
        return len(tiles)

    def release_user(self, rid: str) -> None:
        for h, users in list(self.users.items()):
            users.discard(rid)
            if not users:
                del self.users[h]
                self.arena.dealloc(self.by_hash.pop(h))

    def free_request(self, rid: str) -> None:
        for key in [k for k in self.private if k[0] == rid]:
            self.arena.dealloc(self.private.pop(key))

    def project(self, feats: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        scratch = self.arena.alloc(feats.shape[0]) if self.use_dedup else None  # clean: near miss, the same flag guards the dealloc
        if self.use_dedup:
            view = self.arena.data[scratch.start : scratch.start + scratch.length]
            torch.mm(feats, weight, out=view)
            out = view.clone()
        else:
            out = feats @ weight
        if self.use_dedup:
            self.arena.dealloc(scratch)
        return out

    def pool_mean(self, feats: torch.Tensor, normalise: bool) -> torch.Tensor:
        scratch = self.arena.alloc(feats.shape[0])  # leak: deallocated only when normalise is set
        if scratch is None:
            return feats.mean(dim=0)
        view = self.arena.data[scratch.start : scratch.start + scratch.length]
        view.copy_(feats)
        if normalise:
            view.div_(view.norm(dim=-1, keepdim=True))
            out = view.mean(dim=0)
            self.arena.dealloc(scratch)
            return out
        return view.mean(dim=0)
