from __future__ import annotations

import logging
from dataclasses import dataclass

from .blocks import BlockLease, BlockPool
from .link import SendQueue, TransferLink

log = logging.getLogger(__name__)


@dataclass
class PrefillJob:
    rid: str
    tokens: list[int]
    peer: str
    lease: BlockLease | None = None


class PrefillNode:
    def __init__(self, model, pool: BlockPool, link: TransferLink) -> None:
        self.model = model
        self.pool = pool
        self.link = link
        self.sender = SendQueue(link)
        self._jobs: dict[str, PrefillJob] = {}
        self._retry: list[PrefillJob] = []

    def submit(self, job: PrefillJob) -> bool:
        job.lease = self.pool.reserve(len(job.tokens))  # clean: near miss, held by the job until it is sent or cancelled
        if job.lease is None:
            return False
        self._jobs[job.rid] = job
        return True

    def run(self, rid: str) -> bool:
        job = self._jobs.pop(rid, None)
        if job is None or job.lease is None:
            return False
        self.model.prefill(job.tokens, job.lease.ids)
        self.sender.submit(len(job.tokens), job.peer, job.lease, self._on_sent)
        return True

    def _on_sent(self, lease: BlockLease, ok: bool) -> None:
        if not ok:
            log.warning("migration of %d blocks failed", len(lease))
        self.pool.surrender(lease)

    def cancel(self, rid: str) -> None:
        job = self._jobs.pop(rid, None)
        if job is not None and job.lease is not None:
            self.pool.surrender(job.lease)

    def run_inline(self, job: PrefillJob) -> bool:
        lease = self.pool.reserve(len(job.tokens))  # leak: with no channel to the peer the job is parked for a retry without its lease
        if lease is None:
            return False
        self.model.prefill(job.tokens, lease.ids)
        ch = self.link.open_channel(job.peer)  # clean: near miss, closed ahead of looking at the result
        if ch is None:
            self._retry.append(job)
            return False
        ok = self.link.backend.write_blocks(ch.qp, lease.ids)
        self.link.close_channel(ch)
        self.pool.surrender(lease)
        if not ok:
            self._retry.append(job)
            return False
        return True

    def retry_all(self) -> int:
        todo, self._retry = self._retry, []
        return sum(self.run_inline(j) for j in todo)

    def run_chunked(self, job: PrefillJob, chunk: int) -> int:
        sent = 0
        lease = self.pool.reserve(len(job.tokens))  # clean: near miss, split from the front, every head and the last rest are surrendered
        while lease is not None:
            rest: BlockLease | None = None
            if lease.tokens > chunk:
                lease, rest = self.pool.split(lease, chunk)
            self.model.prefill(job.tokens[sent : sent + lease.tokens], lease.ids)
            sent += lease.tokens
            self.pool.surrender(lease)
            lease = rest
        return sent

    def broadcast(self, job: PrefillJob, peers: list[str]) -> bool:
        lease = self.pool.reserve(len(job.tokens))  # clean: near miss, surrendered before the mesh result is judged
        if lease is None:
            return False
        self.model.prefill(job.tokens, lease.ids)
        chans = self.link.open_mesh(peers)  # leak: the first failing write breaks out and the channels after it stay open
        good = 0
        for ch in chans:
            ok = self.link.backend.write_blocks(ch.qp, lease.ids)
            self.link.close_channel(ch)
            if not ok:
                break
            good += 1
        self.pool.surrender(lease)
        return bool(chans) and good == len(chans)
