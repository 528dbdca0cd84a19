"""Multimodal encoder cache: image and audio embeddings in one paged buffer, shared by hash."""
from __future__ import annotations

import hashlib
import logging
import threading
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch

log = logging.getLogger(__name__)


@dataclass
class Span:
    offset: int
    length: int


@dataclass
class Entry:
    digest: str
    span: Span
    refs: int = 0
    ready: bool = False


@dataclass
class MMRequest:
    rid: str
    media: List[bytes] = field(default_factory=list)
    entries: List[Entry] = field(default_factory=list)
    decoder: Optional[int] = None
    cancelled: bool = False


class EmbeddingBuffer:
    """First fit over a sorted list of free ranges."""

    def __init__(self, rows: int, dim: int):
        self.data = torch.empty(rows, dim)
        self._ranges: List[Tuple[int, int]] = [(0, rows)]

    def cut(self, n: int) -> Optional[Span]:
        for i, (lo, hi) in enumerate(self._ranges):
            if hi - lo >= n:
                if hi - lo == n:
                    del self._ranges[i]
                else:
                    self._ranges[i] = (lo + n, hi)
                return Span(lo, n)
        return None

    def paste(self, span: Span) -> None:
        self._ranges.append((span.offset, span.offset + span.length))
        self._ranges.sort()
        merged: List[Tuple[int, int]] = []
        for lo, hi in self._ranges:
            if merged and merged[-1][1] == lo:
                merged[-1] = (merged[-1][0], hi)
            else:
                merged.append((lo, hi))
        self._ranges = merged

    def view(self, span: Span) -> torch.Tensor:
        return self.data[span.offset: span.offset + span.length]


class DecoderEngines:
    """Hardware JPEG/video decoder engines, by number."""

    def __init__(self, n: int):
        self._sem = threading.Semaphore(n)
        self._ids = list(range(n))
        self._mu = threading.Lock()

    def engage(self, block: bool = True) -> Optional[int]:
        if not self._sem.acquire(blocking=block):  # clean: near miss, the permit goes with the id, disengage() releases it
            return None
        with self._mu:
            return self._ids.pop()

    def engage_at_least(self, minimum: int) -> Optional[int]:
        """Only engines numbered minimum or higher have the large surface pool."""
        if not self._sem.acquire(blocking=False):  # leak: the permit stays taken when no engine is large enough
            return None
        with self._mu:
            for i in self._ids:
                if i >= minimum:
                    self._ids.remove(i)
                    return i
        return None

    def disengage(self, i: int) -> None:
        with self._mu:
            self._ids.append(i)
        self._sem.release()


