"""Sampling: per request state rows, logits scratch, seeded generators."""
from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Sequence

import torch

logger = logging.getLogger(__name__)


class ScratchLogits:
    """Float buffers of vocabulary width."""

    def __init__(self, vocab: int, count: int = 4) -> None:
        self.vocab = vocab
        self._stack = [torch.empty(vocab) for _ in range(count)]

    def rent(self) -> torch.Tensor:
        return self._stack.pop() if self._stack else torch.empty(self.vocab)

    def give(self, t: torch.Tensor) -> None:
        self._stack.append(t)


class GeneratorBank:
    """torch generators are expensive to make; reseed and reuse."""

    def __init__(self) -> None:
        self._idle: List[torch.Generator] = []
        self._made = 0

    def issue(self, seed: int) -> torch.Generator:
        if self._idle:
            gen = self._idle.pop()
        else:
            gen = torch.Generator()
            self._made += 1
        gen.manual_seed(seed)
        return gen

    def redeem(self, gen: torch.Generator) -> None:
        self._idle.append(gen)


class PenaltyTable:
    """Rows of the token count matrix."""

    def __init__(self, rows: int) -> None:
        self._rows = list(range(rows))

    def allot(self) -> int:
        return self._rows.pop()

    def vacate(self, row: int) -> None:
        self._rows.append(row)


@dataclass
class Params:
    temperature: float = 1.0
    top_k: int = 0
    seed: Optional[int] = None
    repetition: float = 1.0
    logit_bias: Dict[int, float] = field(default_factory=dict)


class Processor(ABC):
    """Changes logits, may keep resources for as long as its request lives."""

    @abstractmethod
    def apply(self, logits: torch.Tensor) -> torch.Tensor: ...

    def close(self) -> None:
        """Called once when the request is over."""


class RepetitionProcessor(Processor):
    def __init__(self, table: PenaltyTable, strength: float) -> None:
        self.table = table
        self.strength = strength
        self.row = table.allot()  # clean: vacated by close, which SamplerState.close calls

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits / self.strength if self.row >= 0 else logits

    def close(self) -> None:
        self.table.vacate(self.row)
        super().close()


class BiasProcessor(Processor):
    """The dense bias vector is built once, in a rented buffer."""

    def __init__(self, scratch: ScratchLogits, bias: Dict[int, float]) -> None:
        self.scratch = scratch
        self.vector = scratch.rent()  # leak: the class has no close of its own, the base one does nothing
        self.vector.zero_()
        for tok, b in bias.items():
            self.vector[tok] = b

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits + self.vector


class BannedProcessor(Processor):
    """Mask vector; an all clear mask is given back early."""

    def __init__(self, scratch: ScratchLogits, banned: Sequence[int]) -> None:
        self.scratch = scratch
        self.mask: Optional[torch.Tensor] = scratch.rent()  # clean: near miss, given by clear or by close
        self.mask.zero_()
        for tok in banned:
            self.mask[tok] = float("-inf")

    def clear(self) -> None:
        if self.mask is not None:
            self.scratch.give(self.mask)
            self.mask = None

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits if self.mask is None else logits + self.mask

    def close(self) -> None:
        self.clear()


class SamplerState:
    def __init__(self, params: Params, bank: GeneratorBank, processors: List[Processor]) -> None:
        self.params = params
        self.bank = bank
        self.processors = processors
        self.gen: Optional[torch.Generator] = None
        if params.seed is not None:
            self.gen = bank.issue(params.seed)  # clean: near miss, redeemed by close under the same condition

    def reseed(self, seed: int) -> None:
        if self.gen is None:
            self.gen = self.bank.issue(seed)  # leak: with no params.seed close redeems nothing
        else:
            self.gen.manual_seed(seed)

    def close(self) -> None:
        for p in self.processors:
            p.close()
        if self.params.seed is not None:
            self.bank.redeem(self.gen)


class Sampler:
    def __init__(self, scratch: ScratchLogits, bank: GeneratorBank, table: PenaltyTable) -> None:
        self.scratch = scratch
        self.bank = bank
        self.table = table
        self.states: Dict[str, SamplerState] = {}
        self.greedy_steps = 0

    def add(self, rid: str, params: Params) -> None:
        procs: List[Processor] = []
        if params.repetition != 1.0:
            procs.append(RepetitionProcessor(self.table, params.repetition))
        if params.logit_bias:
            procs.append(BiasProcessor(self.scratch, params.logit_bias))
        self.states[rid] = SamplerState(params, self.bank, procs)

    def remove(self, rid: str) -> None:
        state = self.states.pop(rid, None)
        if state is not None:
            state.close()

    # ---- one token -----------------------------------------------------------

    def _scaled(self, logits: torch.Tensor, temperature: float) -> torch.Tensor:
        buf = self.scratch.rent()  # clean: handed to the caller
        torch.div(logits, max(temperature, 1e-5), out=buf)
        return buf

    def _top_k(self, logits: torch.Tensor, params: Params) -> torch.Tensor:
        buf = self._scaled(logits, params.temperature)  # clean: near miss, changed in place, handed on
        if params.top_k > 0:
            kth = torch.topk(buf, params.top_k).values[-1]
            buf.masked_fill_(buf < kth, float("-inf"))
        return buf

    def sample(self, rid: str, logits: torch.Tensor) -> int:
        state = self.states[rid]
        buf = self._top_k(logits, state.params)  # clean: given after the draw
        probs = torch.softmax(buf, dim=-1)
        tok = int(torch.multinomial(probs, 1, generator=state.gen))
        self.scratch.give(buf)
        return tok

    def sample_or_greedy(self, rid: str, logits: torch.Tensor) -> int:
        state = self.states[rid]
        buf = self._top_k(logits, state.params)  # leak: zero temperature takes argmax and returns at once
        if state.params.temperature == 0.0:
            self.greedy_steps += 1
            return int(buf.argmax())
        tok = int(torch.multinomial(torch.softmax(buf, dim=-1), 1))
        self.scratch.give(buf)
        return tok

    def logprobs(self, logits: torch.Tensor, tokens: List[int], temperature: float) -> List[float]:
        buf = self._scaled(logits, temperature)  # leak: rebound to log_softmax's result, that one is given
        buf = torch.log_softmax(buf, dim=-1)
        vals = [float(buf[t]) for t in tokens]
        self.scratch.give(buf)
        return vals

    def sample_batch(self, rids: List[str], logits: torch.Tensor) -> Dict[str, int]:
        bufs: Dict[str, torch.Tensor] = {}
        for i, rid in enumerate(rids):
            bufs[rid] = self._top_k(logits[i], self.states[rid].params)  # clean: popped and given below
        out: Dict[str, int] = {}
        while bufs:
            rid, buf = bufs.popitem()
            out[rid] = int(torch.multinomial(torch.softmax(buf, dim=-1), 1))
            self.scratch.give(buf)
        return out

    def beam_scores(self, rows: torch.Tensor, width: int) -> List[Any]:
        kept: List[Any] = []
        rented: List[torch.Tensor] = []
        for row in rows:
            buf = self._scaled(row, 1.0)  # leak: a row under the threshold is in no list, given by nobody
            best = torch.topk(buf, width)
            if float(best.values[0]) < -20.0:
                logger.debug("weak beam")
                continue
            rented.append(buf)
            kept.append(best.indices.tolist())
        for buf in rented:
            self.scratch.give(buf)
        return kept
