"""Saved-tensor hooks that move activations to host pages."""
from __future__ import annotations

import itertools
import logging
from typing import Any, Optional, Union

import torch

from .pages import Page, PagePool
from .streams import CopyLanes
from .transfer import copy_in, copy_out

log = logging.getLogger(__name__)

Packed = Union[int, torch.Tensor]


class OffloadHooks:
    def __init__(self, pages: PagePool, lanes: CopyLanes, min_bytes: int = 1 << 16):
        self.pages = pages
        self.lanes = lanes
        self.min_bytes = min_bytes
        self.stored: dict[int, Page] = {}
        self.keys = itertools.count()
        self.recent: Optional[Page] = None

    def pack(self, t: torch.Tensor) -> Packed:
        nbytes = t.numel() * t.element_size()
        if nbytes < self.min_bytes or not t.is_cuda:
            return t
        page = self.pages.get_page(nbytes)  # clean: moved into self.stored, unpack() or drop_all() puts it back
        if page is None:
            return t
        with self.lanes.lane() as lane:  # clean: left at the end of the with statement
            copy_out(t, page, lane)
        key = next(self.keys)
        self.stored[key] = page
        return key

    def unpack(self, packed: Packed) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        page = self.stored.pop(packed)
        with self.lanes.lane() as lane:  # clean: left at the end of the with statement
            out = copy_in(page, lane)
        self.pages.put_page(page)
        return out

    def pack_sparse(self, t: torch.Tensor) -> Packed:
        """Offload only activations that are mostly non-zero."""
        nbytes = t.numel() * t.element_size()
        page = self.pages.get_page(nbytes)  # leak: a mostly zero activation stays on the device, the page is forgotten
        if page is None:
            return t
        if (t != 0).float().mean() < 0.5:
            return t
        with self.lanes.lane() as lane:  # clean: left at the end of the with statement
            copy_out(t, page, lane)
        key = next(self.keys)
        self.stored[key] = page
        return key

    def remember(self, t: torch.Tensor) -> None:
        """Keep a copy of the newest activation for debugging."""
        page = self.pages.get_exact(t.numel() * t.element_size(), 0.5)  # leak: rebinding self.recent loses the one before
        if page is None:
            return
        with self.lanes.lane() as lane:  # clean: left at the end of the with statement
            copy_out(t, page, lane)
        self.recent = page

    def drop_all(self) -> int:
        n = len(self.stored)
        while self.stored:
            _, page = self.stored.popitem()
            self.pages.put_page(page)
        if self.recent is not None:
            self.pages.put_page(self.recent)
            self.recent = None
        return n


class offload:
    """Context manager around a forward/backward pair."""

    def __init__(self, hooks: OffloadHooks):
        self.hooks = hooks
        self.ctx: Any = None

    def __enter__(self) -> OffloadHooks:
        self.ctx = torch.autograd.graph.saved_tensors_hooks(self.hooks.pack, self.hooks.unpack)
        self.ctx.__enter__()
        return self.hooks

    def __exit__(self, et, ev, tb) -> None:
        self.ctx.__exit__(et, ev, tb)
        left = self.hooks.drop_all()
        if left:
            log.debug("%d activations were never unpacked", left)
