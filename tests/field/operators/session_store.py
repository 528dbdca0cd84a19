"""KV retention for multi-turn sessions and chunked prefill workspaces."""
from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch


@dataclass(eq=False)
class Extent:
    """A run of consecutive KV slots."""

    start: int
    size: int
    prev: "Extent | None" = None
    next: "Extent | None" = None


class ExtentList:
    """Equal extents in a doubly linked free list with sentinels."""

    def __init__(self, count: int, size: int) -> None:
        self.size = size
        self._root = Extent(-1, 0)
        self._root.prev = self._root.next = self._root
        for i in range(count):
            self.give(Extent(i * size, size))

    def grab(self) -> Extent | None:
        extent = self._root.next
        if extent is self._root:
            return None
        self._root.next = extent.next  # clean: unlinked from the list and returned
        extent.next.prev = self._root
        extent.prev = extent.next = None
        return extent

    def give(self, extent: Extent) -> None:
        tail = self._root.prev
        tail.next = extent
        extent.prev, extent.next = tail, self._root
        self._root.prev = extent


class Workspaces:
    """Attention workspaces; at most `limit` are handed out."""

    def __init__(self, limit: int, nbytes: int) -> None:
        self.limit = limit
        self.nbytes = nbytes
        self.out = 0
        self._cached: list[torch.Tensor] = []

    def take_workspace(self) -> torch.Tensor | None:
        if self.out == self.limit:
            return None
        self.out += 1  # clean: near miss, the count goes down in drop_workspace()
        if self._cached:
            return self._cached.pop()  # clean: to the caller
        return torch.empty(self.nbytes, dtype=torch.uint8)

    def drop_workspace(self, workspace: torch.Tensor) -> None:
        self.out -= 1
        self._cached.append(workspace)


@dataclass
class Session:
    sid: str
    extents: list[Extent] = field(default_factory=list)
    length: int = 0
    touched: float = 0.0
    ephemeral: bool = False
    workspace: torch.Tensor | None = None


class SessionStore:
    """Sessions by id."""

    def __init__(self, extents: ExtentList, workspaces: Workspaces, ttl: float = 600.0) -> None:
        self.extents = extents
        self.workspaces = workspaces
        self.ttl = ttl
        self.sessions: dict[str, Session] = {}

    def open_session(self, sid: str, ephemeral: bool = False) -> Session | None:
        """Create a session with its first extent."""
        extent = self.extents.grab()  # leak: for an existing session the new extent is dropped
        if extent is None:
            return None
        session = self.sessions.get(sid)
        if session is not None:
            session.touched = time.monotonic()
            return session
        session = Session(sid, [extent], touched=time.monotonic(), ephemeral=ephemeral)
        self.sessions[sid] = session
        return session

    def append_tokens(self, session: Session, n: int) -> bool:
        """Grow the session; a partial growth is kept for the next try."""
        while session.length + n > len(session.extents) * self.extents.size:
            extent = self.extents.grab()  # clean: near miss, a failed growth leaves what it got in the session
            if extent is None:
                return False
            session.extents.append(extent)
        session.length += n
        session.touched = time.monotonic()
        return True

    def truncate(self, session: Session, length: int) -> None:
        """Cut the session for an edited turn."""
        keep = max(1, -(-length // self.extents.size))
        while len(session.extents) > keep:
            self.extents.give(session.extents.pop())
        session.length = min(session.length, length)

    def branch(self, session: Session, sid: str) -> Session | None:
        """Copy a session under a new id (regenerate from here)."""
        if sid in self.sessions:
            return None
        copied: list[Extent] = []
        for _ in session.extents:
            extent = self.extents.grab()  # leak: when the list runs dry the copied extents are not given back
            if extent is None:
                return None
            copied.append(extent)
        child = Session(sid, copied, session.length, time.monotonic())
        self.sessions[sid] = child
        return child

    def begin_prefill(self, session: Session, chunks: int) -> bool:
        """Attach a workspace when more than one chunk follows."""
        if chunks > 1 and session.workspace is None:
            session.workspace = self.workspaces.take_workspace()  # clean: near miss, end_prefill() and close() drop it under the same check
            return session.workspace is not None
        return True

    def end_prefill(self, session: Session) -> None:
        if session.workspace is not None:
            self.workspaces.drop_workspace(session.workspace)
            session.workspace = None

    def prefill_once(self, session: Session, run, tokens: list[int]) -> bool:
        """Prefill with a private workspace."""
        workspace = self.workspaces.take_workspace()  # leak: when the tokens do not fit it returns with the workspace
        if workspace is None:
            return False
        if not self.append_tokens(session, len(tokens)):
            return False
        run(session.extents, tokens, workspace)
        self.workspaces.drop_workspace(workspace)
        return True

    def replace_tail(self, session: Session) -> Extent | None:
        """Swap the last extent for a fresh one and return the old."""
        fresh = self.extents.grab()  # clean: near miss, the old extent is handed out, the fresh one is in the session
        if fresh is None:
            return None
        old, session.extents[-1] = session.extents[-1], fresh
        return old

    def rewrite_tail(self, session: Session, copy) -> bool:
        """Rewrite the last extent without its dead slots."""
        old = self.replace_tail(session)  # leak: a copy that moves nothing returns before the old extent is given back
        if old is None:
            return False
        moved = copy(old.start, session.extents[-1].start)
        if moved == 0:
            return False
        self.extents.give(old)
        return True

    def close(self, sid: str) -> None:
        session = self.sessions.pop(sid, None)
        if session is None:
            return
        self.end_prefill(session)
        for extent in session.extents:
            self.extents.give(extent)

    def expire(self) -> int:
        """Close sessions that were idle too long."""
        now = time.monotonic()
        stale = [s.sid for s in self.sessions.values() if s.ephemeral or now - s.touched > self.ttl]
        for sid in stale:
            self.close(sid)
        return len(stale)
