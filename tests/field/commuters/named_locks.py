"""Per-model lock table used by the registry service (download, convert, delete)."""
from __future__ import annotations

import logging
import os
import shutil
import threading
from dataclasses import dataclass, field
from pathlib import Path

log = logging.getLogger("registry")


@dataclass
class LockEntry:
    lock: threading.Lock = field(default_factory=threading.Lock)
    users: int = 0


class LockTable:
    """Locks by name; an entry lives only while someone uses it."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._entries: dict[str, LockEntry] = {}

    def enter(self, name: str) -> LockEntry:
        with self._guard:  # clean: with statement
            entry = self._entries.setdefault(name, LockEntry())
            entry.users += 1
        entry.lock.acquire()  # clean: held for the caller, who calls leave
        return entry

    def try_enter(self, name: str, timeout: float) -> LockEntry | None:
        with self._guard:  # clean: with statement
            entry = self._entries.setdefault(name, LockEntry())
            entry.users += 1
        if entry.lock.acquire(timeout=timeout):  # clean: near miss, the user count is undone when it times out
            return entry
        self._forget(name, entry)
        return None

    def _forget(self, name: str, entry: LockEntry) -> None:
        with self._guard:  # clean: with statement
            entry.users -= 1
            if entry.users == 0:
                self._entries.pop(name, None)

    def leave(self, name: str, entry: LockEntry) -> None:
        entry.lock.release()
        self._forget(name, entry)


class ModelRegistry:
    def __init__(self, root: Path, table: LockTable) -> None:
        self.root = root
        self.table = table
        self._index_lock = threading.RLock()
        self._index: dict[str, Path] = {}

    def download(self, name: str, fetch) -> Path | None:
        entry = self.table.enter(name)  # leak: the already-present shortcut returns while inside
        dest = self.root / name
        if dest.exists():
            return dest
        ok = fetch(name, dest)
        self.table.leave(name, entry)
        return dest if ok else None

    def convert(self, name: str, fmt: str) -> bool:
        entry = self.table.try_enter(name, 30.0)  # clean: near miss, returns inside the try go through the finally
        if entry is None:
            return False
        try:
            src = self.root / name
            if not src.exists():
                return False
            shutil.copytree(src, self.root / f"{name}.{fmt}")
            return True
        except OSError as exc:
            log.error("convert %s: %s", name, exc)
            return False
        finally:
            self.table.leave(name, entry)

    def delete(self, name: str) -> bool:
        entry = self.table.enter(name)  # leak: the handler logs and returns, only the good path leaves
        try:
            shutil.rmtree(self.root / name)
            self.table.leave(name, entry)
        except FileNotFoundError:
            log.info("%s already gone", name)
            return False
        return True

    def rename(self, old: str, new: str) -> bool:
        first, second = sorted((old, new))
        a = self.table.enter(first)  # leak: left inside when the second name is busy
        b = self.table.try_enter(second, 1.0)  # clean: left at the end, nothing to leave when busy
        if b is None:
            return False
        os.rename(self.root / old, self.root / new)
        self.table.leave(second, b)
        self.table.leave(first, a)
        return True

    def index(self, name: str) -> Path | None:
        self._index_lock.acquire()  # clean: near miss, both arms release
        path = self._index.get(name)
        if path is None:
            self._index_lock.release()
            return None
        self._index_lock.release()
        return path

    def reindex(self) -> int:
        self._index_lock.acquire()  # leak: a missing root returns with the lock held
        self._index.clear()
        if not self.root.is_dir():
            return 0
        for child in self.root.iterdir():
            self._index[child.name] = child
        self._index_lock.release()
        return len(self._index)


def sweep(registry: ModelRegistry, names: list[str]) -> int:
    removed = 0
    for name in names:
        entry = registry.table.try_enter(name, 0.0)  # clean: near miss, the marker continue comes after leaving
        if entry is None:
            continue
        stale = (registry.root / name / ".stale").exists()
        registry.table.leave(name, entry)
        if not stale:
            continue
        removed += int(registry.delete(name))
    return removed
