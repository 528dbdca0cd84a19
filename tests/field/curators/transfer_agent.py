"""Point-to-point KV transfer agent: memory registration, transfer handles, pull jobs."""
from __future__ import annotations

import enum
import itertools
import logging
import time
from dataclasses import dataclass, field
from typing import Dict, Iterable, List, NamedTuple, Optional, Tuple

logger = logging.getLogger(__name__)


class Region(NamedTuple):
    addr: int
    length: int
    device: int


class XferState(enum.Enum):
    PENDING = "pending"
    DONE = "done"
    ERROR = "error"


class Agent:
    """Thin layer over the NIC driver. Registrations and handles are driver objects."""

    def __init__(self, name: str, max_handles: int = 1024) -> None:
        self.name = name
        self.max_handles = max_handles
        self._ids = itertools.count(1)
        self._regs: Dict[int, Tuple[Region, ...]] = {}
        self._handles: Dict[int, XferState] = {}
        self._remotes: Dict[str, bytes] = {}

    def register_memory(self, regions: Iterable[Region]) -> int:
        reg = next(self._ids)
        self._regs[reg] = tuple(regions)
        return reg

    def deregister_memory(self, reg: int) -> None:
        del self._regs[reg]

    def add_remote(self, peer: str, metadata: bytes) -> bool:
        if not metadata:
            return False
        self._remotes[peer] = metadata
        return True

    def remove_remote(self, peer: str) -> None:
        self._remotes.pop(peer, None)

    def peers(self) -> List[str]:
        return list(self._remotes)

    def make_xfer(self, peer: str, src: int, dst_offset: int) -> Optional[int]:
        if peer not in self._remotes or len(self._handles) >= self.max_handles:
            return None
        handle = next(self._ids)
        self._handles[handle] = XferState.PENDING
        return handle

    def post(self, handle: int) -> None:
        self._handles[handle] = XferState.DONE

    def poll(self, handle: int) -> XferState:
        return self._handles[handle]

    def release_xfer(self, handle: int) -> None:
        del self._handles[handle]


@dataclass
class PullJob:
    job_id: str
    peer: str
    regs: List[int] = field(default_factory=list)
    handles: List[int] = field(default_factory=list)
    deadline: float = 0.0


class KVConnector:
    def __init__(self, agent: Agent, kv_regions: List[Region]) -> None:
        self.agent = agent
        self.kv_reg = agent.register_memory(kv_regions)  # clean: near miss, lives as long as the connector, shutdown deregisters it
        self.aux_reg: Optional[int] = None
        self.jobs: Dict[str, PullJob] = {}
        self.finished: List[str] = []

    def set_aux(self, regions: List[Region]) -> None:
        if self.aux_reg is not None:
            self.agent.deregister_memory(self.aux_reg)
        self.aux_reg = self.agent.register_memory(regions)  # leak: shutdown forgets the aux registration

    def start_pull(self, job_id: str, peer: str, metadata: bytes, offsets: List[int]) -> bool:
        if job_id in self.jobs:
            return False
        if not self.agent.add_remote(peer, metadata):  # clean: near miss, remotes are kept by peer name and drop_peer removes them
            return False
        job = PullJob(job_id, peer, deadline=time.monotonic() + 30.0)
        for offset in offsets:
            handle = self.agent.make_xfer(peer, self.kv_reg, offset)  # leak: handles made before a failing one are dropped with the job
            if handle is None:
                logger.warning("pull %s: out of handles", job_id)
                return False
            job.handles.append(handle)
        for handle in job.handles:
            self.agent.post(handle)
        self.jobs[job_id] = job
        return True

    def start_pull_staged(self, job_id: str, peer: str, staging: List[Region], offsets: List[int]) -> bool:
        job = PullJob(job_id, peer, deadline=time.monotonic() + 30.0)
        for region in staging:
            job.regs.append(self.agent.register_memory([region]))  # clean: near miss, in the job, which _drop_job empties
        for reg, offset in zip(job.regs, offsets):
            handle = self.agent.make_xfer(peer, reg, offset)  # clean: near miss, the failing way drops the whole job
            if handle is None:
                self._drop_job(job)
                return False
            job.handles.append(handle)
        for handle in job.handles:
            self.agent.post(handle)
        previous = self.jobs.pop(job_id, None)
        if previous is not None:
            self._drop_job(previous)
        self.jobs[job_id] = job
        return True

    def _drop_job(self, job: PullJob) -> None:
        for handle in job.handles:
            self.agent.release_xfer(handle)
        job.handles.clear()
        for reg in job.regs:
            self.agent.deregister_memory(reg)
        job.regs.clear()

    def step(self) -> List[str]:
        now = time.monotonic()
        done: List[str] = []
        for job_id, job in list(self.jobs.items()):
            states = {self.agent.poll(h) for h in job.handles}
            if XferState.ERROR in states or now > job.deadline:
                self._drop_job(job)
                del self.jobs[job_id]
                continue
            if XferState.PENDING in states:
                continue
            self._drop_job(job)
            del self.jobs[job_id]
            done.append(job_id)
        self.finished.extend(done)
        return done

    def send_notice(self, peer: str, region: Region) -> bool:
        reg = self.agent.register_memory([region])  # clean: near miss, deregistered in finally on both ways
        try:
            handle = self.agent.make_xfer(peer, reg, 0)  # leak: the timeout return leaves the handle posted and unreleased
            if handle is None:
                return False
            self.agent.post(handle)
            limit = time.monotonic() + 1.0
            while self.agent.poll(handle) is XferState.PENDING:
                if time.monotonic() > limit:
                    return False
                time.sleep(0.001)
            self.agent.release_xfer(handle)
            return True
        finally:
            self.agent.deregister_memory(reg)

    def handshake(self, peer: str, metadata: bytes, probe: Region, retries: int = 3) -> bool:
        if not self.agent.add_remote(peer, metadata):  # clean: kept on purpose under the peer name until drop_peer
            return False
        for _ in range(retries):
            reg = self.agent.register_memory([probe])  # leak: a retry after a refused transfer registers anew over the old one
            handle = self.agent.make_xfer(peer, reg, 0)  # clean: near miss, released before the check of its state
            if handle is None:
                time.sleep(0.01)
                continue
            self.agent.post(handle)
            state = self.agent.poll(handle)
            self.agent.release_xfer(handle)
            self.agent.deregister_memory(reg)
            if state is XferState.DONE:
                return True
        return False

    def drop_peer(self, peer: str) -> None:
        for job_id, job in list(self.jobs.items()):
            if job.peer == peer:
                self._drop_job(job)
                del self.jobs[job_id]
        self.agent.remove_remote(peer)

    def shutdown(self) -> None:
        for job in self.jobs.values():
            self._drop_job(job)
        self.jobs.clear()
        for peer in self.agent.peers():
            self.agent.remove_remote(peer)
        self.agent.deregister_memory(self.kv_reg)
