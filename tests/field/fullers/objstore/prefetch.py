from __future__ import annotations

from typing import Dict, Iterable, Optional

from .client import ObjectClient, ObjectView


class Prefetcher:
    """Pins objects ahead of their use; `take` hands a view on, `drop_all` releases the rest."""

    def __init__(self, client: ObjectClient) -> None:
        self.client = client
        self._held: Dict[str, ObjectView] = {}

    def prefetch(self, oid: str) -> bool:
        if oid in self._held:
            return True
        view = self.client.view(oid)  # clean: kept in the table until take or drop_all
        if view is None:
            return False
        self._held[oid] = view
        return True

    def take(self, oid: str) -> Optional[ObjectView]:
        view = self._held.pop(oid, None)
        if view is None:
            view = self.client.view(oid)  # clean: near miss, bound anew only when there was none, and returned
        return view

    def consume(self, oid: str) -> bytes:
        view = self.take(oid)  # clean: released before the return
        if view is None:
            raise KeyError(oid)
        data = bytes(view.data)
        view.release()
        return data

    def drop_all(self) -> None:
        for view in self._held.values():
            view.release()
        self._held.clear()


class EpochPrefetcher:
    def __init__(self, client: ObjectClient) -> None:
        self.client = client
        self.epoch = 0
        self._held: Dict[str, ObjectView] = {}

    def load(self, oids: Iterable[str]) -> None:
        for oid in oids:
            if oid in self._held:
                continue
            view = self.client.view(oid)  # leak: advance replaces the table without releasing its views
            if view is not None:
                self._held[oid] = view

    def advance(self) -> None:
        self.epoch += 1
        self._held = {}

    def close(self) -> None:
        for view in self._held.values():
            view.release()
        self._held = {}
