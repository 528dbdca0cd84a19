"""Budgeted cache of multimodal encoder outputs, with a scheduler that reserves from it."""
from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import torch


@dataclass
class MMInput:
    mm_hash: str
    num_tokens: int
    offset: int = 0


@dataclass
class MMRequest:
    request_id: str
    inputs: list[MMInput]
    done: set[int] = field(default_factory=set)


@dataclass
class _Entry:
    tensor: torch.Tensor | None
    tokens: int
    refs: int = 0


class EncoderCacheManager:
    def __init__(self, budget_tokens: int) -> None:
        self.budget = budget_tokens
        self.used = 0
        self.entries: OrderedDict[str, _Entry] = OrderedDict()

    def reserve(self, tokens: int) -> bool:
        if self.used + tokens > self.budget:
            self._evict_until(tokens)
        if self.used + tokens > self.budget:
            return False
        self.used += tokens
        return True

    def unreserve(self, tokens: int) -> None:
        self.used -= tokens

    def commit(self, mm_hash: str, tensor: torch.Tensor, tokens: int) -> None:
        """The reservation of `tokens` becomes the entry's."""
        if mm_hash in self.entries:
            self.unreserve(tokens)
            return
        self.entries[mm_hash] = _Entry(tensor, tokens)

    def ref(self, mm_hash: str) -> torch.Tensor | None:
        entry = self.entries.get(mm_hash)
        if entry is None:
            return None
        entry.refs += 1
        self.entries.move_to_end(mm_hash)
        return entry.tensor

    def unref(self, mm_hash: str) -> None:
        self.entries[mm_hash].refs -= 1

    def _evict_until(self, tokens: int) -> None:
        for mm_hash, entry in list(self.entries.items()):
            if self.used + tokens <= self.budget:
                return
            if entry.refs == 0:
                del self.entries[mm_hash]
                self.unreserve(entry.tokens)


class FeaturePages:
    def __init__(self, pages: int) -> None:
        self._avail = set(range(pages))

    def grab(self) -> int | None:
        return self._avail.pop() if self._avail else None

    def ungrab(self, page: int) -> None:
        self._avail.add(page)


class EncoderScheduler:
    def __init__(self, cache: EncoderCacheManager, pages: FeaturePages, encoder: torch.nn.Module) -> None:
        self.cache = cache
        self.pages = pages
        self.encoder = encoder
        self.held: dict[str, list[str]] = {}
        self.req_pages: dict[str, list[int]] = {}
        self.preview: dict[str, str] = {}

    def _encode(self, item: MMInput) -> torch.Tensor | None:
        if item.num_tokens == 0:
            return None
        return self.encoder(torch.ones(item.num_tokens, 8))

    def encode_missing(self, req: MMRequest) -> int:
        encoded = 0
        for i, item in enumerate(req.inputs):
            if i in req.done or item.mm_hash in self.cache.entries:
                continue
            if not self.cache.reserve(item.num_tokens):  # clean: near miss, committed with the output or taken back
                break
            out = self._encode(item)
            if out is None:
                self.cache.unreserve(item.num_tokens)
                continue
            self.cache.commit(item.mm_hash, out, item.num_tokens)
            req.done.add(i)
            encoded += 1
        return encoded

    def encode_batch(self, items: list[MMInput]) -> bool:
        total = sum(i.num_tokens for i in items)
        if not self.cache.reserve(total):  # leak: items without output are skipped, and their part of total is never taken back
            return False
        for item in items:
            out = self._encode(item)
            if out is None or out.isnan().any():
                continue
            self.cache.commit(item.mm_hash, out, item.num_tokens)
        return True

    def encode_one(self, item: MMInput) -> torch.Tensor | None:
        if not self.cache.reserve(item.num_tokens):  # leak: the non-finite output returns without unreserve
            return None
        out = self._encode(item)
        if out is None:
            self.cache.unreserve(item.num_tokens)
            return None
        if not torch.isfinite(out).all():
            return None
        self.cache.commit(item.mm_hash, out, item.num_tokens)
        return out

    def gather(self, req: MMRequest) -> list[torch.Tensor] | None:
        outs, taken = [], []
        for item in req.inputs:
            tensor = self.cache.ref(item.mm_hash)  # clean: near miss, those taken are unreferenced when one is missing
            if tensor is None:
                for mm_hash in taken:
                    self.cache.unref(mm_hash)
                return None
            taken.append(item.mm_hash)
            outs.append(tensor)
        self.held.setdefault(req.request_id, []).extend(taken)
        return outs

    def gather_window(self, req: MMRequest, lo: int, hi: int) -> list[torch.Tensor]:
        outs, taken = [], []
        for item in req.inputs:
            tensor = self.cache.ref(item.mm_hash)  # leak: an item outside the window is passed over with its reference
            if tensor is None:
                continue
            if item.offset < lo or item.offset >= hi:
                continue
            taken.append(item.mm_hash)
            outs.append(tensor)
        self.held.setdefault(req.request_id, []).extend(taken)
        return outs

    def show_preview(self, request_id: str, mm_hash: str) -> torch.Tensor | None:
        previous = self.preview.get(request_id)
        if previous == mm_hash:
            return self.cache.entries[mm_hash].tensor
        tensor = self.cache.ref(mm_hash)  # clean: near miss, the former preview is unreferenced, this one at finish
        if tensor is None:
            return None
        if previous is not None:
            self.cache.unref(previous)
        self.preview[request_id] = mm_hash
        return tensor

    def map_pages(self, req: MMRequest, n: int) -> bool:
        got: list[int] = []
        for _ in range(n):
            page = self.pages.grab()  # clean: near miss, all of got go back when the set is empty
            if page is None:
                for p in got:
                    self.pages.ungrab(p)
                return False
            got.append(page)
        self.req_pages.setdefault(req.request_id, []).extend(got)
        return True

    def remap_pages(self, req: MMRequest, n: int) -> list[int]:
        fresh = []
        for _ in range(n):
            page = self.pages.grab()  # leak: the assignment overwrites the pages that map_pages gave to the request
            if page is None:
                break
            fresh.append(page)
        self.req_pages[req.request_id] = fresh
        return fresh

    def finish(self, req: MMRequest) -> None:
        for mm_hash in self.held.pop(req.request_id, []):
            self.cache.unref(mm_hash)
        preview = self.preview.pop(req.request_id, None)
        if preview is not None:
            self.cache.unref(preview)
        for page in self.req_pages.pop(req.request_id, []):
            self.pages.ungrab(page)
