"""Multimodal encoder cache: token budget, shared-memory segments for pixels, decode tickets."""
from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Optional

import numpy as np
import torch


class Budget:
    def __init__(self, tokens: int) -> None:
        self.left = tokens

    def reserve(self, n: int) -> bool:
        if n > self.left:
            return False
        self.left -= n
        return True

    def refund(self, n: int) -> None:
        self.left += n


@dataclass
class Segment:
    name: str
    view: np.ndarray
    refs: int = 0


class SegmentStore:
    def __init__(self, max_segments: int, nbytes: int) -> None:
        self._spare = [Segment(f"seg{i}", np.empty(nbytes, np.uint8)) for i in range(max_segments)]
        self._named: dict[str, Segment] = {}
        self._lock = threading.Lock()

    def attach(self, key: str) -> Optional[Segment]:
        with self._lock:
            seg = self._named.get(key)
            if seg is None:
                if not self._spare:
                    return None
                seg = self._spare.pop()
                self._named[key] = seg
            seg.refs += 1
            return seg

    def detach(self, seg: Segment) -> None:
        with self._lock:
            seg.refs -= 1
            if seg.refs == 0:
                self._named = {k: s for k, s in self._named.items() if s is not seg}
                self._spare.append(seg)


class DecodeTickets:
    def __init__(self, n: int) -> None:
        self._sem = threading.BoundedSemaphore(n)

    def draw(self, wait: float = 0.0) -> bool:
        return self._sem.acquire(timeout=wait) if wait else self._sem.acquire(blocking=False)

    def hand_in(self) -> None:
        self._sem.release()


@dataclass
class Image:
    raw: bytes
    tokens: int

    @property
    def key(self) -> str:
        return hashlib.sha1(self.raw).hexdigest()


@dataclass
class MMRequest:
    rid: str
    images: list[Image]
    segments: list[Segment] = field(default_factory=list)
    reserved: int = 0


class EncoderCache:
    def __init__(self, budget: Budget, store: SegmentStore, tickets: DecodeTickets) -> None:
        self.budget = budget
        self.store = store
        self.tickets = tickets
        self.outputs: OrderedDict[str, tuple[torch.Tensor, int]] = OrderedDict()
        self.early: dict[str, Segment] = {}

    def _decode(self, img: Image, seg: Segment) -> bool:
        data = np.frombuffer(img.raw, np.uint8)
        if data.size > seg.view.size:
            return False
        seg.view[: data.size] = data
        return True

    def admit(self, req: MMRequest) -> bool:
        need = sum(i.tokens for i in req.images)
        if not self.budget.reserve(need):  # clean: near miss, refunded when a segment is missing, else recorded for finish
            return False
        for img in req.images:
            seg = self.store.attach(img.key)  # clean: near miss, the rollback detaches all that were attached before the miss
            if seg is None:
                for s in req.segments:
                    self.store.detach(s)
                req.segments.clear()
                self.budget.refund(need)
                return False
            req.segments.append(seg)
        req.reserved = need
        return True

    def admit_more(self, req: MMRequest, img: Image) -> bool:
        if not self.budget.reserve(img.tokens):  # leak: a missing segment rejects the image without a refund
            return False
        seg = self.store.attach(img.key)  # clean: near miss, None needs no detach, else the request owns it
        if seg is None:
            return False
        req.reserved += img.tokens
        req.images.append(img)
        req.segments.append(seg)
        return True

    def decode_all(self, req: MMRequest) -> int:
        done = 0
        for img, seg in zip(req.images, req.segments):
            if not self.tickets.draw(0.1):  # leak: a failed decode breaks out with the ticket drawn
                continue
            if not self._decode(img, seg):
                break
            done += 1
            self.tickets.hand_in()
        return done

    def decode_one(self, img: Image) -> Optional[np.ndarray]:
        seg = self.store.attach(img.key)  # clean: near miss, detached on the refusal and after the copy
        if seg is None:
            return None
        if not self.tickets.draw():  # clean: near miss, the try below hands it in
            self.store.detach(seg)
            return None
        try:
            return seg.view.copy() if self._decode(img, seg) else None
        finally:
            self.tickets.hand_in()
            self.store.detach(seg)

    def prefetch(self, img: Image) -> None:
        if img.key in self.early:
            return
        seg = self.store.attach(img.key)  # leak: claim_early attaches once more and drops the early entry
        if seg is not None:
            self.early[img.key] = seg

    def claim_early(self, req: MMRequest, img: Image) -> bool:
        seg = self.store.attach(img.key)  # clean: kept in req.segments until finish
        if seg is None:
            return False
        self.early.pop(img.key, None)
        req.segments.append(seg)
        return True

    def encode(self, img: Image) -> Optional[torch.Tensor]:
        hit = self.outputs.get(img.key)
        if hit is not None:
            self.outputs.move_to_end(img.key)
            return hit[0]
        if not self.budget.reserve(img.tokens):  # clean: near miss, charged to the cached output and refunded by evict
            return None
        out = torch.zeros(img.tokens, 64)
        self.outputs[img.key] = (out, img.tokens)
        return out

    def refresh(self, img: Image, out: torch.Tensor) -> bool:
        if not self.budget.reserve(img.tokens):  # leak: the charge of the replaced output is never refunded
            return False
        self.outputs[img.key] = (out, img.tokens)
        return True

    def evict(self, want: int) -> None:
        while self.outputs and self.budget.left < want:
            _, (_, tokens) = self.outputs.popitem(last=False)
            self.budget.refund(tokens)

    def sample_segment(self, img: Image, limit: int) -> Optional[int]:
        seg = self.store.attach(img.key)  # leak: a segment over the limit returns None while attached
        if seg is None:
            return None
        total = int(seg.view[:limit].sum())
        if total > limit * 128:
            return None
        self.store.detach(seg)
        return total

    def finish(self, req: MMRequest) -> None:
        self.budget.refund(req.reserved)
        req.reserved = 0
        while req.segments:
            self.store.detach(req.segments.pop())


def serve(cache: EncoderCache, reqs: list[MMRequest]) -> dict[str, int]:
    result: dict[str, int] = {}
    for req in reqs:
        if not cache.admit(req):  # clean: finished at the end of the turn
            cache.evict(sum(i.tokens for i in req.images))
            continue
        result[req.rid] = cache.decode_all(req)
        for img in req.images:
            cache.encode(img)
            cache.prefetch(img)
        cache.finish(req)
    return result
