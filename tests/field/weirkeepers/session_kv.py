"""KV of multi-turn sessions: retained between turns, with a readers/writer lock over compaction."""
from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Callable, Dict, Iterator, List, Optional

logger = logging.getLogger(__name__)


class ReadersWriter:
    def __init__(self) -> None:
        self._cond = threading.Condition()
        self._readers = 0
        self._writer = False

    def acquire_shared(self) -> None:
        with self._cond:
            self._cond.wait_for(lambda: not self._writer)
            self._readers += 1

    def release_shared(self) -> None:
        with self._cond:
            self._readers -= 1
            self._cond.notify_all()

    def acquire_exclusive(self) -> None:
        with self._cond:
            self._cond.wait_for(lambda: not self._writer and self._readers == 0)
            self._writer = True

    def release_exclusive(self) -> None:
        with self._cond:
            self._writer = False
            self._cond.notify_all()

    @contextmanager
    def exclusive(self, enabled: bool = True) -> Iterator[bool]:
        if enabled:
            self.acquire_exclusive()  # clean: near miss, released in finally when enabled
        try:
            yield enabled
        finally:
            if enabled:
                self.release_exclusive()


class SpanHeap:
    """Contiguous spans of token rows, first fit."""

    def __init__(self, rows: int) -> None:
        self._holes: List[List[int]] = [[0, rows]]

    def reserve_span(self, rows: int) -> Optional["Span"]:
        for hole in self._holes:
            if hole[1] >= rows:
                span = Span(self, hole[0], rows)
                hole[0] += rows
                hole[1] -= rows
                return span
        return None

    def _return(self, start: int, rows: int) -> None:
        self._holes.append([start, rows])
        self._holes.sort()


@dataclass
class Span:
    heap: SpanHeap
    start: int
    rows: int
    closed: bool = False

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.heap._return(self.start, self.rows)


@dataclass
class Session:
    name: str
    spans: List[Span] = field(default_factory=list)
    overflow: Optional[Span] = None
    touched: float = field(default_factory=time.monotonic)
    turns: int = 0

    def rows(self) -> int:
        return sum(s.rows for s in self.spans)

    def close(self) -> None:
        for span in self.spans:
            span.close()
        self.spans.clear()


class Turn:
    """One turn of a session, written into a span of its own until commit."""

    def __init__(self, session: Session, span: Span) -> None:
        self.session = session
        self.span: Optional[Span] = span
        self.written = 0

    def write(self, rows: int) -> int:
        self.written = min(self.span.rows, self.written + rows)
        return self.written

    def commit(self) -> None:
        self.session.spans.append(self.span)
        self.session.turns += 1
        self.span = None

    def abandon(self) -> None:
        if self.span is not None:
            self.span.close()
            self.span = None


class SessionStore:
    def __init__(self, heap: SpanHeap, keep: int) -> None:
        self.heap = heap
        self.keep = keep
        self.lock = ReadersWriter()
        self.sessions: "OrderedDict[str, Session]" = OrderedDict()

    def _session(self, name: str) -> Session:
        session = self.sessions.get(name)
        if session is None:
            session = self.sessions[name] = Session(name)
        self.sessions.move_to_end(name)
        session.touched = time.monotonic()
        return session

    def begin_turn(self, name: str, rows: int) -> Optional[Turn]:
        span = self.heap.reserve_span(rows)  # clean: in the turn, which is returned
        if span is None:
            self.expire(1)
            span = self.heap.reserve_span(rows)  # clean: near miss, rebinds None only
        return None if span is None else Turn(self._session(name), span)

    def serve(self, name: str, rows: int, decode: Callable[[Turn], bool]) -> int:
        turn = self.begin_turn(name, rows)  # clean: near miss, commit moves it to the session, else abandoned
        if turn is None:
            return 0
        written = turn.write(rows)
        if decode(turn):
            turn.commit()
        else:
            turn.abandon()
        return written

    def serve_greedy(self, name: str, rows: int, decode: Callable[[Turn], bool]) -> int:
        turn = self.begin_turn(name, rows)  # leak: a decode that fails neither commits nor abandons
        if turn is None:
            return 0
        if decode(turn):
            turn.commit()
            return rows
        logger.info("turn of %s gave nothing", name)
        return 0

    def add_overflow(self, name: str, rows: int) -> bool:
        session = self._session(name)
        if session.overflow is not None:
            return True
        session.overflow = self.heap.reserve_span(rows)  # leak: Session.close closes spans only
        return session.overflow is not None

    def expire(self, count: int) -> int:
        done = 0
        while self.sessions and done < count:
            _, session = self.sessions.popitem(last=False)
            session.close()
            done += 1
        return done

    def end(self, name: str) -> None:
        session = self.sessions.pop(name, None)
        if session is not None:
            session.close()

    # compaction and reading -------------------------------------------------

    def compact(self, name: str) -> int:
        self.lock.acquire_exclusive()  # leak: return 0 for a session in one piece
        session = self.sessions.get(name)
        if session is None:
            self.lock.release_exclusive()
            return 0
        if len(session.spans) < 2:
            return 0
        whole = self.heap.reserve_span(session.rows())  # clean: takes the place of the spans it merges
        if whole is not None:
            session.close()
            session.spans.append(whole)
        self.lock.release_exclusive()
        return 0 if whole is None else whole.rows

    def compact_idle(self, older: float) -> int:
        moved = 0
        now = time.monotonic()
        with self.lock.exclusive(enabled=bool(self.sessions)) as locked:  # clean: with
            if not locked:
                return 0
            for session in self.sessions.values():
                if now - session.touched < older or len(session.spans) < 2:
                    continue
                whole = self.heap.reserve_span(session.rows())  # clean: replaces the closed spans, or is None
                if whole is None:
                    break
                session.close()
                session.spans.append(whole)
                moved += 1
        return moved

    def largest(self) -> Optional[str]:
        self.lock.acquire_shared()  # leak: release only inside the if
        best = None
        if self.sessions:
            best = max(self.sessions.values(), key=Session.rows).name
            self.lock.release_shared()
        return best

    def copy_session(self, src: str, dst: str) -> bool:
        source = self.sessions.get(src)
        if source is None:
            return False
        fresh: List[Span] = []
        with ExitStack() as stack:
            for span in source.spans:
                twin = self.heap.reserve_span(span.rows)  # clean: near miss, on the stack until pop_all
                if twin is None:
                    return False
                stack.callback(twin.close)
                fresh.append(twin)
            stack.pop_all()
        self._session(dst).spans.extend(fresh)
        return True

    def clone_head(self, src: str, dst: str, limit: int) -> int:
        source = self.sessions.get(src)
        if source is None:
            return 0
        copied: List[Span] = []
        for span in source.spans:
            twin = self.heap.reserve_span(span.rows)  # leak: twins beyond the limit are sliced away
            if twin is None:
                break
            copied.append(twin)
        self._session(dst).spans.extend(copied[:limit])
        return min(limit, len(copied))
