"""Mixture-of-experts token dispatch: capacity budgets per expert and all-to-all buffers."""
from __future__ import annotations

import logging
import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Optional, Sequence

import torch
import torch.distributed as dist

log = logging.getLogger("moe")


class CapacityBudget:
    """Tokens an expert may still receive in this layer's step. What is drawn has to be refunded."""

    def __init__(self, experts: int, per_expert: int) -> None:
        self.left = [per_expert] * experts
        self.denied = 0

    def draw(self, expert: int, tokens: int) -> bool:
        if self.left[expert] < tokens:
            self.denied += 1
            return False
        self.left[expert] -= tokens
        return True

    def refund(self, expert: int, tokens: int) -> None:
        self.left[expert] += tokens


class A2ABuffers:
    """Power-of-two sized send and receive buffers."""

    def __init__(self, width: int, dtype: torch.dtype, device) -> None:
        self.width, self.dtype, self.device = width, dtype, device
        self._bins: dict[int, list[torch.Tensor]] = defaultdict(list)
        self.outstanding = 0

    def alloc(self, rows: int) -> torch.Tensor:
        cls = 1 << max(4, math.ceil(math.log2(max(1, rows))))
        self.outstanding += 1
        if self._bins[cls]:
            return self._bins[cls].pop()
        return torch.empty(cls, self.width, dtype=self.dtype, device=self.device)

    def free(self, buf: torch.Tensor) -> None:
        self.outstanding -= 1
        self._bins[buf.shape[0]].append(buf)


@dataclass
class Route:
    expert: int
    tokens: torch.Tensor
    send: Optional[torch.Tensor] = None
    recv: Optional[torch.Tensor] = None

    @property
    def count(self) -> int:
        return int(self.tokens.numel())


@dataclass
class Ticket:
    routes: list[Route] = field(default_factory=list)
    dropped: int = 0


