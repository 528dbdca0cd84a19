from __future__ import annotations

from typing import Dict, Iterable, List, Optional

import torch

from .hub import AdapterHub


class LoraRunner:
    def __init__(self, hub: AdapterHub) -> None:
        self.hub = hub
        self.using: Dict[str, int] = {}

    def begin(self, rid: str, name: str) -> bool:
        if rid in self.using:
            return True
        row = self.hub.borrow(name)  # clean: kept in using, end() gives it
        if row is None:
            return False
        self.using[rid] = row
        return True

    def end(self, rid: str) -> None:
        row = self.using.pop(rid, None)
        if row is not None:
            self.hub.give(row)

    def weights(self, name: str) -> Optional[torch.Tensor]:
        row = self.hub.borrow(name)  # leak: the row is cloned and never given
        if row is None:
            return None
        return self.hub.host.store[row].clone()

    def norms(self, names: Iterable[str]) -> List[float]:
        out = []
        for n in names:
            with self.hub.pinned(n) as row:  # clean: a context manager, also on continue
                if row is None:
                    continue
                out.append(float(self.hub.host.store[row].norm()))
        return out

    def blend(self, a: str, b: str, w: float) -> Optional[torch.Tensor]:
        ra = self.hub.borrow(a)  # leak: not given when b is not on the host
        if ra is None:
            return None
        rb = self.hub.borrow(b)  # clean: given at the end
        if rb is None:
            return None
        out = torch.lerp(self.hub.host.store[ra], self.hub.host.store[rb], w)
        self.hub.give(ra)
        self.hub.give(rb)
        return out
