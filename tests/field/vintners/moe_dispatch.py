"""Expert-parallel token dispatch: capacity slots, all-to-all buffers and expert residency."""
from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Dict, List, NamedTuple, Optional, Set

import torch
import torch.distributed as dist


class CapacityBook:
    """Counts capacity of each expert; admit() takes n seats, dismiss() gives them back."""

    def __init__(self, n_experts: int, capacity: int) -> None:
        self.left = [capacity] * n_experts

    def admit(self, expert: int, n: int) -> bool:
        if self.left[expert] < n:
            return False
        self.left[expert] -= n
        return True

    def dismiss(self, expert: int, n: int) -> None:
        self.left[expert] += n


class ExchangeBuffer(NamedTuple):
    number: int
    data: torch.Tensor


class ExchangePool:
    def __init__(self, n: int, rows: int, width: int, device: str) -> None:
        self._data = torch.empty(n, rows, width, device=device)
        self._heap = list(range(n))

    def __len__(self) -> int:
        return len(self._heap)

    def pull(self) -> ExchangeBuffer:
        number = heapq.heappop(self._heap)
        return ExchangeBuffer(number, self._data[number])

    def push(self, buf: ExchangeBuffer) -> None:
        heapq.heappush(self._heap, buf.number)

    def pull_pair(self):
        return self.pull(), self.pull()  # clean: both go to the caller

    def pull_zeroed(self) -> ExchangeBuffer:
        buf = self.pull()  # clean: handed to the caller
        buf.data.zero_()
        return buf


@dataclass
class Ticket:
    expert: int
    tokens: torch.Tensor
    weight: float = 1.0


@dataclass
class Dispatch:
    """Tickets admitted in this step; closed by retire_step()."""
    tickets: List[Ticket] = field(default_factory=list)
    overflow: int = 0


class Router:
    def __init__(self, book: CapacityBook, n_experts: int) -> None:
        self.book = book
        self.n_experts = n_experts
        self.current = Dispatch()

    def route(self, tokens: torch.Tensor, gate: torch.Tensor) -> Dispatch:
        choice = gate.argmax(-1)
        for e in range(self.n_experts):
            rows = tokens[choice == e]
            if not len(rows):
                continue
            if not self.book.admit(e, len(rows)):  # clean: near miss, retire_step() dismisses each ticket
                self.current.overflow += len(rows)
                continue
            self.current.tickets.append(Ticket(e, rows))
        return self.current

    def route_second(self, tokens: torch.Tensor, gate: torch.Tensor, floor: float) -> int:
        """Second choice of each token, if its gate value is large enough."""
        values, idx = gate.topk(2, -1)
        added = 0
        for e in range(self.n_experts):
            mask = idx[:, 1] == e
            n = int(mask.sum())
            if n == 0 or not self.book.admit(e, n):  # leak: a weak choice is skipped, its seats taken
                continue
            weight = float(values[mask, 1].mean())
            if weight < floor:
                continue
            self.current.tickets.append(Ticket(e, tokens[mask], weight))
            added += n
        return added

    def retire_step(self) -> int:
        done, self.current = self.current, Dispatch()
        for t in done.tickets:
            self.book.dismiss(t.expert, len(t.tokens))
        return done.overflow

    def can_take(self, expert: int, n: int) -> bool:
        if self.book.admit(expert, n):  # clean: near miss, a trial that is undone at once
            self.book.dismiss(expert, n)
            return True
        return False

    def largest_batch(self, expert: int, sizes: List[int]) -> int:
        """The largest of the sizes the expert could take now."""
        best = 0
        for n in sorted(sizes):
            if not self.book.admit(expert, n):  # leak: only the last trial size is dismissed after the loop
                break
            best = n
        if best:
            self.book.dismiss(expert, best)
        return best


# ---- all-to-all ------------------------------------------------------------------------------


