"""Coordinates feature backfills.

The range of days of a backfill is handed out to workers as leases that have to be renewed. Every partition that runs
occupies a write ticket of the target store, which compacts itself to death when too many writers are active.

    lease     the right to compute one partition; it comes back by `finish`, by `abandon` or by expiry
    ticket    the right to write into one target store; it comes back by `TicketOffice.surrender`
"""
import contextlib
import datetime as dt
import logging
import random
import threading
import time
from dataclasses import dataclass
from typing import Callable, Dict, Iterator, List, Optional, Set

log = logging.getLogger("backfill")

Day = dt.date
Rows = List[dict]

class NoTicket(Exception):
    """The store has as many writers as it can bear."""

class LeaseLost(Exception):
    """Somebody else has taken over the partition."""

class SourceMissing(Exception):
    """The raw events of that day are not there yet."""


@dataclass(eq=False)
class Ticket:
    store: str
    number: int


class TicketOffice:
    def __init__(self, quotas: Dict[str, int]) -> None:
        self._rolls: Dict[str, Set[int]] = {store: set(range(q)) for store, q in quotas.items()}
        self._cond = threading.Condition()

    def obtain(self, store: str, patience: float = 30.0) -> Ticket:
        """Wait for a ticket, and raise NoTicket when patience runs out."""
        with self._cond:
            if not self._cond.wait_for(lambda: self._rolls[store], timeout=patience):
                raise NoTicket(store)
            number = self._rolls[store].pop()  # clean: inside of the ticket that is returned
        return Ticket(store, number)

    def obtain_any(self, stores: List[str]) -> Optional[Ticket]:
        """A ticket for any of several replicas."""
        with self._cond:
            for store in stores:
                if self._rolls[store]:
                    return Ticket(store, self._rolls[store].pop())  # clean: returned inside of the ticket
        return None

    def surrender(self, ticket: Ticket) -> None:
        with self._cond:
            self._rolls[ticket.store].add(ticket.number)
            self._cond.notify_all()

    def close_store(self, store: str) -> int:
        """Collect all tickets that are not out, so that no new writer can start."""
        with self._cond:
            collected = 0
            while self._rolls[store]:
                self._rolls[store].pop()  # leak: the numbers collected here are thrown away, open_store() brings none of them back
                collected += 1
        log.info("%s: %d tickets collected", store, collected)
        return collected

    def open_store(self, store: str) -> None:
        with self._cond:
            self._rolls.setdefault(store, set())
            self._cond.notify_all()


@dataclass(eq=False)
class Lease:
    day: Day
    holder: str
    until: float


class Board:
    """Which partitions are open, which are leased and which are done."""

    def __init__(self, first: Day, last: Day, ttl: float = 120.0) -> None:
        self.ttl = ttl
        n = (last - first).days + 1
        self._open: List[Day] = [first + dt.timedelta(days=i) for i in range(n)]
        self._leased: Dict[Day, Lease] = {}
        self._done: Set[Day] = set()
        self._lock = threading.Lock()

    def next(self, holder: str) -> Optional[Lease]:
        with self._lock:
            self._sweep()
            if not self._open:
                return None
            day = self._open.pop(random.randrange(len(self._open)))  # clean: listed as leased, expiry brings it back
            self._leased[day] = Lease(day, holder, time.time() + self.ttl)
            return self._leased[day]

    def next_before(self, holder: str, limit: Day) -> Optional[Lease]:
        """For features that depend on earlier days."""
        with self._lock:
            self._sweep()
            self._open.sort(reverse=True)
            while self._open:
                day = self._open.pop()  # leak: the first day that is not before the limit is taken off the board and then dropped
                if day >= limit:
                    break
                self._leased[day] = Lease(day, holder, time.time() + self.ttl)
                return self._leased[day]
        return None

    def _sweep(self) -> None:
        now = time.time()
        for day, lease in list(self._leased.items()):
            if now >= lease.until:
                log.warning("%s did not renew %s", lease.holder, day)
                del self._leased[day]
                self._open.append(day)

    def renew(self, lease: Lease) -> None:
        with self._lock:
            if self._leased.get(lease.day) is not lease:
                raise LeaseLost(str(lease.day))
            lease.until = time.time() + self.ttl

    def finish(self, lease: Lease) -> None:
        with self._lock:
            if self._leased.get(lease.day) is not lease:
                raise LeaseLost(str(lease.day))
            del self._leased[lease.day]
            self._done.add(lease.day)

    def abandon(self, lease: Lease) -> None:
        with self._lock:
            if self._leased.get(lease.day) is lease:
                del self._leased[lease.day]
                self._open.append(lease.day)


