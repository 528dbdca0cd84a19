"""Prefill side."""
from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Callable, Dict, List, Optional

import torch

from .staging import Segment, SegmentArena

Wire = Callable[[str, torch.Tensor], bool]


class Producer:
    def __init__(self, arena: SegmentArena, wire: Wire, workers: int = 2):
        self.arena = arena
        self.wire = wire
        self.exec = ThreadPoolExecutor(workers)
        self.offered: Dict[str, Segment] = {}

    def offer(self, rid: str, kv: torch.Tensor) -> bool:
        if rid in self.offered:
            return True
        seg = self.arena.new()  # clean: kept in offered until withdraw
        if seg is None:
            return False
        seg.data[: kv.numel()].copy_(kv.flatten())
        self.offered[rid] = seg
        return True

    def withdraw(self, rid: str) -> None:
        seg = self.offered.pop(rid, None)
        if seg is not None:
            seg.drop()

    def _send(self, peer: str, seg: Segment) -> bool:
        """Consumes the caller's reference."""
        try:
            return self.wire(peer, seg.data)
        finally:
            seg.drop()

    def push(self, rid: str, peers: List[str]) -> List["Future[bool]"]:
        seg = self.offered.get(rid)
        if seg is None:
            return []
        return [self.exec.submit(self._send, p, seg.retain()) for p in peers]  # clean: near miss, each _send drops the reference passed to it

    def push_sync(self, rid: str, peer: str) -> bool:
        seg = self.offered.get(rid)
        if seg is None:
            return False
        ref = seg.retain()  # leak: a wire that answers False returns without drop
        if not self.wire(peer, ref.data):
            return False
        ref.drop()
        return True

    def push_direct(self, peer: str, kv: torch.Tensor) -> bool:
        seg = self.arena.new()  # clean: near miss, _send consumes the reference
        if seg is None:
            return False
        seg.data[: kv.numel()].copy_(kv.flatten())
        return self._send(peer, seg)

    def push_layers(self, peer: str, layers: List[torch.Tensor]) -> int:
        sent = 0
        for kv in layers:
            seg = self.arena.new()  # leak: an empty layer continues with the new segment
            if seg is None:
                break
            if kv.numel() == 0:
                continue
            seg.data[: kv.numel()].copy_(kv.flatten())
            if self._send(peer, seg):
                sent += 1
        return sent

    def push_logged(self, peer: str, kv: torch.Tensor, done: Callable[[bool], None]) -> bool:
        seg = self.arena.new()  # clean: near miss, the done-callback of the future drops it
        if seg is None:
            return False
        seg.data[: kv.numel()].copy_(kv.flatten())
        fut = self.exec.submit(self.wire, peer, seg.data)

        def finished(f: "Future[bool]") -> None:
            seg.drop()
            done(f.exception() is None)

        fut.add_done_callback(finished)
        return True
