"""Encoder-output cache for multimodal requests."""
from __future__ import annotations

import collections
import hashlib
import logging
import typing

import torch

LOGGER = logging.getLogger(__name__)


class EncoderBudget:
    """Counts embedding rows; `reserve` is all or nothing."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def reserve(self, n: int) -> bool:
        if n > self.rows:
            return False
        self.rows -= n
        return True

    def unreserve(self, n: int) -> None:
        self.rows += n


class Image(typing.NamedTuple):
    pixels: torch.Tensor
    rows: int

    def digest(self) -> str:
        return hashlib.sha1(self.pixels.numpy().tobytes()).hexdigest()


class EncoderCache:
    def __init__(self, budget: EncoderBudget, encoder: torch.nn.Module) -> None:
        self.budget = budget
        self.encoder = encoder
        self.entries: typing.OrderedDict[str, tuple[torch.Tensor, int]] = collections.OrderedDict()
        self.failures: list[str] = []

    def add(self, img: Image) -> bool:
        key = img.digest()
        if key in self.entries:
            self.entries.move_to_end(key)
            return True
        while not self.budget.reserve(img.rows):  # clean: near miss, repeats only while nothing was reserved
            if not self.entries:
                return False
            self.drop_oldest()
        self.entries[key] = (self.encoder(img.pixels), img.rows)
        return True

    def add_strict(self, img: Image) -> bool:
        if not self.budget.reserve(img.rows):  # leak: an image that is known returns with the rows reserved twice
            return False
        key = img.digest()
        if key in self.entries:
            return True
        self.entries[key] = (self.encoder(img.pixels), img.rows)
        return True

    def try_add(self, img: Image) -> bool:
        if not self.budget.reserve(img.rows):  # leak: the handler notes the failure and keeps the rows
            return False
        try:
            out = self.encoder(img.pixels)
        except RuntimeError:
            self.failures.append(img.digest())
            return False
        self._store(img, out)
        return True

    def add_or_raise(self, img: Image) -> bool:
        if not self.budget.reserve(img.rows):  # clean: near miss, the handler unreserves before it re-raises
            return False
        try:
            out = self.encoder(img.pixels)
        except RuntimeError:
            self.budget.unreserve(img.rows)
            raise
        self._store(img, out)
        return True

    def _store(self, img: Image, out: torch.Tensor) -> None:
        key = img.digest()
        old = self.entries.pop(key, None)
        if old is not None:
            self.budget.unreserve(old[1])
        self.entries[key] = (out, img.rows)

    def drop_oldest(self) -> None:
        _, (_, rows) = self.entries.popitem(last=False)
        self.budget.unreserve(rows)

    def clear(self) -> None:
        while self.entries:
            self.drop_oldest()

    def encode_many(self, imgs: list[Image]) -> list[torch.Tensor]:
        total = sum(i.rows for i in imgs)
        if not self.budget.reserve(total):  # clean: near miss, the same amount is unreserved on both ways
            return [self.encoder(i.pixels) for i in imgs[:1]]
        outs = [self.encoder(i.pixels) for i in imgs]
        if len(outs) < 2:
            self.budget.unreserve(total)
            return outs
        joined = torch.cat(outs)
        self.budget.unreserve(total)
        return [joined]

    def encode_prefix(self, imgs: list[Image]) -> list[torch.Tensor]:
        outs = []
        for img in imgs:
            if not self.budget.reserve(img.rows):  # leak: the images encoded before the shortage keep their rows
                LOGGER.info("stopped after %d images", len(outs))
                return outs
            outs.append(self.encoder(img.pixels))
        self.budget.unreserve(sum(i.rows for i in imgs))
        return outs

    def encode_each(self, imgs: list[Image]) -> list[torch.Tensor]:
        outs = []
        for img in imgs:
            if not self.budget.reserve(img.rows):  # clean: unreserved in each round
                break
            outs.append(self.encoder(img.pixels))
            self.budget.unreserve(img.rows)
        return outs

    def fits(self, img: Image) -> bool:
        if self.budget.reserve(img.rows):  # clean: near miss, a question only, unreserved at once
            self.budget.unreserve(img.rows)
            return True
        return False

    def plan(self, imgs: list[Image]) -> list[Image]:
        chosen = []
        for img in imgs:
            if self.budget.reserve(img.rows):  # leak: for an image that is cached already the rows are reserved for nothing
                if img.digest() in self.entries:
                    continue
                chosen.append(img)
        return chosen


class Chunked:
    """Reserves for one large image and encodes it in tiles."""

    def __init__(self, cache: EncoderCache, img: Image) -> None:
        self.cache = cache
        self.img = img
        self.reserved = cache.budget.reserve(img.rows)  # clean: near miss, the generator and close() unreserve once

    def tiles(self, n: int) -> typing.Iterator[torch.Tensor]:
        if not self.reserved:
            return
        for t in self.img.pixels.chunk(n):
            yield self.cache.encoder(t)
        self.close()

    def close(self) -> None:
        if self.reserved:
            self.cache.budget.unreserve(self.img.rows)
            self.reserved = False
