from __future__ import annotations

from typing import Dict, List, Optional

import numpy as np

from .typed import TypedWorkspace, WorkTensor


class KernelContext:
    """Scratch of one kernel launch. Scratch taken with `scratch` goes at `end`; `own` is the caller's affair."""

    def __init__(self, ws: TypedWorkspace) -> None:
        self.ws = ws
        self._scratch: List[WorkTensor] = []
        self._named: Dict[str, WorkTensor] = {}

    def scratch(self, *shape: int) -> np.ndarray:
        t = self.ws.zeros(*shape)  # clean: listed in _scratch, discarded by end
        self._scratch.append(t)
        return t.data

    def own(self, *shape: int) -> WorkTensor:
        return self.ws.zeros(*shape)  # clean: returned to the caller

    def disown(self, t: WorkTensor) -> None:
        self.ws.discard(t)

    def named(self, name: str, *shape: int) -> np.ndarray:
        t = self._named.get(name)
        if t is None or t.data.shape != shape:
            if t is not None:
                self.ws.discard(t)
            t = self._named[name] = self.ws.zeros(*shape)  # clean: near miss, another shape's tensor is discarded before it is replaced
        return t.data

    def rename(self, src: str, dst: str) -> None:
        if src in self._named and src != dst:
            displaced = self._named.get(dst)
            if displaced is not None:
                self.ws.discard(displaced)
            self._named[dst] = self._named.pop(src)

    def end(self) -> None:
        for t in self._scratch:
            self.ws.discard(t)
        self._scratch.clear()
        while self._named:
            self.ws.discard(self._named.popitem()[1])

    def __enter__(self) -> "KernelContext":
        return self

    def __exit__(self, *exc: Optional[object]) -> None:
        self.end()
