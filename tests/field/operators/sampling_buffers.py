"""Per-batch sampling state: seeds, penalty counts and scratch tensors."""
from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass

import torch


@dataclass
class SamplingParams:
    temperature: float = 1.0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    logprobs: int = 0
    seed: int | None = None


class ScratchPool:
    """Scratch tensors by power-of-two size class."""

    def __init__(self, device: str, max_cached: int = 8) -> None:
        self.device = device
        self.max_cached = max_cached
        self._classes: dict[int, list[torch.Tensor]] = defaultdict(list)

    def rent(self, numel: int) -> torch.Tensor:
        size = 1 << max(0, numel - 1).bit_length()
        cached = self._classes[size]
        if cached:
            return cached.pop()  # clean: to the caller
        return torch.empty(size, device=self.device)

    def unrent(self, tensor: torch.Tensor) -> None:
        cached = self._classes[tensor.numel()]
        if len(cached) < self.max_cached:
            cached.append(tensor)


class PenaltyTable:
    """Token counts per row for repetition penalties."""

    def __init__(self, rows: int, vocab: int, device: str) -> None:
        self.counts = torch.zeros(rows, vocab, dtype=torch.int16, device=device)
        self._used = [False] * rows

    def reserve_row(self) -> int:
        """Index of a zeroed row, -1 if all are used."""
        for i, used in enumerate(self._used):
            if not used:
                self._used[i] = True  # clean: the row is marked and its index returned
                self.counts[i].zero_()
                return i
        return -1

    def clear_row(self, row: int) -> None:
        self._used[row] = False


@dataclass
class SampleState:
    params: SamplingParams
    row: int = -1
    scratch: torch.Tensor | None = None
    owns_scratch: bool = False


class Sampler:
    """Samples one token per state."""

    def __init__(self, pool: ScratchPool, penalties: PenaltyTable, vocab: int) -> None:
        self.pool = pool
        self.penalties = penalties
        self.vocab = vocab
        self.states: dict[str, SampleState] = {}
        self._seed_lock = threading.Lock()

    def register(self, rid: str, params: SamplingParams, shared: torch.Tensor | None = None) -> bool:
        """Prepare the sampling state of a request."""
        if rid in self.states:
            return False
        state = SampleState(params)
        if params.repetition_penalty != 1.0:
            state.row = self.penalties.reserve_row()  # leak: an invalid top_p is refused below with the row still marked
            if state.row < 0:
                return False
        if not 0.0 < params.top_p <= 1.0:
            return False
        if shared is not None:
            state.scratch = shared
        else:
            state.scratch = self.pool.rent(self.vocab)  # clean: near miss, owned by the flag's account, unregister() gives it back
            state.owns_scratch = True
        self.states[rid] = state
        return True

    def unregister(self, rid: str) -> None:
        state = self.states.pop(rid, None)
        if state is None:
            return
        if state.row >= 0:
            self.penalties.clear_row(state.row)
        if state.owns_scratch:
            self.pool.unrent(state.scratch)

    def update_params(self, rid: str, params: SamplingParams) -> None:
        """New parameters for a running request."""
        state = self.states[rid]
        if params.repetition_penalty != 1.0 and state.row < 0:
            state.row = self.penalties.reserve_row()  # clean: near miss, only when it has no row; unregister() clears it
        state.params = params

    def detach_scratch(self, rid: str) -> None:
        """Give the request a scratch tensor of its own."""
        state = self.states[rid]
        state.scratch = self.pool.rent(self.vocab)  # leak: a state that already owns its scratch loses the old tensor
        state.owns_scratch = True

    def sample(self, rid: str, logits: torch.Tensor) -> int:
        """Sample one token and count it."""
        state = self.states[rid]
        params = state.params
        probs = state.scratch[:self.vocab]
        probs.copy_(logits)
        if state.row >= 0:
            seen = self.penalties.counts[state.row] > 0
            probs[seen] /= params.repetition_penalty
        if params.temperature == 0.0:
            token = int(probs.argmax())
        else:
            probs.copy_(torch.softmax(probs / params.temperature, dim=-1))
            token = self._top_p(probs, params.top_p)
        if state.row >= 0:
            self.penalties.counts[state.row, token] += 1
        return token

    def _top_p(self, probs: torch.Tensor, top_p: float) -> int:
        if top_p >= 1.0:
            return int(torch.multinomial(probs, 1))
        work = self.pool.rent(probs.numel())  # leak: the shortcut for a dominant first token keeps the tensor
        order = probs.argsort(descending=True)
        cumulative = work[:probs.numel()]
        torch.cumsum(probs[order], dim=0, out=cumulative)
        if float(cumulative[0]) >= top_p:
            return int(order[0])
        keep = cumulative - probs[order] < top_p
        choice = int(order[int(torch.multinomial(probs[order] * keep, 1))])
        self.pool.unrent(work)
        return choice

    def top_logprobs(self, logits: torch.Tensor, n: int) -> list[tuple[int, float]]:
        """The n best tokens with their log probabilities."""
        work = self.pool.rent(logits.numel())  # clean: near miss, the early return runs the finally
        try:
            if n == 0:
                return []
            logp = work[:logits.numel()]
            logp.copy_(torch.log_softmax(logits, dim=-1))
            values, ids = logp.topk(n)
            return list(zip(ids.tolist(), values.tolist()))
        finally:
            self.pool.unrent(work)

    def prompt_logprobs(self, chunks: list[torch.Tensor], targets: list[int]) -> list[float]:
        """Log probability of each prompt token, chunk by chunk."""
        out: list[float] = []
        for logits, target in zip(chunks, targets):
            work = self.pool.rent(logits.numel())  # leak: padding positions are skipped after the tensor was rented
            if target < 0:
                continue
            logp = work[:logits.numel()]
            logp.copy_(torch.log_softmax(logits, dim=-1))
            out.append(float(logp[target]))
            self.pool.unrent(work)
        return out

    def seed(self, params: SamplingParams) -> None:
        self._seed_lock.acquire()  # clean: near miss, both branches come to the release
        if params.seed is None:
            torch.seed()
        else:
            torch.manual_seed(params.seed)
        self._seed_lock.release()
