"""Batches requests, runs the vision tower and keeps its outputs."""
from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Callable, Dict, List, Optional, Tuple

from .arena import PixelArena, Region
from .request import MMRequest, RequestTable, State

log = logging.getLogger(__name__)

Tower = Callable[[memoryview], bytes]


class OutputBoard:
    """Encoder outputs that wait for the language model. take() hands the region to the caller."""

    def __init__(self, arena: PixelArena) -> None:
        self.arena = arena
        self._board: Dict[str, Region] = {}

    def post(self, rid: str, region: Region) -> None:
        old = self._board.get(rid)
        if old is not None:
            self.arena.restore(old)
        self._board[rid] = region

    def take(self, rid: str) -> Optional[Region]:
        return self._board.pop(rid, None)

    def clear(self) -> None:
        for region in self._board.values():
            self.arena.restore(region)
        self._board.clear()


class Engine:
    def __init__(self, arena: PixelArena, table: RequestTable, tower: Tower) -> None:
        self.arena = arena
        self.table = table
        self.tower = tower
        self.board = OutputBoard(arena)
        self.workers = ThreadPoolExecutor(2)
        self.futures: Dict[str, "Future[None]"] = {}
        self.steps = 0

    def _view(self, region: Region) -> memoryview:
        return self.arena.memory[region.offset : region.offset + region.size]

    def encode(self, req: MMRequest) -> bool:
        """Runs the tower over the images of a request and posts the output."""
        parts = [self.tower(self._view(r)) for r in req.regions]
        total = sum(len(p) for p in parts)
        out = self.arena.carve(total)  # clean: near miss, the board restores it
        if out is None:
            return False
        self.arena.write(out, b"".join(parts))
        self.board.post(req.rid, out)
        return True

    def encode_async(self, req: MMRequest, size: int) -> bool:
        out = self.arena.carve(size)  # clean: near miss, the task posts it or restores it
        if out is None:
            return False
        self.futures[req.rid] = self.workers.submit(self._encode_into, req, out)
        return True

    def _encode_into(self, req: MMRequest, out: Region) -> None:
        data = b"".join(self.tower(self._view(r)) for r in req.regions)
        if len(data) > out.size:
            log.warning("%s: output of %d bytes does not fit", req.rid, len(data))
            self.arena.restore(out)
            return
        self.arena.write(out, data)
        self.board.post(req.rid, out)

    def score_async(self, req: MMRequest, size: int) -> "Optional[Future[int]]":
        scratch = self.arena.carve(size)  # leak: the task that gets it only reads and writes it
        if scratch is None:
            return None
        return self.workers.submit(self._score, req, scratch)

    def _score(self, req: MMRequest, scratch: Region) -> int:
        best = 0
        for region in req.regions:
            self.arena.write(scratch, self.tower(self._view(region)))
            best = max(best, sum(self._view(scratch)))
        return best

    def output(self, rid: str) -> bytes:
        region = self.board.take(rid)  # clean: restored after the copy
        if region is None:
            return b""
        data = self.arena.read(region)
        self.arena.restore(region)
        return data

    def output_length(self, rid: str) -> int:
        region = self.board.take(rid)  # leak: taken off the board for its size and dropped
        return 0 if region is None else region.size

    def widen(self, rid: str, size: int) -> bool:
        region = self.board.take(rid)  # clean: near miss, regrow ends it on success, else posted back
        if region is None:
            return False
        bigger = self.arena.regrow(region, size)  # clean: posted
        if bigger is None:
            self.board.post(rid, region)
            return False
        self.board.post(rid, bigger)
        return True

    def step(self, limit: int) -> List[str]:
        ran: List[str] = []
        for req in self.table.queued():
            if len(ran) == limit:
                break
            if not self.encode(req):
                break
            req.state = State.RUNNING
            ran.append(req.rid)
        self.steps += 1
        return ran

    def ping_pong(self, chunks: List[bytes], size: int) -> int:
        """Streams chunks through two regions in turn."""
        pair = self.arena.halves(size)  # clean: both restored after the loop
        if pair is None:
            return 0
        seen = 0
        for n, chunk in enumerate(chunks):
            side = pair[n & 1]
            self.arena.write(side, chunk)
            seen += len(self.tower(self._view(side)))
        front, back = pair
        self.arena.restore(front)
        self.arena.restore(back)
        return seen

    def compare(self, left: bytes, right: bytes) -> int:
        pair = self.arena.halves(max(len(left), len(right)))  # leak: only the first of the two is restored
        if pair is None:
            return -1
        a, b = pair
        self.arena.write(a, left)
        self.arena.write(b, right)
        differing = sum(1 for x, y in zip(self._view(a), self._view(b)) if x != y)
        self.arena.restore(a)
        return differing

    def scratch_encode(self, pixels: bytes, keep: Optional[Region] = None) -> Tuple[bytes, Optional[Region]]:
        """Uses the region given, or one of its own which ends here."""
        own = keep is None
        region = self.arena.carve(len(pixels)) if own else keep  # clean: near miss, restored if own
        if region is None:
            return b"", None
        self.arena.write(region, pixels)
        out = self.tower(self._view(region))
        if own:
            self.arena.restore(region)
            return out, None
        return out, region

    def close(self) -> None:
        self.workers.shutdown(wait=True)
        self.futures.clear()
        self.board.clear()
