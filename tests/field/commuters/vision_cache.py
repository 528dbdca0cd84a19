"""Vision-encoder output cache for multimodal requests: budgeted entries, readers counted."""
from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Callable, Optional

import torch

log = logging.getLogger("vision")


@dataclass
class EncoderEntry:
    image_hash: str
    tokens: int
    output: Optional[torch.Tensor] = None
    readers: int = 0


@dataclass
class MultimodalRequest:
    rid: str
    images: list[str]
    entries: list[EncoderEntry] = field(default_factory=list)
    budget: int = 0


class EncoderBudget:
    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def spend(self, tokens: int) -> bool:
        if tokens > self.tokens:
            return False
        self.tokens -= tokens  # clean: spent for the caller
        return True

    def earn(self, tokens: int) -> None:
        self.tokens += tokens


class EncoderCache:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._entries: "OrderedDict[str, EncoderEntry]" = OrderedDict()

    def subscribe(self, image_hash: str, tokens: int) -> Optional[EncoderEntry]:
        entry = self._entries.get(image_hash)
        if entry is None:
            if not self._make_room(tokens):
                return None
            entry = EncoderEntry(image_hash, tokens)
            self._entries[image_hash] = entry
        entry.readers += 1
        return entry

    def subscribe_ready(self, image_hash: str) -> Optional[EncoderEntry]:
        entry = self.subscribe(image_hash, 0)  # clean: near miss, one without output is unsubscribed before None
        if entry is not None and entry.output is None:
            self.unsubscribe(entry)
            return None
        return entry

    def unsubscribe(self, entry: EncoderEntry) -> None:
        entry.readers -= 1
        self._entries.move_to_end(entry.image_hash)

    def _make_room(self, tokens: int) -> bool:
        used = sum(e.tokens for e in self._entries.values())
        for key in list(self._entries):
            if used + tokens <= self.capacity:
                break
            if self._entries[key].readers == 0:
                used -= self._entries.pop(key).tokens
        return used + tokens <= self.capacity


class VisionScheduler:
    def __init__(self, cache: EncoderCache, budget: EncoderBudget, encode: Callable[[str], Optional[torch.Tensor]]) -> None:
        self.cache = cache
        self.budget = budget
        self.encode = encode
        self.active: dict[str, MultimodalRequest] = {}

    def admit(self, req: MultimodalRequest, tokens: int) -> bool:
        """All images or none."""
        for image in req.images:
            entry = self.cache.subscribe(image, tokens)  # clean: near miss, on a refusal all subscribed so far are undone
            if entry is None:
                for e in req.entries:
                    self.cache.unsubscribe(e)
                req.entries.clear()
                return False
            req.entries.append(entry)
        self.active[req.rid] = req
        return True

    def schedule(self, req: MultimodalRequest, tokens: int) -> bool:
        if not self.budget.spend(tokens):  # leak: no room in the cache returns with the budget spent
            return False
        for image in req.images:
            entry = self.cache.subscribe(image, tokens // len(req.images))  # clean: in the request, finish goes through the entries
            if entry is None:
                self._forget_entries(req)
                return False
            req.entries.append(entry)
        req.budget += tokens
        self.active[req.rid] = req
        return True

    def _forget_entries(self, req: MultimodalRequest) -> None:
        for e in req.entries:
            self.cache.unsubscribe(e)
        req.entries.clear()

    def finish(self, rid: str) -> None:
        req = self.active.pop(rid, None)
        if req is None:
            return
        self._forget_entries(req)
        self.budget.earn(req.budget)
        req.budget = 0

    def encode_now(self, image: str, tokens: int) -> Optional[torch.Tensor]:
        entry = self.cache.subscribe(image, tokens)  # leak: a failed encoding returns without unsubscribing
        if entry is None:
            return self.encode(image)
        if entry.output is None:
            out = self.encode(image)
            if out is None:
                return None
            entry.output = out
        result = entry.output
        self.cache.unsubscribe(entry)
        return result

    def encode_budgeted(self, image: str, tokens: int) -> Optional[torch.Tensor]:
        if not self.budget.spend(tokens):  # clean: near miss, earned back in the finally whatever is returned
            return None
        try:
            out = self.encode(image)
            if out is None:
                log.warning("cannot encode %s", image)
                return None
            return out
        finally:
            self.budget.earn(tokens)

    def prefetch(self, req: MultimodalRequest, tokens: int) -> int:
        fetched = 0
        for image in req.images:
            if not self.budget.spend(tokens):  # clean: near miss, a failed encoding earns it back and a good one is charged to the request
                break
            if self.encode(image) is None:
                self.budget.earn(tokens)
                continue
            req.budget += tokens
            fetched += 1
        self.active[req.rid] = req
        return fetched


def pooled_feature(cache: EncoderCache, image: str) -> Optional[torch.Tensor]:
    entry = cache.subscribe_ready(image)  # leak: only the mean is kept of the entry
    if entry is None or entry.output is None:
        return None
    return entry.output.mean(0)


def similarity(cache: EncoderCache, a: str, b: str) -> float:
    ea = cache.subscribe_ready(a)  # leak: still subscribed when the other image is not ready
    if ea is None:
        return 0.0
    eb = cache.subscribe_ready(b)  # clean: None or unsubscribed with the first
    if eb is None:
        return 0.0
    value = float((ea.output * eb.output).sum())
    cache.unsubscribe(eb)
    cache.unsubscribe(ea)
    return value
