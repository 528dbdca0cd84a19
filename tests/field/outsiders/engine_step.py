"""Model runner: builds input batches in persistent buffers and runs one engine step."""
from __future__ import annotations

import logging
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Dict, List, Optional

import torch

logger = logging.getLogger(__name__)


class Phase(Enum):
    PREFILL = auto()
    DECODE = auto()


@dataclass
class RunnerConfig:
    max_tokens: int = 8192
    buffers: int = 4
    vocab: int = 32000
    return_logprobs: bool = False


@dataclass
class InputBatch:
    phase: Phase
    tokens: torch.Tensor
    lengths: List[int] = field(default_factory=list)
    buffer_id: int = -1


class InputBufferPool:
    def __init__(self, cfg: RunnerConfig) -> None:
        self.storage = torch.zeros(cfg.buffers, cfg.max_tokens, dtype=torch.long)
        self.in_use = torch.zeros(cfg.buffers, dtype=torch.bool)

    def reserve(self) -> int:
        idle = (~self.in_use).nonzero()
        if idle.numel() == 0:
            return -1
        idx = int(idle[0])
        self.in_use[idx] = True
        return idx

    def unreserve(self, idx: int) -> None:
        self.in_use[idx] = False


class ModelRunner:
    def __init__(self, model: torch.nn.Module, cfg: RunnerConfig) -> None:
        self.model = model
        self.cfg = cfg
        self.pool = InputBufferPool(cfg)
        self.inflight: Dict[int, InputBatch] = {}
        self.last: Optional[InputBatch] = None

    def build(self, phase: Phase, prompts: List[List[int]]) -> Optional[InputBatch]:
        idx = self.pool.reserve()  # clean: travels in the batch that is returned
        if idx < 0:
            return None
        row = self.pool.storage[idx]
        off = 0
        for p in prompts:
            row[off:off + len(p)] = torch.tensor(p)
            off += len(p)
        return InputBatch(phase, row[:off], [len(p) for p in prompts], idx)

    def build_decode(self, last_tokens: List[int]) -> Optional[InputBatch]:
        idx = self.pool.reserve()  # leak: an empty decode list returns None after the reservation
        if idx < 0:
            return None
        if not last_tokens:
            return None
        row = self.pool.storage[idx]
        row[: len(last_tokens)] = torch.tensor(last_tokens)
        return InputBatch(Phase.DECODE, row[: len(last_tokens)], [1] * len(last_tokens), idx)

    def finish(self, batch: InputBatch) -> None:
        self.pool.unreserve(batch.buffer_id)
        batch.buffer_id = -1

    def execute(self, prompts: List[List[int]]) -> Optional[torch.Tensor]:
        batch = self.build(Phase.PREFILL, prompts)  # clean: finished after the forward pass
        if batch is None:
            logger.debug("no input buffer, retry next step")
            return None
        logits = self.model(batch.tokens)
        self.finish(batch)
        return logits

    def execute_sampled(self, prompts: List[List[int]]) -> List[int]:
        batch = self.build(Phase.PREFILL, prompts)  # leak: the logprobs path returns before finish()
        if batch is None:
            return []
        logits = self.model(batch.tokens)
        if self.cfg.return_logprobs:
            logprobs = torch.log_softmax(logits, -1)
            return logprobs.argmax(-1).tolist()
        self.finish(batch)
        return logits.argmax(-1).tolist()

    def profile(self, lengths: List[int]) -> List[int]:
        sizes = []
        for n in lengths:
            batch = self.build(Phase.PREFILL, [[0] * n])  # leak: when one length is too long the break comes before finish()
            if batch is None:
                continue
            out = self.model(batch.tokens)
            if out.numel() > self.cfg.vocab * n:
                break
            sizes.append(out.numel())
            self.finish(batch)
        return sizes

    def submit(self, step: int, prompts: List[List[int]]) -> bool:
        batch = self.build(Phase.PREFILL, prompts)  # clean: stored by step, collect() finishes it
        if batch is None:
            return False
        self.inflight[step] = batch
        return True

    def collect(self, step: int) -> torch.Tensor:
        batch = self.inflight.pop(step)
        try:
            return self.model(batch.tokens)
        finally:
            self.finish(batch)

    def decode(self, last_tokens: List[int]) -> List[int]:
        batch = self.build_decode(last_tokens)  # clean: near miss, None has nothing to finish and the rest ends in finally
        if batch is None:
            return []
        try:
            logits = self.model(batch.tokens)
            if torch.isnan(logits).any():
                raise FloatingPointError("nan in logits")
            return logits.argmax(-1).tolist()
        finally:
            self.finish(batch)

    def decode_overlapped(self, last_tokens: List[int]) -> Optional[List[int]]:
        """Runs the previous batch while the new one is filled."""
        fresh = self.build_decode(last_tokens)  # clean: near miss, becomes last and is finished a step later or in drain()
        prev, self.last = self.last, fresh
        if prev is None:
            return None
        ids = self.model(prev.tokens).argmax(-1).tolist()
        self.finish(prev)
        return ids

    def drain(self) -> None:
        if self.last is not None:
            self.finish(self.last)
            self.last = None
        for batch in self.inflight.values():
            self.finish(batch)
        self.inflight.clear()

    def dry_run(self) -> None:
        for n in (1, 8, 64):
            idx = self.pool.reserve()  # clean: given back in each round
            if idx == -1:
                return
            self.model(self.pool.storage[idx, :n])
            self.pool.unreserve(idx)

    def dry_run_decode(self) -> int:
        count = len([self.build_decode([0]) for _ in range(2)])  # leak: only the number of batches is kept
        return count
