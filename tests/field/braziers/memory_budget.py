"""Activation-memory budget: tickets, saved activations, recomputation, micro-batches."""
from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any, Callable, Iterator, Optional, Sequence

import torch


class Ticket:
    """A reservation of bytes; may be released once and used as a context manager."""

    def __init__(self, budget: "Budget", nbytes: int) -> None:
        self._budget = budget
        self.nbytes = nbytes

    def split(self, nbytes: int) -> "Ticket":
        """Move part of this reservation to a ticket of its own."""
        self.nbytes -= nbytes
        return Ticket(self._budget, nbytes)

    def release(self) -> None:
        self._budget._settle(self.nbytes)
        self.nbytes = 0

    def __enter__(self) -> "Ticket":
        return self

    def __exit__(self, *exc: Any) -> None:
        self.release()


class Budget:
    def __init__(self, total: int) -> None:
        self.total = total
        self._used = 0
        self._cond = threading.Condition()

    def reserve(self, nbytes: int) -> Optional[Ticket]:
        with self._cond:
            if self._used + nbytes > self.total:
                return None
            self._used += nbytes
            return Ticket(self, nbytes)

    def reserve_blocking(self, nbytes: int) -> Ticket:
        with self._cond:
            self._cond.wait_for(lambda: self._used + nbytes <= self.total)
            self._used += nbytes
            return Ticket(self, nbytes)

    def _settle(self, nbytes: int) -> None:
        with self._cond:
            self._used -= nbytes
            self._cond.notify_all()


def size_of(t: torch.Tensor) -> int:
    return t.numel() * t.element_size()


def can_fit(budget: Budget, sizes: Sequence[int]) -> bool:
    return all(budget.reserve(n) is not None for n in sizes)  # leak: the tickets are tested and dropped


def fits_together(budget: Budget, sizes: Sequence[int]) -> bool:
    ticket = budget.reserve(sum(sizes))  # clean: a trial, released at once
    if ticket is None:
        return False
    ticket.release()
    return True


class ActivationStore:
    """Saved activations by name, the oldest of which may be spilled to the host."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._saved: "OrderedDict[str, tuple[torch.Tensor, Ticket]]" = OrderedDict()
        self._host: dict[str, torch.Tensor] = {}

    def save(self, name: str, t: torch.Tensor) -> None:
        if name in self._saved:
            _, old = self._saved.pop(name)
            old.release()
        need = size_of(t)
        while (ticket := self._budget.reserve(need)) is None:  # clean: near miss, load or _spill ends it
            if not self._spill():
                self._host[name] = t.cpu()
                return
        self._saved[name] = (t, ticket)

    def _spill(self) -> bool:
        if not self._saved:
            return False
        name, (t, ticket) = self._saved.popitem(last=False)
        self._host[name] = t.cpu()
        ticket.release()
        return True

    def load(self, name: str) -> torch.Tensor:
        if name in self._host:
            return self._host.pop(name)
        t, ticket = self._saved.pop(name)
        ticket.release()
        return t

    def clear(self) -> None:
        while self._spill():
            pass
        self._host.clear()


class RecomputeTape:
    """Segment inputs kept for recomputation, popped in reverse by the backward pass."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._stack: list[tuple[Callable, torch.Tensor, Ticket]] = []

    def push(self, fn: Callable, x: torch.Tensor) -> torch.Tensor:
        ticket = self._budget.reserve_blocking(size_of(x))  # leak: pop and abandon ignore the ticket
        self._stack.append((fn, x.detach(), ticket))
        with torch.no_grad():
            return fn(x)

    def pop(self, grad: torch.Tensor) -> torch.Tensor:
        fn, x, _ = self._stack.pop()
        x = x.requires_grad_(True)
        with torch.enable_grad():
            y = fn(x)
        y.backward(grad)
        return x.grad

    def abandon(self) -> None:
        del self._stack[:]


def checkpointed(budget: Budget, fns: Sequence[Callable], x: torch.Tensor) -> torch.Tensor:
    for fn in fns:
        ticket = budget.reserve(2 * size_of(x))  # leak: the last function's result is returned before release
        if ticket is None:
            x = fn(x.cpu())
            continue
        y = fn(x)
        if fn is fns[-1]:
            return y
        x = y
        ticket.release()
    return x


def checkpointed_scoped(budget: Budget, fns: Sequence[Callable], x: torch.Tensor) -> torch.Tensor:
    for fn in fns:
        with budget.reserve_blocking(2 * size_of(x)):  # clean: with block
            y = fn(x)
            if not bool(torch.isfinite(y).all()):
                return x
            x = y
    return x


def microbatches(budget: Budget, batch: torch.Tensor, size: int, skip_empty: bool) -> Iterator[torch.Tensor]:
    for mb in batch.split(size):
        ticket = budget.reserve_blocking(size_of(mb))  # leak: skipped micro-batches continue without release
        if skip_empty and not bool(mb.any()):
            continue
        yield mb
        ticket.release()


def ticketed_microbatches(
    budget: Budget, batch: torch.Tensor, size: int
) -> Iterator[tuple[torch.Tensor, Ticket]]:
    """The consumer releases each ticket when its backward pass is over."""
    for mb in batch.split(size):
        ticket = budget.reserve_blocking(size_of(mb))  # clean: near miss, yielded to the consumer
        yield mb, ticket


def accumulate(budget: Budget, model: Callable, batch: torch.Tensor, size: int) -> float:
    total = 0.0
    for mb, ticket in ticketed_microbatches(budget, batch, size):  # clean: released in each turn
        loss = model(mb).mean()
        loss.backward()
        total += float(loss)
        ticket.release()
    return total


def accumulate_until(budget: Budget, model: Callable, batch: torch.Tensor, size: int, limit: float) -> float:
    total = 0.0
    for mb, ticket in ticketed_microbatches(budget, batch, size):  # leak: the break keeps the last
        loss = model(mb).mean()
        total += float(loss)
        if total > limit:
            break
        loss.backward()
        ticket.release()
    return total


def two_phase(budget: Budget, fwd: Callable, bwd: Callable, x: torch.Tensor) -> torch.Tensor:
    whole = budget.reserve_blocking(3 * size_of(x))  # clean: its remainder is released at the end
    grads = whole.split(2 * size_of(x))  # leak: the part split off is never released
    y = fwd(x)
    dx = bwd(y)[: grads.nbytes // x.element_size()]
    whole.release()
    return dx


class Arena:
    """A tensor under a ticket, resized with the sequence length."""

    def __init__(self, budget: Budget, width: int) -> None:
        self._budget = budget
        self._width = width
        self._ticket: Optional[Ticket] = None
        self._buf: Optional[torch.Tensor] = None

    def resize(self, rows: int) -> torch.Tensor:
        fresh = self._budget.reserve_blocking(rows * self._width * 4)  # clean: near miss, old one released
        if self._ticket is not None:
            self._ticket.release()
        self._ticket = fresh
        self._buf = torch.empty(rows, self._width)
        return self._buf

    def close(self) -> None:
        ticket, self._ticket = self._ticket, None
        self._buf = None
        if ticket is not None:
            ticket.release()
