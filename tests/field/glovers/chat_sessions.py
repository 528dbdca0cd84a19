"""Chat sessions that keep their KV pages between turns."""
from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field


class PageArena:
    def __init__(self, pages: int):
        self._free = set(range(pages))
        self._lock = threading.Lock()

    def alloc(self, n: int) -> list[int] | None:
        with self._lock:
            if len(self._free) < n:
                return None
            return [self._free.pop() for _ in range(n)]

    def dealloc(self, pages: list[int]) -> None:
        with self._lock:
            self._free.update(pages)


class Shared:
    """A reference counted run of pages, e.g. a system prompt."""

    def __init__(self, arena: PageArena, pages: list[int]):
        self.arena = arena
        self.pages = pages
        self.refs = 0

    def retain(self) -> "Shared":
        self.refs += 1
        return self

    def drop(self) -> None:
        self.refs -= 1
        if self.refs == 0:
            self.arena.dealloc(self.pages)


@dataclass
class Session:
    sid: str
    pages: list[int] = field(default_factory=list)
    system: Shared | None = None
    draft: list[int] | None = None
    touched: float = field(default_factory=time.monotonic)
    pinned: bool = False


class SessionStore:
    def __init__(self, arena: PageArena):
        self.arena = arena
        self.sessions: dict[str, Session] = {}
        self.prompts: dict[str, Shared] = {}

    def register_prompt(self, name: str, pages_needed: int) -> bool:
        if name in self.prompts:
            return True
        pages = self.arena.alloc(pages_needed)  # clean: near miss, the last drop of Shared deallocates
        if pages is None:
            return False
        self.prompts[name] = Shared(self.arena, pages).retain()  # clean: unregister_prompt drops it
        return True

    def unregister_prompt(self, name: str) -> None:
        shared = self.prompts.pop(name, None)
        if shared is not None:
            shared.drop()

    def open(self, sid: str, prompt: str | None) -> Session:
        if sid in self.sessions:
            return self.sessions[sid]
        session = Session(sid)
        shared = self.prompts.get(prompt) if prompt else None
        if shared is not None:
            session.system = shared.retain()  # clean: _drop_system in close and expire
        self.sessions[sid] = session
        return session

    def extend(self, session: Session, n: int) -> bool:
        pages = self.arena.alloc(n)  # clean: near miss, expiring may fail, what was got goes into session.pages
        if pages is None:
            self.expire(max_age=60.0)
            pages = self.arena.alloc(n)  # clean: into session.pages
        if pages is None:
            return False
        session.pages.extend(pages)
        session.touched = time.monotonic()
        return True

    def _drop_system(self, session: Session) -> None:
        if session.system is not None:
            session.system.drop()
            session.system = None

    def close(self, sid: str) -> None:
        session = self.sessions.pop(sid, None)
        if session is None:
            return
        self._release(session)

    def _release(self, session: Session) -> None:
        self.arena.dealloc(session.pages)
        session.pages = []
        self._drop_system(session)

    def expire(self, max_age: float) -> int:
        now = time.monotonic()
        old = [s for s in self.sessions.values() if now - s.touched > max_age and not s.pinned]
        for session in old:
            self.close(session.sid)
        return len(old)

    # ---- drafts of an answer that is being written --------------------------------
    def start_draft(self, session: Session, n: int) -> bool:
        if session.draft is not None:
            return True
        session.draft = self.arena.alloc(n)  # leak: discard_draft sets it to None and keeps the pages allocated
        return session.draft is not None

    def commit_draft(self, session: Session) -> None:
        if session.draft is not None:
            session.pages.extend(session.draft)
            session.draft = None

    def discard_draft(self, session: Session) -> None:
        session.draft = None
        session.touched = time.monotonic()

    # ---- other work --------------------------------------------------------------------
    def change_prompt(self, session: Session, name: str) -> bool:
        shared = self.prompts.get(name)
        if shared is None:
            return False
        handle = shared.retain()  # leak: an unchanged prompt returns with the reference taken
        if session.system is handle:
            return True
        self._drop_system(session)
        session.system = handle
        return True

    def branch(self, session: Session, sid: str) -> Session | None:
        if sid in self.sessions:
            return None
        pages = self.arena.alloc(len(session.pages))  # clean: in the child, which close releases
        if pages is None:
            return None
        child = Session(sid, pages)
        if session.system is not None:
            child.system = session.system.retain()  # clean: near miss, _drop_system under the same condition
        self.sessions[sid] = child
        return child

    def measure(self, session: Session) -> int:
        """Pages that a copy would need beyond what is there; 0 if it fits."""
        need = len(session.pages)
        got = self.arena.alloc(need)  # leak: that it fits is the answer and the pages stay allocated
        if got is None:
            return need
        return 0

    def score(self, session: Session, model, candidates: list[list[int]]) -> list[float]:
        scores = []
        for cand in candidates:
            pages = self.arena.alloc(1 + len(cand) // 16)  # clean: deallocated in the finally of each turn
            if pages is None:
                scores.append(float("-inf"))
                continue
            try:
                if not cand:
                    continue
                scores.append(model.score(session.pages + pages, cand))
            finally:
                self.arena.dealloc(pages)
        return scores


class Turn:
    """with Turn(store, session, n) as turn: pages for one answer, kept on accept()."""

    def __init__(self, store: SessionStore, session: Session, n: int):
        self.store = store
        self.session = session
        self.n = n
        self.pages: list[int] | None = None
        self.accepted = False

    def __enter__(self) -> "Turn":
        self.pages = self.store.arena.alloc(self.n)  # clean: near miss, accepted into the session or deallocated
        return self

    def accept(self) -> None:
        if self.pages is not None:
            self.session.pages.extend(self.pages)
            self.accepted = True

    def __exit__(self, exc_type, exc, tb) -> None:
        if self.accepted or self.pages is None:
            return
        self.store.arena.dealloc(self.pages)


def answer(store: SessionStore, session: Session, model) -> str:
    with Turn(store, session, 8) as turn:  # clean: near miss, kept by accept or deallocated by __exit__
        if turn.pages is None:
            return ""
        text = model.generate(session.pages, turn.pages)
        if text:
            turn.accept()
        return text


def vote(store: SessionStore, model, session: Session, n: int) -> str:
    """Best of n answers; the pages of the best one stay in the session."""
    best: tuple[float, list[int], str] | None = None
    for _ in range(n):
        pages = store.arena.alloc(8)  # leak: a better answer replaces the best one without deallocating its pages
        if pages is None:
            break
        text, score = model.generate_scored(session.pages, pages)
        if best is not None and score <= best[0]:
            store.arena.dealloc(pages)
            continue
        best = (score, pages, text)
    if best is None:
        return ""
    session.pages.extend(best[1])
    return best[2]


def vote_strict(store: SessionStore, model, session: Session, n: int) -> str:
    kept: list[int] = []
    top, answer_text = float("-inf"), ""
    for _ in range(n):
        pages = store.arena.alloc(8)  # clean: near miss, the loser is deallocated whichever it is
        if pages is None:
            break
        text, score = model.generate_scored(session.pages, pages)
        if score > top:
            pages, kept = kept, pages
            top, answer_text = score, text
        store.arena.dealloc(pages)
    session.pages.extend(kept)
    return answer_text
