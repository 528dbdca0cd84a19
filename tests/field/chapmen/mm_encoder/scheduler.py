"""Per-request bookkeeping of pinned embeddings."""
from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import DefaultDict, Dict, List, Optional

from .cache import EncoderCache, Entry
from .runner import EncoderRunner


@dataclass
class MMItem:
    key: str
    data: bytes
    position: int


@dataclass
class MMRequest:
    rid: str
    items: List[MMItem]
    pinned: List[Entry] = field(default_factory=list)
    thumbnail: Optional[Entry] = None
    computed: int = 0


class MMScheduler:
    def __init__(self, cache: EncoderCache, runner: EncoderRunner) -> None:
        self.cache = cache
        self.runner = runner
        self.requests: Dict[str, MMRequest] = {}
        self.prefetched: DefaultDict[str, List[Entry]] = defaultdict(list)

    def schedule(self, req: MMRequest) -> bool:
        for item in req.items[len(req.pinned):]:
            entry = self.runner.fetch(item)  # clean: appended to the request, finish() unpins
            if entry is None:
                return False
            req.pinned.append(entry)
        self.requests[req.rid] = req
        return True

    def add_thumbnail(self, req: MMRequest, item: MMItem) -> None:
        req.thumbnail = self.runner.fetch(item)  # leak: neither progress() nor finish() unpins the thumbnail

    def progress(self, rid: str, tokens: int) -> None:
        """Items that lie entirely in the computed part are not needed again."""
        req = self.requests[rid]
        req.computed += tokens
        while req.pinned and req.items[0].position + req.pinned[0].slots <= req.computed:
            req.items.pop(0)
            self.cache.unpin(req.pinned.pop(0))

    def finish(self, req: MMRequest) -> None:
        self.requests.pop(req.rid, None)
        for entry in req.pinned:
            self.cache.unpin(entry)
        req.pinned.clear()
        for entry in self.prefetched.pop(req.rid, []):
            self.cache.unpin(entry)

    def prefetch(self, rid: str, item: MMItem) -> bool:
        entry = self.runner.fetch(item)  # clean: near miss, kept under rid, finish() unpins
        if entry is None:
            return False
        self.prefetched[rid].append(entry)
        return True

    def repin(self, req: MMRequest) -> bool:
        """After a preemption all items must be pinned anew."""
        fresh = self.cache.pin_all([i.key for i in req.items])  # clean: replaces the list which is unpinned
        if fresh is None:
            return False
        old, req.pinned = req.pinned, fresh
        for entry in old:
            self.cache.unpin(entry)
        return True
