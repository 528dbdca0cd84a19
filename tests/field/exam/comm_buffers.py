"""Symmetric communication buffers for tensor-parallel collectives."""
from __future__ import annotations

import enum
import logging
from contextlib import ExitStack, contextmanager
from typing import Generator, Optional

import torch

logger = logging.getLogger(__name__)


class Kind(enum.Enum):
    SEND = "send"
    RECV = "recv"
    SCRATCH = "scratch"


class SlotBitmap:
    """Bitmap over equally sized slots of one arena tensor."""

    def __init__(self, slots: int, width: int) -> None:
        self.arena = torch.zeros(slots, width)
        self.used = [False] * slots

    def acquire_slot(self, kind: Kind = Kind.SCRATCH) -> int:
        for i, u in enumerate(self.used):
            if not u:
                self.used[i] = True
                logger.debug("slot %d -> %s", i, kind.value)
                return i
        return -1

    def release_slot(self, i: int) -> None:
        self.used[i] = False

    def view(self, i: int) -> torch.Tensor:
        return self.arena[i]

    @contextmanager
    def slot(self, kind: Kind) -> Generator[torch.Tensor, None, None]:
        i = self.acquire_slot(kind)  # clean: released in finally when it was valid
        if i < 0:
            raise RuntimeError("no slot")
        try:
            yield self.view(i)
        finally:
            self.release_slot(i)


class Communicator:
    def __init__(self, bitmap: SlotBitmap, rank: int, world: int) -> None:
        self.bm = bitmap
        self.rank = rank
        self.world = world
        self._recv_slot: Optional[int] = None

    def broadcast(self, x: torch.Tensor, src: int) -> torch.Tensor:
        i = self.bm.acquire_slot(Kind.SEND)  # clean: negative means none was taken
        if i < 0:
            return x.clone()
        v = self.bm.view(i)
        v[: x.numel()].copy_(x.flatten())
        out = v[: x.numel()].clone().view_as(x)
        self.bm.release_slot(i)
        return out

    def all_gather(self, x: torch.Tensor) -> Optional[torch.Tensor]:
        send = self.bm.acquire_slot(Kind.SEND)  # leak: stays taken when no receive slot is available
        if send < 0:
            return None
        recv = self.bm.acquire_slot(Kind.RECV)  # clean: released at the end
        if recv < 0:
            logger.warning("no receive slot")
            return None
        self.bm.view(send)[: x.numel()].copy_(x.flatten())
        self.bm.view(recv).copy_(self.bm.view(send))
        out = self.bm.view(recv)[: x.numel()].clone()
        self.bm.release_slot(recv)
        self.bm.release_slot(send)
        return out

    def gather_or_none(self, x: torch.Tensor) -> Optional[torch.Tensor]:
        send = self.bm.acquire_slot(Kind.SEND)  # clean: near miss, released on both exits
        if send < 0:
            return None
        recv = self.bm.acquire_slot(Kind.RECV)  # clean: near miss, the negative branch holds nothing here
        if recv >= 0:
            self.bm.view(recv).copy_(self.bm.view(send))
            out = self.bm.view(recv)[: x.numel()].clone()
            self.bm.release_slot(recv)
        else:
            out = None
        self.bm.release_slot(send)
        return out

    def reduce_scatter(self, parts: list[torch.Tensor]) -> torch.Tensor:
        with ExitStack() as stack:
            views = [stack.enter_context(self.bm.slot(Kind.SCRATCH)) for _ in parts]  # clean: the exit stack closes each
            for v, p in zip(views, parts):
                v[: p.numel()].copy_(p.flatten())
            return torch.stack(views).sum(0).clone()

    def scatter(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        stack = ExitStack()
        views = [stack.enter_context(self.bm.slot(Kind.SCRATCH)) for _ in parts]  # leak: the stack is closed only for a non-empty result
        outs = [v[: p.numel()].clone() for v, p in zip(views, parts) if p.numel() > 1]
        if not outs:
            return []
        stack.close()
        return outs

    def barrier(self) -> None:
        self.bm.acquire_slot()  # leak: the slot number is thrown away

    def post_recv(self) -> bool:
        if self._recv_slot is not None:
            return False
        i = self.bm.acquire_slot(Kind.RECV)  # clean: near miss, field is written only when empty and complete_recv releases it
        if i < 0:
            return False
        self._recv_slot = i
        return True

    def complete_recv(self) -> Optional[torch.Tensor]:
        if self._recv_slot is None:
            return None
        out = self.bm.view(self._recv_slot).clone()
        self.bm.release_slot(self._recv_slot)
        self._recv_slot = None
        return out

    def try_send(self, x: torch.Tensor, attempts: int = 3) -> bool:
        for n in range(attempts):
            i = self.bm.acquire_slot(Kind.SEND)  # leak: an attempt with overflow goes on with the next slot
            if i < 0:
                continue
            v = self.bm.view(i)
            if x.numel() > v.numel() - n:
                continue
            v[: x.numel()].copy_(x.flatten())
            self.bm.release_slot(i)
            return True
        return False
