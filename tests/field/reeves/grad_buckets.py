"""Data parallel gradient reduction with pooled bucket tensors and stream handles."""
from __future__ import annotations

import torch


class TensorArena:
    """Flat tensors of a few sizes, kept for reuse."""

    def __init__(self, device: str = "cuda") -> None:
        self._shelves: dict[int, list[torch.Tensor]] = {}
        self._device = device
        self.outstanding = 0

    def rent(self, numel: int) -> torch.Tensor:
        shelf = self._shelves.setdefault(numel, [])
        self.outstanding += 1
        if shelf:
            return shelf.pop()
        return torch.empty(numel, device=self._device)

    def hand_in(self, t: torch.Tensor) -> None:
        self.outstanding -= 1
        self._shelves[t.numel()].append(t)


class StreamSet:
    def __init__(self, n: int) -> None:
        self._idle = [torch.cuda.Stream() for _ in range(n)]

    def checkout(self):
        return self._idle.pop()

    def checkin(self, s) -> None:
        self._idle.append(s)


class ReducerBase:
    def __init__(self, arena: TensorArena, streams: StreamSet) -> None:
        self.arena = arena
        self.streams = streams
        self.scratch: torch.Tensor | None = None
        self.side = streams.checkout()  # clean: near miss, base close() checks it in, subclasses call super

    def close(self) -> None:
        if self.scratch is not None:
            self.arena.hand_in(self.scratch)
            self.scratch = None
        self.streams.checkin(self.side)


class FlatReducer(ReducerBase):
    """One flat tensor for the whole model."""

    def __init__(self, arena, streams, params) -> None:
        super().__init__(arena, streams)
        self.params = list(params)
        self.total = sum(p.numel() for p in self.params)
        self.residual = arena.rent(self.total)  # leak: no close() hands in residual, base knows nothing of it
        self.residual.zero_()

    def reduce(self, group) -> float:
        if self.scratch is None:
            self.scratch = self.arena.rent(self.total)  # clean: near miss, rented once, base close() has it
        off = 0
        for p in self.params:
            n = p.numel()
            self.scratch[off:off + n].copy_(p.grad.reshape(-1))
            off += n
        self.scratch.add_(self.residual)
        torch.distributed.all_reduce(self.scratch, group=group)
        return float(self.scratch.norm())

    def close(self) -> None:
        self.params = []
        super().close()


class CompressedReducer(ReducerBase):
    """Top-k compression; the error tensor carries what was left out."""

    def __init__(self, arena, streams, numel: int, ratio: float) -> None:
        super().__init__(arena, streams)
        self.numel = numel
        self.k = max(1, int(numel * ratio))
        self.error = arena.rent(numel)  # clean: near miss, swapped in step() and handed in by close()
        self.values: torch.Tensor | None = None
        self.picks: torch.Tensor | None = None

    def step(self, flat: torch.Tensor, group) -> None:
        work = self.arena.rent(self.numel)  # clean: near miss, becomes the error, the former one goes back
        torch.add(flat, self.error, out=work)
        self.values = self.arena.rent(self.k)  # leak: the next step overwrites the field, close() has the last
        top = work.abs().topk(self.k)
        self.values.copy_(work[top.indices])
        torch.distributed.all_reduce(self.values, group=group)
        work[top.indices] = 0
        self.arena.hand_in(self.error)
        self.error = work
        if self.picks is not None:
            self.arena.hand_in(self.picks)
        self.picks = self.arena.rent(self.k)  # clean: near miss, last step's tensor was handed in just before
        self.picks.copy_(top.indices)

    def close(self) -> None:
        self.arena.hand_in(self.error)
        for t in (self.values, self.picks):
            if t is not None:
                self.arena.hand_in(t)
        self.values = self.picks = None
        super().close()


class BucketSchedule:
    """Buckets become ready in backward order; reduced ones are kept till the optimizer ran."""

    def __init__(self, arena: TensorArena, sizes: list[int]) -> None:
        self.arena = arena
        self.sizes = sizes
        self.filling: dict[int, torch.Tensor] = {}
        self.reduced: list[tuple[int, torch.Tensor]] = []
        self.skipped = 0

    def push(self, bucket: int, grad: torch.Tensor, offset: int) -> None:
        buf = self.filling.get(bucket)
        if buf is None:
            buf = self.arena.rent(self.sizes[bucket])  # leak: skip_step() empties both with their tensors
            self.filling[bucket] = buf
        buf[offset:offset + grad.numel()].copy_(grad.reshape(-1))

    def seal(self, bucket: int, group) -> None:
        buf = self.filling.pop(bucket)
        torch.distributed.all_reduce(buf, group=group)
        self.reduced.append((bucket, buf))

    def apply(self, optimizer) -> int:
        for bucket, buf in self.reduced:
            optimizer.load_bucket(bucket, buf)
            self.arena.hand_in(buf)
        n = len(self.reduced)
        self.reduced.clear()
        optimizer.step()
        return n

    def skip_step(self) -> None:
        """The scaler found an overflow: nothing of this step is used."""
        self.skipped += 1
        self.filling = {}
        self.reduced.clear()
