"""Gradient reduction in buckets: flat buffers are rented, reduced asynchronously, and copied back."""
from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Callable, Iterable, Optional

import torch
import torch.distributed as dist


class FlatArena:
    """Flat buffers by size class."""

    def __init__(self, device: str = "cuda") -> None:
        self.device = device
        self._shelves: dict[int, list[torch.Tensor]] = defaultdict(list)
        self.rented = 0

    @staticmethod
    def size_class(n: int) -> int:
        c = 1024
        while c < n:
            c *= 2
        return c

    def rent(self, n: int) -> torch.Tensor:
        shelf = self._shelves[self.size_class(n)]
        self.rented += 1
        return shelf.pop() if shelf else torch.empty(self.size_class(n), device=self.device)

    def hand_in(self, flat: torch.Tensor) -> None:
        self.rented -= 1
        self._shelves[flat.numel()].append(flat)


class StreamPool:
    def __init__(self, n: int) -> None:
        self._idle = [torch.cuda.Stream() for _ in range(n)]

    def claim(self) -> Optional[torch.cuda.Stream]:
        return self._idle.pop() if self._idle else None

    def yield_back(self, stream: torch.cuda.Stream) -> None:
        self._idle.append(stream)


@dataclass
class Bucket:
    params: list[torch.nn.Parameter]
    numel: int
    flat: Optional[torch.Tensor] = None
    work: Any = None
    stream: Any = None
    ready: set[int] = field(default_factory=set)


