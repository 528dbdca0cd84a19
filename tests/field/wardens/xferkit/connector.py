from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Optional

from .agent import TransferAgent, XferHandle
from .memory import Region, RegistrationTable, StagingRing

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class ReqState:
    req_id: str
    remote: str
    handles: list[XferHandle] = field(default_factory=list)
    entry: int = -1


class KVConnector:
    def __init__(self, agent: TransferAgent, table: RegistrationTable, ring: StagingRing) -> None:
        self.agent = agent
        self.table = table
        self.ring = ring
        self.layers: list[Region] = []
        self.recving: dict[str, ReqState] = {}
        self.handshaken: set[str] = set()

    def register_kv_caches(self, layers: list[tuple[int, int]]) -> bool:
        if self.layers:
            return True
        regions = self.table.register_layers(layers, align=256)  # clean: near miss, kept in layers until shutdown
        if regions is None:
            return False
        self.layers = regions
        return True

    def _handshake(self, remote: str) -> None:
        if remote in self.handshaken:
            return
        self.agent.add_remote_agent(remote)  # clean: near miss, once per remote, shutdown removes it
        self.handshaken.add(remote)

    def start_load(self, req_id: str, remote: str) -> bool:
        if req_id in self.recving:
            return True
        self._handshake(remote)
        state = ReqState(req_id, remote)
        state.entry = self.ring.obtain()  # clean: near miss, relinquished when a layer fails, else by get_finished or abort
        if state.entry < 0:
            return False
        for region in self.layers:
            handle = self.agent.start_xfer(remote, region)  # leak: abort() relinquishes the entry and forgets the handles
            if handle is None:
                for started in state.handles:
                    self.agent.release_xfer_handle(started)
                self.ring.relinquish(state.entry)
                return False
            state.handles.append(handle)
        self.recving[req_id] = state
        return True

    def get_finished(self) -> set[str]:
        done: set[str] = set()
        for req_id, state in list(self.recving.items()):
            if any(self.agent.check(h) == "PROC" for h in state.handles):
                continue
            for handle in state.handles:
                self.agent.release_xfer_handle(handle)
            self.ring.relinquish(state.entry)
            del self.recving[req_id]
            done.add(req_id)
        return done

    def abort(self, req_id: str) -> None:
        state = self.recving.pop(req_id, None)
        if state is None:
            return
        self.ring.relinquish(state.entry)

    def send_inline(self, remote: str, payload: bytes) -> bool:
        entry = self.ring.obtain()  # leak: a transfer that did not start returns with the entry obtained
        if entry < 0:
            return False
        self.ring.data[entry] = payload
        region = self.table.register(entry * 4096, len(payload))  # clean: near miss, deregistered on both ways
        handle = self.agent.start_xfer(remote, region)  # clean: near miss, None holds nothing, else released below
        if handle is None:
            self.table.deregister(region)
            return False
        self.agent.release_xfer_handle(handle)
        self.table.deregister(region)
        self.ring.relinquish(entry)
        return True

    def probe(self, remote: str, attempts: int) -> Optional[int]:
        for attempt in range(attempts):
            self.agent.add_remote_agent(remote)  # leak: an unanswered ping goes to the next attempt without removal
            if not self.agent.ping(remote):
                continue
            self.agent.remove_remote_agent(remote)
            return attempt
        return None

    def with_temporary_remote(self, remote: str, payload: bytes) -> bool:
        self.agent.add_remote_agent(remote)  # clean: near miss, both returns pass through finally
        try:
            if not payload:
                return False
            return self.send_inline(remote, payload)
        finally:
            self.agent.remove_remote_agent(remote)

    def shutdown(self) -> None:
        self.get_finished()
        for req_id in list(self.recving):
            self.abort(req_id)
        for region in self.layers:
            self.table.deregister(region)
        self.layers = []
        for remote in self.handshaken:
            self.agent.remove_remote_agent(remote)
        self.handshaken.clear()
