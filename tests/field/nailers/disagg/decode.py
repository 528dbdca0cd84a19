"""Decode worker: receives pages, hands them to the scheduler, frees them when requests end."""
from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Callable, Optional

from .transport import ChannelPool, PageRegistry


@dataclass
class Landing:
    rid: str
    pages: list[int]
    ready: bool = False
    deadline: float = 0.0
    on_done: list[Callable[[], None]] = field(default_factory=list)


class DecodeWorker:
    def __init__(self, pages: PageRegistry, channels: ChannelPool, ttl: float) -> None:
        self.pages = pages
        self.channels = channels
        self.ttl = ttl
        self.landings: dict[str, Landing] = {}
        self.active: dict[str, list[int]] = {}
        self.prefetched: dict[str, list[int]] = {}

    def announce(self, rid: str, npages: int) -> bool:
        """A prefill worker is about to send pages of `rid`."""
        if rid in self.landings:
            return True
        pages = self.pages.grab(npages)  # clean: in landings until activate() or expire()
        if pages is None:
            self.pages.when_free(lambda: self.announce(rid, npages))
            return False
        self.landings[rid] = Landing(rid, pages, deadline=time.monotonic() + self.ttl)
        return True

    def activate(self, rid: str) -> bool:
        landing = self.landings.get(rid)
        if landing is None or not landing.ready:
            return False
        del self.landings[rid]
        self._notify(landing)
        self.active.setdefault(rid, []).extend(landing.pages)
        return True

    @staticmethod
    def _notify(landing: Landing) -> None:
        callbacks, landing.on_done = landing.on_done, []
        for done in callbacks:
            done()

    def expire(self) -> int:
        now = time.monotonic()
        dead = [l for l in self.landings.values() if not l.ready and l.deadline < now]
        for landing in dead:
            del self.landings[landing.rid]
            self._notify(landing)
            self.pages.drop(landing.pages)
        return len(dead)

    def end(self, rid: str) -> None:
        pages = self.active.pop(rid, None)
        if pages:
            self.pages.drop(pages)

    def prefetch(self, rid: str, npages: int) -> bool:
        """Speculative landing area for a request likely to arrive."""
        if rid in self.prefetched:
            return True
        got = self.pages.grab(npages)  # leak: clear_prefetch() removes the entry without dropping the pages
        if got is None:
            return False
        self.prefetched[rid] = got
        return True

    def clear_prefetch(self, rid: str) -> None:
        if rid in self.prefetched:
            del self.prefetched[rid]

    def resize(self, rid: str, npages: int) -> bool:
        """Replace the pages of `rid` by a set of another size."""
        fresh = self.pages.grab(npages)  # clean: near miss, the old pages are dropped before the overwrite
        if fresh is None:
            return False
        old = self.active.get(rid)
        if old is not None:
            for src, dst in zip(old, fresh):
                self.pages.view(dst)[:] = self.pages.view(src)
            self.pages.drop(old)
        self.active[rid] = fresh
        return True

    def pull(self, rid: str, peer: str) -> bool:
        """Ask the peer to resend; acknowledged over the channel."""
        channel = self.channels.dial(peer)  # leak: a landing that is unknown returns with the channel
        if channel is None:
            return False
        landing: Optional[Landing] = self.landings.get(rid)
        if landing is None:
            return False
        for page in landing.pages:
            channel.write(self.pages.view(page))
        landing.ready = True
        self.channels.hang_up(channel)
        return True

    def read_once(self, rid: str, npages: int, sink: Callable[[memoryview], None]) -> bool:
        temp = self.pages.grab(npages)  # clean: near miss, the callback appended to on_done drops it
        if temp is None:
            return False
        landing = self.landings.get(rid)
        if landing is None:
            self.pages.drop(temp)
            return False
        landing.on_done.append(lambda: self.pages.drop(temp))
        for page in temp:
            sink(self.pages.view(page))
        return True

    def complete(self, rid: str) -> None:
        landing = self.landings.pop(rid, None)
        if landing is None:
            return
        self._notify(landing)
        self.pages.drop(landing.pages)
