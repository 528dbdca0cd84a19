from __future__ import annotations

import torch

from .cache import ExpertCache, ExpertSlot
from .prefetch import Prefetcher


class MoERuntime:
    def __init__(self, cache: ExpertCache, prefetcher: Prefetcher) -> None:
        self.cache = cache
        self.prefetcher = prefetcher
        self.shared: dict[int, ExpertSlot] = {}
        self.workspace: ExpertSlot | None = None

    def _pinned(self, layer: int, expert: int) -> ExpertSlot | None:
        slot = self.cache.pin(layer, expert)  # clean: returned to the caller, pinned
        if slot is not None:
            return slot
        if not self.prefetcher.load_now(layer, expert):
            return None
        return self.cache.pin(layer, expert)  # clean: returned to the caller, pinned

    def forward(self, layer: int, x: torch.Tensor, experts: list[int]) -> torch.Tensor | None:
        out = torch.zeros_like(x)
        pinned: list[ExpertSlot] = []
        try:
            for expert in experts:
                slot = self._pinned(layer, expert)  # clean: near miss, the finally unpins those of a part of the experts too
                if slot is None:
                    return None
                pinned.append(slot)
            for slot in pinned:
                out += x @ slot.weight
            return out
        finally:
            for slot in pinned:
                self.cache.unpin(slot)

    def forward_top1(self, layer: int, x: torch.Tensor, expert: int, gate: float) -> torch.Tensor:
        slot = self._pinned(layer, expert)  # leak: a gate of zero returns x with the expert still pinned
        if slot is None:
            return x
        if gate == 0.0:
            return x
        y = x + gate * (x @ slot.weight)
        self.cache.unpin(slot)
        return y

    def hold_shared(self, layer: int, expert: int) -> None:
        slot = self._pinned(layer, expert)  # leak: a layer that holds a shared expert already loses its pin to the new one
        if slot is not None:
            self.shared[layer] = slot

    def drop_shared(self, layer: int) -> None:
        slot = self.shared.pop(layer, None)
        if slot is not None:
            self.cache.unpin(slot)

    def swap_shared(self, layer: int, expert: int) -> bool:
        slot = self._pinned(layer, expert)  # clean: near miss, drop_shared unpins the former one before this one is stored
        if slot is None:
            return False
        self.drop_shared(layer)
        self.shared[layer] = slot
        return True

    def get_workspace(self) -> torch.Tensor | None:
        if self.workspace is None:
            self.workspace = self.cache.take_vacant()  # clean: near miss, one for the runtime, returned in close
        return self.workspace.weight if self.workspace is not None else None

    def close(self) -> None:
        self.prefetcher.drain()
        for layer in list(self.shared):
            self.drop_shared(layer)
        if self.workspace is not None:
            self.cache.return_vacant(self.workspace)
            self.workspace = None
