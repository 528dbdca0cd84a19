from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Callable, Optional

import torch
from torch import Tensor

logger = logging.getLogger(__name__)
_MIN_SHIFT = 12


@dataclass
class Block:
    storage: Tensor
    size: int
    device: torch.device
    generation: int = 0


class ActivationArena:
    def __init__(self, devices: list[torch.device], reserve: int = 8):
        self.devices = devices
        self.generation = 0
        self._free: dict[int, list[Block]] = {}
        self._bytes_out = 0
        for dev in devices:
            for _ in range(reserve):
                self._free.setdefault(1 << 20, []).append(self._create(1 << 20, dev))

    def _create(self, size: int, device: torch.device) -> Block:
        return Block(torch.empty(size, dtype=torch.uint8, device=device), size, device, self.generation)

    @staticmethod
    def size_class(nbytes: int) -> int:
        return max(1 << _MIN_SHIFT, 1 << (nbytes - 1).bit_length())

    def alloc(self, nbytes: int, device: torch.device) -> Block:
        cls = self.size_class(nbytes)
        bucket = self._free.setdefault(cls, [])
        while bucket:
            block = bucket.pop()  # leak: a block of another device is popped and never put back on the list
            if block.device != device:
                continue
            self._bytes_out += block.size
            return block
        self._bytes_out += cls
        return self._create(cls, device)

    def alloc_best_fit(self, nbytes: int, device: torch.device) -> Optional[Block]:
        for cls in sorted(c for c in self._free if c >= nbytes):
            skipped: list[Block] = []
            found: Optional[Block] = None
            bucket = self._free[cls]
            while bucket and found is None:
                block = bucket.pop()  # clean: near miss, blocks of other devices wait in skipped and return to the bucket
                if block.device == device:
                    found = block
                else:
                    skipped.append(block)
            bucket.extend(skipped)
            if found is not None:
                self._bytes_out += found.size
                return found
        return None

    def free(self, block: Block) -> None:
        self._bytes_out -= block.size
        if block.generation == self.generation:
            self._free.setdefault(block.size, []).append(block)

    def trim(self, keep: int) -> int:
        dropped = 0
        for bucket in self._free.values():
            while len(bucket) > keep:
                dropped += bucket.pop().size  # clean: near miss, trimming gives the memory back to the caching allocator on purpose
        return dropped


class ActivationStore:
    def __init__(self, arena: ActivationArena):
        self.arena = arena
        self._saved: dict[str, Block] = {}
        self._recompute: dict[str, Callable[[], Tensor]] = {}

    def save(self, name: str, t: Tensor) -> None:
        block = self.arena.alloc(t.nbytes, t.device)  # leak: saving the same name twice overwrites the block in _saved
        block.storage[: t.nbytes].copy_(t.contiguous().view(-1).view(torch.uint8))
        self._saved[name] = block

    def save_once(self, name: str, t: Tensor) -> None:
        old = self._saved.pop(name, None)
        if old is not None:
            self.arena.free(old)
        block = self.arena.alloc(t.nbytes, t.device)  # clean: near miss, an older block of the name was popped and freed first
        block.storage[: t.nbytes].copy_(t.contiguous().view(-1).view(torch.uint8))
        self._saved[name] = block

    def save_or_recompute(self, name: str, t: Tensor, fn: Callable[[], Tensor]) -> bool:
        block = self.arena.alloc_best_fit(t.nbytes, t.device)  # leak: an oversized fit is turned down without free
        if block is None or block.size > 4 * t.nbytes:
            self._recompute[name] = fn
            return False
        old = self._saved.get(name)
        if old is not None:
            self.arena.free(old)
        block.storage[: t.nbytes].copy_(t.contiguous().view(-1).view(torch.uint8))
        self._saved[name] = block
        return True

    def load(self, name: str, like: Tensor) -> Tensor:
        if name in self._recompute:
            return self._recompute.pop(name)()
        block = self._saved.pop(name)
        out = block.storage[: like.nbytes].view(like.dtype).view_as(like).clone()
        self.arena.free(block)
        return out

    def clear(self) -> None:
        while self._saved:
            _, block = self._saved.popitem()
            self.arena.free(block)
        self._recompute.clear()


class CheckpointedBlock:
    def __init__(self, arena: ActivationArena, fn: Callable[[Tensor], Tensor]):
        self.arena = arena
        self.fn = fn
        self._rng: Optional[Block] = None
        self._inputs: list[Block] = []

    def stash(self, xs: list[Tensor], preserve_rng: bool) -> None:
        for x in xs:
            if not x.requires_grad:
                continue
            block = self.arena.alloc(x.nbytes, x.device)  # clean: listed in _inputs, which drop() frees
            block.storage[: x.nbytes].copy_(x.contiguous().view(-1).view(torch.uint8))
            self._inputs.append(block)
        if preserve_rng:
            if self._rng is None:
                self._rng = self.arena.alloc(1 << 14, xs[0].device)  # clean: near miss, only an empty field is filled and drop() frees it
            state = torch.cuda.get_rng_state(xs[0].device)
            self._rng.storage[: state.numel()].copy_(state)

    def run(self, x: Tensor, attempts: int = 3) -> Tensor:
        scale = 1.0
        for _ in range(attempts):
            tmp = self.arena.alloc(x.nbytes, x.device)  # leak: an overflowed attempt goes round the loop with tmp held
            half = tmp.storage[: x.nbytes].view(x.dtype).view_as(x)
            torch.mul(x, scale, out=half)
            y = self.fn(half)
            if not torch.isfinite(y).all():
                scale *= 0.5
                continue
            out = y / scale
            self.arena.free(tmp)
            return out
        logger.warning("activation overflow persists after %d attempts", attempts)
        return self.fn(x)

    def run_chunked(self, x: Tensor, chunks: int) -> Tensor:
        outs = []
        for piece in x.chunk(chunks):
            tmp = self.arena.alloc(piece.nbytes, piece.device)  # clean: near miss, the finally runs for the continue as well
            try:
                buf = tmp.storage[: piece.nbytes].view(piece.dtype).view_as(piece)
                buf.copy_(piece)
                if not buf.any():
                    outs.append(torch.zeros_like(piece))
                    continue
                outs.append(self.fn(buf).clone())
            finally:
                self.arena.free(tmp)
        return torch.cat(outs)

    def drop(self) -> None:
        for block in self._inputs:
            self.arena.free(block)
        self._inputs = []
        if self._rng is not None:
            self.arena.free(self._rng)
            self._rng = None