class Exchanger:
    def __init__(self, pool: ExchangePool, group=None, chunked: bool = False) -> None:
        self.pool = pool
        self.group = group
        self.chunked = chunked
        self._stage: Optional[ExchangeBuffer] = None
        self._log: List[ExchangeBuffer] = []

    def dispatch(self, x: torch.Tensor) -> ExchangeBuffer:
        """Tokens as the experts see them. The result is the caller's."""
        send, recv = self.pool.pull_pair()  # clean: near miss, send is pushed, recv goes to the caller
        send.data[: len(x)].copy_(x)
        dist.all_to_all_single(recv.data, send.data, group=self.group)
        self.pool.push(send)
        return recv

    def combine(self, y: ExchangeBuffer, n: int) -> torch.Tensor:
        """Takes over y."""
        back = self.pool.pull()  # clean: pushed after the clone
        dist.all_to_all_single(back.data, y.data, group=self.group)
        self.pool.push(y)
        out = back.data[:n].clone()
        self.pool.push(back)
        return out

    def forward(self, x: torch.Tensor, expert) -> torch.Tensor:
        got = self.dispatch(x)  # clean: near miss, combine() takes it over
        got.data.copy_(expert(got.data))
        return self.combine(got, len(x))

    def forward_shared(self, x: torch.Tensor, expert, shared) -> torch.Tensor:
        got = self.dispatch(x)  # leak: without rows on this rank it returns before combine()
        if not bool(got.data.any()):
            return shared(x)
        got.data.copy_(expert(got.data))
        return self.combine(got, len(x)) + shared(x)

    def begin(self, x: torch.Tensor) -> None:
        if self.chunked:
            self._stage = self.pool.pull_zeroed()  # clean: near miss, finish() pushes under the same flag
            self._stage.data[: len(x)].copy_(x)

    def finish(self) -> None:
        if self.chunked:
            self.pool.push(self._stage)
            self._stage = None

    def record(self, x: torch.Tensor) -> None:
        """Keep a copy for the load-balance report."""
        if len(self.pool) < 4:
            return
        buf = self.pool.pull()  # leak: report() trims and clears the log without pushing
        buf.data[: len(x)].copy_(x)
        self._log.append(buf)

    def report(self) -> Dict[str, float]:
        self._log = self._log[-16:]
        stats = {f"chunk{i}": float(b.data.mean()) for i, b in enumerate(self._log)}
        self._log.clear()
        return stats


def expert_histogram(ex: Exchanger, x: torch.Tensor, bins: int) -> torch.Tensor:
    seen = ex.dispatch(x).data  # leak: only the data attribute is kept, the buffer cannot be pushed
    return torch.histc(seen.float().norm(dim=-1), bins=bins)


# ---- residency of expert weights -------------------------------------------------------------


class ExpertResidency:
    """Experts on the device, counted by user; a count of zero lets the expert be moved away."""

    def __init__(self, experts: List[torch.nn.Module], limit: int) -> None:
        self.experts = experts
        self.limit = limit
        self.users: Dict[int, int] = {}

    def incref(self, e: int) -> torch.nn.Module:
        if e not in self.users:
            self.experts[e].to("cuda")
            self.users[e] = 0
        self.users[e] += 1
        return self.experts[e]

    def decref(self, e: int) -> None:
        self.users[e] -= 1
        if self.users[e] == 0 and len(self.users) > self.limit:
            del self.users[e]
            self.experts[e].to("cpu")


def preload(res: ExpertResidency, wanted: List[int]) -> Set[int]:
    """Warm up experts; duplicates in `wanted` are common."""
    loaded: Set[int] = set()
    for e in wanted:
        res.incref(e)  # leak: a repeated expert is counted up twice and down once
        loaded.add(e)
    for e in loaded:
        res.decref(e)
    return loaded


def weight_norm(res: ExpertResidency, e: int) -> float:
    total = 0.0
    module = res.incref(e)  # clean: near miss, break only ends the loop
    for p in module.parameters():
        if not p.requires_grad:
            break
        total += float(p.norm()) ** 2
    res.decref(e)
    return total ** 0.5
