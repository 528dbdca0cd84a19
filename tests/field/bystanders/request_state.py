"""Per request state of the decode worker."""
from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Dict, Iterable, List, Optional

import torch

logger = logging.getLogger(__name__)


class StatePool:
    """Recurrent state rows (mamba style); id -1 never occurs."""

    def __init__(self, rows: int, dim: int) -> None:
        self.state = torch.zeros(rows, dim)
        self._free_rows = list(range(rows - 1, -1, -1))

    def acquire_row(self) -> Optional[int]:
        if not self._free_rows:
            return None
        return self._free_rows.pop()

    def release_row(self, row: int) -> None:
        self.state[row].zero_()
        self._free_rows.append(row)


@dataclass
class RequestState:
    req_id: str
    row: int
    spare: Optional[int] = None
    tokens: List[int] = field(default_factory=list)


@dataclass
class NewRequest:
    req_id: str
    prompt: List[int]
    n: int = 1
    needs_spare: bool = False


class DecodeWorker:
    def __init__(self, pool: StatePool) -> None:
        self.pool = pool
        self.requests: Dict[str, RequestState] = {}
        self.preempted: List[RequestState] = []

    def add(self, new: NewRequest) -> bool:
        row = self.pool.acquire_row()  # clean: lives in the state until remove
        if row is None:
            return False
        self.requests[new.req_id] = RequestState(new.req_id, row, tokens=list(new.prompt))
        return True

    def add_with_spare(self, new: NewRequest) -> bool:
        row = self.pool.acquire_row()  # leak: when no spare is left the function returns without this row
        if row is None:
            return False
        state = RequestState(new.req_id, row, tokens=list(new.prompt))
        if new.needs_spare:
            state.spare = self.pool.acquire_row()  # clean: remove releases the spare too
            if state.spare is None:
                logger.info("no spare row for %s", new.req_id)
                return False
        self.requests[new.req_id] = state
        return True

    def add_parallel(self, new: NewRequest) -> List[str]:
        ids: List[str] = []
        for i in range(new.n):
            row = self.pool.acquire_row()  # clean: near miss, on shortage those added are removed again
            if row is None:
                for rid in ids:
                    self.remove(rid)
                return []
            rid = f"{new.req_id}-{i}"
            self.requests[rid] = RequestState(rid, row, tokens=list(new.prompt))
            ids.append(rid)
        return ids

    def remove(self, req_id: str) -> None:
        st = self.requests.pop(req_id, None)
        if st is None:
            return
        self.pool.release_row(st.row)
        if st.spare is not None:
            self.pool.release_row(st.spare)

    def remove_finished(self, done: Iterable[str]) -> None:
        for rid in done:
            self.remove(rid)

    def snapshot(self, req_id: str) -> Optional[torch.Tensor]:
        st = self.requests.get(req_id)
        if st is None:
            return None
        tmp = self.pool.acquire_row()  # clean: near miss, None leads to a direct clone, otherwise tmp goes back
        if tmp is None:
            return self.pool.state[st.row].clone()
        self.pool.state[tmp].copy_(self.pool.state[st.row])
        out = self.pool.state[tmp].clone()
        self.pool.release_row(tmp)
        return out

    def dry_run(self, prompt: List[int], model) -> int:
        row = self.pool.acquire_row()  # leak: an empty prompt returns zero and keeps the row
        if row is None:
            return -1
        if not prompt:
            return 0
        steps = 0
        for tok in prompt:
            model.step(tok, self.pool.state[row])
            steps += 1
        self.pool.release_row(row)
        return steps

    def score_prompts(self, prompts: List[List[int]], model) -> List[float]:
        scores = []
        for p in prompts:
            row = self.pool.acquire_row()  # clean: near miss, else branch of the loop body releases in both arms
            if row is None:
                scores.append(float("nan"))
                continue
            if p:
                scores.append(model.score(p, self.pool.state[row]))
                self.pool.release_row(row)
            else:
                self.pool.release_row(row)
                scores.append(0.0)
        return scores

    def promote_spare(self, req_id: str) -> bool:
        """Swap working row and spare after a rejected speculation."""
        st = self.requests.get(req_id)
        if st is None or st.spare is None:
            return False
        st.row, st.spare = st.spare, st.row
        return True

    def clone(self, src: str, dst: str) -> bool:
        row = self.pool.acquire_row()  # leak: source unknown, row taken
        if row is None:
            return False
        st = self.requests.get(src)
        if st is None:
            return False
        self.pool.state[row].copy_(self.pool.state[st.row])
        self.requests[dst] = RequestState(dst, row, tokens=list(st.tokens))
        return True
