"""RDMA link between prefill and decode workers: registrations, transfer handles, bounce buffers."""
from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

logger = logging.getLogger("kvlink")


class XferState(Enum):
    PROC = 0
    DONE = 1
    ERR = 2


@dataclass(frozen=True)
class RegDesc:
    key: int
    addr: int
    nbytes: int


@dataclass(eq=False)
class XferHandle:
    op: str
    local: RegDesc
    remote: str
    state: XferState = XferState.PROC
    posted: float = field(default_factory=time.monotonic)


class NixlAgent:
    def __init__(self, name: str, max_handles: int = 256) -> None:
        self.name = name
        self._mrs: dict[int, RegDesc] = {}
        self._handles: set[XferHandle] = set()
        self._next = 0
        self._max = max_handles

    def register_memory(self, arr: np.ndarray) -> RegDesc:
        self._next += 1
        desc = RegDesc(self._next, arr.ctypes.data, arr.nbytes)
        self._mrs[desc.key] = desc
        return desc

    def deregister_memory(self, desc: RegDesc) -> None:
        self._mrs.pop(desc.key)

    def make_xfer(self, op: str, local: RegDesc, remote: str) -> XferHandle | None:
        if len(self._handles) >= self._max:
            return None
        h = XferHandle(op, local, remote)
        self._handles.add(h)
        return h

    def release_xfer(self, h: XferHandle) -> None:
        self._handles.discard(h)

    def check(self, h: XferHandle) -> XferState:
        return h.state


class BouncePool:
    def __init__(self, n: int, nbytes: int) -> None:
        self._lock = threading.Lock()
        self._bufs: deque[np.ndarray] = deque(np.empty(nbytes, np.uint8) for _ in range(n))

    def get(self) -> np.ndarray | None:
        with self._lock:
            return self._bufs.popleft() if self._bufs else None

    def put(self, buf: np.ndarray) -> None:
        with self._lock:
            self._bufs.append(buf)


class KVSender:
    def __init__(self, agent: NixlAgent, bounce: BouncePool, kv: np.ndarray) -> None:
        self.agent = agent
        self.bounce = bounce
        self.kv = kv
        self.kv_desc = agent.register_memory(kv)  # clean: for the sender's life, deregistered in shutdown
        self.aux_desc: RegDesc | None = None
        self.inflight: dict[str, list[XferHandle]] = {}
        self.staged: dict[str, tuple[np.ndarray, RegDesc, XferHandle]] = {}

    def bind_aux(self, aux: np.ndarray) -> None:
        if self.aux_desc is not None:
            self.agent.deregister_memory(self.aux_desc)
        self.aux_desc = self.agent.register_memory(aux)  # leak: shutdown deregisters only kv_desc

    def send_blocks(self, rid: str, remotes: list[str]) -> bool:
        handles: list[XferHandle] = []
        for remote in remotes:
            h = self.agent.make_xfer("WRITE", self.kv_desc, remote)  # clean: near miss, the earlier handles are released when one is refused
            if h is None:
                for done in handles:
                    self.agent.release_xfer(done)
                return False
            handles.append(h)
        self.inflight.setdefault(rid, []).extend(handles)
        return True

    def poll(self, rid: str) -> bool:
        handles = self.inflight.get(rid, [])
        still: list[XferHandle] = []
        for h in handles:
            if self.agent.check(h) is XferState.PROC:
                still.append(h)
                continue
            self.agent.release_xfer(h)
        if still:
            self.inflight[rid] = still
            return False
        self.inflight.pop(rid, None)
        return True

    def send_staged(self, rid: str, payload: bytes, remote: str) -> bool:
        buf = self.bounce.get()  # clean: near miss, put back when no handle is to be had, else in staged
        if buf is None:
            return False
        buf[: len(payload)] = np.frombuffer(payload, np.uint8)
        desc = self.agent.register_memory(buf)  # leak: not deregistered when no handle is to be had
        h = self.agent.make_xfer("WRITE", desc, remote)  # clean: goes into staged with its buffer
        if h is None:
            self.bounce.put(buf)
            return False
        self.abandon_staged(rid)
        self.staged[rid] = (buf, desc, h)
        return True

    def abandon_staged(self, rid: str) -> None:
        entry = self.staged.pop(rid, None)
        if entry is None:
            return
        buf, desc, h = entry
        self.agent.release_xfer(h)
        self.agent.deregister_memory(desc)
        self.bounce.put(buf)

    def ping(self, remote: str, timeout: float) -> bool:
        h = self.agent.make_xfer("READ", self.kv_desc, remote)  # leak: the handle is released when done but not upon the timeout
        if h is None:
            return False
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            state = self.agent.check(h)
            if state is not XferState.PROC:
                self.agent.release_xfer(h)
                return state is XferState.DONE
            time.sleep(0.001)
        logger.warning("ping of %s timed out", remote)
        return False

    def write_retry(self, remote: str, tries: int = 3) -> bool:
        for attempt in range(tries):
            h = self.agent.make_xfer("WRITE", self.kv_desc, remote)  # clean: near miss, released in each round by finally
            if h is None:
                continue
            try:
                while self.agent.check(h) is XferState.PROC:
                    time.sleep(0.001)
                if h.state is XferState.DONE:
                    return True
                logger.info("attempt %d to %s failed", attempt, remote)
            finally:
                self.agent.release_xfer(h)
        return False

    def shutdown(self) -> None:
        for handles in self.inflight.values():
            for h in handles:
                self.agent.release_xfer(h)
        self.inflight.clear()
        for rid in list(self.staged):
            self.abandon_staged(rid)
        self.agent.deregister_memory(self.kv_desc)


class KVReceiver:
    def __init__(self, agent: NixlAgent, bounce: BouncePool) -> None:
        self.agent = agent
        self.bounce = bounce

    def fetch(self, remote: str, nbytes: int, timeout: float = 1.0) -> np.ndarray | None:
        buf = self.bounce.get()  # leak: the caller gets a copy, the buffer itself is put back only on an error
        if buf is None:
            return None
        desc = self.agent.register_memory(buf)  # clean: deregistered on every way
        h = self.agent.make_xfer("READ", desc, remote)  # clean: near miss, released before either result is returned
        if h is None:
            self.agent.deregister_memory(desc)
            self.bounce.put(buf)
            return None
        limit = time.monotonic() + timeout
        while self.agent.check(h) is XferState.PROC and time.monotonic() < limit:
            time.sleep(0.0005)
        ok = h.state is XferState.DONE
        self.agent.release_xfer(h)
        self.agent.deregister_memory(desc)
        if not ok:
            self.bounce.put(buf)
            return None
        return buf[:nbytes].copy()
