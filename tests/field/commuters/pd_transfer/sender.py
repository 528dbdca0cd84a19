from __future__ import annotations

import logging
from typing import Callable, Optional

import torch

from .windows import TransferWindows, Window

log = logging.getLogger(__name__)

Push = Callable[[int, torch.Tensor], bool]


class PrefillSender:
    def __init__(self, windows: TransferWindows, push: Push) -> None:
        self.windows = windows
        self.push = push
        self.in_flight: dict[str, list[Window]] = {}

    def _stage(self, page: torch.Tensor) -> Optional[Window]:
        win = self.windows.acquire_window(page.numel())  # leak: a page larger than the region is refused with the window
        if win is None:
            return None
        if page.numel() > win.region.numel():
            log.error("page of %d elements", page.numel())
            return None
        win.region[: page.numel()].copy_(page.flatten())
        return win

    def send(self, rid: str, pages: list[torch.Tensor]) -> int:
        sent = 0
        for page in pages:
            win = self._stage(page)  # clean: near miss, after a failed push it is released before the break
            if win is None:
                break
            if not self.push(win.wid, win.region):
                self.windows.release_window(win)
                break
            self.in_flight.setdefault(rid, []).append(win)
            sent += 1
        return sent

    def send_layerwise(self, rid: str, layers: list[torch.Tensor]) -> bool:
        staged: list[Window] = []
        for layer in layers:
            win = self._stage(layer)  # leak: the layers staged before are not released when one cannot be
            if win is None:
                return False
            staged.append(win)
        for win in staged:
            self.push(win.wid, win.region)
        self.in_flight.setdefault(rid, []).extend(staged)
        return True

    def acknowledged(self, rid: str) -> None:
        for win in self.in_flight.pop(rid, []):
            self.windows.release_window(win)

    def resend(self, rid: str, pages: list[torch.Tensor]) -> None:
        fresh = [w for w in map(self._stage, pages) if w is not None]  # leak: the list in flight under this id is replaced
        for win in fresh:
            self.push(win.wid, win.region)
        self.in_flight[rid] = fresh
