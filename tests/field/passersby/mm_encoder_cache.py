"""Encoder output cache for multimodal inputs."""
from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import Callable, Iterator, List, Optional, Set

import torch

logger = logging.getLogger(__name__)


@dataclass
class CacheLine:
    key: str
    embeds: torch.Tensor
    pins: int = 0


class EncoderCache:
    def __init__(self, budget_tokens: int) -> None:
        self.budget = budget_tokens
        self.used = 0
        self.lines: OrderedDict[str, CacheLine] = OrderedDict()

    def pin(self, key: str) -> Optional[CacheLine]:
        line = self.lines.get(key)
        if line is None:
            return None
        line.pins += 1  # clean: the pinned line is what the caller gets
        self.lines.move_to_end(key)
        return line

    def unpin(self, line: CacheLine) -> None:
        if line.pins <= 0:
            raise RuntimeError(f"unpin of idle line {line.key}")
        line.pins -= 1

    def insert_pinned(self, key: str, embeds: torch.Tensor) -> Optional[CacheLine]:
        need = embeds.shape[0]
        if not self._make_room(need):
            return None
        line = CacheLine(key, embeds, pins=1)
        self.lines[key] = line
        self.used += need
        return line

    def _make_room(self, need: int) -> bool:
        for key in list(self.lines):
            if self.used + need <= self.budget:
                break
            if self.lines[key].pins == 0:
                line = self.lines.pop(key)  # clean: near miss, evicted on purpose and its budget given back
                self.used -= line.embeds.shape[0]
        return self.used + need <= self.budget


@dataclass
class MMItem:
    data: bytes
    positions: range

    @property
    def key(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


class MMRequest:
    def __init__(self, rid: str, items: List[MMItem]) -> None:
        self.rid = rid
        self.items = items
        self.lines: List[CacheLine] = []
        self.failed: Set[str] = set()


class EncoderRunner:
    def __init__(self, cache: EncoderCache, encode: Callable[[bytes], torch.Tensor]) -> None:
        self.cache = cache
        self.encode = encode

    def _line_for(self, item: MMItem) -> Optional[CacheLine]:
        line = self.cache.pin(item.key)  # clean: returned to the caller
        if line is not None:
            return line
        return self.cache.insert_pinned(item.key, self.encode(item.data))  # clean: returned to the caller

    def prepare(self, req: MMRequest) -> bool:
        for item in req.items:
            line = self._line_for(item)  # clean: near miss, done() unpins those gathered before the failure
            if line is None:
                self.done(req)
                return False
            req.lines.append(line)
        return True

    def prepare_best_effort(self, req: MMRequest) -> int:
        for item in req.items:
            line = self._line_for(item)  # leak: a line with the wrong number of tokens is skipped while pinned
            if line is None:
                req.failed.add(item.key)
                continue
            if line.embeds.shape[0] != len(item.positions):
                logger.warning("%s: %d embeds for %d positions", req.rid, line.embeds.shape[0], len(item.positions))
                req.failed.add(item.key)
                continue
            req.lines.append(line)
        return len(req.lines)

    def done(self, req: MMRequest) -> None:
        while req.lines:
            self.cache.unpin(req.lines.pop())

    def gather(self, req: MMRequest, hidden: torch.Tensor) -> torch.Tensor:
        for item, line in zip(req.items, req.lines):
            hidden[item.positions.start : item.positions.stop].copy_(line.embeds)
        return hidden

    def is_cached(self, item: MMItem) -> bool:
        return self.cache.pin(item.key) is not None  # leak: asks by pinning and never unpins

    def tokens_cached(self, item: MMItem) -> int:
        line = self.cache.pin(item.key)  # clean: near miss, None holds nothing, else unpinned
        if line is None:
            return 0
        n = line.embeds.shape[0]
        self.cache.unpin(line)
        return n

    def embeds(self, item: MMItem) -> Optional[torch.Tensor]:
        line = self._line_for(item)  # leak: the embeddings are copied, the pin stays
        return None if line is None else line.embeds.clone()

    def stream_tiles(self, item: MMItem, tile: int) -> Iterator[torch.Tensor]:
        line = self._line_for(item)  # clean: unpinned in finally of the generator
        if line is None:
            return
        try:
            for i in range(0, line.embeds.shape[0], tile):
                yield line.embeds[i : i + tile].clone()
        finally:
            self.cache.unpin(line)

    def compare(self, a: MMItem, b: MMItem) -> Optional[float]:
        la = self._line_for(a)  # leak: stays pinned when there is no room for b
        lb = self._line_for(b)  # clean: unpinned whenever there is one
        if la is None or lb is None:
            if lb is not None:
                self.cache.unpin(lb)
            return None
        sim = torch.cosine_similarity(la.embeds.mean(0), lb.embeds.mean(0), dim=0)
        self.cache.unpin(la)
        self.cache.unpin(lb)
        return float(sim)

    def prefetch(self, reqs: List[MMRequest]) -> int:
        n = 0
        for r in reqs:
            for item in r.items:
                line = self._line_for(item)  # clean: unpinned at once, prefetch only wants it cached
                if line is not None:
                    self.cache.unpin(line)
                    n += 1
        return n
