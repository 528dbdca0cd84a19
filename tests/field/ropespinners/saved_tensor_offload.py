"""Activation offload through saved-tensor hooks: device tensors go to pinned host pages and come back."""
from __future__ import annotations

import contextlib
import logging
import threading
from collections import OrderedDict, deque
from typing import Callable, Deque, Dict, Iterator, List, Optional

import torch

log = logging.getLogger("offload.saved")


class NoPages(Exception):
    pass


class PageBank:
    """A fixed count of pinned pages of one size, addressed by index."""

    def __init__(self, count: int, page_bytes: int):
        self.page_bytes = page_bytes
        self.storage = torch.empty(count, page_bytes, dtype=torch.uint8, pin_memory=True)
        self._idle: Deque[int] = deque(range(count))
        self._cv = threading.Condition()

    def claim(self, block: bool = False) -> Optional[int]:
        with self._cv:
            while not self._idle:
                if not block:
                    return None
                self._cv.wait()
            return self._idle.popleft()  # clean: returned to the claimer

    def claim_many(self, n: int) -> Optional[List[int]]:
        got: List[int] = []
        for _ in range(n):
            page = self.claim()  # clean: near miss, a short run vacates all that got holds
            if page is None:
                for p in got:
                    self.vacate(p)
                return None
            got.append(page)
        return got

    def vacate(self, page: int) -> None:
        with self._cv:
            self._idle.append(page)
            self._cv.notify()

    def view(self, page: int, like: torch.Tensor) -> torch.Tensor:
        raw = self.storage[page][: like.numel() * like.element_size()]
        return raw.view(like.dtype).view(like.shape)


class Parked:
    __slots__ = ("pages", "shape", "dtype", "device", "event")

    def __init__(self, pages, t: torch.Tensor, event=None):
        self.pages = pages
        self.shape = t.shape
        self.dtype = t.dtype
        self.device = t.device
        self.event = event