class Reducer:
    def __init__(self, arena: FlatArena, streams: StreamPool, params: Iterable[torch.nn.Parameter], cap: int,
                 overlap: bool = True) -> None:
        self.arena = arena
        self.streams = streams
        self.overlap = overlap
        self.buckets = self._partition(list(params), cap)
        self.inflight: list[Bucket] = []
        self.residuals: dict[int, torch.Tensor] = {}
        self.world = dist.get_world_size()

    @staticmethod
    def _partition(params: list[torch.nn.Parameter], cap: int) -> list[Bucket]:
        out, cur, size = [], [], 0
        for p in reversed(params):
            if cur and size + p.numel() > cap:
                out.append(Bucket(cur, size))
                cur, size = [], 0
            cur.append(p)
            size += p.numel()
        if cur:
            out.append(Bucket(cur, size))
        return out

    def _pack(self, bucket: Bucket) -> torch.Tensor:
        flat = self.arena.rent(bucket.numel)  # clean: handed to the caller, filled
        at = 0
        for p in bucket.params:
            if p.grad is None:
                flat[at:at + p.numel()].zero_()
            else:
                flat[at:at + p.numel()].copy_(p.grad.view(-1))
            at += p.numel()
        return flat

    def _unpack(self, bucket: Bucket, flat: torch.Tensor) -> None:
        at = 0
        for p in bucket.params:
            if p.grad is not None:
                p.grad.view(-1).copy_(flat[at:at + p.numel()])
            at += p.numel()

    def reduce_now(self, bucket: Bucket) -> None:
        flat = self._pack(bucket)  # clean: handed in after the copy back
        flat.div_(self.world)
        dist.all_reduce(flat[: bucket.numel])
        self._unpack(bucket, flat)
        self.arena.hand_in(flat)

    def launch(self, bucket: Bucket) -> None:
        bucket.flat = self._pack(bucket)  # clean: near miss, finish hands it in
        bucket.flat.div_(self.world)
        if self.overlap:
            bucket.stream = self.streams.claim()  # clean: near miss, finish gives a claimed stream back
        with torch.cuda.stream(bucket.stream):
            bucket.work = dist.all_reduce(bucket.flat[: bucket.numel], async_op=True)
        self.inflight.append(bucket)

    def finish(self) -> None:
        for bucket in self.inflight:
            bucket.work.wait()
            self._unpack(bucket, bucket.flat)
            self.arena.hand_in(bucket.flat)
            if self.overlap and bucket.stream is not None:
                self.streams.yield_back(bucket.stream)
            bucket.flat = bucket.work = bucket.stream = None
        self.inflight = []

    def grad_norm(self) -> torch.Tensor:
        total = torch.zeros((), device=self.arena.device)
        for bucket in self.buckets:
            total += self._pack(bucket)[: bucket.numel].norm() ** 2  # leak: the packed buffer is never handed in
        dist.all_reduce(total)
        return total.sqrt()

    def has_nan(self) -> bool:
        for bucket in self.buckets:
            flat = self._pack(bucket)  # leak: returns at the first bad bucket with the buffer rented
            if torch.isnan(flat[: bucket.numel]).any():
                return True
            self.arena.hand_in(flat)
        return False

    def max_abs(self) -> float:
        worst = 0.0
        for bucket in self.buckets:
            flat = self._pack(bucket)  # clean: near miss, handed in before the break
            peak = float(flat[: bucket.numel].abs().max())
            self.arena.hand_in(flat)
            worst = max(worst, peak)
            if worst == float("inf"):
                break
        return worst

    def compress(self, bucket: Bucket, ratio: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Top-k with error feedback; residuals live until the next call or reset."""
        flat = self._pack(bucket)  # clean: near miss, kept as residual, the former one is handed in
        key = id(bucket)
        prev = self.residuals.pop(key, None)
        if prev is not None:
            flat.add_(prev)
            self.arena.hand_in(prev)
        k = max(1, int(bucket.numel * ratio))
        _, idx = flat[: bucket.numel].abs().topk(k)
        values = flat[idx].clone()
        flat[idx] = 0
        self.residuals[key] = flat
        return values, idx

    def reset_residuals(self) -> None:
        while self.residuals:
            _, flat = self.residuals.popitem()
            self.arena.hand_in(flat)

    def hierarchical(self, bucket: Bucket, local: Any, cross: Any, leader: bool) -> None:
        flat = self._pack(bucket)  # clean: handed in at the end on both branches
        dist.reduce_scatter_tensor(flat[: bucket.numel // 8], flat[: bucket.numel], group=local)
        wide = self.arena.rent(bucket.numel) if leader else None  # clean: near miss, handed in under the same flag
        if leader:
            wide[: bucket.numel // 8].copy_(flat[: bucket.numel // 8])
            dist.all_reduce(wide[: bucket.numel // 8], group=cross)
            flat[: bucket.numel // 8].copy_(wide[: bucket.numel // 8])
        dist.all_gather_into_tensor(flat[: bucket.numel], flat[: bucket.numel // 8], group=local)
        self._unpack(bucket, flat)
        if leader:
            self.arena.hand_in(wide)
        self.arena.hand_in(flat)

    def ring_exchange(self, bucket: Bucket, send: Callable, recv: Callable, steps: int) -> None:
        cur = self._pack(bucket)  # clean: swapped with the incoming buffer, each side is handed in
        for step in range(steps):
            nxt = self.arena.rent(bucket.numel)  # clean: near miss, becomes the current one
            send(cur, step)
            recv(nxt, step)
            nxt.add_(cur)
            self.arena.hand_in(cur)
            cur = nxt
        self._unpack(bucket, cur)
        self.arena.hand_in(cur)

    def gossip(self, bucket: Bucket, peers: list[int], swap: Callable) -> None:
        mine = self._pack(bucket)  # clean: handed in at the end
        theirs = mine
        for peer in peers:
            theirs = self.arena.rent(bucket.numel)  # leak: each peer's buffer is overwritten by that of the next
            swap(peer, mine, theirs)
            mine.add_(theirs).mul_(0.5)
        self._unpack(bucket, mine)
        self.arena.hand_in(mine)

    def on_side_stream(self, fn: Callable[[], None], min_work: int, work: int) -> bool:
        stream = self.streams.claim()  # leak: little work is run inline and the claimed stream is lost
        if stream is None or work < min_work:
            fn()
            return False
        with torch.cuda.stream(stream):
            fn()
        self.streams.yield_back(stream)
        return True

    def broadcast_params(self, src: int) -> None:
        stream = self.streams.claim()  # clean: near miss, None-checked at both ends
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
        for bucket in self.buckets:
            flat = self.arena.rent(bucket.numel)  # clean: handed in at the end of each round
            dist.broadcast(flat[: bucket.numel], src)
            at = 0
            for p in bucket.params:
                p.data.view(-1).copy_(flat[at:at + p.numel()])
                at += p.numel()
            self.arena.hand_in(flat)
        if stream is not None:
            self.streams.yield_back(stream)
