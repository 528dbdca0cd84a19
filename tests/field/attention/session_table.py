"""Chat sessions of a tiny inference server."""
import time
import uuid
from dataclasses import dataclass, field
from typing import Dict, List, Optional


class ContextRegistry:
    """Numbered model contexts; register gives an id, deregister takes it back."""

    def __init__(self, n: int):
        self._busy = 0
        self._mask = [0] * n

    def register(self) -> int:
        for i, m in enumerate(self._mask):
            if not m:
                self._mask[i] = 1
                self._busy += 1
                return i
        return -1

    def deregister(self, ctx: int) -> None:
        self._mask[ctx] = 0
        self._busy -= 1


@dataclass
class Session:
    sid: str
    ctx: int
    user: str
    touched: float = field(default_factory=time.time)
    history: List[str] = field(default_factory=list)


class SessionTable:
    def __init__(self, registry: ContextRegistry, max_per_user: int = 3, ttl: float = 600.0):
        self.registry = registry
        self.max_per_user = max_per_user
        self.ttl = ttl
        self.sessions: Dict[str, Session] = {}
        self.parked: Dict[str, int] = {}
        self.closed = False

    def _count(self, user: str) -> int:
        return sum(1 for s in self.sessions.values() if s.user == user)

    def create(self, user: str) -> Optional[Session]:
        if self._count(user) >= self.max_per_user:
            return None
        ctx = self.registry.register()  # clean: -1 ends early, otherwise owned by the stored session
        if ctx < 0:
            return None
        s = Session(uuid.uuid4().hex, ctx, user)
        self.sessions[s.sid] = s
        return s

    def create_checked(self, user: str) -> Optional[Session]:
        ctx = self.registry.register()  # leak: the quota test comes after the registration and returns without undoing it
        if ctx < 0:
            return None
        if self._count(user) >= self.max_per_user:
            return None
        s = Session(uuid.uuid4().hex, ctx, user)
        self.sessions[s.sid] = s
        return s

    def create_or_reap(self, user: str) -> Session:
        ctx = self.registry.register()  # clean: near miss, a negative id means nothing is held when it is rebound
        if ctx < 0:
            self.reap(time.time())
            ctx = self.registry.register()  # clean: stored in the session, or nothing was granted
        if ctx < 0:
            raise RuntimeError("server full")
        s = Session(uuid.uuid4().hex, ctx, user)
        self.sessions[s.sid] = s
        return s

    def drop(self, sid: str) -> bool:
        s = self.sessions.pop(sid, None)
        if s is None:
            return False
        self.registry.deregister(s.ctx)
        return True

    def reap(self, now: float) -> int:
        stale = [s.sid for s in self.sessions.values() if now - s.touched > self.ttl]
        for sid in stale:
            self.drop(sid)
        return len(stale)

    def park(self, key: str) -> bool:
        ctx = self.registry.register()  # leak: close clears the parked table without deregistering
        if ctx < 0:
            return False
        self.parked[key] = ctx
        return True

    def one_shot(self, prompt: str) -> str:
        ctx = self.registry.register()  # clean: deregistered after generation
        if ctx < 0:
            return ""
        out = self._generate(ctx, prompt)
        self.registry.deregister(ctx)
        return out

    def one_shot_limited(self, prompt: str, limit: int) -> str:
        ctx = self.registry.register()  # leak: raising for a long prompt leaves the context registered
        if ctx < 0:
            return ""
        if len(prompt) > limit:
            raise ValueError("prompt too long")
        out = self._generate(ctx, prompt)
        self.registry.deregister(ctx)
        return out

    def compare(self, prompt: str, n: int) -> List[str]:
        ids = [self.registry.register() for _ in range(n)]  # clean: near miss, granted ids all pass through the loop
        outs = []
        for c in ids:
            if c < 0:
                continue
            outs.append(self._generate(c, prompt))
            self.registry.deregister(c)
        return outs

    def vote(self, prompt: str, n: int) -> Optional[str]:
        seen: Dict[str, int] = {}
        for _ in range(n):
            c = self.registry.register()  # leak: an early majority returns from inside the loop with c registered
            if c < 0:
                break
            ans = self._generate(c, prompt)
            seen[ans] = seen.get(ans, 0) + 1
            if seen[ans] > n // 2:
                return ans
            self.registry.deregister(c)
        return max(seen, key=seen.get) if seen else None

    def _generate(self, ctx: int, prompt: str) -> str:
        return prompt[::-1][: 16 + ctx]

    def close(self) -> None:
        if self.closed:
            return
        for s in self.sessions.values():
            self.registry.deregister(s.ctx)
        self.sessions.clear()
        self.parked.clear()
        self.closed = True


def chat(table: SessionTable, user: str, lines: List[str]) -> List[str]:
    s = table.create(user)  # clean: near miss, the table still owns the session and drop is called
    if s is None:
        return []
    replies = []
    for ln in lines:
        s.history.append(ln)
        replies.append(table._generate(s.ctx, ln))
    table.drop(s.sid)
    return replies
