"""Encoder output cache for multimodal requests (images, audio clips, video frames).

Embeddings live in rows of one preallocated tensor. An entry has a set of request ids that still need it; entries
nobody needs stay as evictable until the rows are wanted.
"""
from __future__ import annotations

import io
import logging
from collections import OrderedDict
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Set

import torch
from PIL import Image

logger = logging.getLogger(__name__)


class Span(NamedTuple):
    start: int
    length: int

    def view(self, store: torch.Tensor) -> torch.Tensor:
        return store[self.start:self.start + self.length]


class SpanAllocator:
    """First-fit over a sorted list of holes."""

    def __init__(self, rows: int):
        self._holes: List[Span] = [Span(0, rows)]

    def reserve(self, n: int) -> Optional[Span]:
        for i, hole in enumerate(self._holes):
            if hole.length < n:
                continue
            if hole.length == n:
                return self._holes.pop(i)  # clean: returned to the caller
            self._holes[i] = Span(hole.start + n, hole.length - n)
            return Span(hole.start, n)
        return None

    def reserve_aligned(self, n: int, align: int) -> Optional[Span]:
        span = self.reserve(n + align - 1)  # leak: the rows cut off at head and tail are never released
        if span is None:
            return None
        start = -(-span.start // align) * align
        return Span(start, n)

    def release(self, span: Span) -> None:
        self._holes.append(span)
        self._holes.sort()
        merged: List[Span] = []
        for h in self._holes:
            if merged and merged[-1].start + merged[-1].length == h.start:
                merged[-1] = Span(merged[-1].start, merged[-1].length + h.length)
            else:
                merged.append(h)
        self._holes = merged


class PixelBuffers:
    def __init__(self, count: int, shape=(3, 448, 448)):
        self._bufs = [torch.empty(shape, pin_memory=True) for _ in range(count)]

    def lend(self) -> Optional[torch.Tensor]:
        if self._bufs:
            return self._bufs.pop(0)  # clean: returned to the caller
        return None

    def collect(self, buf: torch.Tensor) -> None:
        self._bufs.append(buf)


class EncoderCache:
    def __init__(self, rows: int, hidden: int, device: str):
        self.spans = SpanAllocator(rows)
        self.store = torch.empty(rows, hidden, device=device, dtype=torch.bfloat16)
        self.entries: Dict[str, Span] = {}
        self.users: Dict[str, Set[str]] = {}
        self.evictable: "OrderedDict[str, None]" = OrderedDict()

    def has(self, rid: str, mm_hash: str) -> bool:
        if mm_hash not in self.entries:
            return False
        self.evictable.pop(mm_hash, None)
        self.users.setdefault(mm_hash, set()).add(rid)
        return True

    def put(self, rid: str, mm_hash: str, n: int) -> Optional[torch.Tensor]:
        span = self.spans.reserve(n)  # clean: near miss, overwritten only while None, then kept in self.entries
        while span is None and self.evictable:
            victim, _ = self.evictable.popitem(last=False)
            self.spans.release(self.entries.pop(victim))
            span = self.spans.reserve(n)  # clean: kept in self.entries, released by eviction
        if span is None:
            return None
        self.entries[mm_hash] = span
        self.users[mm_hash] = {rid}
        return span.view(self.store)

    def done_with(self, rid: str, mm_hash: str) -> None:
        users = self.users.get(mm_hash)
        if users is None:
            return
        users.discard(rid)
        if not users:
            del self.users[mm_hash]
            self.evictable[mm_hash] = None

    def put_tiles(self, rid: str, mm_hash: str, tiles: List[torch.Tensor]) -> bool:
        """High resolution images: one span per tile, stored under derived keys."""
        spans: List[Span] = []
        for t in tiles:
            s = self.spans.reserve(t.shape[0])  # clean: released when a later tile does not fit, else in entries
            if s is None:
                for done in spans:
                    self.spans.release(done)
                return False
            s.view(self.store).copy_(t)
            spans.append(s)
        for i, s in enumerate(spans):
            key = f"{mm_hash}/{i}"
            stale = self.entries.get(key)
            if stale is not None:
                self.spans.release(stale)
            self.entries[key] = s
            self.evictable.pop(key, None)
            self.users.setdefault(key, set()).add(rid)
        return True

    def replace(self, mm_hash: str, emb: torch.Tensor) -> bool:
        """Re-encode with a new vision tower; keeps the users."""
        if mm_hash not in self.entries:
            return False
        span = self.spans.reserve(emb.shape[0])  # leak: not released when the hidden size differs
        if span is None:
            return False
        if emb.shape[1] != self.store.shape[1]:
            logger.error("hidden size %d of %s does not fit the cache", emb.shape[1], mm_hash)
            return False
        span.view(self.store).copy_(emb)
        self.spans.release(self.entries[mm_hash])
        self.entries[mm_hash] = span
        return True

    def reset(self) -> None:
        for span in self.entries.values():
            self.spans.release(span)
        self.entries.clear()
        self.users.clear()
        self.evictable.clear()


class ImagePreprocessor:
    def __init__(self, bufs: PixelBuffers, to_chw: Callable[[Image.Image, torch.Tensor], bool]):
        self.bufs = bufs
        self.to_chw = to_chw

    def load(self, raw: bytes) -> Optional[torch.Tensor]:
        """Returns a lent buffer; collect it after the encoder has run."""
        buf = self.bufs.lend()  # clean: collected on a bad image, else handed to the caller
        if buf is None:
            return None
        try:
            with Image.open(io.BytesIO(raw)) as img:  # clean: context manager
                ok = self.to_chw(img, buf)
        except OSError:
            ok = False
        if not ok:
            self.bufs.collect(buf)
            return None
        return buf

    def load_many(self, raws: List[bytes]) -> List[torch.Tensor]:
        out: List[torch.Tensor] = []
        for raw in raws:
            buf = self.load(raw)  # leak: the earlier buffers are lost when one image fails and ValueError is raised
            if buf is None:
                raise ValueError(f"image {len(out)} could not be prepared")
            out.append(buf)
        return out

    def thumbnail(self, raw: bytes, size: int) -> Optional[torch.Tensor]:
        pix = self.load(raw)  # leak: the interpolated copy is returned and the lent buffer dropped
        if pix is None:
            return None
        return torch.nn.functional.interpolate(pix[None], size=(size, size), mode="area")[0]


class EncoderRunner:
    def __init__(self, cache: EncoderCache, pre: ImagePreprocessor, tower: Callable[..., torch.Tensor]):
        self.cache = cache
        self.pre = pre
        self.tower = tower
        self.pending: Dict[str, torch.Tensor] = {}

    def stage(self, mm_hash: str, raw: bytes) -> bool:
        if mm_hash in self.pending:
            return True
        buf = self.pre.load(raw)  # clean: near miss, moved to self.pending, which flush() and drop() empty
        if buf is None:
            return False
        self.pending[mm_hash] = buf
        return True

    def flush(self, rid: str) -> List[str]:
        done = []
        while self.pending:
            mm_hash, buf = self.pending.popitem()
            emb = self.tower(buf[None])[0]
            self.pre.bufs.collect(buf)
            if self.cache.has(rid, mm_hash):  # clean: rid stays a user of the entry until done_with()
                continue
            dst = self.cache.put(rid, mm_hash, emb.shape[0])  # clean: held by the cache under rid until done_with()
            if dst is None:
                logger.warning("encoder cache full, %s will be recomputed", mm_hash)
                continue
            dst.copy_(emb)
            done.append(mm_hash)
        return done

    def drop(self, mm_hash: str) -> None:
        buf = self.pending.pop(mm_hash, None)
        if buf is not None:
            self.pre.bufs.collect(buf)

    def encode_video(self, frames: List[bytes], stride: int) -> Iterator[torch.Tensor]:
        for i, raw in enumerate(frames):
            buf = self.pre.load(raw)  # leak: frames off the stride are skipped with their buffer still lent
            if buf is None:
                continue
            if i % stride:
                continue
            emb = self.tower(buf[None])[0]
            self.pre.bufs.collect(buf)
            yield emb
