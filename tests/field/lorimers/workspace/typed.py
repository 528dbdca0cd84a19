from __future__ import annotations

from dataclasses import dataclass
from typing import Tuple

import numpy as np

from .arena import Arena


@dataclass(eq=False)
class WorkTensor:
    data: np.ndarray
    slab: np.ndarray


class TypedWorkspace:
    def __init__(self, arena: Arena, dtype=np.float32) -> None:
        self.arena = arena
        self.dtype = np.dtype(dtype)

    def tensor(self, *shape: int) -> WorkTensor:
        n = int(np.prod(shape)) * self.dtype.itemsize
        slab = self.arena.raw_get(n)  # clean: travels in the WorkTensor, put by discard
        return WorkTensor(slab[:n].view(self.dtype).reshape(shape), slab)

    def discard(self, t: WorkTensor) -> None:
        self.arena.raw_put(t.slab)

    def zeros(self, *shape: int) -> WorkTensor:
        t = self.tensor(*shape)  # clean: returned to the caller
        t.data.fill(0)
        return t

    def like(self, x: np.ndarray) -> Tuple[WorkTensor, np.ndarray]:
        t = self.tensor(*x.shape)  # clean: returned in the pair
        np.copyto(t.data, x)
        return t, t.data

    def transposed(self, x: np.ndarray) -> np.ndarray:
        t = self.tensor(*x.T.shape)  # leak: only the array leaves, the WorkTensor is lost
        np.copyto(t.data, x.T)
        return t.data
