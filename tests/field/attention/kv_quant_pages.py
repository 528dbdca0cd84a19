"""Quantised KV pages: a float staging page is turned into an int8 page plus scales."""

from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import Callable, Deque, Dict, List, Optional

import torch


class Depot:
    """give()/take_back() of page numbers from one backing tensor."""

    def __init__(self, pages: int, elems: int, dtype: torch.dtype):
        self.mem = torch.zeros(pages, elems, dtype=dtype)
        self._spare: Deque[int] = deque(range(pages))
        self.high_water = 0

    def give(self) -> Optional[int]:
        if not self._spare:
            return None
        p = self._spare.popleft()
        self.high_water = max(self.high_water, self.mem.shape[0] - len(self._spare))
        return p

    def take_back(self, p: int) -> None:
        self._spare.append(p)

    def reserve_tail(self, n: int) -> List[int]:
        kept: List[int] = []
        while len(kept) < n and self._spare:
            p = self._spare.pop()  # clean: near miss, it is put in the list which either is returned or goes back
            kept.append(p)
        if len(kept) < n:
            self._spare.extend(reversed(kept))
            return []
        return kept

    def rotate(self, k: int) -> None:
        moved = [self._spare.popleft() for _ in range(min(k, len(self._spare)))]  # leak: only the even pages rejoin the spare ones
        self._spare.extend(p for p in moved if not p & 1)


@dataclass
class QPage:
    page: int
    scale: float
    hits: int = 0


@dataclass
class LayerState:
    staging: Optional[int] = None
    fill: int = 0
    sealed: List[QPage] = field(default_factory=list)


class QuantKV:
    def __init__(self, floats: Depot, ints: Depot, layers: int):
        self.floats = floats
        self.ints = ints
        self.layers = [LayerState() for _ in range(layers)]
        self.trace: Dict[int, Callable[[], None]] = {}

    def append(self, layer: int, vec: torch.Tensor) -> bool:
        st = self.layers[layer]
        if st.staging is None:
            st.staging = self.floats.give()  # clean: near miss, seal and close take it back
            st.fill = 0
            if st.staging is None:
                return False
        self.floats.mem[st.staging, st.fill: st.fill + vec.numel()] = vec
        st.fill += vec.numel()
        if st.fill >= self.floats.mem.shape[1]:
            return self.seal(layer)
        return True

    def _quantise(self, src: int) -> Optional[QPage]:
        dst = self.ints.give()  # leak: a page of zeros has no scale and None is returned over the given page
        if dst is None:
            return None
        scale = float(self.floats.mem[src].abs().max()) / 127
        if scale == 0.0:
            return None
        self.ints.mem[dst] = (self.floats.mem[src] / scale).round().to(torch.int8)
        return QPage(dst, scale)

    def _quantise_safe(self, src: int) -> Optional[QPage]:
        scale = float(self.floats.mem[src].abs().max()) / 127
        if scale == 0.0:
            return None
        dst = self.ints.give()  # clean: near miss, nothing can fail after it, it leaves inside the QPage
        if dst is None:
            return None
        self.ints.mem[dst] = (self.floats.mem[src] / scale).round().to(torch.int8)
        return QPage(dst, scale)

    def seal(self, layer: int) -> bool:
        st = self.layers[layer]
        q = self._quantise_safe(st.staging)  # clean: goes on the list of sealed pages
        if q is None:
            return False
        st.sealed.append(q)
        self.floats.take_back(st.staging)
        st.staging = None
        return True

    def error(self, layer: int) -> float:
        st = self.layers[layer]
        if st.staging is None:
            return 0.0
        q = self._quantise(st.staging)  # clean: taken back after the comparison
        if q is None:
            return 0.0
        back = self.ints.mem[q.page].float() * q.scale
        err = float((back - self.floats.mem[st.staging]).abs().max())
        self.ints.take_back(q.page)
        return err

    def scale_of(self, layer: int) -> float:
        st = self.layers[layer]
        q = self._quantise_safe(st.staging)  # leak: the scale is read and the page in q forgotten
        return q.scale if q is not None else 0.0

    def trim(self, layer: int, keep: int) -> None:
        st = self.layers[layer]
        for q in st.sealed[keep:]:
            self.ints.take_back(q.page)
        st.sealed = st.sealed[:keep]

    def dequantise(self, layer: int, i: int) -> Optional[torch.Tensor]:
        tmp = self.floats.give()  # clean: taken back after the clone
        if tmp is None:
            return None
        q = self.layers[layer].sealed[i]
        self.floats.mem[tmp] = self.ints.mem[q.page].float() * q.scale
        out = self.floats.mem[tmp].clone()
        self.floats.take_back(tmp)
        return out

    def dequantise_all(self, layer: int) -> List[torch.Tensor]:
        outs = []
        for q in self.layers[layer].sealed:
            tmp = self.floats.give()  # leak: pages without hits continue past the take_back
            if tmp is None:
                break
            self.floats.mem[tmp] = self.ints.mem[q.page].float() * q.scale
            if not q.hits:
                continue
            outs.append(self.floats.mem[tmp].clone())
            self.floats.take_back(tmp)
        return outs

    def watch(self, layer: int) -> bool:
        if layer in self.trace:
            return False
        p = self.floats.give()  # clean: the callback in the trace table takes it back in unwatch
        if p is None:
            return False
        self.trace[layer] = partial(self.floats.take_back, p)
        return True

    def unwatch(self) -> None:
        for cb in self.trace.values():
            cb()
        self.trace.clear()

    def close(self) -> None:
        for i, st in enumerate(self.layers):
            if st.staging is not None:
                self.floats.take_back(st.staging)
                st.staging = None
            self.trim(i, 0)
        self.unwatch()


def self_test(floats: Depot, ints: Depot) -> bool:
    tail = floats.reserve_tail(2)  # leak: the second of the two reserved pages is not taken back
    if not tail:
        return False
    a, b = tail
    floats.mem[b].copy_(floats.mem[a])
    same = bool((floats.mem[a] == floats.mem[b]).all())
    floats.take_back(a)
    q = ints.give()  # clean: taken back
    if q is not None:
        ints.take_back(q)
    return same
