"""Activation offload: pinned host pages claimed at forward, surrendered at backward."""
from __future__ import annotations

import abc
import threading
from dataclasses import dataclass, field
from typing import Optional

import torch

@dataclass
class PinnedPage:
    index: int
    data: torch.Tensor
    busy: bool = False
    tag: str = ""

class PageBank:
    """A fixed row of pinned pages, each with a busy flag."""

    def __init__(self, count: int, page_bytes: int) -> None:
        self._lock = threading.Lock()
        self.pages = [
            PinnedPage(i, torch.empty(page_bytes, dtype=torch.uint8, pin_memory=True))
            for i in range(count)
        ]

    def claim(self, tag: str) -> Optional[PinnedPage]:
        with self._lock:
            for page in self.pages:
                if not page.busy:
                    page.busy, page.tag = True, tag
                    return page
        return None

    def surrender(self, page: PinnedPage) -> None:
        with self._lock:
            page.busy, page.tag = False, ""

class OffloadPolicy(abc.ABC):
    def __init__(self, bank: PageBank, stream: torch.cuda.Stream) -> None:
        self.bank, self.stream = bank, stream

    @abc.abstractmethod
    def pack(self, t: torch.Tensor):
        ...

    @abc.abstractmethod
    def unpack(self, handle) -> torch.Tensor:
        ...

    def _upload(self, t: torch.Tensor, page: PinnedPage) -> None:
        with torch.cuda.stream(self.stream):
            page.data[: t.nbytes].view(t.dtype).copy_(t.flatten(), non_blocking=True)

@dataclass
class Saved:
    shape: torch.Size
    dtype: torch.dtype
    page: Optional[PinnedPage] = None
    kept: Optional[torch.Tensor] = None

class PageOrKeep(OffloadPolicy):
    """Offloads when a page is idle and keeps the tensor on device otherwise."""

    def pack(self, t: torch.Tensor) -> Saved:
        page = self.bank.claim("act")  # clean: near miss, None keeps tensor; else page rides in Saved
        if page is None:
            return Saved(t.shape, t.dtype, kept=t)
        self._upload(t, page)
        return Saved(t.shape, t.dtype, page=page)

    def unpack(self, handle: Saved) -> torch.Tensor:
        if handle.page is None:
            return handle.kept
        n = handle.shape.numel() * handle.dtype.itemsize
        out = handle.page.data[:n].view(handle.dtype).to("cuda").view(handle.shape)
        self.bank.surrender(handle.page)
        handle.page = None
        return out

class SizeGated(PageOrKeep):
    """Claims first and looks at the size afterwards."""

    min_bytes = 1 << 16

    def pack(self, t: torch.Tensor) -> Saved:
        page = self.bank.claim("gated")  # leak: small tensors are kept but page stays busy
        if page is None or t.nbytes < self.min_bytes:
            return Saved(t.shape, t.dtype, kept=t)
        self._upload(t, page)
        return Saved(t.shape, t.dtype, page=page)

class LayerStashMixin:
    """Keeps one page per layer between forward and backward."""

    bank: PageBank

    def init_stash(self) -> None:
        self.by_layer: dict[int, PinnedPage] = {}
        self.residual: Optional[PinnedPage] = None
        self.rng: Optional[PinnedPage] = None

    def stash_layer(self, layer: int) -> bool:
        if layer in self.by_layer:
            return True
        page = self.bank.claim(f"layer{layer}")  # clean: near miss, only stored when not None; clear() surrenders
        if page is not None:
            self.by_layer[layer] = page
        return page is not None

    def stash_residual(self) -> None:
        self.residual = self.bank.claim("residual")  # leak: a second microbatch overwrites the held page

    def stash_rng(self, state: torch.Tensor) -> None:
        if self.rng is None:
            self.rng = self.bank.claim("rng")  # clean: near miss, guarded; clear() surrenders it
        if self.rng is not None:
            self.rng.data[: state.numel()].copy_(state)

    def clear(self) -> None:
        for page in self.by_layer.values():
            self.bank.surrender(page)
        self.by_layer.clear()
        for page in (self.residual, self.rng):
            if page is not None:
                self.bank.surrender(page)
        self.residual = self.rng = None

class BlockOffloader(LayerStashMixin):
    def __init__(self, bank: PageBank) -> None:
        self.bank = bank
        self.init_stash()
    def swap_pair(self, k: torch.Tensor, v: torch.Tensor) -> Optional[tuple[PinnedPage, PinnedPage]]:
        kp = self.bank.claim("k")  # leak: stays busy when the page for v is missing
        if kp is None:
            return None
        vp = self.bank.claim("v")  # clean: returned beside kp when there is one
        if vp is None:
            return None
        kp.data[: k.nbytes].view(k.dtype).copy_(k.flatten())
        vp.data[: v.nbytes].view(v.dtype).copy_(v.flatten())
        return kp, vp
    def checksum(self, k: torch.Tensor, v: torch.Tensor) -> int:
        pair = self.swap_pair(k, v)  # clean: both members surrendered below
        if pair is None:
            return -1
        total = sum(int(p.data.sum()) for p in pair)
        for p in pair:
            self.bank.surrender(p)
        return total
    def replace_layer(self, layer: int) -> None:
        old = self.by_layer.pop(layer, None)
        fresh = self.bank.claim("replace")  # clean: near miss, old goes back, fresh takes its place or none
        if old is not None:
            self.bank.surrender(old)
        if fresh is not None:
            self.by_layer[layer] = fresh
    def probe(self) -> bool:
        return self.bank.claim("probe") is not None  # leak: the page claimed for the test is never surrendered
