"""Chat sessions keep a KV lease between turns."""
from __future__ import annotations

import logging
import time
from collections import OrderedDict
from typing import Dict, List, Optional

logger = logging.getLogger(__name__)


class KVLease:
    __slots__ = ("region", "tokens", "closed")

    def __init__(self, region: int) -> None:
        self.region = region
        self.tokens = 0
        self.closed = False


class KVRegions:
    def __init__(self, n: int) -> None:
        self._free = set(range(n))

    def lease(self) -> KVLease:
        if not self._free:
            raise LookupError("no KV region free")
        return KVLease(self._free.pop())

    def end_lease(self, lease: KVLease) -> None:
        if lease.closed:
            return
        lease.closed = True
        self._free.add(lease.region)

    @property
    def free_count(self) -> int:
        return len(self._free)


class Session:
    def __init__(self, sid: str, regions: KVRegions) -> None:
        self.sid = sid
        self.regions = regions
        self.main = regions.lease()  # clean: close ends it
        self.draft: Optional[KVLease] = None
        self.tools: List[KVLease] = []
        self.last_used = time.monotonic()

    def enable_draft(self) -> None:
        if self.draft is None:
            self.draft = self.regions.lease()  # leak: close never ends the draft lease

    def add_tool(self) -> KVLease:
        lease = self.regions.lease()  # clean: near miss, returned and also kept in tools, which close ends
        self.tools.append(lease)
        return lease

    def reset(self) -> None:
        self.regions.end_lease(self.main)
        self.main = self.regions.lease()  # clean: near miss, the one before has been ended

    def close(self) -> None:
        self.regions.end_lease(self.main)
        for t in self.tools:
            self.regions.end_lease(t)
        self.tools = []


class SessionStore:
    def __init__(self, regions: KVRegions, max_idle: float = 300.0) -> None:
        self.regions = regions
        self.max_idle = max_idle
        self.sessions: "OrderedDict[str, Session]" = OrderedDict()
        self.shared: Dict[str, KVLease] = {}

    def get_or_create(self, sid: str) -> Session:
        s = self.sessions.get(sid)
        if s is None:
            s = self.sessions[sid] = Session(sid, self.regions)  # clean: expire and shutdown close it
        s.last_used = time.monotonic()
        self.sessions.move_to_end(sid)
        return s

    def expire(self) -> int:
        now, n = time.monotonic(), 0
        while self.sessions:
            sid, s = next(iter(self.sessions.items()))
            if now - s.last_used < self.max_idle:
                break
            self.sessions.pop(sid).close()
            n += 1
        return n

    def shared_prefix(self, name: str) -> KVLease:
        lease = self.shared.get(name)
        if lease is None:
            lease = self.regions.lease()  # clean: near miss, the table keeps it until shutdown
            self.shared[name] = lease
        return lease

    def compact(self, name: str, text_len: int) -> bool:
        target = self.regions.lease()  # leak: an unchanged prefix returns False while target is leased
        source = self.shared.get(name)
        if source is None or source.tokens == text_len:
            return False
        target.tokens = text_len
        self.shared[name] = target
        self.regions.end_lease(source)
        return True

    def compact_when_needed(self, name: str, text_len: int) -> bool:
        source = self.shared.get(name)
        if source is None or source.tokens == text_len:
            return False
        target = self.regions.lease()  # clean: near miss, taken after the checks, replaces the ended source
        target.tokens = text_len
        self.shared[name] = target
        self.regions.end_lease(source)
        return True

    def count_tokens(self, text: str, tokenizer) -> int:
        try:
            lease = self.regions.lease()  # clean: ended after counting
        except LookupError:
            return -1
        lease.tokens = len(tokenizer.encode(text))
        n = lease.tokens
        self.regions.end_lease(lease)
        return n

    def warm(self, names: List[str]) -> None:
        for name in names:
            if self.regions.free_count == 0:
                logger.warning("stopped warming at %s", name)
                return
            tmp = self.regions.lease()  # leak: names that are shared already continue with tmp leased
            if name in self.shared:
                continue
            self.shared[name] = tmp

    def shutdown(self) -> None:
        for s in self.sessions.values():
            s.close()
        self.sessions.clear()
        for lease in self.shared.values():
            self.regions.end_lease(lease)
        self.shared.clear()
