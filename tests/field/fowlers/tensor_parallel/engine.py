"""The engine: sequences hold pooled states between steps."""
from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Awaitable, Callable, Optional

import torch

from .arena import Arena, Span, SpillPool
from .layers import ParallelMLP, Pooled, pooled

log = logging.getLogger(__name__)


@dataclass
class Sequence:
    ident: int
    tokens: list[int]
    limit: int
    state: Optional[Pooled] = None
    scratch: Optional[Span] = None
    log_probs: list[float] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return len(self.tokens) >= self.limit


class Engine:
    def __init__(self, arena: Arena, pool: SpillPool, mlp: ParallelMLP, embed: torch.Tensor) -> None:
        self.arena, self.pool, self.mlp, self.embed = arena, pool, mlp, embed
        self._running: dict[int, Sequence] = {}
        self._parked: list[Sequence] = []

    def admit(self, seq: Sequence) -> bool:
        state = pooled(self.pool, 1, self.embed.shape[1])  # clean: near miss, kept in the sequence, _retire frees it
        if state is None:
            return False
        state.t.copy_(self.embed[seq.tokens[-1:]])
        seq.state = state
        if seq.limit > 1024:
            seq.scratch = self.arena.carve(seq.limit)  # leak: nothing mends a sequence's scratch when it retires
        self._running[seq.ident] = seq
        return True

    def step(self) -> int:
        for seq in list(self._running.values()):
            out = self.mlp.forward(seq.state.t)  # clean: near miss, takes the place of the state, which is freed
            seq.state.free()
            seq.state = out
            seq.tokens.append(int(out.t.argmax()))
            if seq.finished:
                self._retire(seq.ident)
        return len(self._running)

    def _retire(self, ident: int) -> None:
        seq = self._running.pop(ident)
        seq.state.free()
        seq.state = None
        seq.scratch = None

    def park(self, ident: int) -> None:
        """Takes a sequence out of the running ones; its state stays where it is."""
        self._parked.append(self._running.pop(ident))

    def unpark(self) -> None:
        while self._parked:
            seq = self._parked.pop()
            self._running[seq.ident] = seq

    def shutdown(self) -> None:
        self.unpark()
        for ident in list(self._running):
            self._retire(ident)
        self.pool.drain()


class SpeculativeEngine(Engine):
    """A draft is run ahead for each sequence and kept when it is accepted."""

    def draft(self, seq: Sequence, accept: Callable[[torch.Tensor], bool]) -> bool:
        trial = self.mlp.forward(seq.state.t)  # leak: a rejected draft isn't freed
        if not accept(trial.t):
            log.debug("sequence %d: draft rejected", seq.ident)
            return False
        seq.state.free()
        seq.state = trial
        return True

    def draft_many(self, accept: Callable[[torch.Tensor], bool]) -> int:
        kept = 0
        drafts = {i: self.mlp.forward(s.state.t) for i, s in self._running.items()}  # clean: near miss, kept or freed
        for ident, trial in drafts.items():
            seq = self._running[ident]
            if accept(trial.t):
                seq.state, trial = trial, seq.state
                kept += 1
            trial.free()
        return kept


class AsyncFront:
    """Requests wait for a place; the place is given back when the stream of tokens ends."""

    def __init__(self, engine: Engine, places: int) -> None:
        self._engine = engine
        self._places = asyncio.BoundedSemaphore(places)

    async def generate(self, seq: Sequence, emit: Callable[[int], Awaitable[None]]) -> int:
        await self._places.acquire()  # clean: released in the finally on every way
        try:
            if not self._engine.admit(seq):
                return 0
            sent = len(seq.tokens)
            while not seq.finished:
                self._engine.step()
                for token in seq.tokens[sent:]:
                    await emit(token)
                sent = len(seq.tokens)
            return sent
        finally:
            self._places.release()

    async def score(self, seq: Sequence) -> Optional[float]:
        await self._places.acquire()  # leak: a sequence that isn't admitted returns with the place
        if not self._engine.admit(seq):
            return None
        while not seq.finished:
            self._engine.step()
            await asyncio.sleep(0)
        self._places.release()
        return sum(seq.log_probs)
