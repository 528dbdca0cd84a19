from __future__ import annotations

import asyncio
from typing import Awaitable, Callable, List, Optional, Tuple

from .store import ObjectStore

Sink = Callable[[bytes], Awaitable[None]]


class ObjectView:
    """A pinned view; `release` unpins it."""

    def __init__(self, store: ObjectStore, oid: str, data: memoryview) -> None:
        self._store = store
        self.oid = oid
        self.data = data
        self._live = True

    def release(self) -> None:
        if self._live:
            self._live = False
            self._store.unpin(self.oid)


class ObjectClient:
    def __init__(self, store: ObjectStore) -> None:
        self.store = store

    def get(self, oid: str) -> bytes:
        view = self.store.pin(oid)  # clean: unpinned before the return
        if view is None:
            raise KeyError(oid)
        data = bytes(view)
        self.store.unpin(oid)
        return data

    def get_typed(self, oid: str, kind: int) -> Optional[bytes]:
        view = self.store.pin(oid)  # leak: a wrong kind returns with the object pinned
        if view is None:
            return None
        if view[0] != kind:
            return None
        data = bytes(view[1:])
        self.store.unpin(oid)
        return data

    def view(self, oid: str) -> Optional[ObjectView]:
        data = self.store.pin(oid)  # clean: moved into the view that is returned
        if data is None:
            return None
        return ObjectView(self.store, oid, data)

    def copy_out(self, oid: str) -> bytes:
        view = self.view(oid)  # leak: copied from and dropped, the view is never released
        return b"" if view is None else bytes(view.data)

    def length(self, oid: str) -> int:
        view = self.view(oid)  # clean: near miss, the branch without release has no view
        if view is None:
            return 0
        n = len(view.data)
        view.release()
        return n

    def pair(self, left: str, right: str) -> Optional[Tuple[ObjectView, ObjectView]]:
        a = self.view(left)  # leak: stays pinned when the right one is missing
        if a is None:
            return None
        b = self.view(right)  # clean: returned in the pair
        if b is None:
            return None
        return a, b

    def concat(self, oids: List[str]) -> Optional[bytes]:
        views = self.store.pin_many(oids)  # clean: None-checked, every one unpinned after the join
        if views is None:
            return None
        data = b"".join(bytes(v) for v in views)
        for oid in oids:
            self.store.unpin(oid)
        return data

    def upload(self, oid: str, sink: Sink) -> Optional[asyncio.Task]:
        view = self.view(oid)  # clean: near miss, moved into the task that releases it
        if view is None:
            return None
        return asyncio.get_running_loop().create_task(self._send(view, sink))

    async def _send(self, view: ObjectView, sink: Sink) -> None:
        try:
            await sink(bytes(view.data))
        finally:
            view.release()

    async def replicate(self, oid: str, sinks: List[Sink]) -> int:
        view = self.view(oid)  # leak: a sink that refuses ends the replication with the view unreleased
        if view is None:
            return 0
        sent = 0
        for sink in sinks:
            try:
                await sink(bytes(view.data))
            except ConnectionError:
                return sent
            sent += 1
        view.release()
        return sent
