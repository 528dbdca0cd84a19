from __future__ import annotations

from typing import Optional

from .pools import DisaggReq, KVPages, MetadataBuffers, RoomTable


class DecodeQueue:
    def __init__(self, meta: MetadataBuffers, rooms: RoomTable, pages: KVPages, reserve: int) -> None:
        self.meta = meta
        self.rooms = rooms
        self.pages = pages
        self.reserve = reserve
        self.prealloc: dict[str, DisaggReq] = {}
        self.transfer: dict[str, DisaggReq] = {}

    def prealloc_one(self, req: DisaggReq) -> bool:
        if len(self.pages.free_pages) - req.n_pages < self.reserve:
            return False
        pages = self.pages.alloc(req.n_pages)  # clean: near miss, given back when no metadata index is left
        if pages is None:
            return False
        index = self.meta.alloc()  # clean: near miss, moves into the request and finish_transfer or fail frees it
        if index is None:
            self.pages.free(pages)
            return False
        req.pages, req.meta_index = pages, index
        self.prealloc[req.rid] = req
        return True

    def start_transfer(self, rid: str) -> bool:
        req = self.prealloc.pop(rid)
        if not self.rooms.join(req.room, rid):  # clean: near miss, a refused room gives the preallocation back, a joined one is quit by finish_transfer or fail
            self._drop_buffers(req)
            return False
        self.transfer[rid] = req
        return True

    def _drop_buffers(self, req: DisaggReq) -> None:
        self.pages.free(req.pages)
        req.pages = []
        if req.meta_index >= 0:
            self.meta.free(req.meta_index)
            req.meta_index = -1

    def finish_transfer(self, rid: str) -> Optional[DisaggReq]:
        req = self.transfer.pop(rid, None)
        if req is None:
            return None
        self.meta.free(req.meta_index)
        req.meta_index = -1
        self.rooms.quit(req.room)
        return req

    def fail(self, rid: str) -> None:
        req = self.transfer.pop(rid, None) or self.prealloc.pop(rid, None)
        if req is not None:
            self._drop_buffers(req)
            self.rooms.quit(req.room)

    def grow(self, req: DisaggReq, extra: int) -> bool:
        more = self.pages.alloc(extra)  # leak: a request that has failed meanwhile returns False with the pages taken
        if more is None:
            return False
        if req.status == "failed":
            return False
        req.pages.extend(more)
        return True

    def release_finished(self, req: DisaggReq) -> None:
        self.pages.free(req.pages)
        req.pages = []
