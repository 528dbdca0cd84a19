"""Chat sessions on a fixed number of seats (one seat is one resident cache row)."""
from __future__ import annotations

import heapq
import itertools
import threading
import time
from dataclasses import dataclass, field
from typing import Dict, List, NamedTuple, Optional, Tuple


class Seat(NamedTuple):
    row: int
    generation: int


class SeatTable:
    """Seats come from a min-heap so low rows stay hot."""

    def __init__(self, rows: int) -> None:
        self._heap = list(range(rows))
        self._taken: Dict[int, str] = {}
        self._gen = itertools.count()
        self._mutex = threading.Lock()

    def occupy(self, who: str) -> Optional[Seat]:
        with self._mutex:
            if not self._heap:
                return None
            row = heapq.heappop(self._heap)
            self._taken[row] = who
            return Seat(row, next(self._gen))

    def vacate(self, seat: Seat) -> None:
        with self._mutex:
            del self._taken[seat.row]
            heapq.heappush(self._heap, seat.row)

    def occupy_near(self, who: str, row: int) -> Optional[Seat]:
        """A seat at most two rows away, or None."""
        seat = self.occupy(who)  # leak: a seat too far away is thrown away with the None
        if seat is None or abs(seat.row - row) > 2:
            return None
        return seat

    def occupy_below(self, who: str, row: int) -> Optional[Seat]:
        seat = self.occupy(who)  # clean: near miss, a seat too high is vacated before None is returned
        if seat is not None and seat.row >= row:
            self.vacate(seat)
            return None
        return seat

    @property
    def taken(self) -> int:
        return len(self._taken)


@dataclass
class Session:
    sid: str
    seat: Optional[Seat] = None
    owns_seat: bool = False
    parent: Optional["Session"] = None
    turns: List[str] = field(default_factory=list)
    seen: float = field(default_factory=time.monotonic)


class SessionManager:
    def __init__(self, seats: SeatTable, ttl: float) -> None:
        self.seats = seats
        self.ttl = ttl
        self._by_id: Dict[str, Session] = {}
        self._guests: Dict[str, Seat] = {}

    def open(self, sid: str) -> Session:
        self.close(sid)
        session = Session(sid)
        session.seat = self.seats.occupy(sid)  # clean: moved into the session, close and expire go through _drop
        session.owns_seat = session.seat is not None
        self._by_id[sid] = session
        return session

    def fork(self, sid: str, new_sid: str) -> Session:
        if new_sid in self._by_id:
            raise KeyError(new_sid)
        parent = self._by_id[sid]
        child = Session(new_sid, seat=parent.seat, owns_seat=False, parent=parent)
        self._by_id[new_sid] = child
        return child

    def _drop(self, session: Session) -> None:
        if session.owns_seat and session.seat is not None:
            self.seats.vacate(session.seat)
        session.seat = None
        session.owns_seat = False

    def close(self, sid: str) -> None:
        session = self._by_id.pop(sid, None)
        if session is not None:
            self._drop(session)

    def expire(self, now: float) -> int:
        stale = [s for s in self._by_id.values() if now - s.seen > self.ttl]
        for session in stale:
            del self._by_id[session.sid]
            self._drop(session)
        return len(stale)

    def turn(self, sid: Optional[str], text: str) -> str:
        """Runs one turn; without a session it sits down only for the turn."""
        session = self._by_id.get(sid) if sid else None
        temporary = session is None
        if temporary:
            seat = self.seats.occupy("anon")  # clean: near miss, vacated under the same flag below
        else:
            seat = session.seat
        if seat is None:
            return "busy"
        reply = f"{seat.row}:{text}"
        if session is not None:
            session.turns.append(reply)
        if temporary:
            self.seats.vacate(seat)
        return reply

    def regenerate(self, sid: str, isolated: bool) -> Optional[str]:
        session = self._by_id[sid]
        seat = session.seat
        borrowed = False
        if isolated:
            seat = self.seats.occupy(sid + "/regen")  # leak: with no turns yet None is returned and the flag never looked at
            borrowed = seat is not None
        if seat is None or not session.turns:
            return None
        text = session.turns.pop() + "'"
        if borrowed:
            self.seats.vacate(seat)
        return text

    def rank(self, sid: str, texts: List[str], shared: bool) -> List[Tuple[int, str]]:
        seat = None if shared else self.seats.occupy(sid)  # clean: near miss, None and shared go together
        base = 0 if seat is None else seat.row
        ranked = sorted((base + len(t), t) for t in texts)
        if not shared and seat is not None:
            self.seats.vacate(seat)
        return ranked

    def invite(self, name: str) -> bool:
        seat = self.seats.occupy(name)  # leak: the name is already a guest, False returned and this seat dropped
        if seat is None:
            return False
        if name in self._guests:
            return False
        self._guests[name] = seat
        return True

    def leave(self, name: str) -> bool:
        seat = self._guests.pop(name, None)
        if seat is None:
            return False
        self.seats.vacate(seat)
        return True

    def move(self, session: Session) -> bool:
        """Gives the session a lower row where one is free."""
        if session.seat is None or not session.owns_seat:
            return False
        better = self.seats.occupy_below(session.sid, session.seat.row)  # clean: near miss, the session's former seat is vacated and this one stored
        if better is None:
            return False
        self.seats.vacate(session.seat)
        session.seat = better
        return True


class VoiceSession:
    """Holds up to two seats, one for speech and one for text."""

    def __init__(self, seats: SeatTable, name: str) -> None:
        self.seats = seats
        self.name = name
        self.speech: Optional[Seat] = None
        self.text: Optional[Seat] = None
        self.bilingual = False

    def start(self, bilingual: bool) -> bool:
        self.stop()
        self.bilingual = bilingual
        self.speech = self.seats.occupy(self.name)  # clean: stop vacates whatever speech holds
        if self.speech is None:
            return False
        if bilingual:
            self.text = self.seats.occupy(self.name)  # clean: near miss, stop is guarded by the field, not by the flag
        return True

    def stop(self) -> None:
        for seat in (self.speech, self.text):
            if seat is not None:
                self.seats.vacate(seat)
        self.speech = self.text = None


class MeetingSession:
    def __init__(self, seats: SeatTable) -> None:
        self.seats = seats
        self.host: Optional[Seat] = None
        self.aux: Optional[Seat] = None
        self.record = False

    def start(self, record: bool) -> None:
        self.stop()
        self.record = record
        self.host = self.seats.occupy("host")  # clean: stop vacates it
        if record:
            self.aux = self.seats.occupy("rec")  # leak: pause_recording clears the flag that stop goes by

    def pause_recording(self) -> None:
        self.record = False

    def stop(self) -> None:
        if self.host is not None:
            self.seats.vacate(self.host)
            self.host = None
        if self.record and self.aux is not None:
            self.seats.vacate(self.aux)
            self.aux = None


def main() -> None:
    table = SeatTable(8)
    mgr = SessionManager(table, ttl=10.0)
    mgr.open("a")  # clean: the manager keeps it, expire drops it
    mgr.fork("a", "b")
    print(mgr.turn("a", "hi"), mgr.turn(None, "yo"), mgr.rank("a", ["x", "yy"], False))
    print(mgr.invite("g"), mgr.leave("g"))
    voice = VoiceSession(table, "v")
    voice.start(True)
    voice.stop()
    mgr.close("b")
    print(mgr.expire(time.monotonic() + 60), table.taken)


if __name__ == "__main__":
    main()
