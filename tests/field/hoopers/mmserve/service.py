"""Prepares the images of a request: fetch, encode, keep the rows until it is done."""
from __future__ import annotations

import hashlib
import logging
import threading
from dataclasses import dataclass, field
from typing import Dict, List, Optional

from .cache import FeatureCache
from .fetch import FetchError, Fetcher
from .slabs import SlabFull, SlabRef

logger = logging.getLogger("mmserve")


class BadImage(ValueError):
    pass


@dataclass
class MMRequest:
    rid: str
    urls: List[str]
    refs: List[SlabRef] = field(default_factory=list)
    error: Optional[str] = None

    def close(self) -> None:
        while self.refs:
            self.refs.pop().drop()


class ImageService:
    def __init__(self, cache: FeatureCache, fetcher: Fetcher, encoder) -> None:
        self.cache, self.fetcher, self.encoder = cache, fetcher, encoder
        self._live: Dict[str, MMRequest] = {}
        self._pinned: Dict[str, SlabRef] = {}
        self._lock = threading.Lock()

    def features(self, raw: bytes) -> SlabRef:
        key = hashlib.sha256(raw).hexdigest()
        ref, ticket = self.cache.lookup(key)  # leak: BadImage leaves the ticket open (only SlabFull abandons it) and all who wait for the key hang
        if ref is not None:
            return ref
        image = self.encoder.decode(raw)
        if image is None:
            raise BadImage(f"{len(raw)} bytes are no image")
        try:
            ref = self.cache.reserve(self.encoder.rows(image))  # clean: the cache takes a share and this one is returned
        except SlabFull:
            ticket.abandon()
            raise
        self.encoder.encode(image, ref.start, ref.rows)
        ticket.fulfil(ref)
        return ref

    def prepare(self, req: MMRequest) -> bool:
        for url in req.urls:
            try:
                req.refs.append(self.features(self.fetcher.get(url)))  # clean: near miss, the request is closed in the handler or by finish()
            except (FetchError, BadImage, SlabFull) as exc:
                req.error = f"{url}: {exc}"
                req.close()
                return False
        with self._lock:
            former, self._live[req.rid] = self._live.get(req.rid), req
        if former is not None:
            former.close()
        return True

    def finish(self, rid: str) -> None:
        with self._lock:
            req = self._live.pop(rid, None)
        if req is not None:
            req.close()

    def fork(self, rid: str, new_rid: str) -> bool:
        """A second answer to the same images."""
        with self._lock:
            parent = self._live.get(rid)
            if parent is None:
                return False
            child = MMRequest(new_rid, list(parent.urls))
            for ref in parent.refs:
                child.refs.append(ref.share())  # leak: when new_rid is taken the child is dropped unclosed
            if new_rid in self._live:
                logger.warning("%s exists", new_rid)
                return False
            self._live[new_rid] = child
            return True

    def pin_logo(self, name: str, raw: bytes) -> None:
        """Images of system prompts stay; a new version takes the place of the old."""
        fresh = self.features(raw)  # clean: near miss, the former reference is dropped, unpin drops this one
        with self._lock:
            old = self._pinned.pop(name, None)
            self._pinned[name] = fresh
        if old is not None:
            old.drop()

    def unpin(self, name: str) -> None:
        with self._lock:
            ref = self._pinned.pop(name, None)
        if ref is not None:
            ref.drop()

    def similarity(self, a: bytes, b: bytes) -> Optional[float]:
        try:
            left = self.features(a)  # leak: BadImage or SlabFull for the second image returns None with the first one's rows held
            right = self.features(b)  # clean: dropped below
        except (BadImage, SlabFull):
            return None
        score = self.encoder.cosine(left.start, left.rows, right.start, right.rows)
        left.drop()
        right.drop()
        return score
