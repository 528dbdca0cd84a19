"""Bump arenas for decode steps: marks, carved tensors and generators over them."""

from __future__ import annotations

import enum
from contextlib import contextmanager
from typing import Generator, Iterable, Iterator, Optional

import torch


class ArenaFull(Exception):
    """Raised by Arena.carve when the slab has no room left."""


class Carve:
    def __init__(self, arena: "Arena", offset: int, tensor: torch.Tensor):
        self.arena = arena
        self.offset = offset
        self.tensor = tensor
        self.folded = False

    def fold(self) -> None:
        if not self.folded:
            self.folded = True
            self.arena._fold(self)


class Arena:
    """One slab; it rewinds to zero once the last live carve has been folded."""

    def __init__(self, size: int):
        self.slab = torch.zeros(size)
        self.top = 0
        self.live = 0

    def carve(self, *shape: int) -> Carve:
        n = 1
        for s in shape:
            n *= s
        if self.top + n > self.slab.numel():
            raise ArenaFull(f"{n} elements requested, {self.slab.numel() - self.top} left")
        at = self.top
        self.top += n
        self.live += 1
        return Carve(self, at, self.slab[at:at + n].view(shape))

    def _fold(self, c: Carve) -> None:
        self.live -= 1
        if self.live == 0:
            self.top = 0


class ArenaRack:
    """Arenas that are handed to one decode stream at a time."""

    def __init__(self, count: int, size: int):
        self._stack = [Arena(size) for _ in range(count)]

    def obtain(self) -> Optional[Arena]:
        return self._stack.pop() if self._stack else None

    def obtain_empty(self, floor: int) -> Optional[Arena]:
        while self._stack:
            arena = self._stack.pop()  # leak: an arena that is too small is popped and not put back
            if arena.slab.numel() >= floor:
                return arena
        return None

    def relinquish(self, arena: Arena) -> None:
        self._stack.append(arena)


class Stop(enum.Enum):
    EOS = 1
    LENGTH = 2
    CANCELLED = 3


@contextmanager
def carved(arena: Arena, *shape: int) -> Iterator[torch.Tensor]:
    c = arena.carve(*shape)  # clean: folded in finally
    try:
        yield c.tensor
    finally:
        c.fold()


class StepState:
    def __init__(self, arena: Arena, hidden: int):
        self.arena = arena
        self.hidden = arena.carve(hidden)  # clean: end() folds it and begin() drops the arena when this raises
        self.logits: Optional[Carve] = None

    def ensure_logits(self, vocab: int) -> torch.Tensor:
        if self.logits is None:
            self.logits = self.arena.carve(vocab)  # clean: folded by end()
        return self.logits.tensor

    def end(self) -> None:
        self.hidden.fold()
        if self.logits is not None:
            self.logits.fold()
            self.logits = None


