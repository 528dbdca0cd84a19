"""Prefill side."""
from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Dict, Iterator, List, Optional

from .peers import PeerDirectory, Session
from .regions import Region, RegionTable

log = logging.getLogger(__name__)


@dataclass
class Transfer:
    req_id: str
    session: Session
    regions: List[Region] = field(default_factory=list)
    layers_left: int = 0


class KVSender:
    def __init__(self, table: RegionTable, peers: PeerDirectory, page_bytes: int) -> None:
        self.table = table
        self.peers = peers
        self.page_bytes = page_bytes
        self.transfers: Dict[str, Transfer] = {}

    def begin(self, req_id: str, peer: str, pages: List[int], layers: int) -> bool:
        if req_id in self.transfers:
            return False
        session = self.peers.open_session(peer)  # clean: closed on shortage, else owned by the transfer
        if session is None:
            return False
        tr = Transfer(req_id, session, layers_left=layers)
        for page in pages:
            region = self.table.try_register(page * self.page_bytes, self.page_bytes)  # clean: kept on the transfer, rolled back on shortage
            if region is None:
                self._drop(tr)
                return False
            tr.regions.append(region)
        self.transfers[req_id] = tr
        return True

    def _drop(self, tr: Transfer) -> None:
        for region in tr.regions:
            self.table.deregister(region)
        tr.regions = []
        self.peers.close_session(tr.session)

    def layer_done(self, req_id: str) -> None:
        tr = self.transfers[req_id]
        for region in tr.regions:
            tr.session.post_write(region.key, region.nbytes)
        tr.layers_left -= 1
        if tr.layers_left == 0:
            self._drop(self.transfers.pop(req_id))

    def abort(self, req_id: str) -> None:
        tr = self.transfers.pop(req_id, None)
        if tr is not None:
            self._drop(tr)

    def push_once(self, peer: str, page: int) -> bool:
        """Single-page push for the warm-up probe."""
        region = self.table.register(page * self.page_bytes, self.page_bytes)  # leak: peer busy, returns without deregistering
        session = self.peers.open_session(peer)  # clean: closed after the write
        if session is None:
            return False
        try:
            session.post_write(region.key, region.nbytes)
        finally:
            self.peers.close_session(session)
        self.table.deregister(region)
        return True

    def push_with_retry(self, peer: str, page: int, attempts: int = 3) -> bool:
        region = self.table.register(page * self.page_bytes, self.page_bytes)  # clean: deregistered after the loop and on success
        for attempt in range(attempts):
            session = self.peers.open_session(peer)  # leak: broken session is caught and retried without closing
            if session is None:
                continue
            try:
                session.post_write(region.key, region.nbytes)
            except ConnectionError:
                log.warning("push to %s failed, attempt %d", peer, attempt)
                continue
            self.peers.close_session(session)
            self.table.deregister(region)
            return True
        self.table.deregister(region)
        return False

    @contextmanager
    def exported(self, page: int) -> Iterator[Region]:
        region = self.table.register(page * self.page_bytes, self.page_bytes)  # clean: deregistered in the finally
        try:
            yield region
        finally:
            self.table.deregister(region)

    def checksum(self, page: int, probe: Session) -> Optional[int]:
        with self.exported(page) as region:  # clean: near miss, early return inside the with
            if not probe.alive:
                return None
            return probe.post_write(region.key, region.nbytes) & 0xFF
