"""Attention steps that hold several buffers through context managers."""
from __future__ import annotations

import contextlib
import logging
from typing import Any, Callable, Iterator, List, Optional, Sequence, Type
from types import TracebackType

import torch

logger = logging.getLogger(__name__)


class BufferShelf:
    def __init__(self, n: int, numel: int) -> None:
        self._bufs: List[torch.Tensor] = [torch.empty(numel) for _ in range(n)]
        self.out = 0

    def pick(self) -> torch.Tensor:
        self.out += 1
        return self._bufs.pop()

    def stow(self, buf: torch.Tensor) -> None:
        self.out -= 1
        self._bufs.append(buf)

    @contextlib.contextmanager
    def picked(self) -> Iterator[torch.Tensor]:
        buf = self.pick()  # clean: stowed in the finally
        try:
            yield buf
        finally:
            self.stow(buf)

    @contextlib.contextmanager
    def picked_if(self, wanted: bool) -> Iterator[Optional[torch.Tensor]]:
        buf = self.pick() if wanted else None  # clean: near miss, None is yielded when not wanted and only a real one stowed
        yield buf
        if buf is not None:
            self.stow(buf)

    @contextlib.contextmanager
    def picked_pair(self) -> Iterator[tuple]:
        a = self.pick()  # clean: stowed in the finally
        b = self.pick()  # leak: the finally stows only the first buffer
        try:
            yield a, b
        finally:
            self.stow(a)


class QKVScratch:
    """with QKVScratch(shelf) as s: s.q, s.k, s.v"""

    def __init__(self, shelf: BufferShelf) -> None:
        self.shelf = shelf
        self.q = self.k = self.v = None

    def __enter__(self) -> "QKVScratch":
        self.q = self.shelf.pick()  # clean: __exit__ stows it
        self.k = self.shelf.pick()  # clean: __exit__ stows it
        self.v = self.shelf.pick()  # leak: __exit__ forgets v
        return self

    def __exit__(self, et: Optional[Type[BaseException]], ev: Optional[BaseException], tb: Optional[TracebackType]) -> None:
        self.shelf.stow(self.q)
        self.shelf.stow(self.k)
        self.q = self.k = self.v = None


class GradScratch:
    def __init__(self, shelf: BufferShelf, frozen: bool = False) -> None:
        self.shelf = shelf
        self.frozen = frozen
        self.buf: Optional[torch.Tensor] = None

    def __enter__(self) -> torch.Tensor:
        self.buf = self.shelf.pick()  # leak: __exit__ returns early for frozen layers
        return self.buf

    def __exit__(self, et, ev, tb) -> bool:
        if self.frozen:
            logger.debug("frozen layer, nothing to reduce")
            return False
        self.shelf.stow(self.buf)
        self.buf = None
        return False


class LogitScratch:
    def __init__(self, shelf: BufferShelf) -> None:
        self.shelf = shelf
        self.buf: Optional[torch.Tensor] = None

    def __enter__(self) -> torch.Tensor:
        self.buf = self.shelf.pick()  # clean: near miss, __exit__ stows first and logs after
        return self.buf

    def __exit__(self, et, ev, tb) -> bool:
        self.shelf.stow(self.buf)
        self.buf = None
        if et is not None:
            logger.warning("logit step failed: %s", ev)
            return False
        return False


def attend(shelf: BufferShelf, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with contextlib.ExitStack() as stack:
        bufs = [stack.enter_context(shelf.picked()) for _ in range(2)]  # clean: the stack leaves both contexts
        s = bufs[0][: q.shape[0] * k.shape[0]].view(q.shape[0], k.shape[0])
        torch.matmul(q, k.t(), out=s)
        o = bufs[1][: q.shape[0] * v.shape[1]].view(q.shape[0], v.shape[1])
        torch.matmul(s.softmax(-1), v, out=o)
        return o.clone()


def attend_callbacks(shelf: BufferShelf, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    with contextlib.ExitStack() as stack:
        buf = shelf.pick()  # clean: the registered callback stows it
        stack.callback(shelf.stow, buf)
        s = buf[: q.shape[0] * k.shape[0]].view(q.shape[0], k.shape[0])
        return torch.matmul(q, k.t(), out=s).clone()


def attend_detached(shelf: BufferShelf, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    with contextlib.ExitStack() as stack:
        buf = shelf.pick()  # leak: pop_all moves the callback to a stack that nobody closes
        stack.callback(shelf.stow, buf)
        s = buf[: q.shape[0] * k.shape[0]].view(q.shape[0], k.shape[0])
        out = torch.matmul(q, k.t(), out=s).clone()
        stack.pop_all()
    return out


def gather_shards(shelf: BufferShelf, shards: Sequence[torch.Tensor]) -> List[torch.Tensor]:
    held: List[torch.Tensor] = []
    with contextlib.ExitStack() as stack:
        for sh in shards:
            b = shelf.pick()  # clean: near miss, the callback is pushed before the break can be met
            stack.callback(shelf.stow, b)
            if sh.numel() > b.numel():
                break
            b[: sh.numel()].copy_(sh.flatten())
            held.append(b[: sh.numel()].clone())
    return held


def gather_strict(shelf: BufferShelf, shards: Sequence[torch.Tensor]) -> List[torch.Tensor]:
    held: List[torch.Tensor] = []
    with contextlib.ExitStack() as stack:
        for sh in shards:
            b = shelf.pick()  # leak: the break comes before the callback is pushed
            if sh.numel() > b.numel():
                break
            stack.callback(shelf.stow, b)
            held.append(b[: sh.numel()].copy_(sh.flatten()).clone())
    return held


def apply(shelf: BufferShelf, fn: Callable[[torch.Tensor], Any], wanted: bool) -> Any:
    with shelf.picked_if(wanted) as buf:  # clean: with statement
        return None if buf is None else fn(buf)


def project(shelf: BufferShelf, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    cm = shelf.picked()  # clean: near miss, entered by the with below
    with cm as buf:
        return torch.matmul(x, w, out=buf[: x.shape[0] * w.shape[1]].view(x.shape[0], -1)).clone()


def peek(shelf: BufferShelf) -> float:
    cm = shelf.picked_if(True)  # leak: entered by hand and never left
    buf = cm.__enter__()
    return float(buf.abs().max())
