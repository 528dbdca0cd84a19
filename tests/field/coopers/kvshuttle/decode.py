import time
from typing import Any, Dict, List, Optional, Tuple

from .agent import Agent, Channel
from .resources import PagePool


class DecodeWorker:
    def __init__(self, agent: Agent, pages: PagePool, page_size: int = 64) -> None:
        self.agent = agent
        self.pages = pages
        self.page_size = page_size
        self.waiting: Dict[str, Tuple[Channel, List[int], float]] = {}
        self.active: Dict[str, List[int]] = {}

    def expect(self, rid: str, peer: str, ntokens: int) -> bool:
        if rid in self.waiting:
            return True
        ch = self.agent.open_verified(peer)  # clean: near miss, closed when the pages are short, else kept in waiting
        if ch is None:
            return False
        pages = self.pages.alloc(ntokens // self.page_size + 1)  # leak: timeouts() closes the channel of an overdue entry but drops its pages
        if pages is None:
            self.agent.close_channel(ch)
            return False
        ch.link.sock.send(("expect", rid, pages, ch.slot))
        self.waiting[rid] = (ch, pages, time.monotonic())
        return True

    def arrived(self, rid: str) -> bool:
        entry = self.waiting.pop(rid, None)
        if entry is None:
            return False
        ch, pages, _ = entry
        self.agent.close_channel(ch)
        self.active.setdefault(rid, []).extend(pages)
        return True

    def timeouts(self, limit: float) -> List[str]:
        now = time.monotonic()
        late = [r for r, (_, _, t0) in self.waiting.items() if now - t0 > limit]
        for rid in late:
            ch, _pages, _t0 = self.waiting.pop(rid)
            self.agent.close_channel(ch)
        return late

    def extend(self, rid: str, n: int) -> bool:
        if rid not in self.active:
            return False
        got = self.pages.alloc(n)  # clean: joined to the pages of the active request
        if got is None:
            return False
        self.active[rid] += got
        return True

    def finish(self, rid: str) -> None:
        self.pages.free(self.active.pop(rid, []))

    def pull_prefix(self, peer: str, key: str, n: int) -> Optional[List[int]]:
        """Fetch a cached prefix from a peer; the caller adopts the pages."""
        pages = self.pages.alloc(n)  # clean: near miss, freed on a miss or without a channel, else returned
        if pages is None:
            return None
        ch = self.agent.open_channel(peer)  # clean: closed right after the one reply
        if ch is None:
            self.pages.free(pages)
            return None
        ch.link.sock.send(("pull", key, pages))
        hit: Any = ch.link.sock.recv()
        self.agent.close_channel(ch)
        if not hit:
            self.pages.free(pages)
            return None
        return pages

    def warm(self, rid: str, peer: str, key: str, n: int) -> bool:
        pages = self.pull_prefix(peer, key, n)  # leak: a request that ended in the meantime makes the function return without the pages
        if pages is None:
            return False
        if rid not in self.active:
            return False
        self.active[rid][:0] = pages
        return True
