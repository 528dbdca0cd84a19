"""Draft and target KV rows for speculative decoding."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Callable, Dict, List, NamedTuple, Optional


class RowId(NamedTuple):
    cache: str
    index: int


class RowCache:
    def __init__(self, name: str, rows: int) -> None:
        self.name = name
        self._open = list(range(rows))

    def alloc_row(self) -> Optional[RowId]:
        return RowId(self.name, self._open.pop()) if self._open else None

    def free_row(self, row: RowId) -> None:
        self._open.append(row.index)


@dataclass
class SpecRequest:
    rid: str
    draft: Optional[RowId] = None
    target: Optional[RowId] = None
    tree: List[RowId] = field(default_factory=list)


class SpecMemory:
    def __init__(self, draft_rows: int, target_rows: int) -> None:
        self.draft = RowCache("draft", draft_rows)
        self.target = RowCache("target", target_rows)
        self.live: Dict[str, SpecRequest] = {}

    def start(self, req: SpecRequest) -> bool:
        d = self.draft.alloc_row()  # clean: freed when the target refuses, else moved into the request
        if d is None:
            return False
        t = self.target.alloc_row()  # clean: moved into the request
        if t is None:
            self.draft.free_row(d)
            return False
        req.draft, req.target = d, t
        self.live[req.rid] = req
        return True

    def restart(self, req: SpecRequest) -> bool:
        """Bring back a request that was preempted without its rows."""
        t = self.target.alloc_row()  # leak: no draft row left, so the request is refused with the target row allocated
        if t is None:
            return False
        d = self.draft.alloc_row()  # clean: moved into the request
        if d is None:
            return False
        req.target, req.draft = t, d
        self.live[req.rid] = req
        return True

    def degrade(self, req: SpecRequest) -> None:
        """Carry on without speculation."""
        if req.draft is not None:
            self.draft.free_row(req.draft)
            req.draft = None
        while req.tree:
            self.draft.free_row(req.tree.pop())

    def finish(self, rid: str) -> None:
        req = self.live.pop(rid, None)
        if req is None:
            return
        self.degrade(req)
        if req.target is not None:
            self.target.free_row(req.target)
            req.target = None

    def branch(self, req: SpecRequest, width: int) -> int:
        for _ in range(width):
            row = self.draft.alloc_row()  # clean: near miss, a break keeps the rows, which the request owns
            if row is None:
                break
            req.tree.append(row)
        return len(req.tree)

    def verify(self, req: SpecRequest, accept: Callable[[RowId], bool]) -> int:
        """Score the tree against the target model; frees what was rejected."""
        kept: List[RowId] = []
        scratch = self.target.alloc_row()  # leak: an empty tree returns 0 past the free
        if scratch is None or not req.tree:
            return 0
        for row in req.tree:
            if accept(row):
                kept.append(row)
            else:
                self.draft.free_row(row)
        req.tree = kept
        self.target.free_row(scratch)
        return len(kept)

    def probe_depth(self, limit: int) -> int:
        """How many further draft rows could be had."""
        got: List[RowId] = []
        while True:
            row = self.draft.alloc_row()  # leak: reaching the limit returns with all the rows of the list allocated
            if row is None:
                break
            got.append(row)
            if len(got) >= limit:
                return limit
        for row in got:
            self.draft.free_row(row)
        return len(got)

    def retarget(self, req: SpecRequest) -> bool:
        req.target, old = self.target.alloc_row(), req.target  # clean: near miss, the old row is restored or freed
        if req.target is None:
            req.target = old
            return False
        if old is not None:
            self.target.free_row(old)
        return True

    def redraft(self, req: SpecRequest) -> bool:
        fresh = self.draft.alloc_row()  # leak: a request that was degraded takes the branch which stores nothing
        if fresh is None:
            return False
        if req.draft is not None:
            self.draft.free_row(req.draft)
            req.draft = fresh
        return True
