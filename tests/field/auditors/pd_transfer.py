from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Optional


XferState = Enum("XferState", ["PROC", "DONE", "ERR"])


class TransferError(RuntimeError): ...


class XferAgent:
    def __init__(self, max_handles: int) -> None:
        self._handles: dict[int, XferState] = {}
        self._next, self._max = 0, max_handles
        self._regions: dict[int, tuple[int, int]] = {}
        self._peers: dict[str, int] = {}

    def register_memory(self, addr: int, size: int) -> int:
        self._next += 1
        self._regions[self._next] = (addr, size)
        return self._next

    def deregister_memory(self, desc: int) -> None:
        self._regions.pop(desc, None)

    def make_xfer(self, desc: int, peer: str) -> Optional[int]:
        if len(self._handles) >= self._max:
            return None
        self._next += 1
        self._handles[self._next] = XferState.PROC
        return self._next

    def check_xfer(self, handle: int) -> XferState:
        if self._handles[handle] is XferState.ERR:
            raise TransferError(handle)
        return self._handles[handle]

    def release_xfer(self, handle: int) -> None:
        self._handles.pop(handle, None)

    def add_remote(self, peer: str) -> str:
        self._peers[peer] = self._peers.get(peer, 0) + 1
        return peer

    def remove_remote(self, peer: str) -> None:
        self._peers[peer] -= 1
        if self._peers[peer] == 0:
            del self._peers[peer]


class MetaSlots:
    def __init__(self, count: int) -> None:
        self._free: deque[int] = deque(range(count))

    def alloc(self) -> Optional[int]:
        return self._free.popleft() if self._free else None

    def free(self, idx: int) -> None:
        self._free.append(idx)


@dataclass
class PrefillJob:
    rid: str
    peer: str
    addr: int
    size: int
    meta: Optional[int] = None
    desc: int = 0
    handle: int = 0


@dataclass
class DecodeSide:
    agent: XferAgent
    slots: MetaSlots
    waiting: dict[str, int] = field(default_factory=dict)
    ready: deque[tuple[str, int]] = field(default_factory=deque)

    def preallocate(self, rid: str) -> bool:
        if rid in self.waiting:
            return True
        idx = self.slots.alloc()  # leak: handed over to ready by on_arrival, but cancel() of a ready request drops the entry only
        if idx is None:
            return False
        self.waiting[rid] = idx
        return True

    def on_arrival(self, rid: str) -> None:
        idx = self.waiting.pop(rid, None)
        if idx is not None:
            self.ready.append((rid, idx))

    def drain_ready(self) -> None:
        while self.ready:
            self.slots.free(self.ready.popleft()[1])

    def cancel(self, rid: str) -> None:
        idx = self.waiting.pop(rid, None)
        if idx is not None:
            self.slots.free(idx)
            return
        self.ready = deque(item for item in self.ready if item[0] != rid)

    def handshake(self, peers: list[str], allowed: set[str]) -> list[str]:
        joined: list[str] = []
        for peer in peers:
            name = self.agent.add_remote(peer)  # clean: near miss, removed again for a peer that is not allowed
            if name not in allowed:
                self.agent.remove_remote(name)
                continue
            joined.append(name)
        return joined

    def leave(self, joined: list[str]) -> None:
        for peer in joined:
            self.agent.remove_remote(peer)


class PrefillSide:
    def __init__(self, agent: XferAgent, slots: MetaSlots) -> None:
        self.agent = agent
        self.slots = slots
        self.inflight: list[PrefillJob] = []
        self.bulk_desc: Optional[int] = None

    def map_pool(self, addr: int, size: int) -> None:
        if self.bulk_desc is not None:
            self.agent.deregister_memory(self.bulk_desc)
        self.bulk_desc = self.agent.register_memory(addr, size)  # clean: near miss, the region before is deregistered first and close() ends this one

    def submit(self, job: PrefillJob) -> bool:
        job.meta = self.slots.alloc()  # clean: freed by _retire or by the refusal below
        if job.meta is None:
            return False
        job.desc = self.agent.register_memory(job.addr, job.size)  # leak: when no handle is left only the meta slot is rolled back
        handle = self.agent.make_xfer(job.desc, job.peer)  # clean: kept in the job, _retire releases it from poll() and close()
        if handle is None:
            self.slots.free(job.meta)
            job.meta = None
            return False
        job.handle = handle
        self.inflight.append(job)
        return True

    def _retire(self, job: PrefillJob) -> None:
        self.agent.release_xfer(job.handle)
        self.agent.deregister_memory(job.desc)
        if job.meta is not None:
            self.slots.free(job.meta)

    def poll(self) -> list[str]:
        done: list[str] = []
        still: list[PrefillJob] = []
        for job in self.inflight:
            try:
                state = self.agent.check_xfer(job.handle)
            except TransferError:
                self._retire(job)
                continue
            if state is XferState.PROC:
                still.append(job)
            else:
                done.append(job.rid)
                self._retire(job)
        self.inflight = still
        return done

    def send_sync(self, desc: int, peer: str) -> bool:
        handle = self.agent.make_xfer(desc, peer)  # leak: a failed transfer is handled by returning False with the handle kept
        if handle is None:
            return False
        try:
            while self.agent.check_xfer(handle) is XferState.PROC:
                pass
        except TransferError:
            return False
        self.agent.release_xfer(handle)
        return True

    def send_with_retry(self, desc: int, peer: str, attempts: int) -> bool:
        for _ in range(attempts):
            handle = self.agent.make_xfer(desc, peer)  # clean: near miss, the finally releases it on each attempt
            if handle is None:
                continue
            try:
                while self.agent.check_xfer(handle) is XferState.PROC:
                    pass
                return True
            except TransferError:
                continue
            finally:
                self.agent.release_xfer(handle)
        return False

    def close(self) -> None:
        while self.inflight:
            self._retire(self.inflight.pop())
        if self.bulk_desc is not None:
            self.agent.deregister_memory(self.bulk_desc)
