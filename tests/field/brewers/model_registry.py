"""Reference-counted registry of loaded model versions."""
from __future__ import annotations

import collections
import logging
import threading
from typing import Any, Callable, Deque, Dict, Iterable, List, Optional, Tuple

log = logging.getLogger("registry")

Loader = Callable[[str], Dict[str, float]]


class Entry:
    def __init__(self, key: str, weights: Dict[str, float]) -> None:
        self.key = key
        self.weights = weights
        self.refs = 0
        self.retired = False


class Registry:
    """Counts users by key. An entry whose count is zero may be unloaded."""

    def __init__(self, loader: Loader, capacity: int) -> None:
        self._loader = loader
        self._capacity = capacity
        self._entries: Dict[str, Entry] = {}
        self._guard = threading.RLock()

    def incref(self, key: str) -> Entry:
        with self._guard:
            entry = self._entries.get(key)
            if entry is None:
                self._make_room()
                entry = Entry(key, self._loader(key))
                self._entries[key] = entry
            entry.refs += 1
            return entry

    def try_incref(self, key: str) -> bool:
        with self._guard:
            entry = self._entries.get(key)
            if entry is None or entry.retired:
                return False
            entry.refs += 1
            return True

    def decref(self, key: str) -> None:
        with self._guard:
            entry = self._entries[key]
            entry.refs -= 1
            if entry.refs == 0 and entry.retired:
                del self._entries[key]

    def retire(self, key: str) -> None:
        with self._guard:
            entry = self._entries.get(key)
            if entry is None:
                return
            entry.retired = True
            if entry.refs == 0:
                del self._entries[key]

    def _make_room(self) -> None:
        while len(self._entries) >= self._capacity:
            victim = next((k for k, e in self._entries.items() if e.refs == 0), None)
            if victim is None:
                raise RuntimeError("registry full")
            del self._entries[victim]

    def refs(self, key: str) -> int:
        entry = self._entries.get(key)
        return entry.refs if entry else 0


class Handle:
    """Counted on creation, uncounted by close."""

    def __init__(self, registry: Registry, key: str) -> None:
        self._registry = registry
        self.key = key
        self.entry: Optional[Entry] = registry.incref(key)  # clean: close uncounts

    def close(self) -> None:
        if self.entry is not None:
            self.entry = None
            self._registry.decref(self.key)

    def __enter__(self) -> "Handle":
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()


class Predictor:
    def __init__(self, registry: Registry, default: str) -> None:
        self.registry = registry
        self.default = default
        self.active: Optional[Handle] = None
        self.shadow: Optional[Handle] = None
        self.ab: Dict[str, Handle] = {}
        self.recent: Deque[Handle] = collections.deque()

    def predict(self, key: str, name: str) -> float:
        entry = self.registry.incref(key)  # leak: unknown name returns nan before the decref
        value = entry.weights.get(name)
        if value is None:
            log.warning("%s has no %s", key, name)
            return float("nan")
        self.registry.decref(key)
        return value

    def predict_default(self, name: str) -> float:
        entry = self.registry.incref(self.default)  # clean: decref in finally
        try:
            return entry.weights[name]
        except KeyError:
            return float("nan")
        finally:
            self.registry.decref(self.default)

    def predict_loaded(self, keys: Iterable[str], name: str) -> List[float]:
        out: List[float] = []
        for key in keys:
            if not self.registry.try_incref(key):  # clean: near miss, continue where nothing was counted, else decref below
                continue
            out.append(self.registry._entries[key].weights.get(name, 0.0))
            self.registry.decref(key)
        return out

    def warm_fraction(self, keys: List[str]) -> float:
        warm = [k for k in keys if self.registry.try_incref(k)]  # leak: counted as if it were a query, never uncounted
        return len(warm) / max(1, len(keys))

    def activate(self, key: str) -> None:
        fresh = Handle(self.registry, key)  # clean: near miss, the former one is closed after the swap
        old, self.active = self.active, fresh
        if old is not None:
            old.close()

    def set_shadow(self, key: str) -> None:
        if self.shadow is not None and self.shadow.key == key:
            return
        self.shadow = Handle(self.registry, key)  # leak: a shadow of another key is overwritten without close

    def stop(self) -> None:
        for handle in (self.active, self.shadow):
            if handle is not None:
                handle.close()
        self.active = self.shadow = None
        for handle in self.ab.values():
            handle.close()
        self.ab.clear()
        while self.recent:
            self.recent.pop().close()

    def assign(self, arm: str, key: str) -> None:
        previous = self.ab.pop(arm, None)
        if previous is not None:
            previous.close()
        self.ab[arm] = Handle(self.registry, key)  # clean: near miss, popped and closed before the overwrite, stop closes the rest

    def compare(self, left: str, right: str, name: str) -> Optional[float]:
        a = self.registry.incref(left)  # leak: RuntimeError of the second incref is caught, None returned without decref of left
        try:
            b = self.registry.incref(right)  # clean: decref below
        except RuntimeError:
            return None
        diff = a.weights.get(name, 0.0) - b.weights.get(name, 0.0)
        self.registry.decref(right)
        self.registry.decref(left)
        return diff

    def touch(self, key: str, keep: int) -> None:
        self.recent.append(Handle(self.registry, key))  # clean: near miss, the oldest are popped and closed, stop closes the rest
        while len(self.recent) > keep:
            self.recent.popleft().close()

    def snapshot(self, keys: Iterable[str]) -> Tuple[Handle, ...]:
        return tuple(Handle(self.registry, k) for k in keys)  # clean: returned, the caller closes each

    def export(self, keys: List[str], sink: Callable[[str, Dict[str, float]], bool]) -> int:
        handles = self.snapshot(keys)  # leak: a refusing sink returns and the remaining handles are not closed
        sent = 0
        for handle in handles:
            assert handle.entry is not None
            ok = sink(handle.key, handle.entry.weights)
            handle.close()
            if not ok:
                return sent
            sent += 1
        return sent


def main() -> None:
    reg = Registry(lambda k: {"w": float(len(k))}, 4)
    p = Predictor(reg, "base")
    print(p.predict("abc", "w"), p.predict_default("none"), p.predict_loaded(["abc", "zzz"], "w"))
    p.activate("abc")
    p.activate("base")
    p.assign("x", "abc")
    p.assign("x", "base")
    p.touch("abc", 1)
    p.touch("base", 0)
    print(p.export(["abc"], lambda k, w: True), p.compare("abc", "base", "w"))
    p.stop()
    print(reg.refs("abc"), reg.refs("base"))


if __name__ == "__main__":
    main()
