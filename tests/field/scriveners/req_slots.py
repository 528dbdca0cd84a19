"""Request slots of the decoding loop: one row of the token table and one LoRA lane per request."""
from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Deque, Optional

log = logging.getLogger("req_slots")


class SlotTable:
    def __init__(self, rows: int, width: int) -> None:
        self.width = width
        self.tokens = [[0] * width for _ in range(rows)]
        self._vacant = list(range(rows))

    def alloc(self) -> Optional[int]:
        if not self._vacant:
            return None
        return self._vacant.pop(0)

    def free(self, row: int) -> None:
        self.tokens[row] = [0] * self.width
        self._vacant.append(row)

    def alloc_list(self, count: int) -> Optional[list[int]]:
        if count > len(self._vacant):
            return None
        taken, self._vacant = self._vacant[:count], self._vacant[count:]
        return taken

    def free_list(self, rows: list[int]) -> None:
        for row in rows:
            self.free(row)

    def alloc_above(self, floor: int) -> Optional[int]:
        """A row with a number of at least `floor`."""
        aside: list[int] = []
        found: Optional[int] = None
        row = self.alloc()  # clean: near miss, lower rows wait aside and are freed, the other is returned
        while row is not None:
            if row >= floor:
                found = row
                break
            aside.append(row)
            row = self.alloc()  # clean: near miss, as above
        self.free_list(aside)
        return found


class LaneAllocator:
    """Lanes of the batched adapter kernel."""

    def __init__(self, lanes: int) -> None:
        self._lanes: Deque[int] = deque(range(lanes))

    def lease_lane(self) -> Optional[int]:
        return self._lanes.popleft() if self._lanes else None

    def return_lane(self, lane: int) -> None:
        self._lanes.append(lane)


@dataclass
class Req:
    rid: str
    prompt: list[int]
    limit: int
    output: list[int] = field(default_factory=list)
    row: Optional[int] = None
    lane: Optional[int] = None
    draft_row: Optional[int] = None
    grammar_row: Optional[int] = None
    aborted: bool = False

    def finished(self) -> bool:
        return self.aborted or len(self.output) >= self.limit


@dataclass
class Batch:
    reqs: list[Req]
    scratch_rows: list[int] = field(default_factory=list)


class DecodeLoop:
    def __init__(self, table: SlotTable, lanes: LaneAllocator, max_running: int) -> None:
        self.table = table
        self.lanes = lanes
        self.max_running = max_running
        self.waiting: Deque[Req] = deque()
        self.running: list[Req] = []
        self.retracted: list[Req] = []

    def receive(self, req: Req) -> None:
        self.waiting.append(req)

    def admit(self) -> int:
        admitted = 0
        while self.waiting and len(self.running) < self.max_running:
            row = self.table.alloc()  # clean: freed when there is no lane, else moved into the request
            if row is None:
                break
            lane = self.lanes.lease_lane()  # clean: near miss, moved into the request, release_req() returns it
            if lane is None:
                self.table.free(row)
                break
            req = self.waiting.popleft()
            req.row, req.lane = row, lane
            self.table.tokens[row][: len(req.prompt)] = req.prompt
            self.running.append(req)
            admitted += 1
        return admitted

    def release_req(self, req: Req) -> None:
        if req.row is not None:
            self.table.free(req.row)
            req.row = None
        if req.lane is not None:
            self.lanes.return_lane(req.lane)
            req.lane = None
        if req.draft_row is not None:
            self.table.free(req.draft_row)
            req.draft_row = None

    def sweep(self) -> list[Req]:
        done = [req for req in self.running if req.finished()]
        for req in done:
            self.release_req(req)
        self.running = [req for req in self.running if not req.finished()]
        return done

    def abort(self, rid: str) -> bool:
        for req in self.running:
            if req.rid == rid:
                req.aborted = True
                return True
        return False

    def start_draft(self, req: Req) -> bool:
        if req.draft_row is not None:
            return True
        req.draft_row = self.table.alloc()  # clean: near miss, release_req() frees the draft row
        if req.draft_row is None:
            return False
        self.table.tokens[req.draft_row][: len(req.output)] = req.output
        return True

    def start_grammar(self, req: Req) -> bool:
        """A row for the token mask of structured output."""
        if req.grammar_row is not None:
            return True
        req.grammar_row = self.table.alloc()  # leak: release_req() knows nothing of the grammar row
        if req.grammar_row is None:
            return False
        self.table.tokens[req.grammar_row][0] = 1
        return True

    def retract(self, req: Req) -> None:
        """Gives up the place of a request, which is tried again later."""
        self.running.remove(req)
        self.release_req(req)
        self.retracted.append(req)

    def readmit(self) -> int:
        back = 0
        while self.retracted:
            lane = self.lanes.lease_lane()  # leak: kept when there is no row for the request
            if lane is None:
                break
            row = self.table.alloc()  # clean: moved into the request
            if row is None:
                break
            req = self.retracted.pop()
            req.row, req.lane = row, lane
            self.running.append(req)
            back += 1
        return back

    def move_high(self, req: Req, floor: int) -> bool:
        target = self.table.alloc_above(floor)  # clean: near miss, it replaces the row, which is freed
        if target is None:
            return False
        source = req.row
        req.row = target
        if source is not None:
            self.table.tokens[target] = list(self.table.tokens[source])
            self.table.free(source)
        return True

    def compact(self, req: Req) -> bool:
        if req.row is None:
            return False
        target = self.table.alloc()  # leak: a target that lies above the row is dropped
        if target is None:
            return False
        if target < req.row:
            source, req.row = req.row, target
            self.table.tokens[target] = list(self.table.tokens[source])
            self.table.free(source)
            return True
        return False

    def renew_lane(self, req: Req) -> bool:
        lane = self.lanes.lease_lane()  # leak: the lane goes into a local of another name and is lost
        if lane is None or req.lane is None:
            return False
        previous = req.lane
        current = lane
        log.debug("lane of %s from %d to %d", req.rid, previous, current)
        return True

    def swap_lane(self, req: Req) -> bool:
        lane = self.lanes.lease_lane()  # clean: near miss, either the new one or the old one is returned
        if lane is None:
            return False
        if req.lane is None or lane > req.lane:
            self.lanes.return_lane(lane)
            return False
        self.lanes.return_lane(req.lane)
        req.lane = lane
        return True

    def make_batch(self, scratch: int) -> Optional[Batch]:
        rows = self.table.alloc_list(scratch)  # clean: near miss, end_batch() frees the rows of the batch
        if rows is None:
            return None
        return Batch(list(self.running), rows)

    def end_batch(self, batch: Batch) -> None:
        self.table.free_list(batch.scratch_rows)
        batch.scratch_rows = []

    def step(self, scratch: int) -> int:
        batch = self.make_batch(scratch)  # clean: ended after the tokens are appended
        if batch is None:
            return 0
        for req in batch.reqs:
            req.output.append(len(req.output))
        self.end_batch(batch)
        return len(batch.reqs)

    def split_batch(self, scratch: int) -> list[int]:
        batch = self.make_batch(scratch)  # clean: near miss, both halves of the rows are freed
        if batch is None:
            return []
        half = len(batch.scratch_rows) // 2
        first, second = batch.scratch_rows[:half], batch.scratch_rows[half:]
        batch.scratch_rows = []
        self.table.free_list(first)
        self.table.free_list(second)
        return [len(first), len(second)]
