from __future__ import annotations

import logging
from typing import Callable, Iterable, Optional

from .locks import StripedLocks
from .refs import AdapterHandle, Registry

log = logging.getLogger(__name__)


class LoadError(RuntimeError):
    pass


class AdapterService:
    def __init__(self, registry: Registry, fetch: Callable[[str], int]) -> None:
        self.registry = registry
        self.fetch = fetch
        self.locks = StripedLocks(4)
        self._sessions: dict[str, AdapterHandle] = {}

    # sessions

    def open_session(self, session_id: str, name: str) -> bool:
        if session_id in self._sessions:
            return True
        handle = self.registry.pin_or_default(name, "base")  # clean: kept in the session table, close_session unpins
        if handle is None:
            return False
        self._sessions[session_id] = handle
        return True

    def close_session(self, session_id: str) -> None:
        handle = self._sessions.pop(session_id, None)
        if handle is not None:
            self.registry.unpin(handle)

    def upgrade_session(self, session_id: str) -> bool:
        old = self._sessions.get(session_id)
        if old is None:
            return False
        new = self.registry.pin_newer(old.name, old.revision)  # clean: near miss, replaces the entry whose old handle is unpinned
        if new is None:
            return False
        self._sessions[session_id] = new
        self.registry.unpin(old)
        return True

    # one-off uses

    def revision_of(self, name: str) -> int:
        handle = self.registry.pin(name)  # leak: only the revision is taken, never unpinned
        return handle.revision if handle is not None else -1

    def generate(self, name: str, prompt: str) -> str:
        handle = self.registry.pin_or_default(name, "base")  # clean: unpinned after the call
        if handle is None:
            raise LoadError(name)
        text = f"{handle.name}@{handle.revision}:{prompt}"
        self.registry.unpin(handle)
        return text

    def generate_pinned(self, name: str, revision: int, prompt: str) -> Optional[str]:
        handle = self.registry.pin_revision(name, revision)  # leak: an empty prompt returns before unpin
        if handle is None:
            return None
        if not prompt:
            return ""
        text = f"{handle.name}@{handle.revision}:{prompt}"
        self.registry.unpin(handle)
        return text

    def ensemble(self, names: Iterable[str], prompt: str) -> list[str]:
        handles = [h for h in map(self.registry.pin, names) if h is not None]  # clean: near miss, every handle of the list is unpinned
        try:
            return [f"{h.name}:{prompt}" for h in handles]
        finally:
            for h in handles:
                self.registry.unpin(h)

    # loading

    def ensure(self, name: str) -> bool:
        lock = self.locks.of(name)
        lock.acquire()  # leak: the LoadError handler returns False with the lock held
        try:
            revision = self._fetch_checked(name)
        except LoadError as e:
            log.warning("cannot load %s: %s", name, e)
            return False
        self.registry.register(name, revision)
        lock.release()
        return True

    def ensure_quietly(self, name: str) -> bool:
        lock = self.locks.of(name)
        lock.acquire()  # clean: near miss, finally covers the handler's return
        try:
            self.registry.register(name, self._fetch_checked(name))
            return True
        except LoadError:
            return False
        finally:
            lock.release()

    def try_refresh(self, name: str) -> bool:
        lock = self.locks.of(name)
        if not lock.acquire(blocking=False):  # clean: near miss, the early return holds nothing
            return False
        try:
            self.registry.register(name, self._fetch_checked(name))
        finally:
            lock.release()
        return True

    def swap_names(self, a: str, b: str) -> bool:
        rw = self.registry.rw
        if not rw.lock_exclusive(timeout=1.0):  # leak: an unknown name returns without unlocking
            return False
        ha = self.registry.pin(a)  # clean: near miss, unpinned on both ways whichever of the two is missing
        hb = self.registry.pin(b)  # clean: unpinned on both ways
        if ha is None or hb is None:
            for h in (ha, hb):
                if h is not None:
                    self.registry.unpin(h)
            return False
        ra, rb = ha.revision, hb.revision
        self.registry.unpin(ha)
        self.registry.unpin(hb)
        self.registry.register(a, rb)
        self.registry.register(b, ra)
        rw.unlock_exclusive()
        return True

    def snapshot(self, names: Iterable[str]) -> dict[str, int]:
        out: dict[str, int] = {}
        with self.registry.rw.shared():  # clean: with
            for name in names:
                handle = self.registry.pin(name)  # clean: unpinned in the same pass
                if handle is None:
                    continue
                out[name] = handle.revision
                self.registry.unpin(handle)
        return out

    def wait_idle(self, name: str, attempts: int) -> bool:
        rw = self.registry.rw
        for _ in range(attempts):
            if not rw.lock_shared(timeout=0.01):  # leak: a pinned adapter goes round again with the shared lock held
                continue
            handle = self.registry._current.get(name)
            if handle is not None and handle.pins > 0:
                continue
            rw.unlock_shared()
            return True
        return False

    def _fetch_checked(self, name: str) -> int:
        revision = self.fetch(name)
        if revision < 0:
            raise LoadError(f"{name} has no revision")
        return revision


def main() -> None:
    reg = Registry()
    svc = AdapterService(reg, lambda name: len(name))
    assert svc.ensure_quietly("base") and svc.try_refresh("poet")
    svc.open_session("s1", "poet")
    reg.register("poet", 9)
    svc.upgrade_session("s1")
    print(svc.generate("unknown", "hi"), svc.ensemble(["poet", "base"], "x"), svc.snapshot(["poet", "nope"]))
    svc.close_session("s1")
    print("unloaded", reg.unloaded, "idle", reg.rw.idle)


if __name__ == "__main__":
    main()
