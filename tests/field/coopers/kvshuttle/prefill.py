import logging
from collections import deque
from dataclasses import dataclass
from typing import Any, Deque, List, Optional

from .agent import Agent, Channel
from .resources import PagePool

log = logging.getLogger("kvshuttle.prefill")


@dataclass
class PrefillJob:
    rid: str
    peer: str
    tokens: List[int]
    pages: Optional[List[int]] = None
    channel: Optional[Channel] = None
    tries: int = 0


class PrefillWorker:
    MAX_TRIES = 5

    def __init__(self, agent: Agent, pages: PagePool, model: Any, page_size: int = 64) -> None:
        self.agent = agent
        self.pages = pages
        self.model = model
        self.page_size = page_size
        self.sending: Deque[PrefillJob] = deque()
        self.done: List[str] = []

    def _npages(self, job: PrefillJob) -> int:
        return (len(job.tokens) + self.page_size - 1) // self.page_size

    def start(self, job: PrefillJob) -> bool:
        job.pages = self.pages.alloc(self._npages(job))  # clean: near miss, freed when no channel opens, and by every end of pump
        if job.pages is None:
            return False
        job.channel = self.agent.open_channel(job.peer)  # leak: pump drops a job that ran out of tries without closing its channel
        if job.channel is None:
            self.pages.free(job.pages)
            job.pages = None
            return False
        self.model.prefill(job.tokens, job.pages)
        self.sending.append(job)
        return True

    def pump(self) -> None:
        for _ in range(len(self.sending)):
            job = self.sending.popleft()
            if job.channel.link.sock.try_send((job.rid, job.pages, job.channel.slot)):
                self.agent.close_channel(job.channel)
                self.pages.free(job.pages)
                self.done.append(job.rid)
                continue
            job.tries += 1
            if job.tries < self.MAX_TRIES:
                self.sending.append(job)
                continue
            log.error("%s: giving up", job.rid)
            self.pages.free(job.pages)
            job.channel = None

    def cancel(self, rid: str) -> bool:
        for job in list(self.sending):
            if job.rid == rid:
                self.sending.remove(job)
                self.agent.close_channel(job.channel)
                self.pages.free(job.pages)
                return True
        return False

    def reroute(self, rid: str, peer: str) -> bool:
        for job in self.sending:
            if job.rid != rid:
                continue
            ch = self.agent.open_channel(peer)  # clean: near miss, the channel it replaces is closed first
            if ch is None:
                return False
            self.agent.close_channel(job.channel)
            job.peer, job.channel = peer, ch
            return True
        return False

    def prefill_local(self, tokens: List[int]) -> Optional[int]:
        pages = self.pages.alloc(len(tokens) // self.page_size + 1)  # leak: a model without an answer leaves by return None and the pages are not freed
        if pages is None:
            return None
        first = self.model.prefill(tokens, pages)
        if first is None:
            return None
        self.pages.free(pages)
        return first
