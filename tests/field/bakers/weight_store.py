"""Reference-counted store of weight versions shared by actors and learners."""
from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterator, List, Optional

log = logging.getLogger("weights")


@dataclass
class WeightVersion:
    number: int
    tensors: Dict[str, List[float]]
    holders: int = 0


class WeightStore:
    """Keeps every version that has at least one holder."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._versions: Dict[int, WeightVersion] = {}
        self._latest = -1

    def publish(self, tensors: Dict[str, List[float]]) -> int:
        with self._lock:
            self._latest += 1
            self._versions[self._latest] = WeightVersion(self._latest, tensors)
            for number in [n for n, v in self._versions.items() if v.holders == 0 and n != self._latest]:
                del self._versions[number]
            return self._latest

    def retain(self, number: Optional[int] = None) -> WeightVersion:
        with self._lock:
            version = self._versions[self._latest if number is None else number]
            version.holders += 1
            return version

    def retain_if_alive(self, number: int) -> Optional[WeightVersion]:
        with self._lock:
            version = self._versions.get(number)
            if version is not None:
                version.holders += 1
            return version

    def drop(self, version: WeightVersion) -> None:
        with self._lock:
            version.holders -= 1
            if version.holders == 0 and version.number != self._latest:
                self._versions.pop(version.number, None)

    def live(self) -> int:
        return len(self._versions)


class Actor:
    """Generates with the newest weights it has seen."""

    def __init__(self, store: WeightStore) -> None:
        self.store = store
        self.version: Optional[WeightVersion] = None

    def refresh(self) -> None:
        newest = self.store.retain()  # clean: near miss, dropped when it is the one held, else takes its place
        if self.version is not None and newest.number == self.version.number:
            self.store.drop(newest)
            return
        if self.version is not None:
            self.store.drop(self.version)
        self.version = newest

    def stop(self) -> None:
        if self.version is not None:
            self.store.drop(self.version)
            self.version = None

    def score(self, name: str) -> float:
        if self.version is None:
            self.refresh()
        return sum(self.version.tensors.get(name, ()))


class LazyActor(Actor):
    def refresh(self) -> None:
        self.version = self.store.retain()  # leak: every refresh but the last is overwritten in the field

    def run(self, steps: int, name: str) -> List[float]:
        scores = []
        for _ in range(steps):
            self.refresh()
            scores.append(self.score(name))
        self.stop()
        return scores


class Evaluator:
    def __init__(self, store: WeightStore) -> None:
        self.store = store
        self.pinned: Dict[str, WeightVersion] = {}

    def compare(self, old: int, name: str) -> Optional[float]:
        base = self.store.retain_if_alive(old)  # leak: a missing tensor name returns with base held
        if base is None:
            return None
        head = self.store.retain()  # leak: lost together with base when the name is missing
        if name not in head.tensors:
            return None
        diff = sum(head.tensors[name]) - sum(base.tensors.get(name, ()))
        self.store.drop(head)
        self.store.drop(base)
        return diff

    def compare_safe(self, old: int, name: str) -> Optional[float]:
        base = self.store.retain_if_alive(old)  # clean: dropped in the outer finally
        if base is None:
            return None
        try:
            head = self.store.retain()  # clean: dropped in the inner finally
            try:
                if name not in head.tensors:
                    return None
                return sum(head.tensors[name]) - sum(base.tensors.get(name, ()))
            finally:
                self.store.drop(head)
        finally:
            self.store.drop(base)

    def pin_best(self, label: str, number: int) -> bool:
        version = self.store.retain_if_alive(number)  # clean: near miss, None is no holding, else kept by label and the former one dropped
        if version is None:
            return False
        former = self.pinned.pop(label, None)
        self.pinned[label] = version
        if former is not None:
            self.store.drop(former)
        return True

    def pin_default(self, label: str) -> WeightVersion:
        return self.pinned.setdefault(label, self.store.retain())  # leak: a label already present keeps its old version, the new count is lost

    def unpin(self, label: str) -> None:
        version = self.pinned.pop(label, None)
        if version is not None:
            self.store.drop(version)

    def unpin_all(self) -> None:
        for label in list(self.pinned):
            self.unpin(label)

    def _snapshot(self, number: int) -> Optional[WeightVersion]:
        version = self.store.retain_if_alive(number)  # clean: returned
        if version is None:
            log.debug("version %d is gone", number)
        return version

    def export(self, number: int) -> Dict[str, List[float]]:
        version = self._snapshot(number)  # leak: the tensors are copied, the version is not dropped
        if version is None:
            return {}
        return {k: list(v) for k, v in version.tensors.items()}

    def walk(self, numbers: List[int]) -> Iterator[WeightVersion]:
        """Yields each live version, held while the consumer looks at it."""
        for number in numbers:
            version = self.store.retain_if_alive(number)  # clean: near miss, finally runs when the generator is closed too
            if version is None:
                continue
            try:
                yield version
            finally:
                self.store.drop(version)

    def walk_until(self, numbers: List[int], stop: Callable[[WeightVersion], bool]) -> Iterator[int]:
        for number in numbers:
            version = self.store.retain_if_alive(number)  # leak: stop ends the generator before the drop
            if version is None:
                continue
            if stop(version):
                return
            yield version.number
            self.store.drop(version)


class WeightHandle:
    """Owns or borrows a version, as told."""

    def __init__(self, store: WeightStore, version: WeightVersion, owned: bool) -> None:
        self.store = store
        self.version = version
        self.owned = owned

    def close(self) -> None:
        if self.owned:
            self.owned = False
            self.store.drop(self.version)

    def __enter__(self) -> WeightVersion:
        return self.version

    def __exit__(self, *exc: Any) -> None:
        self.close()


def open_handle(store: WeightStore, held: Optional[WeightVersion] = None) -> WeightHandle:
    if held is not None:
        return WeightHandle(store, held, owned=False)
    return WeightHandle(store, store.retain(), owned=True)  # clean: near miss, the owning handle drops it on close


def borrow_handle(store: WeightStore) -> WeightHandle:
    return WeightHandle(store, store.retain(), owned=False)  # leak: close of a handle that does not own drops nothing


def mean_of(store: WeightStore, name: str) -> float:
    with open_handle(store) as version:  # clean: context manager closes the handle
        values = version.tensors.get(name, [])
        return sum(values) / len(values) if values else 0.0
