"""Multimodal encoder cache: image embeddings occupy budgeted entries shared by content hash."""
from __future__ import annotations

import abc
import hashlib
from dataclasses import dataclass, field
from typing import Callable, Iterable

import torch


@dataclass
class EncoderEntry:
    digest: str
    tokens: int
    refs: int = 0
    value: "torch.Tensor | None" = None


class EncoderBudget(abc.ABC):
    @abc.abstractmethod
    def occupy(self, digest: str, tokens: int) -> EncoderEntry | None: ...

    @abc.abstractmethod
    def abandon(self, entry: EncoderEntry) -> None: ...


class EncoderCache(EncoderBudget):
    """Entries with no references stay until their room is wanted."""

    def __init__(self, max_tokens: int):
        self.max_tokens = max_tokens
        self.used = 0
        self.entries: dict[str, EncoderEntry] = {}

    def _reclaim(self, want: int) -> None:
        for digest in [d for d, e in self.entries.items() if e.refs == 0]:
            if self.used + want <= self.max_tokens:
                return
            self.used -= self.entries.pop(digest).tokens

    def occupy(self, digest: str, tokens: int) -> EncoderEntry | None:
        entry = self.entries.get(digest)
        if entry is None:
            self._reclaim(tokens)
            if self.used + tokens > self.max_tokens:
                return None
            entry = EncoderEntry(digest, tokens)
            self.entries[digest] = entry
            self.used += tokens
        entry.refs += 1
        return entry

    def abandon(self, entry: EncoderEntry) -> None:
        entry.refs -= 1


@dataclass
class MMInput:
    data: bytes
    tokens: int
    hash: str = ""

    def digest(self) -> str:
        if not self.hash:
            self.hash = hashlib.blake2b(self.data, digest_size=16).hexdigest()
        return self.hash


@dataclass
class MMRequest:
    rid: str
    inputs: list[MMInput]
    held: dict[int, EncoderEntry] = field(default_factory=dict)
    consumed: int = 0


class EncoderStage:
    def __init__(self, cache: EncoderBudget, encode: Callable[[bytes], "torch.Tensor"]):
        self.cache = cache
        self.encode = encode
        self.live: dict[str, MMRequest] = {}
        self.thumbnails: dict[str, EncoderEntry] = {}
        self.starved = 0

    def schedule(self, req: MMRequest) -> bool:
        for i, item in enumerate(req.inputs):
            if i in req.held:
                continue
            entry = self.cache.occupy(item.digest(), item.tokens)  # clean: the request holds it, abort ends
            if entry is None:
                self.starved += 1
                self.abort(req)
                return False
            req.held[i] = entry
        self.live[req.rid] = req
        return True

    def encode_all(self, req: MMRequest) -> None:
        for i, item in enumerate(req.inputs):
            entry = req.held[i]
            if entry.value is None:
                entry.value = self.encode(item.data)

    def consume(self, req: MMRequest, index: int) -> "torch.Tensor | None":
        entry = req.held.pop(index, None)
        if entry is None:
            return None
        value = entry.value
        self.cache.abandon(entry)
        req.consumed += 1
        return value

    def abort(self, req: MMRequest) -> None:
        for entry in req.held.values():
            self.cache.abandon(entry)
        req.held.clear()
        self.live.pop(req.rid, None)

    def encode_once(self, item: MMInput) -> "torch.Tensor | None":
        entry = self.cache.occupy(item.digest(), item.tokens)  # leak: a hit returns with the count kept
        if entry is None:
            return None
        if entry.value is not None:
            return entry.value
        entry.value = self.encode(item.data)
        value = entry.value
        self.cache.abandon(entry)
        return value

    def encode_shared(self, item: MMInput) -> "torch.Tensor | None":
        entry = self.cache.occupy(item.digest(), item.tokens)  # clean: one exit abandons hit and miss alike
        if entry is None:
            return None
        if entry.value is None:
            entry.value = self.encode(item.data)
        value = entry.value
        self.cache.abandon(entry)
        return value

    def _entry_for(self, item: MMInput, allow_miss: bool) -> EncoderEntry | None:
        entry = self.cache.occupy(item.digest(), item.tokens)  # leak: a refused miss turns into None
        if entry is None or (entry.value is None and not allow_miss):
            return None
        return entry

    def total_width(self, items: Iterable[MMInput]) -> int:
        width = 0
        for item in items:
            entry = self._entry_for(item, allow_miss=True)  # clean: abandoned at the end of each turn
            if entry is None:
                break
            if entry.value is None:
                entry.value = self.encode(item.data)
            width += entry.value.shape[-1]
            self.cache.abandon(entry)
        return width

    def first_cached(self, items: Iterable[MMInput]) -> "torch.Tensor | None":
        for item in items:
            entry = self._entry_for(item, allow_miss=False)  # leak: only the value leaves, the count stays
            if entry is not None:
                return entry.value
        return None

    def pin_thumbnail(self, item: MMInput) -> bool:
        entry = self.cache.occupy(item.digest(), item.tokens)  # leak: the second pin of one hash is dropped
        if entry is None:
            return False
        if entry.digest in self.thumbnails:
            return True
        self.thumbnails[entry.digest] = entry
        return True

    def unpin_thumbnails(self) -> None:
        while self.thumbnails:
            _, entry = self.thumbnails.popitem()
            self.cache.abandon(entry)

    def pair(self, left: MMInput, right: MMInput) -> "torch.Tensor | None":
        a = self.cache.occupy(left.digest(), left.tokens)  # clean: near miss, abandoned in finally if taken
        b = self.cache.occupy(right.digest(), right.tokens)  # clean: near miss, abandoned in finally if taken
        try:
            if a is None or b is None or a.value is None or b.value is None:
                return None
            return torch.cat([a.value, b.value])
        finally:
            for entry in (a, b):
                if entry is not None:
                    self.cache.abandon(entry)
