"""Dispatch buffers of the mixture-of-experts layer."""
import logging
from typing import Dict, List, Optional

import torch

logger = logging.getLogger("moe.dispatch")


class CapacityOverflow(RuntimeError):
    pass


class ExpertBuffers:
    def __init__(self, n: int, capacity: int, hidden: int):
        self.capacity = capacity
        # column-major, as the grouped GEMM wants them
        self._shelf: List[torch.Tensor] = [torch.empty(hidden, capacity).t() for _ in range(n)]

    def lift(self) -> Optional[torch.Tensor]:
        if not self._shelf:
            return None
        buf = self._shelf.pop()  # clean: returned
        return buf

    def lift_many(self, n: int) -> List[torch.Tensor]:
        got = [self._shelf.pop() for _ in range(min(n, len(self._shelf)))]  # clean: returned, or shelved again before the raise
        if len(got) < n:
            self._shelf.extend(got)
            raise CapacityOverflow(f"{n} buffers")
        return got

    def lift_contiguous(self) -> Optional[torch.Tensor]:
        buf = self.lift()  # leak: contiguous() of a strided buffer makes a copy and the shelf's tensor is lost
        if buf is not None and not buf.is_contiguous():
            buf = buf.contiguous()
        return buf

    def shelve(self, buf: torch.Tensor) -> None:
        self._shelf.append(buf)


def gather(buffers: ExpertBuffers, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Tokens of one expert in a buffer, which the caller shelves."""
    if index.numel() > buffers.capacity:
        raise CapacityOverflow(f"{index.numel()} tokens")
    buf = buffers.lift()  # clean: returned, or None and nothing is held
    if buf is None:
        raise CapacityOverflow("no buffer")
    buf[: index.numel()].copy_(x[index])
    return buf


class Dispatcher:
    def __init__(self, buffers: ExpertBuffers, experts, reuse: bool = False):
        self.buffers = buffers
        self.experts = experts
        self.reuse = reuse
        self._stash: Dict[int, torch.Tensor] = {}

    def forward(self, x: torch.Tensor, routes: Dict[int, torch.Tensor]) -> torch.Tensor:
        out = torch.zeros_like(x)
        for e, index in routes.items():
            try:
                buf = gather(self.buffers, x, index)  # clean: shelved or, with reuse, exchanged in the stash
            except CapacityOverflow:
                logger.debug("expert %d drops %d tokens", e, index.numel())
                continue
            out[index] += self.experts[e](buf[: index.numel()])
            if self.reuse:
                buf, self._stash[e] = self._stash.pop(e, None), buf
            if buf is not None:
                self.buffers.shelve(buf)
        return out

    def forward_dense(self, x: torch.Tensor, routes: Dict[int, torch.Tensor]) -> torch.Tensor:
        out = torch.zeros_like(x)
        for e, index in routes.items():
            buf = gather(self.buffers, x, index).clone()  # leak: the gathered buffer is cloned and forgotten
            out[index] += self.experts[e](buf[: index.numel()])
        return out

    def forward_planned(self, x: torch.Tensor, routes: Dict[int, torch.Tensor]) -> torch.Tensor:
        out = torch.zeros_like(x)
        bufs = self.buffers.lift_many(len(routes))  # leak: an oversized route raises CapacityOverflow with the list in hand
        for buf, (e, index) in zip(bufs, routes.items()):
            n = index.numel()
            if n > self.buffers.capacity:
                raise CapacityOverflow(f"expert {e}: {n}")
            buf[:n].copy_(x[index])
            out[index] += self.experts[e](buf[:n])
        for buf in bufs:
            self.buffers.shelve(buf)
        return out

    def load(self, x: torch.Tensor, routes: Dict[int, torch.Tensor]) -> Dict[int, float]:
        norms: Dict[int, float] = {}
        buf = None
        for e, index in routes.items():
            if buf is None:
                buf = self.buffers.lift()  # clean: lifted once, used for each expert, shelved after the loop
                if buf is None:
                    return norms
            n = min(index.numel(), self.buffers.capacity)
            buf[:n].copy_(x[index[:n]])
            norms[e] = float(buf[:n].norm())
        if buf is not None:
            self.buffers.shelve(buf)
        return norms

    def flush(self) -> None:
        while self._stash:
            self.buffers.shelve(self._stash.popitem()[1])
