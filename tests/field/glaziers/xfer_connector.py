from __future__ import annotations

import itertools
import queue
import time
from dataclasses import dataclass, field
from enum import Enum


class XferState(Enum):
    PROC = "PROC"
    DONE = "DONE"
    ERR = "ERR"


@dataclass(frozen=True)
class Region:
    addr: int
    nbytes: int


class XferAgent:
    """Thin bookkeeping over the RDMA library; lkeys and transfer handles are finite."""

    def __init__(self, name: str, max_handles: int = 4096):
        self.name = name
        self._lkeys: dict[int, Region] = {}
        self._next = itertools.count(1)
        self._idle = queue.SimpleQueue()
        for h in range(max_handles):
            self._idle.put(h)
        self._state: dict[int, XferState] = {}

    def register_memory(self, region: Region) -> int:
        lkey = next(self._next)
        self._lkeys[lkey] = region
        return lkey

    def deregister_memory(self, lkey: int) -> None:
        del self._lkeys[lkey]

    def prep_xfer(self, peer: str, blocks: list[int]) -> int:
        h = self._idle.get()
        self._state[h] = XferState.PROC
        return h

    def check(self, h: int) -> XferState:
        return self._state[h]

    def release_xfer(self, h: int) -> None:
        del self._state[h]
        self._idle.put(h)


@dataclass
class LoadMeta:
    req_id: str
    peer: str
    block_groups: list[list[int]] = field(default_factory=list)


class KVConnector:
    def __init__(self, agent: XferAgent, kv: list[Region], meta: Region, chunk: int = 128):
        self.agent = agent
        self.chunk = chunk
        self.kv_lkeys = [agent.register_memory(r) for r in kv]  # clean: shutdown deregisters every one
        self.meta_lkey = agent.register_memory(meta)  # leak: shutdown goes over kv_lkeys and scratch only
        self.scratch: dict[str, int] = {}
        self.recving: dict[str, list[int]] = {}
        self.sending: dict[str, list[int]] = {}
        self.failed: set[str] = set()

    def start_load(self, meta: LoadMeta) -> None:
        handles = self.recving.setdefault(meta.req_id, [])
        for blocks in meta.block_groups:
            handles.append(self.agent.prep_xfer(meta.peer, blocks))  # leak: poll_recv drops a failed handle off its list

    def start_send(self, meta: LoadMeta) -> None:
        handles = self.sending.setdefault(meta.req_id, [])
        for blocks in meta.block_groups:
            handles.append(self.agent.prep_xfer(meta.peer, blocks))  # clean: near miss, poll_send releases done and failed alike

    def poll_recv(self) -> set[str]:
        done = set()
        for req_id, handles in list(self.recving.items()):
            left = []
            for h in handles:
                st = self.agent.check(h)
                if st is XferState.DONE:
                    self.agent.release_xfer(h)
                elif st is XferState.PROC:
                    left.append(h)
                else:
                    self.failed.add(req_id)
            if left:
                self.recving[req_id] = left
            else:
                del self.recving[req_id]
                done.add(req_id)
        return done

    def poll_send(self) -> set[str]:
        done = set()
        for req_id, handles in list(self.sending.items()):
            left = []
            for h in handles:
                st = self.agent.check(h)
                if st is XferState.PROC:
                    left.append(h)
                    continue
                if st is XferState.ERR:
                    self.failed.add(req_id)
                self.agent.release_xfer(h)
            if left:
                self.sending[req_id] = left
            else:
                del self.sending[req_id]
                done.add(req_id)
        return done

    def _wait(self, h: int, deadline: float) -> XferState:
        while time.monotonic() < deadline:
            st = self.agent.check(h)
            if st is not XferState.PROC:
                return st
            time.sleep(0.0005)
        return XferState.PROC

    def push_header(self, peer: str, retries: int = 3) -> bool:
        for _ in range(retries):
            h = self.agent.prep_xfer(peer, [0])  # leak: an attempt that fails goes round again with its handle held
            if self._wait(h, time.monotonic() + 1.0) is XferState.DONE:
                self.agent.release_xfer(h)
                return True
        return False

    def push_trailer(self, peer: str, retries: int = 3) -> bool:
        for _ in range(retries):
            h = self.agent.prep_xfer(peer, [1])  # clean: near miss, released after the wait whatever came of it
            st = self._wait(h, time.monotonic() + 1.0)
            self.agent.release_xfer(h)
            if st is XferState.DONE:
                return True
        return False

    def _begin(self, peer: str, blocks: list[int]) -> tuple[int, float]:
        h = self.agent.prep_xfer(peer, blocks)  # clean: returned to the caller with its deadline
        return h, time.monotonic() + 0.01 * len(blocks)

    def copy_blocking(self, peer: str, blocks: list[int]) -> int:
        moved = 0
        for i in range(0, len(blocks), self.chunk):
            part = blocks[i:i + self.chunk]
            h, deadline = self._begin(peer, part)  # clean: near miss, the finally runs before the return too
            try:
                if self._wait(h, deadline) is not XferState.DONE:
                    return moved
            finally:
                self.agent.release_xfer(h)
            moved += len(part)
        return moved

    def probe(self, peer: str) -> float | None:
        t0 = time.monotonic()
        h, deadline = self._begin(peer, [0])  # leak: the timing is returned and the handle forgotten
        if self._wait(h, deadline) is not XferState.DONE:
            self.agent.release_xfer(h)
            return None
        return time.monotonic() - t0

    def attach_scratch(self, req_id: str, region: Region) -> int:
        if req_id in self.scratch:
            return self.scratch[req_id]
        lkey = self.agent.register_memory(region)  # clean: filed under the request; detach_scratch or shutdown
        self.scratch[req_id] = lkey
        return lkey

    def detach_scratch(self, req_id: str) -> None:
        lkey = self.scratch.pop(req_id, None)
        if lkey is not None:
            self.agent.deregister_memory(lkey)

    def shutdown(self) -> None:
        for lkey in self.kv_lkeys:
            self.agent.deregister_memory(lkey)
        for req_id in list(self.scratch):
            self.detach_scratch(req_id)
        for handles in (*self.recving.values(), *self.sending.values()):
            for h in handles:
                self.agent.release_xfer(h)
        self.recving.clear()
        self.sending.clear()
