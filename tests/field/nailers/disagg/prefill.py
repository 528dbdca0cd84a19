"""Prefill worker: fills staging pages and pushes them to the decode worker."""
from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Optional

from .transport import Channel, ChannelPool, PageRegistry

log = logging.getLogger(__name__)


@dataclass
class Transfer:
    rid: str
    peer: str
    pages: list[int]
    channel: Optional[Channel] = None
    offset: int = 0


@dataclass
class PrefillStats:
    pushed: int = 0
    refused: int = 0
    by_peer: dict[str, int] = field(default_factory=dict)


class PrefillWorker:
    def __init__(self, channels: ChannelPool, pages: PageRegistry) -> None:
        self.channels = channels
        self.pages = pages
        self.outbox: deque[Transfer] = deque()
        self.stats = PrefillStats()

    def enqueue(self, rid: str, peer: str, npages: int) -> bool:
        pages = self.pages.grab(npages)  # clean: travels in the Transfer, pump() drops it
        if pages is None:
            self.stats.refused += 1
            return False
        self.outbox.append(Transfer(rid, peer, pages))
        return True

    def pump(self) -> int:
        """Push one page per queued transfer."""
        finished = 0
        for _ in range(len(self.outbox)):
            tr = self.outbox.popleft()
            if tr.channel is None:
                tr.channel = self.channels.dial(tr.peer)  # clean: near miss, _close hangs up later
            if tr.channel is None:
                self.outbox.append(tr)
                continue
            ok = tr.channel.write(self.pages.view(tr.pages[tr.offset]))
            tr.offset += 1
            if not ok or tr.offset == len(tr.pages):
                self._close(tr)
                finished += ok
                continue
            self.outbox.append(tr)
        return finished

    def _close(self, tr: Transfer) -> None:
        if tr.channel is not None:
            self.channels.hang_up(tr.channel)
            tr.channel = None
        self.pages.drop(tr.pages)
        self.stats.by_peer[tr.peer] = self.stats.by_peer.get(tr.peer, 0) + 1

    def cancel(self, rid: str) -> bool:
        for tr in list(self.outbox):
            if tr.rid == rid:
                self.outbox.remove(tr)
                self._close(tr)
                return True
        return False

    def push_now(self, peer: str, npages: int) -> bool:
        pages = self.pages.grab(npages)  # leak: not dropped when no channel can be dialled
        if pages is None:
            return False
        channel = self.channels.dial(peer)  # clean: hung up after the loop
        if channel is None:
            log.info("no channel to %s", peer)
            return False
        sent = sum(channel.write(self.pages.view(p)) for p in pages)
        self.channels.hang_up(channel)
        self.pages.drop(pages)
        return sent == npages

    def push_with_retry(self, peers: list[str], npages: int, attempts: int) -> bool:
        pages = self.pages.grab(npages)  # clean: dropped after the loop
        if pages is None:
            return False
        ok = False
        for attempt in range(attempts):
            channel = self.channels.dial_any(peers)  # leak: a failed write goes round again with it dialled
            if channel is None:
                continue
            if not all(channel.write(self.pages.view(p)) for p in pages):
                log.warning("attempt %d to %s failed", attempt, channel.peer)
                continue
            self.channels.hang_up(channel)
            ok = True
            break
        self.pages.drop(pages)
        return ok
