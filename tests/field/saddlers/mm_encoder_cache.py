"""Budgeted cache for the outputs of vision and audio encoders, plus the scratch tensors used to fill it."""
from __future__ import annotations

from typing import Dict, List, NamedTuple, Optional, Tuple

try:
    import torch
except ImportError:  # CPU-only tooling images
    torch = None


class Scratch:
    def __init__(self, numel: int) -> None:
        self.numel = numel
        self.data = torch.empty(numel) if torch is not None else [0.0] * numel

    def clone_data(self):
        return self.data.clone() if torch is not None else list(self.data)


class ScratchPool:
    """Free lists by power-of-two size."""

    def __init__(self) -> None:
        self._by_size: Dict[int, List[Scratch]] = {}
        self.out = 0

    def borrow(self, numel: int) -> Scratch:
        size = 1 << max(4, (numel - 1).bit_length())
        bucket = self._by_size.setdefault(size, [])
        self.out += 1
        return bucket.pop() if bucket else Scratch(size)

    def give_back(self, scratch: Scratch) -> None:
        self.out -= 1
        self._by_size[scratch.numel].append(scratch)


class Budget:
    """Encoder-token budget shared by all running requests."""

    def __init__(self, tokens: int) -> None:
        self.left = tokens

    def reserve(self, tokens: int) -> bool:
        if tokens > self.left:
            return False
        self.left -= tokens
        return True

    def unreserve(self, tokens: int) -> None:
        self.left += tokens


class MMItem(NamedTuple):
    key: str
    modality: str
    tokens: int


class EncoderCache:
    def __init__(self, budget: Budget, pool: ScratchPool) -> None:
        self.budget = budget
        self.pool = pool
        self.entries: Dict[str, Tuple[MMItem, object]] = {}
        self.pending: Dict[str, MMItem] = {}

    def _encode(self, item: MMItem) -> Scratch:
        out = self.pool.borrow(item.tokens * 8)  # clean: handed to the caller
        return out

    def _pad(self, src: Scratch, tokens: int) -> Scratch:
        """Pads into a larger scratch; takes over ``src``."""
        if src.numel >= tokens * 8:
            return src
        dst = self.pool.borrow(tokens * 8)  # clean: handed to the caller in place of src, which is given back
        self.pool.give_back(src)
        return dst

    def fill(self, item: MMItem) -> bool:
        if item.key in self.entries or item.key in self.pending:
            return True
        if not self.budget.reserve(item.tokens):  # clean: the entry holds the tokens until drop()
            return False
        out = self._encode(item)  # clean: given back once copied
        self.entries[item.key] = (item, out.clone_data())
        self.pool.give_back(out)
        return True

    def fill_preview(self, item: MMItem):
        feats = self._encode(item).clone_data()  # leak: the pooled scratch is copied and dropped
        return feats

    def fill_padded(self, item: MMItem, tokens: int):
        out = self._encode(item)  # clean: near miss, _pad takes it over and answers with what must be given back
        out = self._pad(out, tokens)  # clean: given back after the copy
        data = out.clone_data()
        self.pool.give_back(out)
        return data

    def fill_pair(self, image: MMItem, audio: MMItem) -> bool:
        if image.key + audio.key in self.entries:
            return True
        total = 0
        if not self.budget.reserve(image.tokens):  # leak: the image's tokens stay reserved when the audio does not fit
            return False
        total += image.tokens
        if not self.budget.reserve(audio.tokens):  # clean: unreserved with the total
            return False
        total += audio.tokens
        a = self._encode(image)  # clean: given back below
        b = self._encode(audio)  # clean: given back below
        self.entries[image.key + audio.key] = (MMItem(image.key + audio.key, "pair", total), (a.clone_data(), b.clone_data()))
        self.pool.give_back(b)
        self.pool.give_back(a)
        return True

    def stage(self, items: List[MMItem]) -> List[MMItem]:
        """Reserves as many items as fit; the rest is for the next step."""
        rest: List[MMItem] = []
        for item in items:
            if item.key in self.pending or item.key in self.entries:
                continue
            if not self.budget.reserve(item.tokens):  # clean: near miss, pending holds it, commit or cancel settles it
                rest.append(item)
                continue
            self.pending[item.key] = item
        return rest

    def commit(self, key: str) -> None:
        item = self.pending.pop(key)
        out = self._encode(item)  # leak: silent items return before give_back
        if item.modality == "audio" and item.tokens < 2:
            self.budget.unreserve(item.tokens)
            return
        self.entries[key] = (item, out.clone_data())
        self.pool.give_back(out)

    def cancel(self, key: str) -> None:
        item = self.pending.pop(key, None)
        if item is not None:
            self.budget.unreserve(item.tokens)

    def drop(self, key: str) -> None:
        item, _ = self.entries.pop(key)
        self.budget.unreserve(item.tokens)


class VideoFrames:
    """Encodes frames one by one and mean-pools them."""

    def __init__(self, cache: EncoderCache) -> None:
        self.cache = cache
        self.pool = cache.pool

    def encode_mean(self, frames: List[MMItem]):
        acc: Optional[Scratch] = None
        for frame in frames:
            cur = self.cache._encode(frame)  # clean: near miss, the first becomes acc, the others are given back in the loop
            if acc is None:
                acc = cur
                continue
            self.pool.give_back(cur)
        if acc is None:
            return None
        out = acc.clone_data()
        self.pool.give_back(acc)
        return out

    def encode_keyframes(self, frames: List[MMItem], every: int) -> int:
        kept = 0
        for i, frame in enumerate(frames):
            cur = self.cache._encode(frame)  # leak: continue skips give_back for frames between key frames
            if i % every:
                continue
            kept += cur.numel
            self.pool.give_back(cur)
        return kept

    def resample(self, frame: MMItem, factor: int):
        buf = self.cache._encode(frame)  # leak: rebound to the resampled scratch
        if factor > 1:
            buf = self.pool.borrow(frame.tokens * 8 // factor)  # clean: given back below
        data = buf.clone_data()
        self.pool.give_back(buf)
        return data

    def thumbnails(self, frames: List[MMItem]) -> List[int]:
        held = [self.cache._encode(f) for f in frames]  # clean: every element is given back in the finally
        try:
            return [h.numel for h in held]
        finally:
            for h in held:
                self.pool.give_back(h)


def main() -> None:
    pool, budget = ScratchPool(), Budget(100)
    cache = EncoderCache(budget, pool)
    img, aud = MMItem("i", "image", 10), MMItem("a", "audio", 4)
    assert cache.fill(img) and cache.fill_pair(img, aud)
    cache.stage([aud])
    cache.commit("a")
    cache.drop("i")
    cache.drop("ia")
    cache.drop("a")
    cache.fill_padded(img, 40)
    vid = VideoFrames(cache)
    vid.encode_mean([img, aud])
    vid.thumbnails([img, aud])
    vid.encode_keyframes([img], 1)
    vid.resample(img, 1)
    assert pool.out == 0 and budget.left == 100
    cache.fill_preview(img)


if __name__ == "__main__":
    main()
