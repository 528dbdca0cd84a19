"""Decode side."""
from __future__ import annotations

from typing import Dict, List, Optional

import torch

from .staging import Segment, SegmentArena


class Consumer:
    def __init__(self, arena: SegmentArena):
        self.arena = arena
        self.inbox: Dict[str, List[Segment]] = {}
        self.latest: Optional[Segment] = None

    def on_receive(self, rid: str, payload: torch.Tensor) -> bool:
        seg = self.arena.new()  # leak: an unknown request returns False with the segment
        if seg is None:
            return False
        parts = self.inbox.get(rid)
        if parts is None:
            return False
        seg.data[: payload.numel()].copy_(payload.flatten())
        parts.append(seg)
        return True

    def expect(self, rid: str) -> None:
        self.inbox.setdefault(rid, [])

    def assemble(self, rid: str) -> Optional[torch.Tensor]:
        parts = self.inbox.pop(rid, None)
        if not parts:
            return None
        out = torch.cat([p.data for p in parts])
        for p in parts:
            p.drop()
        return out

    def peek(self, rid: str) -> Optional[float]:
        parts = self.inbox.get(rid)
        if not parts:
            return None
        head = parts[0].retain()  # leak: the value is returned and the reference not dropped
        return float(head.data.sum())

    def remember(self, rid: str) -> None:
        parts = self.inbox.get(rid)
        if parts:
            if self.latest is not None:
                self.latest.drop()
            self.latest = parts[-1].retain()  # clean: near miss, the former latest is dropped first; close drops this one

    def close(self) -> None:
        for rid in list(self.inbox):
            for p in self.inbox.pop(rid):
                p.drop()
        if self.latest is not None:
            self.latest.drop()
            self.latest = None
