"""Decode side: pre-allocates regions and waits for pages."""
from __future__ import annotations

from collections import deque
from typing import Optional

from .transfer import KVRequest, Region, TransferEngine


class DecodeReceiver:
    def __init__(self, engine: TransferEngine) -> None:
        self.engine = engine
        self.waiting: deque[KVRequest] = deque()
        self.ready: list[KVRequest] = []
        self.mirrors: dict[str, tuple[int, Region]] = {}
        self.replays: dict[str, int] = {}

    def expect(self, req: KVRequest) -> None:
        req.region = self.engine.register(req.pages)  # leak: poll() drops failed requests with their region
        self.waiting.append(req)

    def poll(self) -> list[KVRequest]:
        keep: deque[KVRequest] = deque()
        for req in self.waiting:
            if req.failed:
                continue
            if len(req.pages) == req.meta.get("received", 0):
                self.ready.append(req)
            else:
                keep.append(req)
        self.waiting = keep
        return self.ready

    def consume(self) -> list[str]:
        out: list[str] = []
        while self.ready:
            req = self.ready.pop()
            if req.region is not None:
                self.engine.deregister(req.region)
                req.region = None
            out.append(req.rid)
        return out

    def mirror(self, rid: str, peer: str, pages: list[int]) -> bool:
        if rid in self.mirrors:
            return True
        handle = self.engine.open_handle(peer)  # clean: in the table as a pair with its region
        if handle is None:
            return False
        self.mirrors[rid] = (handle, self.engine.register(pages))  # clean: near miss, the pair is taken apart in unmirror
        return True

    def unmirror(self, rid: str) -> None:
        pair = self.mirrors.pop(rid, None)
        if pair is None:
            return
        handle, region = pair
        self.engine.close_handle(handle)
        self.engine.deregister(region)

    def replay(self, rid: str, peer: str) -> Optional[int]:
        handle = self.engine.open_handle(peer)  # leak: setdefault keeps the older handle and drops this one
        if handle is None:
            return None
        return self.replays.setdefault(rid, handle)

    def end_replay(self, rid: str) -> None:
        if rid in self.replays:
            self.engine.close_handle(self.replays.pop(rid))
