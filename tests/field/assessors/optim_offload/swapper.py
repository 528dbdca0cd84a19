"""Moves optimizer state between device and host arena."""
from __future__ import annotations

from typing import Optional

import torch

from .arena import Extent, HostArena


class StateSwapper:
    def __init__(self, arena: HostArena) -> None:
        self.arena = arena
        self._homes: dict[int, tuple[Extent, Extent]] = {}
        self._masters: dict[int, Extent] = {}

    def place(self, key: int, numel: int) -> bool:
        if key in self._homes:
            return True
        m = self.arena.reserve(numel)  # leak: without room for the second moment the first one is lost
        if m is None:
            return False
        v = self.arena.reserve(numel)  # clean: kept in _homes, remove releases both
        if v is None:
            return False
        self.arena.view(m, numel).zero_()
        self.arena.view(v, numel).zero_()
        self._homes[key] = (m, v)
        return True

    def place_master(self, key: int, p: torch.Tensor) -> bool:
        ext = self.arena.reserve(p.numel())  # leak: remove releases the moments only, _masters is never emptied
        if ext is None:
            return False
        self.arena.view(ext, p.numel()).copy_(p.detach().float().view(-1))
        self._masters[key] = ext
        return True

    def master(self, key: int, numel: int) -> Optional[torch.Tensor]:
        ext = self._masters.get(key)
        return None if ext is None else self.arena.view(ext, numel)

    def moments(self, key: int, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        m, v = self._homes[key]
        return self.arena.view(m, numel), self.arena.view(v, numel)

    def resize(self, key: int, old: int, new: int) -> bool:
        m = self.arena.reserve(new)  # clean: near miss, released again when there is no room for its partner
        if m is None:
            return False
        v = self.arena.reserve(new)  # clean: near miss, takes the old place in _homes after that is released
        if v is None:
            self.arena.release(m)
            return False
        om, ov = self._homes[key]
        keep = min(old, new)
        self.arena.view(m, keep).copy_(self.arena.view(om, keep))
        self.arena.view(v, keep).copy_(self.arena.view(ov, keep))
        self.arena.release(om)
        self.arena.release(ov)
        self._homes[key] = (m, v)
        return True

    def remove(self, key: int) -> None:
        pair = self._homes.pop(key, None)
        if pair is None:
            return
        for ext in pair:
            self.arena.release(ext)