class Dispatcher:
    def __init__(self, budget: CapacityBudget, buffers: A2ABuffers, group, experts: Sequence) -> None:
        self.budget = budget
        self.buffers = buffers
        self.group = group
        self.experts = experts
        self.overflow: dict[int, list[torch.Tensor]] = defaultdict(list)
        self.cached: Optional[torch.Tensor] = None
        self.cached_rows = 0

    def plan(self, assignment: torch.Tensor) -> Ticket:
        """Routes within capacity. complete() gives back everything that a ticket holds."""
        ticket = Ticket()
        for e in range(len(self.experts)):
            tokens = (assignment == e).nonzero().flatten()
            n = int(tokens.numel())
            if n == 0:
                continue
            if not self.budget.draw(e, n):  # clean: near miss, the route is refunded by complete()
                ticket.dropped += n
                continue
            ticket.routes.append(Route(e, tokens))
        return ticket

    def stage(self, ticket: Ticket, hidden: torch.Tensor) -> None:
        for route in ticket.routes:
            route.send = self.buffers.alloc(route.count)  # clean: near miss, complete() frees route.send
            route.send[:route.count].copy_(hidden[route.tokens])

    def exchange(self, ticket: Ticket) -> None:
        for route in ticket.routes:
            route.recv = self.buffers.alloc(route.count)  # leak: complete() frees send and never recv
            dist.all_to_all_single(route.recv, route.send, group=self.group)

    def complete(self, ticket: Ticket, out: torch.Tensor) -> torch.Tensor:
        for route in ticket.routes:
            result = self.experts[route.expert](route.recv[:route.count])
            out.index_add_(0, route.tokens, result)
            self.budget.refund(route.expert, route.count)
            if route.send is not None:
                self.buffers.free(route.send)
                route.send = None
        ticket.routes.clear()
        return out

    # shared expert and residual paths ---------------------------------------------------------------
    def shared(self, hidden: torch.Tensor) -> torch.Tensor:
        buf = self.gathered(hidden)  # leak: sliced into a new tensor, the buffer is dropped
        n = hidden.shape[0] * dist.get_world_size(self.group)
        return self.experts[0](buf[:n]).clone()

    def gathered(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.shape[0] * dist.get_world_size(self.group)
        buf = self.buffers.alloc(rows)  # clean: the caller frees it
        dist.all_gather_into_tensor(buf[:rows], hidden, group=self.group)
        return buf

    def second_choice(self, primary: int, secondary: int, tokens, hidden) -> Optional[torch.Tensor]:
        """Top-2 without renormalising: both experts or none."""
        n = int(tokens.numel())
        if not self.budget.draw(primary, n):  # leak: not refunded when secondary is full
            return None
        if not self.budget.draw(secondary, n):  # clean: refunded below
            return None
        picked = hidden[tokens]
        out = 0.5 * (self.experts[primary](picked) + self.experts[secondary](picked))
        self.budget.refund(secondary, n)
        self.budget.refund(primary, n)
        return out

    def both_or_first(self, primary: int, secondary: int, tokens: torch.Tensor, hidden) -> torch.Tensor:
        n = int(tokens.numel())
        if not self.budget.draw(primary, n):  # clean: refunded on each way
            return hidden[tokens]
        extra = self.budget.draw(secondary, n)  # clean: near miss, refunded under the same flag
        out = self.experts[primary](hidden[tokens])
        if extra:
            out = out + self.experts[secondary](hidden[tokens])
        self.budget.refund(primary, n)
        if extra:
            self.budget.refund(secondary, n)
        return out

    # padded fallback -----------------------------------------------------------------------------------
    def padded(self, hidden: torch.Tensor, blocks: list[torch.Tensor]) -> list[torch.Tensor]:
        outs = []
        for e, tokens in enumerate(blocks):
            send = self.buffers.alloc(tokens.numel())  # clean: freed before the continue and at the end
            send.zero_()
            if tokens.numel() == 0:
                self.buffers.free(send)
                outs.append(hidden[:0])
                continue
            send[:tokens.numel()].copy_(hidden[tokens])
            recv = self.buffers.alloc(tokens.numel())  # leak: freed only when the expert is a local one
            dist.all_to_all_single(recv, send, group=self.group)
            outs.append(self.experts[e](recv[:tokens.numel()]).clone())
            self.buffers.free(send)
            if getattr(self.experts[e], "local", False):
                self.buffers.free(recv)
        return outs

    def spill(self, expert: int, hidden: torch.Tensor) -> None:
        """Tokens over capacity are kept for a second pass."""
        buf = self.buffers.alloc(hidden.shape[0])  # leak: second_pass() clears the list, frees nothing
        buf[:hidden.shape[0]].copy_(hidden)
        self.overflow[expert].append(buf)

    def second_pass(self, rows: dict[int, list[int]]) -> dict[int, torch.Tensor]:
        done: dict[int, list[torch.Tensor]] = {}
        for expert, bufs in self.overflow.items():
            done[expert] = [self.experts[expert](b[:n]) for b, n in zip(bufs, rows[expert])]
            bufs.clear()
        return {e: torch.cat(parts) for e, parts in done.items() if parts}

    def workspace(self, rows: int) -> torch.Tensor:
        """A buffer kept between calls; grows as needed."""
        if self.cached is not None and self.cached_rows >= rows:
            return self.cached
        if self.cached is not None:
            self.buffers.free(self.cached)
        self.cached = self.buffers.alloc(rows)  # clean: near miss, close() frees the cached one
        self.cached_rows = rows
        return self.cached

    def combine(self, parts: list[torch.Tensor]) -> torch.Tensor:
        rows = sum(p.shape[0] for p in parts)
        flat = self.workspace(rows)  # clean: near miss, the cache goes on owning it
        offset = 0
        for p in parts:
            flat[offset:offset + p.shape[0]].copy_(p)
            offset += p.shape[0]
        return flat[:rows].clone()

    def balance(self, want: list[int]) -> list[int]:
        """Draw as many tokens as every expert allows, halving on refusal."""
        granted = []
        for e, n in enumerate(want):
            while n and not self.budget.draw(e, n):  # clean: near miss, settle() refunds the counts
                n //= 2
            granted.append(n)
        return granted

    def settle(self, granted: list[int]) -> None:
        for e, n in enumerate(granted):
            if n:
                self.budget.refund(e, n)

    def rebalanced(self, want: list[int], hidden) -> torch.Tensor:
        granted = self.balance(want)  # clean: settled below
        out = hidden.clone()
        offset = 0
        for e, n in enumerate(granted):
            out[offset:offset + n] = self.experts[e](hidden[offset:offset + n])
            offset += n
        self.settle(granted)
        return out

    def imbalance(self, want: list[int]) -> float:
        granted = self.balance(want)  # leak: what was drawn is only looked at
        asked = sum(want) or 1
        return 1.0 - sum(granted) / asked

    def close(self) -> None:
        for bufs in self.overflow.values():
            for buf in bufs:
                self.buffers.free(buf)
        self.overflow.clear()
        if self.cached is not None:
            self.buffers.free(self.cached)
            self.cached = None
