"""Cache of encoded images and video frames for multimodal prompts."""
from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
import weakref
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Callable, Sequence

import torch

log = logging.getLogger("mm.features")

PAGE = 64  # embeddings


class CacheFull(RuntimeError):
    pass


class DecodeError(ValueError):
    pass


def digest_of(raw: bytes) -> str:
    return hashlib.blake2b(raw, digest_size=16).hexdigest()


class Slab:
    __slots__ = ("pages",)

    def __init__(self, pages: list[int]):
        self.pages = pages


class SlabAllocator:
    def __init__(self, n_pages: int, dim: int):
        self.store = torch.zeros(n_pages, PAGE, dim)
        self._free = list(range(n_pages))
        self._mu = threading.Lock()

    def alloc(self, n: int) -> Slab | None:
        with self._mu:
            if n > len(self._free):
                return None
            return Slab([self._free.pop() for _ in range(n)])  # clean: the length was checked, all go into the slab

    def free(self, slab: Slab) -> None:
        with self._mu:
            self._free.extend(slab.pages)
            slab.pages = []


class Entry:
    def __init__(self, digest: str, slab: Slab, rows: int, kind: str):
        self.digest = digest
        self.slab = slab
        self.rows = rows
        self.kind = kind
        self.refs = 0

    def tensor(self, slabs: SlabAllocator) -> torch.Tensor:
        return slabs.store[self.slab.pages].flatten(0, 1)[: self.rows]


class FeatureCache:
    """get(), insert() and fetch() hand out a reference; put_back() returns it."""

    def __init__(self, slabs: SlabAllocator, encoder: Callable[[bytes], torch.Tensor]):
        self.slabs = slabs
        self.encoder = encoder
        self._map: OrderedDict[str, Entry] = OrderedDict()
        self._mu = threading.RLock()
        self.hits = self.misses = 0

    def get(self, digest: str) -> Entry | None:
        with self._mu:
            entry = self._map.get(digest)
            if entry is None:
                self.misses += 1
                return None
            self.hits += 1
            entry.refs += 1
            self._map.move_to_end(digest)
            return entry

    def put_back(self, entry: Entry) -> None:
        with self._mu:
            assert entry.refs > 0, entry.digest
            entry.refs -= 1

    def _evict_one(self) -> bool:
        with self._mu:
            for digest, entry in self._map.items():
                if entry.refs == 0:
                    del self._map[digest]
                    self.slabs.free(entry.slab)
                    return True
        return False

    def insert(self, digest: str, feats: torch.Tensor, kind: str) -> Entry:
        n = -(-feats.shape[0] // PAGE)
        slab = self.slabs.alloc(n)  # leak: when another thread was faster its entry is returned and this slab forgotten
        while slab is None:
            if not self._evict_one():
                raise CacheFull(f"{n} pages")
            slab = self.slabs.alloc(n)  # leak: the same lost race
        with self._mu:
            other = self._map.get(digest)
            if other is not None:
                other.refs += 1
                return other
            entry = Entry(digest, slab, feats.shape[0], kind)
            entry.tensor(self.slabs)[:] = feats
            entry.refs = 1
            self._map[digest] = entry
            return entry

    def fetch(self, raw: bytes, kind: str = "image") -> Entry:
        digest = digest_of(raw)
        entry = self.get(digest)  # clean: returned when it is there
        if entry is not None:
            return entry
        feats = self.encoder(raw)
        if feats.numel() == 0:
            raise DecodeError(digest)
        return self.insert(digest, feats, kind)  # clean: returned


class Handle:
    """Puts the entry back when nobody refers to the handle any more."""

    def __init__(self, cache: FeatureCache, entry: Entry):
        self.entry = entry
        self._fin = weakref.finalize(self, cache.put_back, entry)

    def close(self):
        self._fin()


class Prompt:
    def __init__(self, cache: FeatureCache):
        self.cache = cache
        self.images: list[Entry] = []
        self.frames: list[Entry] = []

    def attach_images(self, raws: Sequence[bytes]) -> None:
        for raw in raws:
            self.images.append(self.cache.fetch(raw))  # clean: near miss, DecodeError midway leaves them to close(), which the caller runs

    def attach_video(self, frames: Sequence[bytes], every: int = 4) -> None:
        for raw in frames[::every]:
            self.frames.append(self.cache.fetch(raw, "frame"))  # leak: close() puts the images back and not the frames

    def swap_image(self, i: int, raw: bytes) -> None:
        old = self.images[i]
        self.images[i] = self.cache.fetch(raw)  # clean: near miss, the old one was kept and is put back on the next line
        self.cache.put_back(old)

    def features(self) -> torch.Tensor:
        parts = [e.tensor(self.cache.slabs) for e in self.images + self.frames]
        return torch.cat(parts)

    def close(self) -> None:
        for entry in self.images:
            self.cache.put_back(entry)
        self.images = []
        self.frames = []


def process(cache: FeatureCache, images, frames, model):
    prompt = Prompt(cache)
    try:
        prompt.attach_images(images)
        prompt.attach_video(frames)
        return model(prompt.features())
    except DecodeError as exc:
        log.warning("prompt refused: %s", exc)
        return None
    finally:
        prompt.close()


def known(cache: FeatureCache, digests: Sequence[str]) -> dict[str, int]:
    """Rows of the features that are in the cache."""
    by_digest: dict[str, Entry] = {}
    for d in digests:
        entry = cache.get(d)  # leak: a digest that comes twice is counted twice and put back once
        if entry is None:
            continue
        by_digest[d] = entry
    try:
        return {d: e.rows for d, e in by_digest.items()}
    finally:
        for entry in by_digest.values():
            cache.put_back(entry)


def thumbnail(cache: FeatureCache, digest: str) -> torch.Tensor | None:
    entry = cache.get(digest)  # leak: frames return None without put_back
    if entry is None:
        return None
    if entry.kind != "image":
        return None
    out = entry.tensor(cache.slabs).mean(0).clone()
    cache.put_back(entry)
    return out


def similarity(cache: FeatureCache, left: bytes, right: bytes) -> float:
    with contextlib.ExitStack() as stack:
        a = cache.fetch(left)  # clean: the stack puts it back
        stack.callback(cache.put_back, a)
        b = cache.fetch(right)  # clean: near miss, may raise with a held, but a is on the stack
        stack.callback(cache.put_back, b)
        return float((a.tensor(cache.slabs).mean(0) @ b.tensor(cache.slabs).mean(0)))


def handle_for(cache: FeatureCache, raw: bytes) -> Handle:
    return Handle(cache, cache.fetch(raw))  # clean: near miss, the finalizer of the handle puts it back


class Prefetch:
    def __init__(self, cache: FeatureCache, workers: int = 4):
        self.cache = cache
        self._pool = ThreadPoolExecutor(workers)
        self._ahead: dict[str, Future] = {}

    def want(self, raw: bytes) -> None:
        digest = digest_of(raw)
        if digest not in self._ahead:
            self._ahead[digest] = self._pool.submit(self.cache.fetch, raw)  # leak: drop() cannot cancel a finished one and forgets the entry in its result

    def ready(self, digest: str) -> Entry | None:
        fut = self._ahead.pop(digest, None)
        if fut is None:
            return self.cache.get(digest)  # clean: returned
        try:
            return fut.result()
        except (DecodeError, CacheFull):
            return None

    def drop(self, digests: Sequence[str]) -> None:
        for d in digests:
            fut = self._ahead.pop(d, None)
            if fut is not None:
                fut.cancel()
