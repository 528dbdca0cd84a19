from __future__ import annotations

import logging
from collections import deque

from .request import EngineRequest, Stage
from .resources import EncoderBudget, GrammarPool, RowTable

logger = logging.getLogger(__name__)


class EngineCore:
    def __init__(self, rows: RowTable, encoder: EncoderBudget, grammars: GrammarPool, model) -> None:
        self.rows = rows
        self.encoder = encoder
        self.grammars = grammars
        self.model = model
        self.queue: deque[EngineRequest] = deque()
        self.active: dict[str, EngineRequest] = {}
        self.paused: dict[str, EngineRequest] = {}

    def add(self, req: EngineRequest) -> bool:
        if req.schema is not None:
            req.grammar = self.grammars.compile(req.schema)  # leak: pause and close recycle it, cancelling in the queue does not
            if req.grammar is None:
                return False
        self.queue.append(req)
        return True

    def schedule(self) -> list[EngineRequest]:
        admitted: list[EngineRequest] = []
        while self.queue:
            req = self.queue[0]
            row = self.rows.claim()  # leak: kept when the encoder has no room
            if row is None:
                break
            if req.images and not self.encoder.hold(req.req_id, req.images):  # clean: near miss, let go by pause or close
                break
            self.queue.popleft()
            self._activate(req, row)
            admitted.append(req)
        return admitted

    def _activate(self, req: EngineRequest, row: int) -> None:
        req.row, req.stage = row, Stage.ACTIVE
        self.active[req.req_id] = req

    def pause(self, req_id: str) -> None:
        req = self.active.pop(req_id)
        self.rows.vacate(req.row)
        req.row = None
        if req.images:
            self.encoder.let_go(req_id)
        if req.grammar is not None:
            self.grammars.recycle(req.grammar)
            req.grammar = None
        req.stage = Stage.PAUSED
        self.paused[req_id] = req

    def resume(self, req_id: str) -> bool:
        req = self.paused.get(req_id)
        if req is None:
            return False
        row = self.rows.claim()  # clean: near miss, vacated where encoder or grammar fail
        if row is None:
            return False
        if req.images and not self.encoder.hold(req_id, req.images):  # clean: near miss, let go where the grammar fails, else by close
            self.rows.vacate(row)
            return False
        if req.schema is not None:
            req.grammar = self.grammars.compile(req.schema)  # clean: recycled by pause or close
            if req.grammar is None:
                self.rows.vacate(row)
                if req.images:
                    self.encoder.let_go(req_id)
                return False
        del self.paused[req_id]
        self._activate(req, row)
        return True

    def step(self) -> list[str]:
        done: list[str] = []
        for req_id, token in self.model.decode(list(self.active.values())):
            req = self.active[req_id]
            req.output.append(token)
            if token == self.model.eos:
                done.append(req_id)
        for req_id in done:
            self.close(req_id)
        return done

    def close(self, req_id: str) -> None:
        req = self.active.pop(req_id)
        self.rows.vacate(req.row)
        req.row = None
        self.encoder.let_go(req_id)
        if req.grammar is not None:
            self.grammars.recycle(req.grammar)
            req.grammar = None
        req.stage = Stage.CLOSED

    def cancel(self, req_id: str) -> bool:
        if req_id in self.active:
            self.close(req_id)
            return True
        if self.paused.pop(req_id, None) is not None:
            return True
        for req in self.queue:
            if req.req_id == req_id:
                self.queue.remove(req)
                req.stage = Stage.CLOSED
                return True
        return False

    def validate(self, schema: str, tokens: list[int]) -> bool:
        grammar = self.grammars.compile(schema)  # leak: the first token refused returns at once
        if grammar is None:
            return False
        for token in tokens:
            if not self.model.accepts(grammar, token):
                return False
        self.grammars.recycle(grammar)
        return True

    def dry_run(self, lengths: list[int]) -> int:
        claimed: list[int] = []
        for n in lengths:
            row = self.rows.claim()  # clean: near miss, vacated in the last loop or before the break
            if row is None:
                break
            if not self.model.fits(row, n):
                self.rows.vacate(row)
                break
            claimed.append(row)
        for row in claimed:
            self.rows.vacate(row)
        return len(claimed)

    def profile_encoder(self, images: int) -> float:
        if not self.encoder.hold("_profile", images):  # leak: let go under a name that holds nothing
            return 0.0
        elapsed = self.model.time_encoder(images)
        self.encoder.let_go("profile")
        return elapsed
