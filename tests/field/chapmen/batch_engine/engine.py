"""The step loop: admit, run, retire."""
from __future__ import annotations

import logging
from collections import deque
from typing import Callable, Deque, Dict, Iterable, List, Optional

from .request import Request, Status
from .slots import OutputBuffers, SlotTable

logger = logging.getLogger(__name__)

Model = Callable[[List[int]], List[int]]


class Engine:
    def __init__(self, model: Model, rows: int, eos: int) -> None:
        self.model = model
        self.eos = eos
        self.slots = SlotTable(rows)
        self.buffers = OutputBuffers(rows * 2, 4096)
        self.waiting: Deque[Request] = deque()
        self.running: Dict[str, Request] = {}
        self.paused: Dict[str, Request] = {}
        self.shadow_rows: Dict[str, int] = {}

    def submit(self, req: Request) -> None:
        self.waiting.append(req)

    # -- admission -----------------------------------------------------

    def admit(self, budget: int) -> int:
        admitted = 0
        while self.waiting:
            req = self.waiting[0]
            if len(req.prompt) > budget:
                break
            row = self.slots.claim()  # clean: bound to the request, retire() unbinds
            if row < 0:
                break
            self.waiting.popleft()
            req.bind(row)
            budget -= len(req.prompt)
            self.running[req.rid] = req
            admitted += 1
        return admitted

    def admit_parallel(self, req: Request) -> bool:
        """A request with n samples occupies n rows at once."""
        rows = self.slots.claim_group(req.n)  # clean: the first is bound, the others become extra_rows
        if rows is None:
            return False
        first, *others = rows
        req.bind(first)
        req.extra_rows = others
        self.running[req.rid] = req
        return True

    def admit_with_text(self, req: Request) -> bool:
        row = self.slots.claim()  # leak: the row stays claimed when no text buffer is idle
        if row < 0:
            return False
        text = self.buffers.borrow()  # clean: moved into the request, drop_text() hands it back
        if text is None:
            self.waiting.appendleft(req)
            return False
        req.text = text
        req.bind(row)
        self.running[req.rid] = req
        return True

    def admit_batch(self, reqs: Iterable[Request], limit: int) -> List[Request]:
        taken: List[Request] = []
        for req in reqs:
            row = self.slots.claim()  # leak: the row of a request over the limit is skipped by continue
            if row < 0:
                break
            if len(req.prompt) + req.max_tokens > limit:
                req.status = Status.ABORTED
                logger.warning("%s over the context limit", req.rid)
                continue
            req.bind(row)
            self.running[req.rid] = req
            taken.append(req)
        return taken

    # -- step ----------------------------------------------------------

    def step(self) -> int:
        live = [r for r in self.running.values() if r.status is Status.RUNNING]
        if not live:
            return 0
        tokens = self.model([r.row for r in live])
        for req, token in zip(live, tokens):
            req.output.append(token)
            if token == self.eos or len(req.output) >= req.max_tokens:
                req.status = Status.DONE
        return self.retire()

    def retire(self) -> int:
        over = [r for r in self.running.values() if r.finished]
        for req in over:
            del self.running[req.rid]
            req.unbind(self.slots)
            req.drop_text(self.buffers)
        return len(over)

    def abort(self, rid: str) -> bool:
        req = self.running.pop(rid, None) or self.paused.pop(rid, None)
        if req is None:
            return False
        req.status = Status.ABORTED
        req.unbind(self.slots)
        req.drop_text(self.buffers)
        return True

    def pause(self, rid: str) -> None:
        req = self.running.pop(rid)
        req.unbind(self.slots)
        req.status = Status.PAUSED
        self.paused[rid] = req

    def resume(self, rid: str) -> bool:
        row = self.slots.claim()  # leak: the row stays claimed when there is nothing to resume
        if row < 0:
            return False
        req = self.paused.pop(rid, None)
        if req is None:
            logger.debug("%s is not paused", rid)
            return False
        req.bind(row)
        self.running[rid] = req
        return True

    # -- shadow traffic ------------------------------------------------

    def start_shadow(self, rid: str) -> bool:
        """Replays a live request in a second row for comparison."""
        row = self.slots.claim()  # leak: stop_shadow() only deletes the entry, the row is not vacated
        if row < 0:
            return False
        self.shadow_rows[rid] = row
        return True

    def stop_shadow(self, rid: str) -> int:
        row = self.shadow_rows.pop(rid, -1)
        if row >= 0:
            logger.info("shadow of %s left row %d", rid, row)
        return len(self.shadow_rows)

    # -- text ----------------------------------------------------------

    def _scratch(self, need: int) -> Optional[bytearray]:
        buf = self.buffers.borrow()  # clean: handed on to the caller, grown if need be
        if buf is None:
            return None
        return self.buffers.resize(buf, need)

    def render(self, req: Request, table: List[bytes]) -> bytes:
        need = sum(len(table[t]) for t in req.output)
        buf = self._scratch(need)  # leak: the caller copies the bytes and drops the buffer
        if buf is None:
            return b"".join(table[t] for t in req.output)
        pos = 0
        for token in req.output:
            piece = table[token]
            buf[pos:pos + len(piece)] = piece
            pos += len(piece)
        return bytes(buf[:pos])

    def render_prompt(self, req: Request, table: List[bytes]) -> bytes:
        buf = self._scratch(sum(len(table[t]) for t in req.prompt))  # clean: handed back after the copy
        if buf is None:
            return b""
        pos = 0
        for token in req.prompt:
            piece = table[token]
            buf[pos:pos + len(piece)] = piece
            pos += len(piece)
        text = bytes(buf[:pos])
        self.buffers.hand_back(buf)
        return text

    def dump(self, rids: List[str], table: List[bytes]) -> Dict[str, int]:
        """Rendered length of every known request, one scratch for all."""
        sizes: Dict[str, int] = {}
        buf = self.buffers.borrow()  # clean: near miss, handed back after the loop in any case
        if buf is None:
            return sizes
        for rid in rids:
            req = self.running.get(rid)
            if req is None:
                continue
            pos = 0
            for token in req.output:
                piece = table[token]
                if pos + len(piece) > len(buf):
                    break
                buf[pos:pos + len(piece)] = piece
                pos += len(piece)
            sizes[rid] = pos
        self.buffers.hand_back(buf)
        return sizes
