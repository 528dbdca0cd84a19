from __future__ import annotations

import threading
from typing import Callable, Optional

from .models import Assignment, Outcome, Session
from .workers import WorkerPark

Send = Callable[[Assignment, str], Outcome]


class SessionRoutes:
    def __init__(self, park: WorkerPark, send: Send, fallback_regions: list[str]) -> None:
        self.park = park
        self.send = send
        self.fallback_regions = fallback_regions
        self.sessions: dict[str, Session] = {}
        self._lock = threading.Lock()

    def _place(self, region: str) -> Optional[Assignment]:
        a = self.park.assign(region)  # clean: near miss, other regions are only asked when this is None
        if a is not None:
            return a
        for other in self.fallback_regions:
            a = self.park.assign(other)  # clean: the first one found is returned
            if a is not None:
                break
        return a

    def open(self, sid: str, region: str) -> Optional[Session]:
        with self._lock:  # clean: with statement
            if sid in self.sessions:
                return self.sessions[sid]
            a = self._place(region)  # clean: in the session until close
            if a is None:
                return None
            session = Session(sid, region, a)
            self.sessions[sid] = session
            return session

    def close(self, sid: str) -> None:
        with self._lock:  # clean: with statement
            session = self.sessions.pop(sid, None)
        if session is not None and session.assignment is not None:
            self.park.unassign(session.assignment)
            session.assignment = None

    def chat(self, sid: str, text: str) -> Outcome:
        session = self.sessions[sid]
        if session.assignment is None:
            return Outcome(410)
        out = self.send(session.assignment, text)
        if out.status == 503:
            replacement = self._place(session.region)  # leak: the session's first lane is not unassigned when replaced
            if replacement is None:
                return out
            session.assignment = replacement
            out = self.send(replacement, text)
        session.history.append(out.text)
        return out

    def one_shot(self, region: str, text: str) -> Outcome:
        a = self._place(region)  # leak: an oversized prompt is refused after the lane was taken
        if a is None:
            return Outcome(503)
        if len(text) > 100_000:
            return Outcome(413)
        out = self.send(a, text)
        self.park.unassign(a)
        return out

    def hedge(self, region: str, text: str) -> Outcome:
        first = self._place(region)  # clean: near miss, unassigned before the retry's lane is asked for
        if first is None:
            return Outcome(503)
        out = self.send(first, text)
        self.park.unassign(first)
        if out.status == 200:
            return out
        second = self._place(region)  # leak: the same worker again answers with the first outcome and keeps the lane
        if second is None:
            return out
        if second.worker.addr == first.worker.addr:
            return out
        out = self.send(second, text)
        self.park.unassign(second)
        return out
