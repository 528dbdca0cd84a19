"""Runs the vision tower for requests and hands features to the language model."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Callable

import torch

from .manager import EncoderCacheManager, Entry
from .pool import SegmentPool

Encode = Callable[[memoryview], torch.Tensor]


@dataclass(eq=False)
class MMRequest:
    rid: str
    media: dict[str, bytes]
    entries: list[Entry] = field(default_factory=list)


class EncoderRunner:
    def __init__(self, manager: EncoderCacheManager, segments: SegmentPool, encode: Encode) -> None:
        self.manager = manager
        self.segments = segments
        self.encode = encode
        self.running: dict[str, MMRequest] = {}

    def _encode(self, digest: str, raw: bytes) -> bool:
        seg = self.segments.grab()  # clean: put back in finally
        if seg is None:
            return False
        try:
            if len(raw) > self.segments.nbytes:
                return False
            seg.buf[: len(raw)] = raw
            return self.manager.store(digest, self.encode(seg.buf[: len(raw)]))
        finally:
            self.segments.put(seg)

    def prepare(self, req: MMRequest) -> bool:
        for digest, raw in req.media.items():
            if digest not in self.manager.entries and not self._encode(digest, raw):
                return False
            entry = self.manager.addref(digest)  # leak: a later medium that cannot be encoded returns False and admit() drops the request with its references
            if entry is not None:
                req.entries.append(entry)
        self.running[req.rid] = req
        return True

    def admit(self, reqs: list[MMRequest]) -> list[MMRequest]:
        return [req for req in reqs if self.prepare(req)]

    def release(self, req: MMRequest) -> None:
        for entry in req.entries:
            self.manager.unref(entry)
        req.entries.clear()
        self.running.pop(req.rid, None)

    def abort(self, rid: str) -> None:
        req = self.running.get(rid)
        if req is not None:
            self.release(req)

    def prewarm(self, media: dict[str, bytes]) -> int:
        fresh = 0
        for digest, raw in media.items():
            entry = self.manager.addref(digest)  # leak: a known digest is skipped by continue while its reference stays up
            if entry is not None:
                continue
            fresh += int(self._encode(digest, raw))
        return fresh

    def peek(self, digest: str) -> torch.Tensor | None:
        entry = self.manager.addref(digest)  # clean: near miss, dropped after the clone, and None holds nothing
        if entry is None:
            return None
        out = entry.buf[: entry.length].clone()
        self.manager.unref(entry)
        return out

    def gather(self, digests: list[str]) -> torch.Tensor:
        views = []
        for digest in digests:
            entry = self.manager.addref(digest)  # leak: only the view of the features is kept, the entry is never unreferenced
            if entry is not None:
                views.append(entry.buf[: entry.length])
        return torch.cat(views)

    def ingest(self, frames: list[bytes]) -> list[torch.Tensor]:
        outs: list[torch.Tensor] = []
        seg = self.segments.grab()  # clean: near miss, the break leads to the put after the loop
        if seg is None:
            return outs
        for raw in frames:
            if len(raw) > self.segments.nbytes:
                break
            seg.buf[: len(raw)] = raw
            outs.append(self.encode(seg.buf[: len(raw)]))
        self.segments.put(seg)
        return outs
