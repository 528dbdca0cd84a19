from __future__ import annotations

from typing import Callable, Dict, Generic, Iterable, List, Optional, Tuple, TypeVar

from .core import Pool

T = TypeVar("T")


class KeyedPools(Generic[T]):
    def __init__(self, factory: Callable[[str], T], limit: int) -> None:
        self._factory = factory
        self._limit = limit
        self._pools: Dict[str, Pool[T]] = {}

    def _pool(self, key: str) -> Pool[T]:
        if key not in self._pools:
            self._pools[key] = Pool(lambda: self._factory(key), self._limit)
        return self._pools[key]

    def borrow(self, key: str) -> Optional[T]:
        return self._pool(key).borrow(timeout=0.1)  # clean: returned to the caller, who repays under the key

    def repay(self, key: str, item: T) -> None:
        self._pool(key).repay(item)

    def borrow_all(self, keys: Iterable[str]) -> Optional[Dict[str, T]]:
        out: Dict[str, T] = {}
        for key in keys:
            item = self.borrow(key)  # clean: near miss, the ones before are repaid when one is missing
            if item is None:
                for k, held in out.items():
                    self.repay(k, held)
                return None
            if key in out:
                self.repay(key, item)
                continue
            out[key] = item
        return out

    def borrow_first(self, keys: Iterable[str], good: Callable[[T], bool]) -> Optional[Tuple[str, T]]:
        for key in keys:
            item = self.borrow(key)  # leak: one that is not good is passed over without repay
            if item is not None and good(item):
                return key, item
        return None

    def apply(self, keys: List[str], fn: Callable[[Dict[str, T]], bool]) -> bool:
        items = self.borrow_all(keys)  # clean: repaid in the loop of the finally
        if items is None:
            return False
        try:
            return fn(items)
        finally:
            for key, item in items.items():
                self.repay(key, item)
