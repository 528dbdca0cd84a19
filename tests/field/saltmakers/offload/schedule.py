"""Which layer's optimizer state is where."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, List, Optional

import torch

from .arena import Block, PinnedArena
from .mover import Mover
from .stats import Timeline


@dataclass
class LayerState:
    index: int
    moments: torch.Tensor
    block: Optional[Block] = None
    on_host: bool = False
    history: List[str] = field(default_factory=list)


class LayerSchedule:
    def __init__(self, layers: List[LayerState], mover: Mover, arena: PinnedArena):
        self.layers = layers
        self.mover = mover
        self.arena = arena
        self.timeline = Timeline()
        self.shadow: Dict[int, Block] = {}

    def offload(self, layer: LayerState) -> bool:
        if layer.on_host:
            return True
        block = self.mover.to_host(layer.moments)  # clean: near miss, on_host is set with it and restore() tests that
        if block is None:
            return False
        layer.block = block
        layer.on_host = True
        self.timeline.mark(layer.index, "out")
        return True

    def restore(self, layer: LayerState) -> None:
        if layer.on_host:
            layer.moments.view(-1).copy_(layer.block.data)
            self.arena.end_block(layer.block)
            layer.block = None
            layer.on_host = False
            self.timeline.mark(layer.index, "in")

    def restore_all(self) -> None:
        for layer in self.layers:
            self.restore(layer)

    def take_shadow(self, layer: LayerState) -> bool:
        """Keeps a copy to return to after a loss spike."""
        block = self.arena.lease_like(layer.moments)  # clean: near miss, the former shadow is ended before it is replaced
        if block is None:
            return False
        former = self.shadow.get(layer.index)
        if former is not None:
            self.arena.end_block(former)
        self.shadow[layer.index] = block
        return True

    def drop_shadows(self) -> None:
        while self.shadow:
            _, block = self.shadow.popitem()
            self.arena.end_block(block)

    def verify(self, layer: LayerState, tol: float) -> bool:
        now = self.arena.lease_like(layer.moments)  # leak: the return for a layer without a shadow leaves it leased
        if now is None:
            return False
        ref = self.shadow.get(layer.index)
        if ref is None:
            layer.history.append("no shadow")
            return True
        same = torch.allclose(now.data, ref.data, atol=tol)
        self.arena.end_block(now)
        return same

    def rotate(self, layers: List[LayerState]) -> int:
        """Asynchronous offload of several layers, drained in order."""
        begun: List[LayerState] = []
        for layer in layers:
            if layer.on_host or not self.mover.begin_to_host(layer.index, layer.moments):  # clean: near miss, every key begun is finished below
                continue
            begun.append(layer)
        for layer in begun:
            layer.block = self.mover.finish(layer.index)  # clean: moved to the layer, restore() ends it
            layer.on_host = True
        return len(begun)
