from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Optional

from .rooms import KVPages, Room, RoomTable, RowPool


@dataclass
class DecodeReq:
    rid: str
    num_tokens: int
    peer: str
    room: Optional[Room] = None
    row: Optional[int] = None
    pages: list[int] = field(default_factory=list)
    retries: int = 0


class DecodeQueue:
    def __init__(self, rooms: RoomTable, rows: RowPool, pages: KVPages, page_size: int, max_retries: int = 2) -> None:
        self.rooms = rooms
        self.rows = rows
        self.pages = pages
        self.page_size = page_size
        self.max_retries = max_retries
        self.pending: deque[DecodeReq] = deque()
        self.transfer: dict[str, DecodeReq] = {}
        self.running: dict[str, DecodeReq] = {}

    def submit(self, req: DecodeReq) -> None:
        self.pending.append(req)

    def preallocate(self) -> int:
        n = 0
        while self.pending:
            req = self.pending[0]
            pages = self.pages.alloc(-(-req.num_tokens // self.page_size))  # clean: near miss, freed where the row or the room is refused
            if pages is None:
                break
            row = self.rows.alloc()  # leak: a refused room gives back the pages and forgets the row
            if row is None:
                self.pages.free(pages)
                break
            room = self.rooms.enter(req.peer)  # clean: near miss, stored in the request, left by _to_running, _retry or _drop
            if room is None:
                self.pages.free(pages)
                break
            req.room, req.row, req.pages = room, row, pages
            self.transfer[req.rid] = self.pending.popleft()
            n += 1
        return n

    def poll(self) -> None:
        for rid, req in list(self.transfer.items()):
            if req.room.state == "success":
                del self.transfer[rid]
                self._to_running(req)
            elif req.room.state == "failed":
                self._retry(rid, req)

    def _to_running(self, req: DecodeReq) -> None:
        self.rows.free(req.row)
        req.row = None
        self.rooms.leave(req.room)
        req.room = None
        self.running[req.rid] = req

    def _retry(self, rid: str, req: DecodeReq) -> None:
        if req.retries >= self.max_retries:
            del self.transfer[rid]
            self._drop(req)
            return
        req.retries += 1
        old = req.room
        fresh = self.rooms.enter(req.peer)  # clean: near miss, takes the place of the failed room, which is left
        if fresh is None:
            return
        self.rooms.leave(old)
        req.room = fresh

    def _drop(self, req: DecodeReq) -> None:
        if req.row is not None:
            self.rows.free(req.row)
            req.row = None
        if req.room is not None:
            self.rooms.leave(req.room)
            req.room = None
        if req.pages:
            self.pages.free(req.pages)
            req.pages = []

    def grow(self, rid: str) -> bool:
        req = self.running[rid]
        more = self.pages.alloc(1)  # clean: appended to the request's pages
        if more is None:
            return False
        req.pages.extend(more)
        return True

    def migrate(self, rid: str, peer: str) -> bool:
        req = self.running.get(rid)
        row = self.rows.alloc()  # leak: an unknown request returns with the row
        if row is None or req is None:
            return False
        room = self.rooms.enter(peer)  # clean: near miss, the request waits in transfer with it, poll or abort take it out
        if room is None:
            self.rows.free(row)
            return False
        del self.running[rid]
        req.room, req.row = room, row
        self.transfer[rid] = req
        return True

    def finish(self, rid: str) -> None:
        req = self.running.pop(rid)
        self.pages.free(req.pages)
        req.pages = []

    def abort(self, rid: str) -> None:
        req = self.transfer.pop(rid, None) or self.running.pop(rid, None)
        if req is not None:
            self._drop(req)

    def self_test(self, tokens: int) -> bool:
        pages = self.pages.alloc(tokens // self.page_size)  # leak: when no row is left the pages are not freed
        if pages is None:
            return False
        row = self.rows.alloc()  # clean: freed below
        if row is None:
            return False
        self.rows.free(row)
        self.pages.free(pages)
        return True
