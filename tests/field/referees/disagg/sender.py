from __future__ import annotations

import logging
from collections import deque

from .pools import DisaggReq, KVPages, MetadataBuffers, RoomTable

logger = logging.getLogger(__name__)


class PrefillQueue:
    def __init__(self, meta: MetadataBuffers, rooms: RoomTable, pages: KVPages) -> None:
        self.meta = meta
        self.rooms = rooms
        self.pages = pages
        self.bootstrap: deque[DisaggReq] = deque()
        self.inflight: list[DisaggReq] = []

    def add(self, req: DisaggReq) -> bool:
        if not self.rooms.join(req.room, req.rid):  # clean: near miss, the queued request owns its room and every end of it quits
            return False
        self.bootstrap.append(req)
        return True

    def pop_bootstrapped(self) -> list[DisaggReq]:
        ready: list[DisaggReq] = []
        for _ in range(len(self.bootstrap)):
            req = self.bootstrap.popleft()
            index = self.meta.alloc()  # leak: a request without pages goes back to the queue and draws another index next time
            if index is None:
                self.bootstrap.appendleft(req)
                break
            pages = self.pages.alloc(req.n_pages)  # clean: near miss, stored in the request that goes inflight
            if pages is None:
                self.bootstrap.append(req)
                continue
            req.meta_index, req.pages = index, pages
            req.status = "transferring"
            self.inflight.append(req)
            ready.append(req)
        return ready

    def process_inflight(self) -> list[DisaggReq]:
        done: list[DisaggReq] = []
        still: list[DisaggReq] = []
        for req in self.inflight:
            if req.status == "transferring":
                still.append(req)
                continue
            self.pages.free(req.pages)
            self.meta.free(req.meta_index)
            self.rooms.quit(req.room)
            req.pages = []
            done.append(req)
        self.inflight = still
        return done

    def abort_bootstrap(self, rid: str) -> bool:
        for req in list(self.bootstrap):
            if req.rid == rid:
                self.bootstrap.remove(req)
                self.rooms.quit(req.room)
                return True
        return False

    def probe_room(self, room: int, peer: str) -> bool:
        if not self.rooms.join(room, peer):  # leak: too few metadata buffers returns False with the room joined
            return False
        if len(self.meta.free_indices) < 2:
            logger.warning("not enough metadata buffers for %s", peer)
            return False
        self.rooms.quit(room)
        return True