class Decoder:
    def __init__(self, rack: ArenaRack, weight: torch.Tensor, eos: int):
        self.rack = rack
        self.weight = weight
        self.eos = eos
        self.streams: dict[int, Arena] = {}

    def generate(self, first: int, max_len: int) -> Generator[int, None, Stop]:
        arena = self.rack.obtain()  # clean: relinquished in finally, also when the generator is closed
        if arena is None:
            return Stop.CANCELLED
        try:
            token = first
            for _ in range(max_len):
                with carved(arena, self.weight.shape[1]) as logits:  # clean: with block
                    torch.matmul(self.weight[token], self.weight, out=logits)
                    token = int(logits.argmax())
                if token == self.eos:
                    return Stop.EOS
                yield token
            return Stop.LENGTH
        finally:
            self.rack.relinquish(arena)

    def generate_greedy(self, first: int, max_len: int) -> Generator[int, None, Stop]:
        arena = self.rack.obtain()  # leak: the return on eos skips relinquish
        if arena is None:
            return Stop.CANCELLED
        token = first
        for _ in range(max_len):
            with carved(arena, self.weight.shape[1]) as logits:  # clean: with block
                torch.matmul(self.weight[token], self.weight, out=logits)
                token = int(logits.argmax())
            if token == self.eos:
                return Stop.EOS
            yield token
        self.rack.relinquish(arena)
        return Stop.LENGTH

    def score(self, tokens: Iterable[int]) -> float:
        arena = self.rack.obtain()  # clean: relinquished in finally
        if arena is None:
            return 0.0
        total = 0.0
        try:
            for t in tokens:
                c = arena.carve(self.weight.shape[1])  # clean: near miss, folded before the test that continues
                torch.matmul(self.weight[t], self.weight, out=c.tensor)
                top = float(c.tensor.max())
                c.fold()
                if top <= 0:
                    continue
                total += top
        finally:
            self.rack.relinquish(arena)
        return total

    def score_masked(self, arena: Arena, tokens: Iterable[int], pad: int) -> float:
        total = 0.0
        for t in tokens:
            c = arena.carve(self.weight.shape[1])  # leak: not folded for pad tokens
            if t == pad:
                continue
            torch.matmul(self.weight[t], self.weight, out=c.tensor)
            total += float(c.tensor.logsumexp(0))
            c.fold()
        return total

    # streams that live over several calls

    def begin(self, sid: int) -> Optional[StepState]:
        if sid in self.streams:
            raise KeyError(f"stream {sid} has begun already")
        arena = self.rack.obtain()  # leak: cancel() takes it out of streams and relinquishes it for CANCELLED only
        if arena is None:
            return None
        try:
            state = StepState(arena, self.weight.shape[0])  # clean: handed to the caller, who calls end()
        except ArenaFull:
            self.rack.relinquish(arena)
            return None
        self.streams[sid] = arena
        return state

    def finish(self, sid: int) -> None:
        self.rack.relinquish(self.streams.pop(sid))

    def cancel(self, sid: int, reason: Stop) -> bool:
        arena = self.streams.pop(sid, None)
        if arena is None:
            return False
        if reason is Stop.CANCELLED:
            self.rack.relinquish(arena)
        return True

    def step(self, sid: int, token: int) -> int:
        arena = self.streams[sid]
        logits = arena.carve(self.weight.shape[1])  # clean: near miss, folded when temp does not fit and at the end
        try:
            temp = arena.carve(self.weight.shape[1])  # clean: folded at the end
        except ArenaFull:
            logits.fold()
            raise
        torch.matmul(self.weight[token], self.weight, out=logits.tensor)
        torch.softmax(logits.tensor, 0, out=temp.tensor)
        nxt = int(temp.tensor.argmax())
        temp.fold()
        logits.fold()
        return nxt

    def step_topk(self, sid: int, token: int, k: int) -> list[int]:
        arena = self.streams[sid]
        logits = arena.carve(self.weight.shape[1])  # leak: not folded when temp does not fit
        try:
            temp = arena.carve(self.weight.shape[1])  # clean: folded at the end
        except ArenaFull:
            return []
        torch.matmul(self.weight[token], self.weight, out=logits.tensor)
        torch.softmax(logits.tensor, 0, out=temp.tensor)
        best = temp.tensor.topk(k).indices.tolist()
        temp.fold()
        logits.fold()
        return best


def windows(arena: Arena, x: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    """Yields a scratch copy of each window; it is valid until the next one is asked for."""
    for i in range(0, x.shape[0], size):
        c = arena.carve(min(size, x.shape[0] - i))  # leak: a consumer that stops early leaves the carve live
        c.tensor.copy_(x[i:i + size])
        yield c.tensor
        c.fold()


def first_peak(arena: Arena, x: torch.Tensor, size: int, floor: float) -> Optional[float]:
    for w in windows(arena, x, size):
        if float(w.max()) > floor:
            return float(w.max())
    return None
