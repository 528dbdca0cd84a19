from __future__ import annotations

import logging

import torch

from .pools import BlockPool, LogitsPool
from .request import Request, State
from .scheduler import Scheduler

log = logging.getLogger(__name__)


class Engine:
    def __init__(self, model, blocks: BlockPool, logits: LogitsPool, eos: int):
        self.model = model
        self.blocks = blocks
        self.logits = logits
        self.sched = Scheduler(blocks)
        self.eos = eos

    def _project(self, hidden: torch.Tensor) -> torch.Tensor:
        out = self.logits.rows(hidden.shape[0])  # clean: returned to the caller
        torch.matmul(hidden, self.model.head.t(), out=out[: hidden.shape[0]])
        return out

    def step(self) -> int:
        self.sched.admit()
        batch = [r for r in list(self.sched.running.values()) if r.state is State.RUNNING and self.sched.grow(r)]
        batch = [r for r in batch if r.rid in self.sched.running]
        if not batch:
            return 0
        logits = self._project(self.model.hidden(batch))  # clean: finally
        try:
            picks = logits[: len(batch)].argmax(-1).tolist()
        finally:
            self.logits.put_rows(logits)
        for req, tok in zip(batch, picks):
            req.output.append(tok)
            if tok == self.eos or len(req.output) >= req.max_new:
                self.sched.finish(req)
        return len(batch)

    def logprobs(self, req: Request) -> torch.Tensor:
        hidden = self.model.hidden([req])
        return self._project(hidden)[:1].log_softmax(-1).cpu()  # leak: pooled rows are turned into log-probabilities and dropped

    def rank(self, req: Request, candidates: list[int]) -> list[int]:
        rows = self._project(self.model.hidden([req]))  # clean: near miss, the indexed copy is returned and the rows put back
        scores = rows[0, torch.tensor(candidates, device=rows.device)]
        self.logits.put_rows(rows)
        return [candidates[i] for i in scores.argsort(descending=True).tolist()]

    def greedy_until(self, req: Request, stop: set[int]) -> list[int]:
        while len(req.output) < req.max_new:
            if not self.sched.grow(req):
                break
            rows = self._project(self.model.hidden([req]))  # leak: the break on a stop token skips put_rows
            tok = int(rows[0].argmax())
            if tok in stop:
                break
            req.output.append(tok)
            self.logits.put_rows(rows)
        return req.output

    def cancel(self, rid: str) -> None:
        req = self.sched.running.get(rid)
        if req is not None:
            log.info("cancelled %s", rid)
            self.sched.finish(req, State.FAILED)
