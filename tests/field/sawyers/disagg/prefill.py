"""Prefill side: pushes finished KV pages to a decode node."""
from __future__ import annotations

import logging
from typing import Optional

from .transfer import KVRequest, TransferEngine

logger = logging.getLogger(__name__)


class PrefillSender:
    def __init__(self, engine: TransferEngine) -> None:
        self.engine = engine
        self.sending: dict[str, KVRequest] = {}
        self.by_handle: dict[int, KVRequest] = {}

    def push(self, req: KVRequest, peer: str) -> bool:
        handle = self.engine.open_handle(peer)  # clean: closed at once or by the completion
        if handle is None:
            return False
        region = self.engine.register(req.pages)  # clean: deregistered at once or by the completion
        req.handle, req.region = handle, region
        self.by_handle[handle] = req
        if not self.engine.post(handle, region, self._sent):
            del self.by_handle[handle]
            self._close(req)
            return False
        return True

    def _sent(self, handle: int) -> None:
        self._close(self.by_handle.pop(handle))

    def _close(self, req: KVRequest) -> None:
        if req.handle is not None:
            self.engine.close_handle(req.handle)
            req.handle = None
        if req.region is not None:
            self.engine.deregister(req.region)
            req.region = None

    def push_inline(self, req: KVRequest, peer: str) -> bool:
        region = self.engine.register(req.pages)  # leak: stays registered when no handle is to be had
        handle = self.engine.open_handle(peer)  # clean: closed below
        if handle is None:
            logger.warning("no handle for %s", req.rid)
            return False
        ok = self.engine.post(handle, region, lambda h: None)
        self.engine.close_handle(handle)
        self.engine.deregister(region)
        return ok

    def multicast(self, req: KVRequest, peers: list[str]) -> int:
        region = self.engine.register(req.pages)  # clean: the count of one is dropped after the loop
        sent = 0
        for peer in peers:
            handle = self.engine.open_handle(peer)  # leak: a refused post goes on to the next peer
            if handle is None:
                break
            shared = self.engine.addref(region)  # clean: dropped on refusal and by the completion
            if not self.engine.post(handle, shared, self._finisher(req.rid, shared)):
                self.engine.deregister(shared)
                continue
            sent += 1
        self.engine.deregister(region)
        return sent

    def _finisher(self, rid: str, region):
        def finish(handle: int) -> None:
            logger.debug("%s done on %d", rid, handle)
            self.engine.close_handle(handle)
            self.engine.deregister(region)
        return finish

    def reserve_peer(self, req: KVRequest, peers: list[str]) -> Optional[str]:
        for peer in peers:
            req.handle = self.engine.open_handle(peer)  # clean: near miss, the loop stops at the first that is not None
            if req.handle is not None:
                self.sending[req.rid] = req
                return peer
        return None

    def done(self, rid: str) -> None:
        req = self.sending.pop(rid)
        self._close(req)
