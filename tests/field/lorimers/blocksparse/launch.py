from __future__ import annotations

from typing import Callable, Dict, List, Optional, Sequence

from .cache import LayoutCache, MaskKey
from .tiles import Layout


class Launcher:
    def __init__(self, cache: LayoutCache) -> None:
        self.cache = cache
        self._inflight: Dict[int, Layout] = {}
        self._callbacks: List[Callable[[], None]] = []
        self._serial = 0

    def launch(self, key: MaskKey) -> int:
        layout = self.cache.fetch(key)  # clean: kept in _inflight, complete drops it
        if layout is None:
            return -1
        self._serial += 1
        self._inflight[self._serial] = layout
        return self._serial

    def complete(self, serial: int) -> None:
        self._inflight.pop(serial).drop()

    def density(self, key: MaskKey) -> float:
        layout = self.cache.fetch(key)  # leak: an empty layout returns before drop
        if layout is None:
            return 0.0
        if not layout.tiles:
            return 0.0
        d = sum(bin(t.bits).count("1") for t in layout.tiles) / len(layout.tiles)
        layout.drop()
        return d

    def defer(self, keys: Sequence[MaskKey]) -> int:
        for key in keys:
            layout = self.cache.fetch(key)  # clean: near miss, the bound drop runs in flush
            if layout is not None:
                self._callbacks.append(layout.drop)
        return len(self._callbacks)

    def flush(self) -> None:
        pending, self._callbacks = self._callbacks, []
        for cb in pending:
            cb()

    def share(self, serial: int, copies: int) -> List[int]:
        base = self._inflight[serial]
        out: List[int] = []
        for _ in range(copies):
            self._serial += 1
            self._inflight[self._serial] = base.retain()  # clean: one holding per serial, complete drops it
            out.append(self._serial)
        return out

    def cancel(self, serial: int) -> Optional[Layout]:
        layout = self._inflight.pop(serial, None)
        if layout is not None:
            layout.drop()
        return layout

    def compare(self, a: MaskKey, b: MaskKey) -> bool:
        left = self.cache.fetch(a)  # leak: left stays held when b cannot be built
        if left is None:
            return False
        right = self.cache.fetch(b)  # clean: dropped with left
        if right is None:
            return False
        same = [t.bits for t in left.tiles] == [t.bits for t in right.tiles]
        left.drop()
        right.drop()
        return same
