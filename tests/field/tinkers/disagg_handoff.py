"""Prefill to decode handoff of the Ferry project: board, berths, layer permits, loans, peers."""
from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Dict, Iterator, List, Optional


class HandoffBoard:
    """Finished prefills wait here for their decoder. A posted one is collected or withdrawn."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._posted: Dict[str, tuple] = {}
        self._cv = threading.Condition()

    def post(self, rid: str, pages: List[int]) -> str:
        with self._cv:
            self._cv.wait_for(lambda: len(self._posted) < self._room)
            slip = f"{rid}:{uuid.uuid4().hex[:8]}"
            self._posted[slip] = (time.monotonic(), tuple(pages))
            self._cv.notify_all()
            return slip

    def collect(self, slip: str) -> tuple:
        with self._cv:
            _, pages = self._posted.pop(slip)
            self._cv.notify_all()
            return pages

    def withdraw(self, slip: str) -> bool:
        with self._cv:
            gone = self._posted.pop(slip, None) is not None
            self._cv.notify_all()
            return gone


def hand_over(board: HandoffBoard, rid: str, pages: List[int], decoder) -> bool:
    slip = board.post(rid, pages)  # leak: a busy decoder never learns the slip and it is not withdrawn
    if decoder.busy():
        return False
    decoder.notify(rid, slip)
    return True


def hand_over_or_keep(board: HandoffBoard, rid: str, pages: List[int], decoder) -> bool:
    slip = board.post(rid, pages)  # clean: withdrawn when the decoder is gone, else the decoder collects it
    try:
        decoder.notify(rid, slip)
    except ConnectionError:
        board.withdraw(slip)
        return False
    return True


@dataclass(frozen=True)
class Booking:
    number: int
    node: str
    berths: int
    made: float = field(default_factory=time.monotonic)


class BerthOffice:
    """Decode berths at the nodes, booked ahead by number and unbooked by that number."""

    def __init__(self, berths: Dict[str, int]) -> None:
        self._left = dict(berths)
        self._book: Dict[int, Booking] = {}
        self._last = 0

    def book(self, node: str, berths: int = 1) -> Optional[Booking]:
        if self._left.get(node, 0) < berths:
            return None
        self._left[node] -= berths
        self._last += 1
        booking = Booking(self._last, node, berths)
        self._book[booking.number] = booking
        return booking

    def unbook(self, number: int) -> None:
        booking = self._book.pop(number)
        self._left[booking.node] += booking.berths

    def longest_held(self) -> Optional[Booking]:
        return min(self._book.values(), key=lambda b: b.made, default=None)


def choose_berth(office: BerthOffice, nodes: List[str], latency) -> Optional[Booking]:
    best: Optional[Booking] = None
    for node in nodes:
        booking = office.book(node)  # leak: the former best is replaced without being unbooked
        if booking is None:
            continue
        if best is None or latency(node) < latency(best.node):
            best = booking
        else:
            office.unbook(booking.number)
    return best


def try_node(office: BerthOffice, node: str, call) -> Optional[str]:
    booking = office.book(node, 2)  # clean: unbooked by its number on every way
    if booking is None:
        return None
    try:
        return call(node)
    except ConnectionError:
        return None
    finally:
        office.unbook(booking.number)


@dataclass
class Job:
    rid: str
    booking: Optional[Booking] = None


class Dispatcher:
    def __init__(self, office: BerthOffice) -> None:
        self.office = office
        self.jobs: Dict[str, Job] = {}

    def assign(self, job: Job, node: str) -> bool:
        if job.rid in self.jobs:
            return False
        job.booking = self.office.book(node)  # clean: kept in the job's record, unbooked in complete
        if job.booking is None:
            return False
        self.jobs[job.rid] = job
        return True

    def complete(self, rid: str) -> None:
        job = self.jobs.pop(rid)
        self.office.unbook(job.booking.number)


class LayerPermits:
    """Permits for layers in transfer, taken in bundles and returned in bundles."""

    def __init__(self, total: int) -> None:
        self._permits = deque(range(total))
        self._short = 0

    def take_bundle(self, n: int) -> List[int]:
        if len(self._permits) < n:
            self._short += 1
            return []
        return [self._permits.popleft() for _ in range(n)]

    def return_bundle(self, bundle: List[int]) -> None:
        self._permits.extend(bundle)


def push_layers(permits: LayerPermits, layers, wire) -> int:
    bundle = permits.take_bundle(len(layers))  # leak: only the permits of layers sent before the stop are returned
    sent = []
    for permit, layer in zip(bundle, layers):
        if not wire.push(layer):
            break
        sent.append(permit)
    permits.return_bundle(sent)
    return len(sent)


def push_half(permits: LayerPermits, layers, wire) -> None:
    bundle = permits.take_bundle(len(layers) // 2)  # clean: near miss, the bundle comes back in two parts
    if not bundle:
        return
    middle = len(bundle) // 2
    wire.push_many(layers[:middle])
    permits.return_bundle(bundle[:middle])
    wire.push_many(layers[middle:len(bundle)])
    permits.return_bundle(bundle[middle:])


class ScratchLoans:
    """Scratch pages lent by a generator; what one turn lends is called in when the next begins."""

    def __init__(self, pages: int) -> None:
        self._pages = set(range(pages))
        self.lent = 0

    def loan(self) -> int:
        if not self._pages:
            raise LookupError("no scratch page")
        self.lent += 1
        return self._pages.pop()

    def call_in(self, page: int) -> None:
        if page in self._pages:
            raise ValueError("page is in the house")
        self.lent -= 1
        self._pages.add(page)

    def loans(self, n: int) -> Iterator[int]:
        for _ in range(n):
            page = self.loan()
            try:
                yield page
            finally:
                self.call_in(page)

    @contextlib.contextmanager
    def several(self, n: int):
        pages = [self.loan() for _ in range(n)]
        try:
            yield pages
        finally:
            for page in pages:
                self.call_in(page)


def quantize(loans: ScratchLoans, chunks, kernel) -> int:
    done = 0
    for page, chunk in zip(loans.loans(len(chunks)), chunks):  # clean: the generator calls each page in
        if chunk is None:
            continue
        kernel.quantize(page, chunk)
        done += 1
    return done


def dequantize(loans: ScratchLoans, chunk, kernel):
    page = loans.loan()  # leak: a chunk of scale zero returns its zeros before the page is called in
    scale = kernel.scale(chunk)
    if scale == 0:
        return kernel.zeros(chunk)
    out = kernel.dequantize(page, chunk, scale)
    loans.call_in(page)
    return out


def merge(loans: ScratchLoans, a, b, kernel):
    with loans.several(2) as (left, right):  # clean: called in by the context manager
        kernel.load(left, a)
        kernel.load(right, b)
        return kernel.add(left, right)


@dataclass
class PeerSeat:
    peer: str
    ordinal: int


class PeerTable:
    """Peers that share a decode node. Seats are taken here and cleared by the reaper."""

    def __init__(self, per_peer: int) -> None:
        self.per_peer = per_peer
        self.seats: Dict[str, List[PeerSeat]] = defaultdict(list)
        self.lock = threading.Lock()

    def attach(self, peer: str) -> PeerSeat:
        with self.lock:
            row = self.seats[peer]
            if len(row) >= self.per_peer:
                raise ConnectionRefusedError(peer)
            seat = PeerSeat(peer, len(row))
            row.append(seat)
            return seat


class PeerReaper:
    def __init__(self, table: PeerTable) -> None:
        self._table = table

    def detach(self, seat: PeerSeat) -> None:
        with self._table.lock:
            self._table.seats[seat.peer].remove(seat)


def pull_once(table: PeerTable, reaper: PeerReaper, peer: str, pull) -> Optional[bytes]:
    try:
        seat = table.attach(peer)  # leak: an empty answer returns None with the seat attached
    except ConnectionRefusedError:
        return None
    data = pull(seat)
    if not data:
        return None
    reaper.detach(seat)
    return data


def pull_twice(table: PeerTable, reaper: PeerReaper, peer: str, pull) -> List[bytes]:
    parts = []
    for _ in range(2):
        seat = table.attach(peer)  # clean: the partner detaches it in finally at each turn
        try:
            data = pull(seat)
            if not data:
                break
            parts.append(data)
        finally:
            reaper.detach(seat)
    return parts


class RouteMemo:
    """Remembers the cheapest decoder for a prompt length. Forgetting is only a matter of size."""

    def __init__(self) -> None:
        self._routes: Dict[int, str] = {}

    def lookup(self, length: int, compute) -> str:
        bucket = length // 512
        if bucket not in self._routes:
            self._routes[bucket] = compute(bucket)
        return self._routes[bucket]

    def invalidate(self, length: int) -> None:
        self._routes.pop(length // 512, None)


def preferred(memo: RouteMemo, req, compute) -> Optional[str]:
    route = memo.lookup(len(req.tokens), compute)  # clean: a memo table
    if req.pinned_to:
        return req.pinned_to
    return route
