"""Expert weights streamed from host memory into a bounded device cache (MoE)."""
from __future__ import annotations

import contextlib
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Dict, List, Optional, Protocol, Sequence, Tuple

import torch

Key = Tuple[int, int]


class WeightSource(Protocol):
    def read(self, key: Key) -> torch.Tensor: ...


@dataclass(eq=False)
class Entry:
    key: Key
    packed: torch.Tensor
    scale: float = 1.0
    pins: int = 0


class ExpertCache:
    """LRU of quantised experts. Entries with pins stay."""

    def __init__(self, source: WeightSource, capacity: int) -> None:
        self.source = source
        self.capacity = capacity
        self._lru: "OrderedDict[Key, Entry]" = OrderedDict()
        self.misses = 0

    def pin(self, layer: int, expert: int) -> Entry:
        key = (layer, expert)
        ent = self._lru.get(key)
        if ent is None:
            self.misses += 1
            self._make_room()
            ent = Entry(key, self.source.read(key))
            self._lru[key] = ent
        self._lru.move_to_end(key)
        ent.pins += 1
        return ent

    def unpin(self, ent: Entry) -> None:
        ent.pins -= 1

    def _make_room(self) -> None:
        if len(self._lru) < self.capacity:
            return
        for key, ent in self._lru.items():
            if ent.pins == 0:
                del self._lru[key]
                return

    def pin_many(self, layer: int, experts: Sequence[int]) -> List[Entry]:
        return [self.pin(layer, e) for e in experts]  # clean: the whole list goes to the caller


# Dequantised weights live in workspaces; there are few of them.
_WORKSPACES: List[torch.Tensor] = [torch.empty(4096, 4096) for _ in range(6)]


def get_workspace() -> torch.Tensor:
    return _WORKSPACES.pop()


def return_workspace(ws: torch.Tensor) -> None:
    _WORKSPACES.append(ws)


def dequantize(ent: Entry) -> torch.Tensor:
    ws = get_workspace()  # clean: handed to the caller
    ws.copy_(ent.packed)
    ws.mul_(ent.scale)
    return ws


class PinGuard:
    """Pins one expert for a block of code, counting the blocks which failed."""

    failures = 0

    def __init__(self, cache: ExpertCache, layer: int, expert: int) -> None:
        self.cache = cache
        self.where = (layer, expert)

    def __enter__(self) -> Entry:
        self.entry = self.cache.pin(*self.where)  # leak: __exit__ returns early when there was no exception
        return self.entry

    def __exit__(self, exc_type, exc, tb) -> bool:
        if exc_type is None:
            return False
        type(self).failures += 1
        self.cache.unpin(self.entry)
        return False


class SoftPin:
    """As above, for experts which may be too far down the routing to matter."""

    def __init__(self, cache: ExpertCache, layer: int, expert: int, weight: float) -> None:
        self.cache = cache
        self.where = (layer, expert)
        self.weight = weight
        self.entry: Optional[Entry] = None

    def __enter__(self) -> Optional[Entry]:
        if self.weight > 1e-3:
            self.entry = self.cache.pin(*self.where)  # clean: near miss, __exit__ returns early only if None
        return self.entry

    def __exit__(self, *exc) -> None:
        if self.entry is None:
            return
        self.cache.unpin(self.entry)
        self.entry = None


class MoELayer:
    def __init__(self, cache: ExpertCache, layer: int, shared_expert: int) -> None:
        self.cache = cache
        self.layer = layer
        self.shared = cache.pin(layer, shared_expert)  # clean: unpinned by unload
        self.load: Dict[int, int] = defaultdict(int)

    def unload(self) -> None:
        self.cache.unpin(self.shared)

    def forward(self, x: torch.Tensor, experts: List[int], weights: List[float]) -> torch.Tensor:
        entries = self.cache.pin_many(self.layer, experts)  # clean: each one unpinned in the loop
        out = torch.zeros_like(x)
        for ent, w in zip(entries, weights, strict=True):
            mat = dequantize(ent)  # clean: returned to the workspaces after the product
            out += w * (x @ mat)
            return_workspace(mat)
            self.cache.unpin(ent)
        return out

    def forward_sparse(self, x: torch.Tensor, experts: List[int], weights: List[float]) -> torch.Tensor:
        out = torch.zeros_like(x)
        for e, w in zip(experts, weights):
            ent = self.cache.pin(self.layer, e)  # leak: experts of small weight are skipped while pinned
            self.load[e] += 1
            if w < 1e-4:
                continue
            mat = dequantize(ent)  # clean: returned two lines on
            out += w * (x @ mat)
            return_workspace(mat)
            self.cache.unpin(ent)
        return out

    def forward_shared(self, x: torch.Tensor) -> torch.Tensor:
        mat = dequantize(self.shared)  # leak: the workspace is only read here and never returned
        return x @ mat

    def forward_soft(self, x: torch.Tensor, experts: List[int], weights: List[float]) -> torch.Tensor:
        out = torch.zeros_like(x)
        for e, w in zip(experts, weights):
            with SoftPin(self.cache, self.layer, e, w) as ent:  # clean: its __exit__ unpins what it pinned
                if ent is None:
                    continue
                out += w * (x @ ent.packed)
        return out

    def forward_stack(self, x: torch.Tensor, experts: List[int]) -> torch.Tensor:
        with contextlib.ExitStack() as stack:
            mats = []
            for e in experts:
                ent = self.cache.pin(self.layer, e)  # clean: near miss, the exit stack unpins it
                stack.callback(self.cache.unpin, ent)
                mats.append(ent.packed)
            return x @ torch.stack(mats).mean(dim=0)


class Prefetcher:
    """Pins the experts which the next layer will probably want."""

    def __init__(self, cache: ExpertCache) -> None:
        self.cache = cache
        self.ahead: Dict[int, List[Entry]] = {}
        self.hot: Dict[Key, Entry] = {}
        self.replicas: Dict[Key, Entry] = {}

    def predict(self, layer: int, experts: Sequence[int]) -> None:
        if layer in self.ahead:
            return
        self.ahead[layer] = self.cache.pin_many(layer, experts)  # leak: cancel pops it without unpinning

    def consume(self, layer: int) -> int:
        entries = self.ahead.pop(layer, [])
        for ent in entries:
            self.cache.unpin(ent)
        return len(entries)

    def cancel(self, layer: int) -> None:
        self.ahead.pop(layer, None)

    def mark_hot(self, layer: int, expert: int) -> None:
        self.hot[(layer, expert)] = self.cache.pin(layer, expert)  # leak: marked twice, the first pin is lost

    def cool_down(self) -> None:
        for ent in self.hot.values():
            self.cache.unpin(ent)
        self.hot.clear()

    def replicate(self, layer: int, expert: int) -> None:
        key = (layer, expert)
        if key in self.replicas:
            return
        self.replicas[key] = self.cache.pin(layer, expert)  # clean: near miss, tested before, ended by shrink

    def shrink(self, keep: int) -> None:
        while len(self.replicas) > keep:
            _, ent = self.replicas.popitem()
            self.cache.unpin(ent)
