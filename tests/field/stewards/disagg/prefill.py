from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Optional

from .rooms import KVPages, Room, RoomTable, RowPool


@dataclass
class PrefillReq:
    rid: str
    num_tokens: int
    peer: str
    room: Optional[Room] = None
    row: Optional[int] = None
    pages: list[int] = field(default_factory=list)


class PrefillQueue:
    def __init__(self, rooms: RoomTable, rows: RowPool, pages: KVPages, page_size: int) -> None:
        self.rooms = rooms
        self.rows = rows
        self.pages = pages
        self.page_size = page_size
        self.bootstrap: deque[PrefillReq] = deque()
        self.inflight: list[PrefillReq] = []

    def add(self, req: PrefillReq) -> bool:
        req.room = self.rooms.enter(req.peer)  # clean: near miss, each way out of the queues goes through _close
        if req.room is None:
            return False
        self.bootstrap.append(req)
        return True

    def pop_ready(self) -> list[PrefillReq]:
        ready: list[PrefillReq] = []
        for _ in range(len(self.bootstrap)):
            req = self.bootstrap.popleft()
            if req.room.state == "failed":
                self._close(req)
                continue
            if req.room.state != "waiting":
                self.bootstrap.append(req)
                continue
            row = self.rows.alloc()  # leak: without pages the request returns to the queue and the row stays in the local
            if row is None:
                self.bootstrap.appendleft(req)
                break
            pages = self.pages.alloc(-(-req.num_tokens // self.page_size))  # clean: moved into the request, freed by _close
            if pages is None:
                self.bootstrap.append(req)
                continue
            req.row, req.pages = row, pages
            self.inflight.append(req)
            ready.append(req)
        return ready

    def warm(self, peers: list[str]) -> int:
        n = 0
        for peer in peers:
            room = self.rooms.enter(peer)  # clean: near miss, left at once, it only proves the peer can be entered
            if room is None:
                break
            n += 1
            self.rooms.leave(room)
        return n

    def poll(self) -> list[str]:
        done: list[str] = []
        still: list[PrefillReq] = []
        for req in self.inflight:
            if req.room.state in ("success", "failed"):
                self._close(req)
                done.append(req.rid)
            else:
                still.append(req)
        self.inflight = still
        return done

    def _close(self, req: PrefillReq) -> None:
        if req.pages:
            self.pages.free(req.pages)
            req.pages = []
        if req.row is not None:
            self.rows.free(req.row)
            req.row = None
        if req.room is not None:
            self.rooms.leave(req.room)
            req.room = None

    def abort(self, rid: str) -> None:
        for req in list(self.bootstrap):
            if req.rid == rid:
                self.bootstrap.remove(req)
                self._close(req)
        for req in list(self.inflight):
            if req.rid == rid:
                self.inflight.remove(req)
                self._close(req)
