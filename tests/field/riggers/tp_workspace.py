"""Workspaces of tensor-parallel layers: a bump arena per device, and loans on top of it that nest.

Arena.push gives a frame, frames are popped by Arena.pop in any order (a bitmap of blocks, not a true
stack). Layers do not talk to the arena but to a Lender, of which there are several.
"""
from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Callable, Optional, Protocol

import torch
import torch.distributed as dist

BLOCK = 1 << 20


@dataclass(frozen=True)
class Frame:
    first: int
    blocks: int


class Arena:
    def __init__(self, blocks: int, device: str = "cuda"):
        self.memory = torch.empty(blocks * BLOCK, dtype=torch.uint8, device=device)
        self.busy = bytearray(blocks)
        self.peak = 0

    def push(self, nbytes: int) -> Optional[Frame]:
        need = -(-nbytes // BLOCK)
        at = self.busy.find(bytes(need))
        if at < 0:
            return None
        self.busy[at : at + need] = b"\x01" * need
        self.peak = max(self.peak, sum(self.busy))
        return Frame(at, need)

    def pop(self, frame: Frame) -> None:
        self.busy[frame.first : frame.first + frame.blocks] = bytes(frame.blocks)

    def tensor(self, frame: Frame, shape: tuple[int, ...], dtype=torch.bfloat16) -> torch.Tensor:
        numel = functools.reduce(lambda a, b: a * b, shape, 1)
        raw = self.memory[frame.first * BLOCK :][: numel * dtype.itemsize]
        return raw.view(dtype).view(shape)


@dataclass
class Loan:
    tensor: torch.Tensor
    frame: Optional[Frame]
    owned: bool = True


class Lender(Protocol):
    def lend(self, shape: tuple[int, ...]) -> Loan: ...

    def settle(self, loan: Loan) -> None: ...


class ArenaLender:
    """Lends from the arena; falls back to the caching allocator, which needs no settling."""

    def __init__(self, arena: Arena, dtype=torch.bfloat16):
        self.arena = arena
        self.dtype = dtype

    def lend(self, shape: tuple[int, ...]) -> Loan:
        nbytes = self.dtype.itemsize
        for s in shape:
            nbytes *= s
        frame = self.arena.push(nbytes)  # clean: handed on in the loan
        if frame is None:
            return Loan(torch.empty(shape, dtype=self.dtype, device="cuda"), None)
        return Loan(self.arena.tensor(frame, shape, self.dtype), frame)

    def settle(self, loan: Loan) -> None:
        if loan.owned and loan.frame is not None:
            self.arena.pop(loan.frame)
            loan.frame = None


class CachedLender(ArenaLender):
    """Keeps settled loans by shape to save the search; purge() returns them to the arena."""

    def __init__(self, arena: Arena, dtype=torch.bfloat16, per_shape: int = 2):
        super().__init__(arena, dtype)
        self.per_shape = per_shape
        self.cache: dict[tuple[int, ...], list[Loan]] = {}

    def lend(self, shape: tuple[int, ...]) -> Loan:
        shelf = self.cache.get(shape)
        if shelf:
            return shelf.pop()
        return super().lend(shape)  # clean: handed on

    def settle(self, loan: Loan) -> None:
        if not loan.owned:
            return
        shelf = self.cache.setdefault(tuple(loan.tensor.shape), [])
        if len(shelf) < self.per_shape:
            shelf.append(loan)
        else:
            super().settle(loan)

    def purge(self) -> None:
        for shelf in self.cache.values():
            for loan in shelf:
                super().settle(loan)
        self.cache.clear()


class TracingLender:
    def __init__(self, inner: Lender, note: Callable[[str], None]):
        self.inner = inner
        self.note = note

    def lend(self, shape: tuple[int, ...]) -> Loan:
        loan = self.inner.lend(shape)  # clean: a wrapper of a wrapper, handed on
        self.note(f"lend {shape} arena={loan.frame is not None}")
        return loan

    def settle(self, loan: Loan) -> None:
        self.note("settle")
        self.inner.settle(loan)


class ColumnLinear:
    def __init__(self, weight: torch.Tensor, lender: Lender, gather: bool):
        self.weight = weight
        self.lender = lender
        self.gather = gather
        self.saved: Optional[Loan] = None

    def forward(self, x: torch.Tensor, training: bool) -> torch.Tensor:
        out = self.lender.lend((x.shape[0], self.weight.shape[0]))  # clean: settled after the copy
        torch.matmul(x, self.weight.t(), out=out.tensor)
        y = out.tensor.clone()
        self.lender.settle(out)
        if training:
            if self.saved is not None:
                self.lender.settle(self.saved)
            self.saved = self.lender.lend(tuple(x.shape))  # clean: near miss, backward settles it
            self.saved.tensor.copy_(x)
        return y

    def backward(self, grad: torch.Tensor) -> torch.Tensor:
        saved, self.saved = self.saved, None
        self.weight.grad = grad.t() @ saved.tensor
        self.lender.settle(saved)
        return grad @ self.weight


class RowLinear:
    def __init__(self, weight: torch.Tensor, lender: Lender, group):
        self.weight = weight
        self.lender = lender
        self.group = group
        self.partial: Optional[Loan] = None
        self.saved: Optional[Loan] = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.partial = self.lender.lend((x.shape[0], self.weight.shape[0]))  # clean: reset settles it
        torch.matmul(x, self.weight.t(), out=self.partial.tensor)
        dist.all_reduce(self.partial.tensor, group=self.group)
        self.saved = self.lender.lend(tuple(x.shape))  # leak: neither backward nor reset settles saved
        self.saved.tensor.copy_(x)
        y = self.partial.tensor.clone()
        self.reset()
        return y

    def backward(self, grad: torch.Tensor) -> torch.Tensor:
        self.weight.grad = grad.t() @ self.saved.tensor
        self.saved = None
        return grad @ self.weight

    def reset(self) -> None:
        if self.partial is not None:
            self.lender.settle(self.partial)
            self.partial = None


def gelu_scratch(lender: Lender, x: torch.Tensor, scratch: Optional[Loan] = None) -> torch.Tensor:
    """Uses the caller's scratch when it is given, otherwise a loan of its own."""
    mine = scratch is None
    if mine:
        scratch = lender.lend(tuple(x.shape))  # clean: near miss, settled under the same flag
    scratch.tensor.copy_(x)
    y = torch.nn.functional.gelu(scratch.tensor)
    if mine:
        lender.settle(scratch)
    return y


def swiglu_scratch(lender: Lender, x: torch.Tensor, scratch: Optional[Loan] = None) -> torch.Tensor:
    if scratch is None:
        scratch = lender.lend(tuple(x.shape))  # leak: a loan of its own is settled as little as the caller's
    a, b = scratch.tensor.copy_(x).chunk(2, dim=-1)
    return torch.nn.functional.silu(a) * b


def vocab_parallel_loss(lender: Lender, logits, target, group, ignore: int) -> float:
    peak = lender.lend((logits.shape[0],))  # clean: settled on the early return and at the end
    torch.amax(logits, dim=-1, out=peak.tensor)
    dist.all_reduce(peak.tensor, op=dist.ReduceOp.MAX, group=group)
    norm = lender.lend((logits.shape[0],))  # leak: a batch without a target returns with only peak settled
    torch.sum(torch.exp(logits - peak.tensor[:, None]), dim=-1, out=norm.tensor)
    keep = target != ignore
    if not bool(keep.any()):
        lender.settle(peak)
        return 0.0
    dist.all_reduce(norm.tensor, group=group)
    picked = logits.gather(1, target.clamp_min(0)[:, None])[:, 0] - peak.tensor
    loss = (norm.tensor.log() - picked)[keep].mean()
    lender.settle(norm)
    lender.settle(peak)
    return float(loss)


def borrow_view(loan: Loan, rows: int) -> Loan:
    """A loan on a part of another one; settling it does nothing."""
    return Loan(loan.tensor[:rows], loan.frame, owned=False)


def topk_rows(lender: Lender, x: torch.Tensor, rows: int) -> torch.Tensor:
    whole = lender.lend(tuple(x.shape))  # clean: near miss, the view does not own, this is settled
    part = borrow_view(whole, rows)
    part.tensor.copy_(x[:rows])
    best = part.tensor.topk(4, dim=-1).values.clone()
    lender.settle(part)
    lender.settle(whole)
    return best


def bottomk_rows(lender: Lender, x: torch.Tensor, rows: int) -> torch.Tensor:
    part = borrow_view(lender.lend(tuple(x.shape)), rows)  # leak: only the view that does not own is settled
    part.tensor.copy_(x[:rows])
    least = part.tensor.topk(4, dim=-1, largest=False).values.clone()
    lender.settle(part)
    return least


def autotune(arena: Arena, sizes: list[int], run: Callable[[torch.Tensor], float]):
    """Tries workspaces of several sizes and keeps the frame of the fastest for the caller."""
    best, best_size, kept = float("inf"), 0, None
    for n in sizes:
        frame = arena.push(n)  # leak: a better one replaces the kept frame without pop
        if frame is None:
            continue
        took = run(arena.tensor(frame, (n // 2,)))
        if took < best:
            best, best_size, kept = took, n, frame
        else:
            arena.pop(frame)
    return best_size, kept


def autotune_once(arena: Arena, sizes: list[int], run: Callable[[torch.Tensor], float]) -> Optional[Frame]:
    best, kept = float("inf"), None
    for n in sizes:
        frame = arena.push(n)  # clean: near miss, the loser of each round is popped, the winner handed on
        if frame is None:
            continue
        took = run(arena.tensor(frame, (n // 2,)))
        loser = frame
        if took < best:
            best, kept, loser = took, frame, kept
        if loser is not None:
            arena.pop(loser)
    return kept
