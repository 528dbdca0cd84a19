from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass, field
from typing import Callable, Dict, List, Optional

import torch

from .cache import EncoderCache, FeatureEntry
from .shm import SegmentRef, SegmentStore

logger = logging.getLogger(__name__)


@dataclass
class MMItem:
    ref: SegmentRef
    tokens: int
    mm_hash: Optional[str] = None


@dataclass
class MMRequest:
    rid: str
    items: List[MMItem]
    held: List[FeatureEntry] = field(default_factory=list)
    audio: Optional[FeatureEntry] = None


class EncoderEngine:
    def __init__(self, cache: EncoderCache, shm: SegmentStore, encode: Callable[[bytes], torch.Tensor]) -> None:
        self.cache = cache
        self.shm = shm
        self.encode = encode
        self.requests: Dict[str, MMRequest] = {}

    def fingerprint(self, item: MMItem) -> Optional[str]:
        view = self.shm.attach(item.ref)  # leak: an empty segment returns None while still attached
        if view is None:
            return None
        if len(view) == 0:
            return None
        digest = hashlib.blake2b(view, digest_size=16).hexdigest()
        self.shm.detach(item.ref, view)
        return digest

    def _run(self, item: MMItem, entry: FeatureEntry) -> bool:
        with self.shm.viewing(item.ref) as view:  # clean: near miss, the context detaches on the early return as well
            if view is None:
                return False
            entry.features = self.encode(bytes(view))
        return True

    def prepare(self, req: MMRequest) -> bool:
        for item in req.items:
            if item.mm_hash is None:
                item.mm_hash = self.fingerprint(item)
            if item.mm_hash is None:
                self._let_go(req)
                return False
            entry = self.cache.lookup(item.mm_hash)  # clean: near miss, in held, which finish and each failing way let go
            if entry is None:
                entry = self.cache.open_entry(item.mm_hash, item.tokens)  # leak: a failed encoder run returns before the entry is in held
                if entry is None:
                    self._let_go(req)
                    return False
                if not self._run(item, entry):
                    self._let_go(req)
                    return False
            req.held.append(entry)
        self.requests[req.rid] = req
        return True

    def _let_go(self, req: MMRequest) -> None:
        for entry in req.held:
            self.cache.unref(entry)
        req.held.clear()

    def attach_audio(self, rid: str, mm_hash: str) -> bool:
        req = self.requests[rid]
        if req.audio is not None:
            return True
        req.audio = self.cache.lookup(mm_hash)  # leak: cancel lets held go but forgets audio, unlike finish
        return req.audio is not None

    def share_features(self, src: str, dst: MMRequest) -> int:
        for entry in self.requests[src].held:
            dst.held.append(self.cache.ref(entry))  # clean: near miss, a reference of its own that finish of dst gives up
        self.requests[dst.rid] = dst
        return len(dst.held)

    def finish(self, rid: str) -> None:
        req = self.requests.pop(rid)
        self._let_go(req)
        if req.audio is not None:
            self.cache.unref(req.audio)
            req.audio = None

    def cancel(self, rid: str) -> None:
        req = self.requests.pop(rid, None)
        if req is not None:
            self._let_go(req)

    def cached_tokens(self, hashes: List[str]) -> int:
        total = 0
        for mm_hash in hashes:
            entry = self.cache.lookup(mm_hash)  # leak: every hit keeps its reference, so the entry is never evictable
            if entry is not None:
                total += entry.tokens
        return total

    def warm(self, items: List[MMItem]) -> int:
        ready = 0
        for item in items:
            if item.mm_hash is None:
                continue
            entry = self.cache.open_entry(item.mm_hash, item.tokens)  # clean: near miss, unref comes before the check of the run
            if entry is None:
                logger.info("encoder cache is full after %d items", ready)
                break
            ok = entry.features is not None or self._run(item, entry)
            self.cache.unref(entry)
            if not ok:
                continue
            ready += 1
        return ready
