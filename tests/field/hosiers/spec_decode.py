"""Speculative decoding worker: draft proposals, tree verification and rollback of draft KV."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Callable, Optional, Protocol

import torch


class Lease(Protocol):
    tensor: torch.Tensor

    def recycle(self) -> None: ...


class ScratchTensor:
    def __init__(self, arena: "ScratchArena", tensor: torch.Tensor, key: tuple) -> None:
        self.arena = arena
        self.tensor = tensor
        self.key = key

    def recycle(self) -> None:
        self.arena._buckets.setdefault(self.key, []).append(self.tensor)
        self.arena.outstanding -= 1


class ScratchArena:
    """Reuses tensors by shape and dtype; never returns memory to the caching allocator."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._buckets: dict[tuple, list[torch.Tensor]] = {}
        self.outstanding = 0

    def get(self, shape: tuple, dtype: torch.dtype = torch.float32) -> ScratchTensor:
        key = (shape, dtype)
        bucket = self._buckets.get(key)
        tensor = bucket.pop() if bucket else torch.empty(shape, dtype=dtype, device=self.device)
        self.outstanding += 1
        return ScratchTensor(self, tensor, key)


class DraftRows:
    """Rows of the draft model's KV cache."""

    def __init__(self, rows: int) -> None:
        self._idle = set(range(rows))

    def reserve_row(self) -> Optional[int]:
        return self._idle.pop() if self._idle else None

    def return_row(self, row: int) -> None:
        self._idle.add(row)


@dataclass
class Proposal:
    req_id: str
    tokens: list[int]
    probs: ScratchTensor
    row: int
    parents: list[int] = field(default_factory=list)

    def close(self, rows: DraftRows) -> None:
        self.probs.recycle()
        rows.return_row(self.row)


class SpecWorker:
    def __init__(self, arena: ScratchArena, rows: DraftRows, vocab: int, depth: int,
                 draft: Callable, target: Callable) -> None:
        self.arena = arena
        self.rows = rows
        self.vocab = vocab
        self.depth = depth
        self.draft = draft
        self.target = target
        self.accepted_total = 0

    # ---- helpers that hand a lease to the caller ---------------------------

    def _draft_logits(self, ids: list[int], row: int) -> ScratchTensor:
        buf = self.arena.get((len(ids), self.vocab))  # clean: handed to the caller
        self.draft(ids, row, out=buf.tensor)
        return buf

    def _softmax_of(self, ids: list[int], row: int, temperature: float) -> ScratchTensor:
        logits = self._draft_logits(ids, row)  # clean: recycled once the probabilities exist
        probs = self.arena.get((len(ids), self.vocab))  # clean: handed to the caller
        torch.softmax(logits.tensor / temperature, dim=-1, out=probs.tensor)
        logits.recycle()
        return probs

    # ---- proposing ---------------------------------------------------------

    def propose(self, req_id: str, ids: list[int], temperature: float) -> Optional[Proposal]:
        row = self.rows.reserve_row()  # clean: moves into the proposal or there is none
        if row is None:
            return None
        probs = self._softmax_of(ids, row, temperature)  # clean: moves into the proposal
        tokens = torch.argmax(probs.tensor[-self.depth:], dim=-1).tolist()
        return Proposal(req_id, tokens, probs, row)

    def propose_greedy(self, ids: list[int]) -> list[int]:
        row = self.rows.reserve_row()  # clean: given back before each return
        if row is None:
            return []
        out = list(ids)
        for _ in range(self.depth):
            logits = self._draft_logits(out, row)  # leak: only a copy of the last row is kept
            last = logits.tensor[-1].clone()
            out.append(int(last.argmax()))
        self.rows.return_row(row)
        return out[len(ids):]

    def propose_with_cutoff(self, ids: list[int], min_prob: float) -> list[int]:
        row = self.rows.reserve_row()  # leak: the cutoff return skips return_row
        if row is None:
            return []
        out: list[int] = []
        for _ in range(self.depth):
            probs = self._softmax_of(ids + out, row, 1.0)  # clean: recycled in every iteration
            top = float(probs.tensor[-1].max())
            tok = int(probs.tensor[-1].argmax())
            probs.recycle()
            if top < min_prob:
                return out
            out.append(tok)
        self.rows.return_row(row)
        return out

    def propose_batch(self, reqs: dict[str, list[int]]) -> list[Proposal]:
        made = []
        for req_id, ids in reqs.items():
            prop = self.propose(req_id, ids, 1.0)  # clean: collected and returned
            if prop is None:
                break
            made.append(prop)
        return made

    # ---- verifying ---------------------------------------------------------

    def verify(self, prop: Proposal, ids: list[int]) -> list[int]:
        full = ids + prop.tokens
        scores = self.arena.get((len(full), self.vocab))  # clean: recycled after the acceptance loop
        self.target(full, out=scores.tensor)
        accepted: list[int] = []
        for i, tok in enumerate(prop.tokens):
            best = int(scores.tensor[len(ids) + i - 1].argmax())
            accepted.append(best)
            if best != tok:
                break
        scores.recycle()
        prop.close(self.rows)
        self.accepted_total += len(accepted)
        return accepted

    def rejection_sample(self, prop: Proposal, uniform: torch.Tensor) -> int:
        q = self.arena.get((len(prop.tokens), self.vocab))  # clean: recycled on both returns
        self.target(prop.tokens, out=q.tensor)
        residual = self.arena.get((self.vocab,))  # leak: only the rejecting branch recycles it
        for i, tok in enumerate(prop.tokens):
            ratio = q.tensor[i, tok] / prop.probs.tensor[i, tok]
            if float(uniform[i]) > float(ratio):
                torch.sub(q.tensor[i], prop.probs.tensor[i], out=residual.tensor)
                pick = int(residual.tensor.clamp_(min=0).argmax())
                residual.recycle()
                q.recycle()
                return pick
        bonus = int(q.tensor[-1].argmax())
        q.recycle()
        return bonus

    def step(self, reqs: dict[str, list[int]]) -> dict[str, list[int]]:
        result = {}
        for prop in self.propose_batch(reqs):  # clean: every proposal is closed by verify
            result[prop.req_id] = self.verify(prop, reqs[prop.req_id])
        return result

    def step_filtered(self, reqs: dict[str, list[int]], finished: set[str]) -> dict[str, list[int]]:
        result = {}
        for prop in self.propose_batch(reqs):  # leak: proposals of finished requests are skipped unclosed
            if prop.req_id in finished:
                continue
            result[prop.req_id] = self.verify(prop, reqs[prop.req_id])
        return result

    def acceptance_probe(self, ids: list[int]) -> float:
        prop = self.propose("probe", ids, 1.0)  # leak: only the tensor half is given back, not the row
        if prop is None:
            return 0.0
        want = self.propose_greedy(ids)
        same = sum(a == b for a, b in zip(want, prop.tokens))
        prop.probs.recycle()
        return same / max(1, len(prop.tokens))
