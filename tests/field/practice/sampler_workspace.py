"""Sampling kernels on preallocated logits/probability workspaces."""
import abc
import logging
from dataclasses import dataclass
from typing import Generic, List, Optional, Sequence, TypeVar

import torch

logger = logging.getLogger(__name__)
T = TypeVar("T")


class ObjectPool(abc.ABC, Generic[T]):
    def __init__(self) -> None:
        self._items: List[T] = []

    @abc.abstractmethod
    def make(self) -> T:
        ...

    def obtain(self) -> T:
        return self._items.pop() if self._items else self.make()

    def recycle(self, item: T) -> None:
        self._items.append(item)


@dataclass
class SampleWorkspace:
    probs: torch.Tensor
    sorted_idx: torch.Tensor
    mask: torch.Tensor


class WorkspacePool(ObjectPool[SampleWorkspace]):
    def __init__(self, max_batch: int, vocab: int):
        super().__init__()
        self.shape = (max_batch, vocab)

    def make(self) -> SampleWorkspace:
        return SampleWorkspace(torch.empty(self.shape), torch.empty(self.shape, dtype=torch.long),
                               torch.empty(self.shape, dtype=torch.bool))


class SamplingParams:
    def __init__(self, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, greedy: bool = False):
        self.temperature, self.top_k, self.top_p, self.greedy = temperature, top_k, top_p, greedy


class BaseSampler:
    def __init__(self, pool: WorkspacePool):
        self.pool = pool

    def _prepare(self, logits: torch.Tensor, temperature: float) -> SampleWorkspace:
        ws = self.pool.obtain()  # clean: handed to the caller
        torch.softmax(logits / max(temperature, 1e-5), -1, out=ws.probs[: len(logits)])
        return ws

    def sample(self, logits: torch.Tensor, p: SamplingParams) -> torch.Tensor:
        raise NotImplementedError


class GreedySampler(BaseSampler):
    def sample(self, logits: torch.Tensor, p: SamplingParams) -> torch.Tensor:
        ws = self._prepare(logits, 1.0)  # clean: argmax gives a new tensor, ws goes back
        ids = ws.probs[: len(logits)].argmax(-1)
        self.pool.recycle(ws)
        return ids

    def margin(self, logits: torch.Tensor) -> torch.Tensor:
        probs = self._prepare(logits, 1.0).probs[: len(logits)]  # leak: only the probabilities of the workspace are kept
        top = probs.topk(2, -1).values
        return top[:, 0] - top[:, 1]


class TopKSampler(BaseSampler):
    def sample(self, logits: torch.Tensor, p: SamplingParams) -> torch.Tensor:
        ws = self._prepare(logits, p.temperature)  # leak: a greedy request returns from the middle
        probs = ws.probs[: len(logits)]
        if p.greedy:
            return probs.argmax(-1)
        if p.top_k:
            kth = probs.topk(p.top_k, -1).values[:, -1:]
            probs.masked_fill_(probs < kth, 0)
        ids = torch.multinomial(probs, 1).squeeze(-1)
        self.pool.recycle(ws)
        return ids


class TopPSampler(BaseSampler):
    def sample(self, logits: torch.Tensor, p: SamplingParams) -> torch.Tensor:
        ws = self._prepare(logits, p.temperature)  # clean: near miss, the greedy branch recycles before its return
        probs = ws.probs[: len(logits)]
        if p.greedy:
            ids = probs.argmax(-1)
            self.pool.recycle(ws)
            return ids
        order = torch.argsort(probs, -1, descending=True)
        ws.sorted_idx[: len(logits)].copy_(order)
        cum = probs.gather(-1, order).cumsum(-1)
        probs.scatter_(-1, order, probs.gather(-1, order).masked_fill(cum > p.top_p, 0))
        ids = torch.multinomial(probs.clamp_min(1e-12), 1).squeeze(-1)
        self.pool.recycle(ws)
        return ids

    def entropy(self, logits: torch.Tensor) -> Optional[torch.Tensor]:
        ws = self._prepare(logits, 1.0)  # leak: the handler logs and returns None
        try:
            probs = ws.probs[: len(logits)]
            ent = -(probs * probs.log()).sum(-1)
            if torch.isnan(ent).any():
                raise ArithmeticError("nan entropy")
        except ArithmeticError:
            logger.exception("entropy failed")
            return None
        self.pool.recycle(ws)
        return ent


class PenaltyMixin:
    """Expects `self.pool`."""

    penalty_ws: Optional[SampleWorkspace] = None

    def enable_penalties(self) -> None:
        if self.penalty_ws is None:
            self.penalty_ws = self.pool.obtain()  # clean: near miss, taken once and recycled in disable_penalties()
            self.penalty_ws.mask.zero_()

    def disable_penalties(self) -> None:
        if self.penalty_ws is not None:
            self.pool.recycle(self.penalty_ws)
        self.penalty_ws = None


class PenalisedSampler(PenaltyMixin, TopPSampler):
    def __init__(self, pool: WorkspacePool, penalty: float):
        super().__init__(pool)
        self.penalty = penalty
        self.history: List[SampleWorkspace] = []

    def sample(self, logits: torch.Tensor, p: SamplingParams) -> torch.Tensor:
        if self.penalty_ws is not None:
            logits = torch.where(self.penalty_ws.mask[: len(logits)], logits / self.penalty, logits)
        return super().sample(logits, p)

    def record(self, logits: torch.Tensor) -> None:
        self.history.append(self._prepare(logits, 1.0))  # leak: trim() slices the list and the front is lost

    def trim(self, n: int) -> None:
        self.history = self.history[-n:]

    def close(self) -> None:
        for ws in self.history:
            self.pool.recycle(ws)
        self.history = []
        self.disable_penalties()


class SpeculativeTreeSampler(BaseSampler):
    def sample_levels(self, levels: Sequence[torch.Tensor]) -> List[torch.Tensor]:
        wss = [self._prepare(lv, 1.0) for lv in levels]  # clean: every one recycled in the second loop
        out = []
        for ws, lv in zip(wss, levels):
            out.append(torch.multinomial(ws.probs[: len(lv)], 1))
            self.pool.recycle(ws)
        return out

    def first_level(self, levels: Sequence[torch.Tensor]) -> Optional[torch.Tensor]:
        wss = [self._prepare(lv, 1.0) for lv in levels]  # leak: only the head of the list is recycled
        if not wss:
            return None
        head, *_rest = wss
        ids = head.probs[: len(levels[0])].argmax(-1)
        self.pool.recycle(head)
        return ids

    def pick(self, logits: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        a = self._prepare(logits, 1.0)  # clean: near miss, the swap only exchanges names, both go back
        b = self._prepare(other, 1.0)  # clean: near miss, as above
        if a.probs.max() < b.probs.max():
            a, b = b, a
        ids = a.probs[: len(logits)].argmax(-1)
        self.pool.recycle(b)
        self.pool.recycle(a)
        return ids