class SavedTensorOffload:
    """pack() parks a tensor and unpack() brings it back. One unpack for each pack, as autograd frees after backward."""

    def __init__(self, bank: PageBank, min_bytes: int = 1 << 16):
        self.bank = bank
        self.min_bytes = min_bytes
        self.copy_stream = torch.cuda.Stream()
        self.parked: Dict[int, Parked] = {}
        self.stats = {"packed": 0, "kept": 0}

    def _pages_for(self, t: torch.Tensor) -> int:
        size = t.numel() * t.element_size()
        return -(-size // self.bank.page_bytes)

    def pack(self, t: torch.Tensor):
        if t.numel() * t.element_size() < self.min_bytes:
            self.stats["kept"] += 1
            return t
        pages = self.bank.claim_many(self._pages_for(t))  # leak: non-contiguous tensors are returned after the claim
        if pages is None:
            self.stats["kept"] += 1
            return t
        if not t.is_contiguous():
            self.stats["kept"] += 1
            return t
        with torch.cuda.stream(self.copy_stream):
            flat = t.view(-1).view(torch.uint8)
            for i, p in enumerate(pages):
                part = flat[i * self.bank.page_bytes:(i + 1) * self.bank.page_bytes]
                self.bank.storage[p][: part.numel()].copy_(part, non_blocking=True)
        key = self.stats["packed"]
        self.parked[key] = Parked(pages, t)
        self.stats["packed"] += 1
        return key

    def unpack(self, handle):
        if isinstance(handle, torch.Tensor):
            return handle
        rec = self.parked.pop(handle)
        out = torch.empty(rec.shape, dtype=rec.dtype, device=rec.device)
        flat = out.view(-1).view(torch.uint8)
        self.copy_stream.synchronize()
        for i, p in enumerate(rec.pages):
            part = flat[i * self.bank.page_bytes:(i + 1) * self.bank.page_bytes]
            part.copy_(self.bank.storage[p][: part.numel()])
            self.bank.vacate(p)
        return out

    @contextlib.contextmanager
    def scope(self) -> Iterator["SavedTensorOffload"]:
        with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
            try:
                yield self
            finally:
                self.flush_unused()

    def flush_unused(self) -> None:
        for rec in self.parked.values():
            for p in rec.pages:
                self.bank.vacate(p)
        self.parked.clear()


class LayerStash:
    """Explicit stash of one hidden state for each layer, evicted by age."""

    def __init__(self, bank: PageBank, keep: int):
        self.bank = bank
        self.keep = keep
        self.by_layer: "OrderedDict[int, int]" = OrderedDict()

    def put(self, layer: int, hidden: torch.Tensor) -> bool:
        page = self.bank.claim()  # leak: a second put for the layer overwrites the older page in by_layer
        if page is None:
            return False
        self.bank.view(page, hidden).copy_(hidden, non_blocking=True)
        self.by_layer[layer] = page
        if len(self.by_layer) > self.keep:
            _, old = self.by_layer.popitem(last=False)
            self.bank.vacate(old)
        return True

    def fetch(self, layer: int, like: torch.Tensor) -> Optional[torch.Tensor]:
        page = self.by_layer.pop(layer, None)
        if page is None:
            return None
        out = self.bank.view(page, like).to(like.device, copy=True)
        self.bank.vacate(page)
        return out


class GradSpill:
    """Gradient spill: reduces on the host once all ranks' shares are there."""

    def __init__(self, bank: PageBank, shares: int):
        self.bank = bank
        self.shares = shares
        self.waiting: Dict[str, List[int]] = {}

    def add(self, name: str, grad: torch.Tensor) -> Optional[torch.Tensor]:
        page = self.bank.claim(block=True)  # clean: near miss, joins waiting[name], which is vacated when complete or by drop()
        self.bank.view(page, grad).copy_(grad)
        self.waiting.setdefault(name, []).append(page)
        if len(self.waiting[name]) < self.shares:
            return None
        pages = self.waiting.pop(name)
        total = torch.zeros_like(grad, device="cpu")
        for p in pages:
            total.add_(self.bank.view(p, total))
            self.bank.vacate(p)
        return total

    def drop(self) -> None:
        while self.waiting:
            _, pages = self.waiting.popitem()
            for p in pages:
                self.bank.vacate(p)


def roundtrip(bank: PageBank, t: torch.Tensor, fn: Callable[[torch.Tensor], Optional[torch.Tensor]]):
    page = bank.claim(block=True)  # clean: vacated in finally
    try:
        host = bank.view(page, t)
        host.copy_(t)
        out = fn(host)
        return None if out is None else out.to(t.device, copy=True)
    finally:
        bank.vacate(page)


def spill_pair(bank: PageBank, hidden: torch.Tensor, residual: Optional[torch.Tensor], sink) -> bool:
    first = bank.claim()  # clean: vacated when second is None, else given to sink
    if first is None:
        return False
    if residual is None:
        bank.view(first, hidden).copy_(hidden)
        sink.accept([first])
        return True
    second = bank.claim()  # clean: given to sink with first
    if second is None:
        bank.vacate(first)
        return False
    bank.view(first, hidden).copy_(hidden)
    bank.view(second, residual).copy_(residual)
    sink.accept([first, second])
    return True


def prefetch_layers(bank: PageBank, layers: List[int], source: Dict[int, torch.Tensor]) -> Dict[int, int]:
    ready: Dict[int, int] = {}
    for layer in layers:
        page = bank.claim()  # leak: the page is kept when source has no tensor for the layer
        if page is None:
            break
        t = source.get(layer)
        if t is None:
            log.debug("layer %d has nothing to prefetch", layer)
            continue
        bank.view(page, t).copy_(t, non_blocking=True)
        ready[layer] = page
    return ready


def checksum(bank: PageBank, tensors: List[torch.Tensor]) -> List[int]:
    sums = []
    page = bank.claim(block=True)  # leak: the early return for an empty tensor keeps it
    for t in tensors:
        if t.numel() == 0:
            return []
        host = bank.view(page, t)
        host.copy_(t)
        sums.append(int(host.view(torch.uint8).sum()))
    bank.vacate(page)
    return sums
