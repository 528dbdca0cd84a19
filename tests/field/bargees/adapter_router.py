"""Routes chat sessions to LoRA adapters; adapters are reference counted, staging memory is pinned."""
from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, replace


@dataclass
class Adapter:
    name: str
    rank: int
    refs: int = 0
    loaded_at: float = 0.0


class AdapterStore:
    def __init__(self, ranks: dict[str, int]) -> None:
        self._known = {n: Adapter(n, r) for n, r in ranks.items()}

    def retain(self, name: str) -> Adapter:
        adapter = self._known[name]
        adapter.refs += 1
        if not adapter.loaded_at:
            adapter.loaded_at = time.monotonic()
        return adapter

    def drop(self, adapter: Adapter) -> None:
        adapter.refs -= 1

    def unload_idle(self) -> list[str]:
        idle = [a for a in self._known.values() if a.refs == 0 and a.loaded_at]
        for a in idle:
            a.loaded_at = 0.0
        return [a.name for a in idle]


class PinnedArena:
    def __init__(self, limit: int) -> None:
        self.left = limit
        self._next = 1
        self._regions: dict[int, int] = {}

    def pin(self, nbytes: int) -> int:
        self.left -= nbytes
        handle, self._next = self._next, self._next + 1
        self._regions[handle] = nbytes
        return handle

    def unpin(self, handle: int) -> None:
        self.left += self._regions.pop(handle)


@dataclass(frozen=True)
class Session:
    sid: str
    adapter: Adapter
    staging: int
    turn: int = 0


@dataclass(frozen=True)
class Shadow:
    sid: str
    candidate: Adapter
    score: float = 0.0


class Router:
    def __init__(self, store: AdapterStore, arena: PinnedArena) -> None:
        self.store = store
        self.arena = arena
        self.sessions: dict[str, Session] = {}
        self.shadows: dict[str, Shadow] = {}
        self.groups: dict[str, list[Adapter]] = defaultdict(list)
        self.warm: list[Adapter] = []
        self.prefetched: list[tuple[float, Adapter]] = []

    def open(self, sid: str, adapter_name: str) -> Session:
        if sid in self.sessions:
            return self.sessions[sid]
        adapter = self.store.retain(adapter_name)  # clean: near miss, switch and close both drop it
        staging = self.arena.pin(adapter.rank * 4096)  # leak: close pops the session, drops the adapter only
        session = Session(sid, adapter, staging)
        self.sessions[sid] = session
        return session

    def switch(self, sid: str, adapter_name: str) -> None:
        before = self.sessions[sid]
        if before.adapter.name == adapter_name:
            return
        fresh = self.store.retain(adapter_name)  # clean: put into the session, close drops it
        self.sessions[sid] = replace(before, adapter=fresh, turn=before.turn + 1)
        self.store.drop(before.adapter)

    def close(self, sid: str) -> int:
        session = self.sessions.pop(sid, None)
        if session is None:
            return 0
        self.store.drop(session.adapter)
        return session.turn

    def shadow(self, sid: str, adapter_name: str) -> None:
        """Compare one candidate at a time for a session; a later call changes the candidate."""
        current = self.shadows.get(sid)
        if current is None:
            first = self.store.retain(adapter_name)  # leak: a later shadow() puts another over it
            self.shadows[sid] = Shadow(sid, first)
            return
        if current.candidate.name != adapter_name:
            later = self.store.retain(adapter_name)  # leak: replaced in turn by the next candidate
            self.shadows[sid] = replace(current, candidate=later, score=0.0)

    def end_shadow(self, sid: str) -> float:
        shadow = self.shadows.pop(sid)
        self.store.drop(shadow.candidate)
        return shadow.score

    def enlist(self, tenant: str, adapter_name: str) -> None:
        self.groups[tenant].append(self.store.retain(adapter_name))  # leak: prune filters small groups out

    def prune(self, minimum: int) -> int:
        before = len(self.groups)
        kept = {tenant: members for tenant, members in self.groups.items() if len(members) >= minimum}
        self.groups = defaultdict(list, kept)
        return before - len(kept)

    def disband(self, tenant: str) -> None:
        for adapter in self.groups.pop(tenant, []):
            self.store.drop(adapter)

    def warm_up(self, names: list[str]) -> None:
        for name in names:
            self.warm.append(self.store.retain(name))  # clean: near miss, cool drops what it filters out

    def cool(self, older_than: float) -> int:
        cutoff = time.monotonic() - older_than
        stay = [a for a in self.warm if a.loaded_at >= cutoff]
        leave = [a for a in self.warm if a.loaded_at < cutoff]
        self.warm = stay
        for adapter in leave:
            self.store.drop(adapter)
        return len(leave)

    def prefetch(self, adapter_name: str, due: float) -> None:
        self.prefetched.append((due, self.store.retain(adapter_name)))  # leak: next_due only reads its name
        self.prefetched.sort(key=lambda item: item[0], reverse=True)

    def next_due(self, now: float) -> str | None:
        if not self.prefetched or self.prefetched[-1][0] > now:
            return None
        _, adapter = self.prefetched.pop()
        return adapter.name

    def stage_blob(self, payload: bytes) -> int:
        handle = self.arena.pin(len(payload))  # clean: given back in the same function
        checksum = sum(payload) & 0xFFFF
        self.arena.unpin(handle)
        return checksum
