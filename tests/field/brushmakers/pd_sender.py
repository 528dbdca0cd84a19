"""Prefill side of disaggregated serving: pushes finished KV to decode peers."""
from __future__ import annotations

import heapq
import logging
import threading
import time
from typing import Callable, Dict, List, Optional

log = logging.getLogger("pd.sender")


class PeerGone(ConnectionError):
    pass


class Ticket:
    """A lane of a transfer engine, good for one write at a time."""

    def __init__(self, lane: int) -> None:
        self.lane = lane
        self.room_id: Optional[int] = None
        self.started = 0.0

    def __lt__(self, other: "Ticket") -> bool:
        return self.lane < other.lane


class LanePool:
    """Lowest lane first, kept in a heap."""

    def __init__(self, lanes: int) -> None:
        self._heap = [Ticket(i) for i in range(lanes)]
        heapq.heapify(self._heap)
        self._cv = threading.Condition()

    def enter(self, timeout: Optional[float] = None) -> Optional[Ticket]:
        with self._cv:
            if not self._cv.wait_for(lambda: self._heap, timeout):
                return None
            t = heapq.heappop(self._heap)  # clean: returned to the caller
            t.started = time.monotonic()
            return t

    def enter_above(self, floor: int) -> Optional[Ticket]:
        with self._cv:
            if not self._heap:
                return None
            t = heapq.heappop(self._heap)  # leak: a lane below the floor is popped and never pushed again
            if t.lane < floor:
                return None
            return t

    def leave(self, t: Ticket) -> None:
        with self._cv:
            t.room_id = None
            heapq.heappush(self._heap, t)
            self._cv.notify()


class AuxSlots:
    """Metadata rows (first token, logprobs) registered for RDMA."""

    def __init__(self, n: int) -> None:
        self.free = set(range(n))

    def pick(self) -> Optional[int]:
        return self.free.pop() if self.free else None  # clean: returned to the caller

    def put(self, row: int) -> None:
        self.free.add(row)


class KVSender:
    def __init__(self, lanes: LanePool, aux: AuxSlots, engine) -> None:
        self.lanes = lanes
        self.aux = aux
        self.engine = engine
        self.pending: Dict[int, Ticket] = {}
        self.rows: Dict[int, int] = {}

    def send_async(self, room: int, blocks: List[int], peer: str, on_done: Callable) -> bool:
        t = self.lanes.enter(timeout=1.0)  # clean: near miss, the completion callback leaves it
        if t is None:
            return False

        def _done(status: int) -> None:
            self.lanes.leave(t)
            on_done(room, status)

        self.engine.write_async(t.lane, blocks, peer, _done)
        return True

    def send_layerwise(self, room: int, layers: List[List[int]], peer: str, on_done: Callable) -> bool:
        t = self.lanes.enter(timeout=1.0)  # leak: the callback leaves the lane only on status zero
        if t is None:
            return False
        left = [len(layers)]

        def _layer_done(status: int) -> None:
            if status != 0:
                on_done(room, status)
                return
            left[0] -= 1
            if left[0] == 0:
                self.lanes.leave(t)
                on_done(room, 0)

        for blocks in layers:
            self.engine.write_async(t.lane, blocks, peer, _layer_done)
        return True

    def open_room(self, room: int, peer: str) -> bool:
        if room in self.rows:
            return False
        row = self.aux.pick()  # leak: a peer that is not up yet returns before the row is recorded
        if row is None:
            return False
        if not self.engine.is_up(peer):
            log.info("peer %s not up, room %d waits", peer, room)
            return False
        self.rows[room] = row
        return True

    def close_room(self, room: int) -> None:
        row = self.rows.pop(room, None)
        if row is not None:
            self.aux.put(row)

    def start(self, room: int, blocks: List[int], peer: str) -> None:
        t = self.lanes.enter()  # clean: waits in self.pending for poll()
        stale = self.pending.pop(room, None)
        if stale is not None:
            self.engine.abort(stale.lane)
            self.lanes.leave(stale)
        self.pending[room] = t
        self.engine.post(t.lane, blocks, peer)

    def poll(self) -> List[int]:
        done = []
        for room, t in list(self.pending.items()):
            if self.engine.test(t.lane):
                del self.pending[room]
                self.lanes.leave(t)
                done.append(room)
        return done

    def send_with_retry(self, room: int, blocks: List[int], peer: str, tries: int = 3) -> bool:
        for attempt in range(tries):
            t = self.lanes.enter(timeout=1.0)  # leak: PeerGone goes on to the next try with the lane still held
            if t is None:
                continue
            try:
                self.engine.write(t.lane, blocks, peer)
            except PeerGone:
                log.warning("room %d: try %d failed", room, attempt)
                time.sleep(0.1 * attempt)
                continue
            self.lanes.leave(t)
            return True
        return False

    def send_pair(self, room: int, kv: List[int], state: List[int], peer: str) -> bool:
        first = self.lanes.enter(timeout=1.0)  # clean: left on every way out
        if first is None:
            return False
        second = self.lanes.enter(timeout=0.1)  # clean: near miss, only used and left when it came
        try:
            self.engine.write(first.lane, kv, peer)
            if second is not None:
                self.engine.write(second.lane, state, peer)
            else:
                self.engine.write(first.lane, state, peer)
            return True
        finally:
            if second is not None:
                self.lanes.leave(second)
            self.lanes.leave(first)

    def send_meta(self, room: int, token: int, peer: str) -> bool:
        row = self.aux.pick()  # leak: no lane in time, and the row is not put
        if row is None:
            return False
        t = self.lanes.enter(timeout=0.5)  # clean: left in the finally
        if t is None:
            return False
        try:
            self.engine.write_row(t.lane, row, token, peer)
        finally:
            self.lanes.leave(t)
            self.aux.put(row)
        return True

    def shutdown(self) -> None:
        for t in self.pending.values():
            self.lanes.leave(t)
        self.pending.clear()
        for room in list(self.rows):
            self.close_room(room)
