from __future__ import annotations

import logging
from collections import deque
from typing import Deque

from .buffers import PagePool, RegionTable
from .request import PrefillRequest

logger = logging.getLogger(__name__)


class PeerGone(ConnectionError):
    pass


class PrefillWorker:
    def __init__(self, pool: PagePool, regions: RegionTable, live_peers: set[str]) -> None:
        self.pool = pool
        self.regions = regions
        self.live_peers = live_peers
        self.outbox: Deque[PrefillRequest] = deque()

    def _pages_for(self, req: PrefillRequest) -> int:
        return max(1, -(-len(req.prompt) // self.pool.page_bytes))

    def prepare(self, req: PrefillRequest) -> bool:
        pages = self.pool.get_pages(self._pages_for(req))  # clean: adopted by the request, release puts them back
        if pages is None:
            return False
        req.adopt(pages)
        req.region = self.regions.register(req.peer)  # clean: kept on the request, release deregisters
        for i, page in enumerate(req.pages):
            chunk = req.prompt[i * self.pool.page_bytes:(i + 1) * self.pool.page_bytes]
            page.data[:len(chunk)] = chunk
        self.outbox.append(req)
        return True

    def prepare_direct(self, req: PrefillRequest) -> bool:
        """Write straight into the peer's region; one bounce page only."""
        region = self.regions.register(req.peer)  # leak: without a free page it returns before deregister
        page = self.pool.get_page()  # clean: put back after the push
        if page is None:
            return False
        chunk = req.prompt[:self.pool.page_bytes]
        page.data[:len(chunk)] = chunk
        self.pool.put_page(page)
        self.regions.deregister(region)
        return True

    def push(self, req: PrefillRequest) -> None:
        if req.peer not in self.live_peers:
            raise PeerGone(req.peer)

    def pump(self) -> int:
        sent = 0
        while self.outbox:
            req = self.outbox.popleft()
            try:
                if not req.cancelled:
                    self.push(req)
                    sent += 1
            except PeerGone as e:
                logger.warning("peer %s gone, %s dropped", e, req.rid)
            finally:
                req.release(self.pool, self.regions)
        return sent

    def resend_tail(self, req: PrefillRequest, nbytes: int) -> bool:
        page = self.pool.get_page()  # leak: PeerGone is caught and the page is not put back
        if page is None:
            return False
        try:
            tail = req.prompt[-nbytes:][:self.pool.page_bytes]
            page.data[:len(tail)] = tail
            self.push(req)
            self.pool.put_page(page)
        except PeerGone:
            logger.info("tail of %s not sent", req.rid)
            return False
        return True
