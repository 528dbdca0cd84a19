"""Encoder output cache for multimodal requests; entries are counted in embeddings, not bytes."""
from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Optional

import torch

logger = logging.getLogger(__name__)


@dataclass
class MMInput:
    key: str
    num_embeds: int
    pixels: Optional[torch.Tensor] = None


@dataclass
class MMRequest:
    rid: str
    inputs: list[MMInput] = field(default_factory=list)
    held: set[str] = field(default_factory=set)


class EncoderBudget:
    """Counter of free embedding cells."""

    def __init__(self, cells: int) -> None:
        self.free_cells = cells

    def reserve_cells(self, n: int) -> bool:
        if n > self.free_cells:
            return False
        self.free_cells -= n
        return True

    def release_cells(self, n: int) -> None:
        self.free_cells += n


class EncoderCache:
    def __init__(self, budget: EncoderBudget) -> None:
        self.budget = budget
        self.data: OrderedDict[str, torch.Tensor] = OrderedDict()
        self.users: dict[str, int] = {}

    def incref(self, key: str) -> bool:
        if key not in self.data:
            return False
        self.users[key] = self.users.get(key, 0) + 1
        return True

    def decref(self, key: str) -> None:
        self.users[key] -= 1
        if self.users[key] == 0:
            del self.users[key]

    def insert(self, inp: MMInput, out: torch.Tensor) -> bool:
        if inp.key in self.data:
            return True
        if not self.budget.reserve_cells(inp.num_embeds):  # leak: a wrong output length returns False with the cells
            return False
        if out.shape[0] != inp.num_embeds:
            logger.error("%s: %d embeddings expected", inp.key, inp.num_embeds)
            return False
        self.data[inp.key] = out
        return True

    def insert_or_replace(self, inp: MMInput, out: torch.Tensor) -> bool:
        if out.shape[0] != inp.num_embeds:
            return False
        if inp.key in self.data:
            self.evict(inp.key)
        if not self.budget.reserve_cells(inp.num_embeds):  # clean: near miss, the old entry is evicted first, evict releases this one
            return False
        self.data[inp.key] = out
        return True

    def evict(self, key: str) -> None:
        out = self.data.pop(key)
        self.budget.release_cells(out.shape[0])

    def evict_idle(self) -> int:
        idle = [k for k in self.data if k not in self.users]
        for k in idle:
            self.evict(k)
        return len(idle)


class MMScheduler:
    def __init__(self, cache: EncoderCache, enforce: bool = True) -> None:
        self.cache = cache
        self.enforce = enforce
        self.step_cells = 0

    def attach(self, req: MMRequest) -> int:
        for inp in req.inputs:
            if inp.key in req.held:
                continue
            if self.cache.incref(inp.key):  # clean: near miss, key goes into held, detach drops all of held
                req.held.add(inp.key)
        return len(req.held)

    def attach_all(self, req: MMRequest) -> bool:
        for inp in req.inputs:
            if not self.cache.incref(inp.key):  # leak: earlier keys are recorded only after the loop
                return False
        req.held.update(inp.key for inp in req.inputs)
        return True

    def attach_atomic(self, req: MMRequest) -> bool:
        done: list[str] = []
        for inp in req.inputs:
            if not self.cache.incref(inp.key):  # clean: near miss, the earlier keys are decref'ed on a miss
                for k in done:
                    self.cache.decref(k)
                return False
            done.append(inp.key)
        for k in done:
            if k in req.held:
                self.cache.decref(k)
            req.held.add(k)
        return True

    def detach(self, req: MMRequest) -> None:
        for key in req.held:
            self.cache.decref(key)
        req.held.clear()

    def gather(self, req: MMRequest) -> Optional[torch.Tensor]:
        parts = []
        for inp in req.inputs:
            if not self.cache.incref(inp.key):  # clean: near miss, decref follows at once on a hit
                continue
            parts.append(self.cache.data[inp.key].clone())
            self.cache.decref(inp.key)
        return torch.cat(parts) if parts else None

    def begin_step(self, n: int) -> bool:
        if self.enforce:
            if not self.cache.budget.reserve_cells(n):  # clean: near miss, end_step has the same guard and releases step_cells
                return False
            self.step_cells += n
        return True

    def end_step(self) -> None:
        if self.enforce:
            self.cache.budget.release_cells(self.step_cells)
            self.step_cells = 0

    def profile(self, sizes: list[int]) -> int:
        total = 0
        for n in sizes:
            if not self.cache.budget.reserve_cells(n):  # leak: max(sizes) is released at the end, not the sum
                break
            total += n
        if total:
            self.cache.budget.release_cells(max(sizes))
        return total

    def fits(self, req: MMRequest) -> bool:
        need = sum(i.num_embeds for i in req.inputs if i.key not in self.cache.data)
        return self.cache.budget.reserve_cells(need)  # leak: used as a question, the cells stay taken

    def touch(self, key: str) -> Optional[torch.Size]:
        if not self.cache.incref(key):  # leak: a one-dimensional entry returns before decref
            return None
        out = self.cache.data[key]
        if out.dim() == 1:
            return None
        shape = out.shape
        self.cache.decref(key)
        return shape