class EncoderCache:
    def __init__(self, buf: EmbeddingBuffer, engines: DecoderEngines, encoder: Callable[[torch.Tensor], torch.Tensor]):
        self.buf = buf
        self.engines = engines
        self.encoder = encoder
        self.entries: Dict[str, Entry] = {}
        self.requests: Dict[str, MMRequest] = {}

    @staticmethod
    def digest(media: bytes) -> str:
        return hashlib.blake2b(media, digest_size=16).hexdigest()

    # -- entries --------------------------------------------------------------

    def ref(self, digest: str, rows: int) -> Optional[Entry]:
        e = self.entries.get(digest)
        if e is None:
            span = self.buf.cut(rows)  # clean: kept by the entry, reclaim() pastes it
            if span is None:
                return None
            e = Entry(digest, span)
            self.entries[digest] = e
        e.refs += 1
        return e

    def deref(self, e: Entry) -> None:
        e.refs -= 1

    def reclaim(self, want: int) -> int:
        got = 0
        for digest, e in list(self.entries.items()):
            if got >= want:
                break
            if e.refs == 0:
                del self.entries[digest]
                self.buf.paste(e.span)
                got += e.span.length
        return got

    def resize(self, e: Entry, rows: int) -> bool:
        """A dynamic-resolution image turned out to need another number of rows."""
        span = self.buf.cut(rows)  # clean: takes the entry's span over and pastes the former one
        if span is None:
            return False
        before, e.span = e.span, span
        self.buf.paste(before)
        e.ready = False
        return True

    def promote_temp(self, digest: str, x: torch.Tensor) -> bool:
        span = self.buf.cut(x.shape[0])  # leak: nothing keeps the span when the digest is cached already
        if span is None:
            return False
        self.buf.view(span).copy_(x)
        if digest not in self.entries:
            self.entries[digest] = Entry(digest, span, ready=True)
        return True

    # -- requests -------------------------------------------------------------

    def add_request(self, req: MMRequest, rows_of: Callable[[bytes], int]) -> bool:
        for m in req.media:
            e = self.ref(self.digest(m), rows_of(m))  # clean: near miss, on the request, drop_request() undoes a partial one
            if e is None:
                self.drop_request(req)
                return False
            req.entries.append(e)
        self.requests[req.rid] = req
        return True

    def drop_request(self, req: MMRequest) -> None:
        while req.entries:
            self.deref(req.entries.pop())
        if req.decoder is not None:
            self.engines.disengage(req.decoder)
            req.decoder = None
        self.requests.pop(req.rid, None)

    def warm_request(self, req: MMRequest, rows: int) -> int:
        hot = 0
        for m in req.media:
            e = self.ref(self.digest(m), rows)  # leak: an entry that is not ready keeps its extra reference
            if e is None:
                break
            if not e.ready:
                continue
            hot += 1
            self.deref(e)
        return hot

    def assign_decoder(self, req: MMRequest) -> bool:
        if req.decoder is not None:
            return True
        req.decoder = self.engines.engage(block=False)  # clean: on the request, drop_request() disengages
        return req.decoder is not None

    def reassign_decoder(self, req: MMRequest, minimum: int) -> bool:
        better = self.engines.engage_at_least(minimum)  # leak: a cancelled request does not take the new engine
        if better is None:
            return False
        if req.cancelled:
            return False
        if req.decoder is not None:
            self.engines.disengage(req.decoder)
        req.decoder = better
        return True

    # -- encoding -------------------------------------------------------------

    def decode(self, media: bytes) -> torch.Tensor:
        eng = self.engines.engage()  # clean: disengaged in finally
        try:
            raw = torch.frombuffer(bytearray(media), dtype=torch.uint8)
            return raw.float().div_(255)
        finally:
            if eng is not None:
                self.engines.disengage(eng)

    def decode_clip(self, frames: List[bytes]) -> Optional[torch.Tensor]:
        eng = self.engines.engage(block=False)  # leak: an empty frame ends the clip with the engine engaged
        if eng is None:
            return None
        out = []
        for f in frames:
            if not f:
                log.info("empty frame after %d", len(out))
                return None
            out.append(torch.frombuffer(bytearray(f), dtype=torch.uint8).float())
        self.engines.disengage(eng)
        return torch.stack(out)

    def encode_into(self, e: Entry, media: bytes) -> None:
        if e.ready:
            return
        self.buf.view(e.span).copy_(self.encoder(self.decode(media)))
        e.ready = True

    def encode_scratch(self, media: bytes, rows: int) -> Optional[torch.Tensor]:
        span = self.buf.cut(rows)  # clean: pasted back after the copy
        if span is None:
            return None
        v = self.buf.view(span)
        v.copy_(self.encoder(self.decode(media)))
        out = v.mean(0)
        self.buf.paste(span)
        return out

    def similarity(self, a: bytes, b: bytes, rows: int) -> float:
        ea = self.ref(self.digest(a), rows)  # leak: not dereferenced when the second reference fails
        eb = self.ref(self.digest(b), rows)  # clean: dereferenced with the first
        if ea is None or eb is None:
            if eb is not None:
                self.deref(eb)
            return 0.0
        self.encode_into(ea, a)
        self.encode_into(eb, b)
        s = torch.cosine_similarity(self.buf.view(ea.span).mean(0), self.buf.view(eb.span).mean(0), dim=0)
        self.deref(eb)
        self.deref(ea)
        return float(s)
