"""Multimodal encoder cache: a budget of embedding slots shared by images, video frames and audio."""
from __future__ import annotations

import functools
import hashlib
import logging
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Iterator, List, Optional, Set, Tuple

import torch

logger = logging.getLogger(__name__)


class SlabExhausted(Exception):
    def __init__(self, want: int, have: int) -> None:
        super().__init__(f"want {want}, have {have}")
        self.want = want


@dataclass
class Slab:
    offset: int
    length: int
    media: str = ""


class SlabAllocator:
    """First fit over one embedding tensor, free extents in a dict offset -> length."""

    def __init__(self, capacity: int, hidden: int) -> None:
        self.table = torch.zeros(capacity, hidden)
        self._extents: Dict[int, int] = {0: capacity}

    def slice_off(self, length: int) -> Slab:
        for off in sorted(self._extents):
            have = self._extents[off]
            if have >= length:
                del self._extents[off]
                if have > length:
                    self._extents[off + length] = have - length
                return Slab(off, length)
        raise SlabExhausted(length, max(self._extents.values(), default=0))

    def give_up(self, slab: Slab) -> None:
        off, length = slab.offset, slab.length
        nxt = self._extents.pop(off + length, None)
        if nxt is not None:
            length += nxt
        for o, n in list(self._extents.items()):
            if o + n == off:
                del self._extents[o]
                off, length = o, length + n
                break
        self._extents[off] = length

    def slice_many(self, lengths: List[int]) -> List[Slab]:
        out: List[Slab] = []
        for n in lengths:
            try:
                out.append(self.slice_off(n))  # leak: the handler re-raises without giving up what is in out
            except SlabExhausted:
                logger.info("%d of %d slabs", len(out), len(lengths))
                raise
        return out

    def slice_all_or_none(self, lengths: List[int]) -> Optional[List[Slab]]:
        out: List[Slab] = []
        try:
            for n in lengths:
                out.append(self.slice_off(n))  # clean: near miss, the handler gives up all of out
        except SlabExhausted:
            while out:
                self.give_up(out.pop())
            return None
        return out

    def view(self, slab: Slab) -> torch.Tensor:
        return self.table[slab.offset:slab.offset + slab.length]


@dataclass
class Entry:
    slab: Slab
    users: Set[str] = field(default_factory=set)


@dataclass
class MediaItem:
    digest: str
    kind: str
    ntokens: int
    payload: Any


def digest_of(blob: bytes) -> str:
    return hashlib.blake2b(blob, digest_size=16).hexdigest()


class EncoderCache:
    def __init__(self, alloc: SlabAllocator, towers: Dict[str, Callable[[Any], Optional[torch.Tensor]]]) -> None:
        self.alloc = alloc
        self.towers = towers
        self.entries: "OrderedDict[str, Entry]" = OrderedDict()
        self.video: Dict[str, List[Slab]] = {}

    def _reclaim(self) -> bool:
        for dig, e in self.entries.items():
            if not e.users:
                del self.entries[dig]
                self.alloc.give_up(e.slab)
                return True
        return False

    def _slab(self, n: int) -> Slab:
        while True:
            try:
                return self.alloc.slice_off(n)  # clean: returned, a retry only follows an exception
            except SlabExhausted:
                if not self._reclaim():
                    raise

    def encode(self, rid: str, item: MediaItem) -> Optional[torch.Tensor]:
        hit = self.entries.get(item.digest)
        if hit is not None:
            hit.users.add(rid)
            return self.alloc.view(hit.slab)
        slab = self._slab(item.ntokens)  # leak: not given up when the tower returns None
        feats = self.towers[item.kind](item.payload)
        if feats is None:
            logger.warning("%s: undecodable %s", rid, item.kind)
            return None
        self.alloc.view(slab).copy_(feats)
        self.entries[item.digest] = Entry(slab, {rid})
        return self.alloc.view(slab)

    def encode_strict(self, rid: str, item: MediaItem) -> torch.Tensor:
        hit = self.entries.get(item.digest)
        if hit is not None:
            hit.users.add(rid)
            return self.alloc.view(hit.slab)
        slab = self._slab(item.ntokens)  # clean: given up when the tower returns None, else owned by the entry
        feats = self.towers[item.kind](item.payload)
        if feats is None:
            self.alloc.give_up(slab)
            raise ValueError(item.digest)
        self.alloc.view(slab).copy_(feats)
        self.entries[item.digest] = Entry(slab, {rid})
        return self.alloc.view(slab)

    def release_request(self, rid: str) -> None:
        for e in self.entries.values():
            e.users.discard(rid)

    def open_video(self, vid: str, frame_tokens: List[int]) -> bool:
        if vid in self.video:
            return True
        slabs = self.alloc.slice_all_or_none(frame_tokens)  # clean: in self.video until close_video()
        if slabs is None:
            return False
        self.video[vid] = slabs
        return True

    def append_frame(self, vid: str, ntokens: int, frame: torch.Tensor) -> bool:
        slab = self._slab(ntokens)  # leak: not given up for a video that was closed
        slabs = self.video.get(vid)
        if slabs is None:
            return False
        self.alloc.view(slab).copy_(frame)
        slabs.append(slab)
        return True

    def drop_frames(self, vid: str, keep_every: int) -> int:
        slabs = self.video.get(vid, [])
        kept: List[Slab] = []
        for i, s in enumerate(slabs):
            if i % keep_every:
                self.alloc.give_up(s)
            else:
                kept.append(s)
        dropped = len(slabs) - len(kept)
        if vid in self.video:
            self.video[vid] = kept
        return dropped

    def close_video(self, vid: str) -> None:
        for s in self.video.pop(vid, []):
            self.alloc.give_up(s)

    def frames_once(self, kind: str, frames: List[Any], ntokens: int) -> Iterator[torch.Tensor]:
        slab = self._slab(ntokens)  # clean: near miss, one slab for all frames, given up when the generator ends
        try:
            for f in frames:
                feats = self.towers[kind](f)
                if feats is None:
                    continue
                self.alloc.view(slab).copy_(feats)
                yield self.alloc.view(slab).clone()
        finally:
            self.alloc.give_up(slab)

    def profile(self, kind: str, sizes: List[int], payload: Any) -> Dict[int, bool]:
        result: Dict[int, bool] = {}
        for n in sizes:
            slab = self._slab(n)  # leak: continue for a failed tower passes over give_up
            feats = self.towers[kind](payload)
            if feats is None:
                result[n] = False
                continue
            self.alloc.view(slab)[: feats.shape[0]].copy_(feats)
            result[n] = True
            self.alloc.give_up(slab)
        return result

    def reserve_batch(self, rid: str, items: List[MediaItem]) -> bool:
        fresh = [i for i in items if i.digest not in self.entries]
        slabs = self.alloc.slice_all_or_none([i.ntokens for i in fresh])  # clean: near miss, one entry or give_up for each
        if slabs is None:
            return False
        for item, slab in zip(fresh, slabs):
            if item.digest in self.entries:
                self.alloc.give_up(slab)
                self.entries[item.digest].users.add(rid)
            else:
                self.entries[item.digest] = Entry(slab, {rid})
        return True
