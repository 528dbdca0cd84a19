from __future__ import annotations

import logging
import threading
from typing import Dict, List, Optional

from .mover import Move, Mover
from .tiers import Damaged, DiskTier, GpuTier, HostTier

log = logging.getLogger(__name__)


class Session:
    """A conversation: its blocks on the GPU, in order, and the sink blocks that attention always sees."""

    def __init__(self, sid: str) -> None:
        self.sid = sid
        self.blocks: List[int] = []
        self.sinks: List[int] = []
        self.stored = 0

    def drop(self, gpu: GpuTier) -> None:
        gpu.free(self.blocks)
        self.blocks = []


class Engine:
    def __init__(self, gpu: GpuTier, host: HostTier, disk: DiskTier, mover: Mover) -> None:
        self.gpu = gpu
        self.host = host
        self.disk = disk
        self.mover = mover
        self.sessions: Dict[str, Session] = {}
        self.cold: Dict[str, int] = {}
        self._lock = threading.RLock()

    def begin(self, sid: str, sinks: int = 2) -> Optional[Session]:
        if sid in self.sessions:
            return self.sessions[sid]
        session = Session(sid)
        got = self.gpu.alloc_even(sinks)  # leak: Session.drop() frees the ordinary blocks, the sink blocks go with the session
        if len(got) < sinks:
            self.gpu.free(got)
            return None
        session.sinks = got
        self.sessions[sid] = session
        return session

    def extend(self, sid: str) -> bool:
        session = self.sessions[sid]
        b = self.gpu.alloc()  # clean: in the session's list, drop() frees it
        if b is None:
            return False
        session.blocks.append(b)
        return True

    def extend_run(self, sid: str, n: int) -> bool:
        run = self.gpu.alloc_run(n)  # leak: for a session that has ended meanwhile the run is not freed before the return
        if run is None:
            return False
        session = self.sessions.get(sid)
        if session is None:
            log.info("%s ended before its blocks came", sid)
            return False
        session.blocks.extend(run)
        return True

    def demote(self, sid: str) -> int:
        """Copy the oldest blocks of a session to the host tier; the copies free the GPU blocks when they are made."""
        session = self.sessions[sid]
        moved = 0
        while len(session.blocks) > 1:
            slot = self.host.reserve()  # clean: near miss, vacated when the mover refuses or fails, otherwise in the cold table
            if slot is None:
                break
            b = session.blocks[0]
            key = f"{sid}.{session.stored}"
            if not self.mover.enqueue(Move(self.gpu.data[b], self.host.data[slot], self._demoted(key, b, slot), key)):
                self.host.vacate(slot)
                break
            session.blocks.pop(0)
            session.stored += 1
            moved += 1
        return moved

    def _demoted(self, key: str, block: int, slot: int):
        def done(ok: bool) -> None:
            self.gpu.free([block])
            if not ok:
                self.host.vacate(slot)
                return
            self.host.seal(slot)
            with self._lock:
                self._forget(key)
                self.cold[key] = slot
        return done

    def promote(self, sid: str, key: str) -> bool:
        """Bring a cold block back to the end of a session."""
        with self._lock:
            slot = self.cold.get(key)
        if slot is None:
            return False
        b = self.gpu.alloc()  # leak: Damaged from the check is caught, the block that should have received the copy is not freed
        if b is None:
            return False
        try:
            self.host.check(slot)
        except Damaged as exc:
            log.error("%s: %s", key, exc)
            self._forget(key)
            return False
        self.gpu.data[b].copy_(self.host.data[slot])
        self._forget(key)
        self.sessions[sid].blocks.append(b)
        return True

    def _forget(self, key: str) -> None:
        with self._lock:
            slot = self.cold.pop(key, None)
        if slot is not None:
            self.host.vacate(slot)

    def prefetch(self, key: str) -> bool:
        """From the disk to the host tier."""
        with self._lock:
            if key in self.cold:
                return True
            slot = self.host.reserve()  # clean: near miss, in the cold table after a load, vacated after a failed one
            if slot is None:
                return False
            if self.disk.load(key, self.host.data[slot]):
                self.host.seal(slot)
                self.cold[key] = slot
                return True
            self.host.vacate(slot)
            return False

    def speculate(self, sid: str, key: str) -> bool:
        """Start to bring a block back before the session asks for it."""
        b = self.gpu.alloc()  # leak: done(False) after a failed copy only writes a line to the log, the block stays taken
        if b is None:
            return False
        slot = self.cold.get(key)
        if slot is None:
            self.gpu.free([b])
            return False

        def done(ok: bool) -> None:
            session = self.sessions.get(sid)
            if not ok:
                log.warning("speculation on %s failed", key)
            elif session is None:
                self.gpu.free([b])
            else:
                session.blocks.append(b)

        if not self.mover.enqueue(Move(self.host.data[slot], self.gpu.data[b], done, key)):
            self.gpu.free([b])
            return False
        return True

    def sink_to_disk(self) -> None:
        for key, slot in list(self.cold.items()):
            self.disk.store(key, self.host.data[slot])
            self._forget(key)
        self.host.reinstate()

    def end(self, sid: str) -> None:
        session = self.sessions.pop(sid, None)
        if session is None:
            return
        session.drop(self.gpu)
        for key in [k for k in self.cold if k.rsplit(".", 1)[0] == sid]:
            self._forget(key)

    def close(self) -> None:
        self.mover.stop()
        for sid in list(self.sessions):
            self.end(sid)
        self.sink_to_disk()
