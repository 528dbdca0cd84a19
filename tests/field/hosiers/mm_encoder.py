"""Multimodal encoder scheduling: embedding cache with pins, image decode buffers, encoder compute slots."""
from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Optional


@dataclass
class Item:
    digest: str
    modality: str
    tokens: int
    raw: bytes = b""


@dataclass
class MMRequest:
    rid: str
    items: list[Item]
    next_item: int = 0
    pinned: set[str] = field(default_factory=set)
    claim: Optional["SpaceClaim"] = None


class SpaceClaim:
    """Space in the embedding cache before the embedding exists."""

    def __init__(self, cache: "EmbedCache", tokens: int) -> None:
        self.cache = cache
        self.tokens = tokens

    def settle(self, digest: str, embed: Any) -> None:
        """Turn the claim into an entry."""
        self.cache._claimed -= self.tokens
        self.cache._store(digest, self.tokens, embed)

    def cancel(self) -> None:
        self.cache._claimed -= self.tokens


class EmbedCache:
    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._claimed = 0
        self._used = 0
        self._data: OrderedDict[str, tuple[int, Any]] = OrderedDict()
        self._refs: dict[str, set[str]] = {}

    def _store(self, digest: str, tokens: int, embed: Any) -> None:
        self._data[digest] = (tokens, embed)
        self._used += tokens

    def claim(self, tokens: int) -> Optional[SpaceClaim]:
        while self._used + self._claimed + tokens > self.budget:
            if not self._evict():
                return None
        self._claimed += tokens
        return SpaceClaim(self, tokens)

    def _evict(self) -> bool:
        for digest, (tokens, _) in self._data.items():
            if not self._refs.get(digest):
                del self._data[digest]
                self._used -= tokens
                return True
        return False

    def acquire_ref(self, digest: str, rid: str) -> bool:
        if digest not in self._data:
            return False
        self._refs.setdefault(digest, set()).add(rid)
        return True

    def release_ref(self, digest: str, rid: str) -> None:
        self._refs.get(digest, set()).discard(rid)

    def get(self, digest: str) -> Any:
        return self._data[digest][1]


class DecodeBuffers:
    """Pixel buffers for the image decoder, by side length."""

    def __init__(self, sizes: list[int], each: int) -> None:
        self._free = {s: [bytearray(s * s * 3) for _ in range(each)] for s in sorted(sizes)}

    def lend(self, side: int) -> Optional[bytearray]:
        for s, lst in self._free.items():
            if s >= side and lst:
                return lst.pop()
        return None

    def take_back(self, buf: bytearray) -> None:
        side = int(round((len(buf) / 3) ** 0.5))
        self._free[side].append(buf)


class Preprocessor:
    def __init__(self, bufs: DecodeBuffers, decoder: Any) -> None:
        self.bufs = bufs
        self.decoder = decoder

    def _decode(self, item: Item, side: int) -> Optional[bytearray]:
        buf = self.bufs.lend(side)  # clean: handed to the caller, or None
        if buf is not None:
            self.decoder.decode_into(item.raw, buf)
        return buf

    def digest(self, item: Item) -> str:
        buf = self._decode(item, 336)  # leak: hashed and dropped
        if buf is None:
            return hashlib.sha256(item.raw).hexdigest()
        h = hashlib.sha256(buf)
        h.update(item.modality.encode())
        return h.hexdigest()

    def frames(self, video: list[Item], stride: int):
        """Yields decoded frames; each buffer is valid until the next one is asked for."""
        for i, item in enumerate(video):
            if i % stride:
                continue
            buf = self._decode(item, 336)  # clean: taken back after each yield
            if buf is None:
                return
            yield i, buf
            self.bufs.take_back(buf)

    def motion(self, video: list[Item]) -> list[int]:
        """Frame differences: keeps the previous frame while decoding the next."""
        prev: Optional[bytearray] = None
        out = []
        for item in video:
            cur = self._decode(item, 336)  # leak: the frame left in prev after the loop stays out
            if cur is None:
                break
            if prev is not None:
                out.append(sum(a != b for a, b in zip(prev, cur)))
                self.bufs.take_back(prev)
            prev = cur
        return out

    def motion_window(self, video: list[Item], width: int) -> list[int]:
        window: list[bytearray] = []
        out = []
        for item in video:
            cur = self._decode(item, 336)  # clean: near miss, the window is emptied at head and end
            if cur is None:
                break
            window.append(cur)
            if len(window) > width:
                old = window.pop(0)
                out.append(sum(a != b for a, b in zip(old, cur)))
                self.bufs.take_back(old)
        for buf in window:
            self.bufs.take_back(buf)
        return out


class EncoderScheduler:
    def __init__(self, cache: EmbedCache, encoder: Any, max_per_step: int) -> None:
        self.cache = cache
        self.encoder = encoder
        self.max_per_step = max_per_step

    def encode_next(self, req: MMRequest) -> bool:
        item = req.items[req.next_item]
        if self.cache.acquire_ref(item.digest, req.rid):  # clean: recorded in pinned, free releases all
            req.pinned.add(item.digest)
            req.next_item += 1
            return True
        space = self.cache.claim(item.tokens)  # clean: settled after encoding
        if space is None:
            return False
        embed = self.encoder.encode(item)
        space.settle(item.digest, embed)
        self.cache.acquire_ref(item.digest, req.rid)  # clean: recorded in pinned
        req.pinned.add(item.digest)
        req.next_item += 1
        return True

    def encode_many(self, req: MMRequest) -> int:
        n = 0
        spent = 0
        while req.next_item < len(req.items):
            item = req.items[req.next_item]
            space = self.cache.claim(item.tokens)  # leak: over the step limit the claim is not cancelled
            if space is None:
                break
            if spent + item.tokens > self.max_per_step:
                break
            space.settle(item.digest, self.encoder.encode(item))
            spent += item.tokens
            req.next_item += 1
            n += 1
        return n

    def reserve_ahead(self, req: MMRequest) -> bool:
        if req.claim is not None:
            return True
        rest = sum(i.tokens for i in req.items[req.next_item:])
        req.claim = self.cache.claim(rest)  # clean: near miss, free cancels it if it is still there
        return req.claim is not None

    def all_cached(self, req: MMRequest) -> bool:
        """Pins everything if everything is cached."""
        got = []
        for item in req.items:
            if not self.cache.acquire_ref(item.digest, req.rid):  # clean: near miss, got is undone on a miss
                for d in got:
                    self.cache.release_ref(d, req.rid)
                return False
            got.append(item.digest)
        req.pinned.update(got)
        return True

    def peek_embeds(self, req: MMRequest) -> list[Any]:
        out = []
        for item in req.items:
            if not self.cache.acquire_ref(item.digest, "peek"):  # leak: nothing releases the peek's refs
                continue
            out.append(self.cache.get(item.digest))
        return out

    def free(self, req: MMRequest) -> None:
        for digest in req.pinned:
            self.cache.release_ref(digest, req.rid)
        req.pinned.clear()
        if req.claim is not None:
            req.claim.cancel()
            req.claim = None


def average_side(pre: Preprocessor, video: list[Item]) -> float:
    sides = []
    for _, buf in pre.frames(video, 4):  # clean: the generator takes each buffer back
        sides.append((len(buf) / 3) ** 0.5)
    return sum(sides) / max(1, len(sides))
