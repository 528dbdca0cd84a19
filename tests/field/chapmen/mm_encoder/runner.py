"""Runs the encoder and gathers embeddings for the language model."""
from __future__ import annotations

from typing import Callable, Dict, List, Optional, Protocol

import torch

from .cache import EncoderCache, Entry

Encoder = Callable[[bytes], torch.Tensor]


class Item(Protocol):
    key: str
    data: bytes
    position: int


class EncoderRunner:
    def __init__(self, cache: EncoderCache, encoder: Encoder) -> None:
        self.cache = cache
        self.encoder = encoder
        self.misses = 0

    def fetch(self, item: Item) -> Optional[Entry]:
        """The pinned entry of an item, encoded when it is not there."""
        entry = self.cache.pin(item.key)  # clean: handed on, or None
        if entry is None:
            self.misses += 1
            entry = self.cache.insert_pinned(item.key, self.encoder(item.data))  # clean: handed on
        return entry

    def gather(self, items: List[Item], hidden: torch.Tensor) -> int:
        """Writes embeddings of all items into the hidden states."""
        written = 0
        for item in items:
            entry = self.fetch(item)  # clean: unpinned after the copy
            if entry is None:
                continue
            end = item.position + entry.slots
            hidden[item.position:end].copy_(entry.embedding)
            written += entry.slots
            self.cache.unpin(entry)
        return written

    def gather_window(self, items: List[Item], hidden: torch.Tensor, begin: int, end: int) -> int:
        written = 0
        for item in items:
            entry = self.fetch(item)  # leak: break at the end of the window leaves the entry pinned
            if entry is None:
                continue
            if item.position >= end:
                break
            if item.position + entry.slots > begin:
                hidden[item.position:item.position + entry.slots].copy_(entry.embedding)
                written += 1
            self.cache.unpin(entry)
        return written

    def embedding(self, item: Item) -> Optional[torch.Tensor]:
        entry = self.fetch(item)  # leak: a clone is returned, the entry stays pinned
        return None if entry is None else entry.embedding.clone()

    def norm(self, item: Item) -> float:
        entry = self.fetch(item)  # clean: near miss, the value is computed before the unpin
        value = 0.0 if entry is None else float(entry.embedding.norm())
        if entry is not None:
            self.cache.unpin(entry)
        return value

    def similarity(self, keys: List[str], query: torch.Tensor) -> Dict[str, float]:
        entries = self.cache.pin_present(keys)  # clean: all values unpinned below
        scores = {k: float((e.embedding.mean(0) * query).sum()) for k, e in entries.items()}
        for entry in entries.values():
            self.cache.unpin(entry)
        return scores

    def stack(self, keys: List[str], limit: int) -> Optional[torch.Tensor]:
        entries = self.cache.pin_all(keys)  # leak: entries over the limit are cut off and stay pinned
        if entries is None:
            return None
        entries = entries[:limit]
        out = torch.cat([e.embedding for e in entries])
        for entry in entries:
            self.cache.unpin(entry)
        return out
