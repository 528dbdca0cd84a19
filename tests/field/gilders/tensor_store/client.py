"""Client handles over the arena."""
from __future__ import annotations

from typing import Dict, List, Optional

import numpy as np

from .arena import Arena, StoredTensor


class TensorRef:
    """One counted reference; may be cloned."""

    def __init__(self, arena: Arena, item: StoredTensor):
        self._arena = arena
        self._item: Optional[StoredTensor] = item

    @property
    def array(self) -> np.ndarray:
        return self._item.array

    @property
    def key(self) -> str:
        return self._item.key

    def clone(self) -> "TensorRef":
        item = self._arena.addref(self._item.key)  # clean: the new ref owns it
        return TensorRef(self._arena, item)

    def drop(self) -> None:
        if self._item is not None:
            self._arena.unref(self._item)
            self._item = None

    def __enter__(self) -> "TensorRef":
        return self

    def __exit__(self, *exc) -> None:
        self.drop()


class StoreClient:
    def __init__(self, arena: Arena):
        self.arena = arena
        self._held: Dict[str, TensorRef] = {}
        self._window: List[TensorRef] = []

    def open_ref(self, key: str) -> Optional[TensorRef]:
        item = self.arena.addref(key)  # clean: near miss, None or owned by the returned ref
        if item is None:
            return None
        return TensorRef(self.arena, item)

    def require(self, key: str) -> TensorRef:
        ref = self.open_ref(key)  # clean: handed to the caller
        if ref is None:
            raise KeyError(key)
        return ref

    def fetch(self, key: str) -> np.ndarray:
        """A private copy."""
        ref = self.require(key)  # leak: copied, the ref is dropped without drop()
        return ref.array.copy()

    def hold(self, key: str) -> bool:
        if key in self._held:
            return True
        ref = self.open_ref(key)  # clean: kept in the table, let_go and close drop it
        if ref is None:
            return False
        self._held[key] = ref
        return True

    def let_go(self, key: str) -> None:
        ref = self._held.pop(key, None)
        if ref is not None:
            ref.drop()

    def slide(self, keys: List[str]) -> int:
        """Move the read-ahead window to `keys`."""
        fresh: List[TensorRef] = []
        for key in keys:
            ref = self.open_ref(key)  # leak: the next slide replaces the whole list without dropping its refs
            if ref is not None:
                fresh.append(ref)
        self._window = fresh
        return len(fresh)

    def close(self) -> None:
        for key in list(self._held):
            self.let_go(key)
        for ref in self._window:
            ref.drop()
        self._window = []
