"""KV layers which either own their pages or share those of another layer."""
from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Dict, List, Optional, Sequence

import torch


class Mode(str, enum.Enum):
    OWN = "own"
    SHARE = "share"
    TEMP = "temp"


class PageHeap:
    def __init__(self, n: int, elems: int) -> None:
        self.mem = torch.zeros(n, elems)
        self.bits = (1 << n) - 1

    def page_alloc(self) -> int:
        if not self.bits:
            raise RuntimeError("page heap empty")
        low = self.bits & -self.bits
        self.bits ^= low
        return low.bit_length() - 1

    def page_free(self, i: int) -> None:
        self.bits |= 1 << i


@dataclass
class LayerCfg:
    index: int
    mode: Mode = Mode.OWN
    source: Optional[int] = None


class LayerKV:
    def __init__(self, cfg: LayerCfg, heap: PageHeap, shared: Optional["LayerKV"] = None) -> None:
        self.cfg = cfg
        self.heap = heap
        if cfg.mode is Mode.SHARE and shared is not None:
            self.pages = shared.pages
            self.owns = False
        else:
            self.pages = [heap.page_alloc() for _ in range(2)]  # clean: near miss, owns is set exactly here and close frees by it
            self.owns = True

    def close(self) -> None:
        if not self.owns:
            return
        for p in self.pages:
            self.heap.page_free(p)
        self.pages = []


class LazyLayerKV:
    def __init__(self, cfg: LayerCfg, heap: PageHeap) -> None:
        self.cfg = cfg
        self.heap = heap
        self.page = heap.page_alloc()  # leak: close frees only in OWN mode though every mode allocates

    def close(self) -> None:
        if self.cfg.mode is Mode.OWN:
            self.heap.page_free(self.page)


class TempKV:
    def __init__(self, heap: PageHeap, mode: Mode) -> None:
        self.heap = heap
        self.mode = mode
        self.page: Optional[int] = None
        if mode is not Mode.SHARE:
            self.page = heap.page_alloc()  # clean: near miss, allocated and freed under the same mode

    def close(self) -> None:
        if self.mode is not Mode.SHARE:
            self.heap.page_free(self.page)
            self.page = None


class KVStack:
    def __init__(self, cfgs: Sequence[LayerCfg], heap: PageHeap) -> None:
        self.heap = heap
        self.layers: Dict[int, LayerKV] = {}
        for c in cfgs:
            src = self.layers.get(c.source) if c.source is not None else None
            self.layers[c.index] = LayerKV(c, heap, src)  # clean: close closes every layer
        self.staging: List[int] = []

    def close(self) -> None:
        for layer in self.layers.values():
            layer.close()
        self.layers.clear()
        self.flush_staging()

    def stage(self, data: torch.Tensor) -> int:
        p = self.heap.page_alloc()  # clean: flush_staging frees it
        self.heap.mem[p, : data.numel()] = data.flatten()
        self.staging.append(p)
        return p

    def flush_staging(self) -> None:
        for p in self.staging:
            self.heap.page_free(p)
        self.staging.clear()

    def copy_layer(self, src: int, own: bool) -> torch.Tensor:
        p = self.heap.page_alloc() if own else self.layers[src].pages[0]  # clean: near miss, freed when it is an own page
        self.heap.mem[p].copy_(self.heap.mem[self.layers[src].pages[0]])
        out = self.heap.mem[p].clone()
        if own:
            self.heap.page_free(p)
        return out

    def copy_layer_lazy(self, src: int, own: bool) -> torch.Tensor:
        p = self.heap.page_alloc() if own else self.layers[src].pages[0]  # leak: the release is only reached for pages that are not own
        self.heap.mem[p].copy_(self.heap.mem[self.layers[src].pages[0]])
        out = self.heap.mem[p].clone()
        if not own and p not in self.layers[src].pages:
            self.heap.page_free(p)
        return out

    def mean_of(self, indices: Sequence[int], mode: str = "copy") -> torch.Tensor:
        p = self.heap.page_alloc()  # leak: the view mode returns without freeing, and its callers get a clone
        acc = self.heap.mem[p].zero_()
        for i in indices:
            acc += self.heap.mem[self.layers[i].pages[0]]
        acc /= max(1, len(indices))
        if mode == "view":
            return acc.clone()
        out = acc.clone()
        self.heap.page_free(p)
        return out

    def exchange(self, a: int, b: int) -> None:
        tmp = self.heap.page_alloc()  # clean: freed after the three copies
        pa, pb = self.layers[a].pages[0], self.layers[b].pages[0]
        self.heap.mem[tmp].copy_(self.heap.mem[pa])
        self.heap.mem[pa].copy_(self.heap.mem[pb])
        self.heap.mem[pb].copy_(self.heap.mem[tmp])
        self.heap.page_free(tmp)


def build(cfgs: List[LayerCfg], heap: PageHeap, dry: bool) -> Optional[KVStack]:
    stack = KVStack(cfgs, heap)  # clean: closed when dry, else the caller's
    if dry:
        stack.close()
        return None
    return stack


def measure(cfgs: List[LayerCfg], heap: PageHeap) -> int:
    stack = KVStack(cfgs, heap)  # leak: the stack is dropped without close
    return sum(len(l.pages) for l in stack.layers.values())


def run_temp(heap: PageHeap, mode: Mode, x: torch.Tensor) -> torch.Tensor:
    kv = TempKV(heap, mode)  # clean: closed on both paths
    if kv.page is None:
        kv.close()
        return x
    heap.mem[kv.page, : x.numel()] = x.flatten()
    y = heap.mem[kv.page, : x.numel()].clone().view_as(x)
    kv.close()
    return y
