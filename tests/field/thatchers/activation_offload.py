"""Activation offloading through saved-tensor hooks into a host arena."""
from __future__ import annotations

import contextlib
import threading
import weakref
from dataclasses import dataclass
from typing import Any, Callable, Iterator, Optional, Union

import torch


@dataclass(eq=False)
class HostPage:
    index: int
    storage: torch.Tensor
    live: int = 0


class HostArena:
    def __init__(self, pages: int, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self._stack = [HostPage(i, torch.empty(page_bytes, dtype=torch.uint8)) for i in range(pages)]
        self._guard = threading.Lock()

    def take_page(self) -> Optional[HostPage]:
        with self._guard:
            if not self._stack:
                return None
            return self._stack.pop()

    def put_page(self, page: HostPage) -> None:
        with self._guard:
            page.live = 0
            self._stack.append(page)

    def take_pages(self, nbytes: int) -> Optional[list[HostPage]]:
        need = -(-nbytes // self.page_bytes)
        pages: list[HostPage] = []
        for _ in range(need):
            page = self.take_page()  # leak: the pages got so far are dropped when the arena runs dry half way
            if page is None:
                return None
            pages.append(page)
        return pages

    def put_pages(self, pages: list[HostPage]) -> None:
        for p in pages:
            self.put_page(p)


@dataclass(eq=False)
class Offloaded:
    pages: list[HostPage]
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


Packed = Union[torch.Tensor, Offloaded]


class Offloader:
    def __init__(self, arena: HostArena, min_bytes: int = 1 << 20) -> None:
        self.arena = arena
        self.min_bytes = min_bytes
        self.layer_pages: dict[int, list[HostPage]] = {}
        self.rng_page: Optional[HostPage] = None
        self.live: set[Offloaded] = set()

    def _spill(self, raw: torch.Tensor, pages: list[HostPage]) -> None:
        step = self.arena.page_bytes
        for i, page in enumerate(pages):
            part = raw[i * step : (i + 1) * step]
            page.storage[: part.numel()].copy_(part)
            page.live = part.numel()

    def pack(self, t: torch.Tensor) -> Packed:
        nbytes = t.numel() * t.element_size()
        if nbytes < self.min_bytes or not t.is_cuda:
            return t
        pages = self.arena.take_pages(nbytes)  # clean: near miss, held by the packed object, unpack() or discard() puts them back
        if pages is None:
            return t
        self._spill(t.contiguous().view(torch.uint8).flatten(), pages)
        packed = Offloaded(pages, t.shape, t.dtype, t.device)
        self.live.add(packed)
        return packed

    def unpack(self, p: Packed) -> torch.Tensor:
        if isinstance(p, torch.Tensor):
            return p
        raw = torch.cat([pg.storage[: pg.live] for pg in p.pages]).to(p.device)
        if p in self.live:
            self.live.remove(p)
            self.arena.put_pages(p.pages)
        return raw.view(p.dtype).view(p.shape)

    def discard(self) -> None:
        for p in self.live:
            self.arena.put_pages(p.pages)
        self.live.clear()

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
            yield

    def stash_layer(self, layer: int, t: torch.Tensor) -> bool:
        pages = self.arena.take_pages(t.numel() * t.element_size())  # leak: fetch_layer(keep=False) pops the list but only its first page is put back
        if pages is None:
            return False
        self.drop_layer(layer)
        self._spill(t.contiguous().view(torch.uint8).flatten(), pages)
        self.layer_pages[layer] = pages
        return True

    def fetch_layer(self, layer: int, out: torch.Tensor, keep: bool = False) -> bool:
        pages = self.layer_pages.get(layer)
        if pages is None:
            return False
        raw = torch.cat([p.storage[: p.live] for p in pages])
        out.copy_(raw.view(out.dtype).view(out.shape))
        if not keep:
            head, *_ = self.layer_pages.pop(layer)
            self.arena.put_page(head)
        return True

    def drop_layer(self, layer: int) -> None:
        pages = self.layer_pages.pop(layer, None)
        if pages:
            self.arena.put_pages(pages)

    def save_rng(self) -> bool:
        state = torch.get_rng_state()
        page = self.arena.take_page()  # leak: a second save before restore_rng() overwrites the page
        if page is None:
            return False
        page.storage[: state.numel()].copy_(state)
        page.live = state.numel()
        self.rng_page = page
        return True

    def restore_rng(self) -> None:
        if self.rng_page is None:
            return
        page, self.rng_page = self.rng_page, None
        torch.set_rng_state(page.storage[: page.live].clone())
        self.arena.put_page(page)

    def measure(self, t: torch.Tensor, clock: Callable[[], float]) -> Optional[float]:
        page = self.arena.take_page()  # clean: put back after the timing
        if page is None:
            return None
        t0 = clock()
        n = min(t.numel(), self.arena.page_bytes)
        page.storage[:n].copy_(t.view(torch.uint8).flatten()[:n])
        elapsed = clock() - t0
        self.arena.put_page(page)
        return elapsed


class RecomputeCell:
    """One checkpointed segment; inputs live on the host between forward and backward."""

    def __init__(self, arena: HostArena, fn: Callable[..., torch.Tensor]) -> None:
        self.arena = arena
        self.fn = fn
        self.inputs: list[HostPage] = []
        self.meta: Optional[HostPage] = None

    def forward(self, x: torch.Tensor, tag: bytes) -> torch.Tensor:
        page = self.arena.take_page()  # clean: near miss, the inputs list owns it, backward() and drop() empty the list
        if page is not None:
            self.inputs.append(page)
        if self.meta is None:
            self.meta = self.arena.take_page()  # leak: drop() sets the field to None without a put_page
        if self.meta is not None:
            self.meta.storage[: len(tag)].copy_(torch.frombuffer(bytearray(tag), dtype=torch.uint8))
        return self.fn(x)

    def backward(self, grad: torch.Tensor) -> torch.Tensor:
        while self.inputs:
            self.arena.put_page(self.inputs.pop())
        if self.meta is not None:
            self.arena.put_page(self.meta)
            self.meta = None
        return grad

    def drop(self) -> None:
        for p in self.inputs:
            self.arena.put_page(p)
        self.inputs.clear()
        self.meta = None


def attach_scratch(arena: HostArena, owner: Any) -> bool:
    page = arena.take_page()  # clean: near miss, the finalizer puts it back when the owner dies
    if page is None:
        return False
    weakref.finalize(owner, arena.put_page, page)
    owner.scratch = page.storage
    return True


def compare_roundtrip(arena: HostArena, a: torch.Tensor, b: torch.Tensor) -> bool:
    left = arena.take_page()  # clean: the stack puts it back
    with contextlib.ExitStack() as stack:
        if left is None:
            return False
        stack.callback(arena.put_page, left)
        right = arena.take_page()  # clean: near miss, a missing right page unwinds only the left
        if right is None:
            return False
        stack.callback(arena.put_page, right)
        left.storage[: a.numel()].copy_(a)
        right.storage[: b.numel()].copy_(b)
        return torch.equal(left.storage[: a.numel()], right.storage[: b.numel()])
