from __future__ import annotations

from typing import Callable, Optional

import torch

from .windows import TransferWindows, Window

Pull = Callable[[str, Window], int]


class DecodeReceiver:
    def __init__(self, windows: TransferWindows, pull: Pull) -> None:
        self.windows = windows
        self.pull = pull
        self.parked: list[Window] = []

    def fetch(self, rid: str, numel: int) -> Optional[torch.Tensor]:
        win = self.windows.acquire_window(numel)  # clean: released on the short read and on the full one
        if win is None:
            return None
        got = self.pull(rid, win)
        data = win.region[:got].clone()
        self.windows.release_window(win)
        return data if got == numel else None

    def fetch_in_place(self, rid: str, numel: int) -> Optional[Window]:
        win = self.windows.acquire_any(numel)  # clean: near miss, an empty pull is released, else it is the caller's
        if win is None:
            return None
        if self.pull(rid, win) == 0:
            self.windows.release_window(win)
            return None
        return win

    def park(self, count: int) -> int:
        for _ in range(count):
            win = self.windows.acquire_window(0)  # clean: parked until unpark
            if win is None:
                break
            self.parked.append(win)
        return len(self.parked)

    def unpark(self) -> None:
        while self.parked:
            self.windows.release_window(self.parked.pop())


def first_tokens(receiver: DecodeReceiver, rids: list[str], numel: int) -> dict[str, float]:
    out: dict[str, float] = {}
    for rid in rids:
        win = receiver.fetch_in_place(rid, numel)  # leak: a NaN result continues without releasing the window
        if win is None:
            continue
        value = float(win.region[0])
        if value != value:
            continue
        out[rid] = value
        receiver.windows.release_window(win)
    return out


def region_of(receiver: DecodeReceiver, rid: str, numel: int) -> torch.Tensor:
    win = receiver.fetch_in_place(rid, numel)  # leak: the caller gets a copy, nobody has the window
    if win is None:
        return torch.empty(0)
    return win.region[:numel].clone()
