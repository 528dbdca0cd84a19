"""Ring attention over a sequence-parallel group: rotating KV blocks and borrowed side streams."""
from __future__ import annotations

import contextlib
from typing import Any, Dict, Iterator, List, Optional, Tuple

import torch
import torch.distributed as dist


class KVExchange:
    """Rotating buffers for the KV block of the neighbour."""

    def __init__(self, depth: int, shape: Tuple[int, ...], device: str) -> None:
        self._idle: List[torch.Tensor] = [torch.empty(shape, device=device) for _ in range(depth)]

    def borrow(self) -> torch.Tensor:
        if not self._idle:
            raise RuntimeError("more blocks in rotation than the exchange is deep")
        return self._idle.pop()

    def give_back(self, block: torch.Tensor) -> None:
        self._idle.append(block)


class StreamRack:
    def __init__(self, n: int) -> None:
        self._streams = [torch.cuda.Stream() for _ in range(n)]

    def grab(self) -> Optional[torch.cuda.Stream]:
        return self._streams.pop() if self._streams else None

    def drop(self, stream: torch.cuda.Stream) -> None:
        stream.synchronize()
        self._streams.append(stream)


class SideStream:
    def __init__(self, rack: StreamRack) -> None:
        self.rack = rack
        self.stream: Optional[torch.cuda.Stream] = None

    def __enter__(self) -> Optional[torch.cuda.Stream]:
        self.stream = self.rack.grab()  # leak: __exit__ returns early when the body failed, and callers catch that
        return self.stream

    def __exit__(self, exc_type: Any, exc: Any, tb: Any) -> bool:
        if exc_type is not None:
            return exc_type is torch.cuda.OutOfMemoryError
        if self.stream is not None:
            self.rack.drop(self.stream)
            self.stream = None
        return False


class OverlapStream:
    def __init__(self, rack: StreamRack) -> None:
        self.rack = rack
        self.stream: Optional[torch.cuda.Stream] = None

    def __enter__(self) -> Optional[torch.cuda.Stream]:
        self.stream = self.rack.grab()  # clean: near miss, __exit__ drops it first and only then decides on the exception
        return self.stream

    def __exit__(self, exc_type: Any, exc: Any, tb: Any) -> bool:
        stream, self.stream = self.stream, None
        if stream is not None:
            self.rack.drop(stream)
        return exc_type is torch.cuda.OutOfMemoryError


class RingAttention:
    def __init__(self, group: Any, rank: int, world: int, exchange: KVExchange, rack: StreamRack) -> None:
        self.group = group
        self.rank = rank
        self.world = world
        self.exchange = exchange
        self.rack = rack
        self.kept: Dict[int, List[torch.Tensor]] = {}

    def _rotate(self, block: torch.Tensor) -> torch.Tensor:
        incoming = self.exchange.borrow()  # clean: returned to the caller
        ops = [dist.P2POp(dist.isend, block, (self.rank + 1) % self.world),
               dist.P2POp(dist.irecv, incoming, (self.rank - 1) % self.world)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return incoming

    def forward(self, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(q)
        block = self.exchange.borrow()  # clean: near miss, replaced in the loop only after it went back
        block.copy_(kv)
        for _ in range(self.world):
            out += self._attend(q, block)
            nxt = self._rotate(block)  # clean: near miss, becomes block, given back next turn or after the loop
            self.exchange.give_back(block)
            block = nxt
        self.exchange.give_back(block)
        return out

    def forward_causal(self, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(q)
        block = kv
        for step in range(self.world):
            source = (self.rank - step) % self.world
            nxt = self._rotate(block)  # leak: a block skipped above the diagonal is bound over by the next one and never given back
            if source > self.rank:
                block = nxt
                continue
            out += self._attend(q, block)
            if block is not kv:
                self.exchange.give_back(block)
            block = nxt
        if block is not kv:
            self.exchange.give_back(block)
        return out

    def _attend(self, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        k, v = kv.chunk(2, dim=-1)
        return torch.softmax(q @ k.transpose(-1, -2), dim=-1) @ v

    def save_for_backward(self, layer: int, kv: torch.Tensor) -> None:
        copy = self.exchange.borrow()  # clean: kept by layer, backward gives it back
        copy.copy_(kv)
        self.kept.setdefault(layer, []).append(copy)

    def backward(self, layer: int, grad: torch.Tensor) -> List[torch.Tensor]:
        grads = []
        for copy in self.kept.pop(layer, []):
            grads.append(grad @ copy)
            self.exchange.give_back(copy)
        return grads

    def peek_neighbour(self, kv: torch.Tensor) -> float:
        norm = self._rotate(kv).norm()  # leak: the borrowed block is only measured and never returned
        return float(norm)

    def overlapped(self, q: torch.Tensor, kv: torch.Tensor) -> Optional[torch.Tensor]:
        out = None
        with SideStream(self.rack) as side:
            with torch.cuda.stream(side):
                out = self._attend(q, kv)
        return out

    def overlapped_rows(self, q: torch.Tensor, kv: torch.Tensor) -> List[torch.Tensor]:
        rows: List[torch.Tensor] = []
        with OverlapStream(self.rack) as side, torch.cuda.stream(side):
            rows.extend(self._attend(q, kv).unbind(0))
        return rows

    def blocks(self, kv: torch.Tensor) -> Iterator[torch.Tensor]:
        current = self.exchange.borrow()  # clean: the finally gives back the current one even if the consumer stops
        current.copy_(kv)
        try:
            for _ in range(self.world):
                yield current
                nxt = self._rotate(current)  # clean: near miss, becomes current after the previous block went back
                self.exchange.give_back(current)
                current = nxt
        finally:
            self.exchange.give_back(current)

    def pooled_blocks(self, kv: torch.Tensor) -> Iterator[torch.Tensor]:
        for _ in range(self.world):
            block = self._rotate(kv)  # leak: find_hot stops in the middle, then the code behind the yield is not run
            yield block
            self.exchange.give_back(block)

    def find_hot(self, kv: torch.Tensor, threshold: float) -> bool:
        for block in self.pooled_blocks(kv):
            if float(block.abs().max()) > threshold:
                return True
        return False

    def total_norm(self, kv: torch.Tensor, limit: float) -> float:
        total = 0.0
        for block in self.blocks(kv):
            total += float(block.norm())
            if total > limit:
                break
        return total

    def copy_async(self, kv: torch.Tensor) -> Optional[torch.Tensor]:
        stream = self.rack.grab()  # leak: not dropped for tensors already on the host
        if stream is None:
            return kv.cpu()
        if not kv.is_cuda:
            return kv
        with torch.cuda.stream(stream):
            host = kv.to("cpu", non_blocking=True)
        self.rack.drop(stream)
        return host

    @contextlib.contextmanager
    def lanes(self, n: int) -> Iterator[List[torch.cuda.Stream]]:
        got: List[torch.cuda.Stream] = []
        try:
            while len(got) < n:
                stream = self.rack.grab()  # clean: near miss, fewer than asked are still dropped in the finally
                if stream is None:
                    break
                got.append(stream)
            yield got
        finally:
            for stream in got:
                self.rack.drop(stream)
