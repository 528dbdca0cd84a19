from typing import Dict, List, Optional, Tuple

import torch


class Workspace:
    """Bump allocator with marks; chunk scratch by key for what must outlive a mark."""

    def __init__(self, nbytes: int, device: str = "cuda") -> None:
        self.buf = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._top = 0
        self._chunks: Dict[int, List[torch.Tensor]] = {}

    def push(self, nbytes: int) -> int:
        if self._top + nbytes > self.buf.numel():
            return -1
        at, self._top = self._top, self._top + nbytes
        return at

    def pop_to(self, at: int) -> None:
        self._top = at

    def chunk(self, nbytes: int) -> torch.Tensor:
        lst = self._chunks.setdefault(nbytes, [])
        return lst.pop() if lst else torch.empty(nbytes, dtype=torch.uint8, device=self.buf.device)

    def unchunk(self, t: torch.Tensor) -> None:
        self._chunks.setdefault(t.numel(), []).append(t)


class KVStash:
    def __init__(self, ws: Workspace) -> None:
        self.ws = ws
        self._kv: Dict[int, Tuple[torch.Tensor, torch.Tensor]] = {}

    def save(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        self.discard(layer)
        a = self.ws.chunk(k.nbytes)  # clean: near miss, discard gives the layer's earlier pair back before this one
        b = self.ws.chunk(v.nbytes)  # clean: near miss, stashed as the second of the pair and given back by discard
        a.copy_(k.reshape(-1).view(torch.uint8))
        b.copy_(v.reshape(-1).view(torch.uint8))
        self._kv[layer] = (a, b)

    def load(self, layer: int) -> Optional[Tuple[torch.Tensor, torch.Tensor]]:
        return self._kv.get(layer)

    def discard(self, layer: int) -> None:
        pair = self._kv.pop(layer, None)
        if pair is not None:
            for t in pair:
                self.ws.unchunk(t)

    def clear(self) -> None:
        for layer in list(self._kv):
            self.discard(layer)