class Writer:
    """A writing session with a target store; owns the ticket that it was opened with."""

    def __init__(self, office: TicketOffice, ticket: Ticket, sink) -> None:
        self.office, self.ticket, self.sink = office, ticket, sink
        self.rows = 0

    def write(self, rows: Rows) -> None:
        self.sink.put(self.ticket.store, rows)
        self.rows += len(rows)

    def close(self) -> None:
        self.sink.flush(self.ticket.store)
        self.office.surrender(self.ticket)


class Worker(threading.Thread):
    def __init__(self, name: str, board: Board, office: TicketOffice, source, sink, store: str, compute: Callable[[Rows], Rows]) -> None:
        super().__init__(name=name, daemon=True)
        self.board, self.office = board, office
        self.source, self.sink, self.store = source, sink, store
        self.compute = compute
        self.halt = threading.Event()

    def run(self) -> None:
        while not self.halt.is_set():
            lease = self.board.next(self.name)  # clean: near miss, finished or abandoned, or lost to somebody who has it now
            if lease is None:
                break
            try:
                self.partition(lease)
                self.board.finish(lease)
            except LeaseLost:
                log.info("%s: lost %s", self.name, lease.day)
            except (SourceMissing, NoTicket) as exc:
                log.info("%s: %s: %r", self.name, lease.day, exc)
                self.board.abandon(lease)
                self.halt.wait(1.0)

    def partition(self, lease: Lease) -> None:
        ticket = self.office.obtain(self.store)  # leak: SourceMissing, and LeaseLost from renew(), leave before the ticket is surrendered, run() knows nothing of it
        rows = self.source.read(lease.day)
        if rows is None:
            raise SourceMissing(str(lease.day))
        for i in range(0, len(rows), 10_000):
            self.board.renew(lease)
            self.sink.put(self.store, self.compute(rows[i:i + 10_000]))
        self.office.surrender(ticket)


@contextlib.contextmanager
def writing(office: TicketOffice, store: str, sink) -> Iterator[Writer]:
    writer = Writer(office, office.obtain(store), sink)  # clean: the writer owns it and is closed in the finally
    try:
        yield writer
    finally:
        writer.close()


def open_writer(office: TicketOffice, stores: List[str], sink, probe: Callable[[str], bool]) -> Optional[Writer]:
    """A writer for the first replica that is healthy."""
    left = list(stores)
    while left:
        ticket = office.obtain_any(left)  # clean: near miss, surrendered before the next replica is tried, otherwise owned by the writer
        if ticket is None:
            return None
        if probe(ticket.store):
            return Writer(office, ticket, sink)
        left.remove(ticket.store)
        office.surrender(ticket)
    return None


def repair(office: TicketOffice, stores: List[str], sink, probe: Callable[[str], bool], chunks: Iterator[Rows]) -> int:
    """Write corrected rows; stops at the first empty chunk."""
    writer = open_writer(office, stores, sink, probe)  # leak: an empty chunk returns from the middle of the loop, the writer is not closed and keeps its ticket
    if writer is None:
        return 0
    for rows in chunks:
        if not rows:
            return writer.rows
        writer.write(rows)
    writer.close()
    return writer.rows


def backfill_one(board: Board, office: TicketOffice, day_source, sink, store: str) -> bool:
    """Used by the command line: exactly one partition, in the foreground."""
    lease = board.next("cli")  # clean: abandoned in the handler or finished
    if lease is None:
        return False
    try:
        with writing(office, store, sink) as writer:  # clean: with
            writer.write(day_source.read(lease.day) or [])
    except NoTicket:
        board.abandon(lease)
        return False
    board.finish(lease)
    return True


def mirror_day(office: TicketOffice, source, sink, day: Day, primary: str, secondary: str) -> None:
    """Both stores get the same rows, or neither."""
    first = office.obtain(primary)  # leak: NoTicket for the secondary store is raised while the primary's ticket is held
    second = office.obtain(secondary, patience=5.0)  # clean: surrendered in the finally
    try:
        rows = source.read(day) or []
        sink.put(primary, rows)
        sink.put(secondary, rows)
    finally:
        office.surrender(second)
        office.surrender(first)
