from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Optional

from .locks import RWLock


@dataclass(eq=False)
class AdapterHandle:
    name: str
    revision: int
    pins: int = 0
    stale: bool = False


class Registry:
    """name -> current handle. A stale handle goes away with its last pin."""

    def __init__(self) -> None:
        self._current: dict[str, AdapterHandle] = {}
        self._mutex = threading.Lock()
        self.rw = RWLock()
        self.unloaded: list[str] = []

    def register(self, name: str, revision: int) -> None:
        with self._mutex:
            old = self._current.get(name)
            self._current[name] = AdapterHandle(name, revision)
            if old is not None:
                old.stale = True
                if old.pins == 0:
                    self.unloaded.append(f"{name}@{old.revision}")

    def pin(self, name: str) -> Optional[AdapterHandle]:
        with self._mutex:
            handle = self._current.get(name)
            if handle is not None:
                handle.pins += 1
            return handle

    def unpin(self, handle: AdapterHandle) -> None:
        with self._mutex:
            handle.pins -= 1
            if handle.stale and handle.pins == 0:
                self.unloaded.append(f"{handle.name}@{handle.revision}")

    def pin_or_default(self, name: str, default: str) -> Optional[AdapterHandle]:
        handle = self.pin(name)  # clean: returned when found
        if handle is not None:
            return handle
        return self.pin(default)  # clean: returned

    def pin_revision(self, name: str, revision: int) -> Optional[AdapterHandle]:
        handle = self.pin(name)  # leak: another revision returns None with the pin still counted
        if handle is None or handle.revision != revision:
            return None
        return handle

    def pin_newer(self, name: str, revision: int) -> Optional[AdapterHandle]:
        handle = self.pin(name)  # clean: near miss, unpinned when too old
        if handle is not None and handle.revision <= revision:
            self.unpin(handle)
            handle = None
        return handle
