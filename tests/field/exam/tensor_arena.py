"""Bump/size-class arena used by the activation offloader."""
import dataclasses
import math
import typing
import warnings

import torch


@dataclasses.dataclass(eq=False)
class Chunk:
    buf: torch.Tensor
    order: int
    tag: str = ""

    def as_shape(self, *shape: int) -> torch.Tensor:
        return self.buf[: math.prod(shape)].view(*shape)


class Arena:
    MIN_ORDER = 6

    def __init__(self, max_order: int = 20):
        self.max_order = max_order
        self.bins: typing.List[typing.List[Chunk]] = [[] for _ in range(max_order + 1)]
        self.outstanding = 0

    def alloc(self, numel: int, tag: str = "") -> Chunk:
        order = max(self.MIN_ORDER, (numel - 1).bit_length())
        if order > self.max_order:
            raise ValueError(f"{numel} elements exceed the arena")
        self.outstanding += 1
        if self.bins[order]:
            c = self.bins[order].pop()  # clean: goes to the caller
            c.tag = tag
            return c
        return Chunk(torch.empty(1 << order), order, tag)

    def dealloc(self, c: Chunk) -> None:
        self.outstanding -= 1
        self.bins[c.order].append(c)

    def pop_best(self, order: int) -> typing.Optional[Chunk]:
        for o in range(order, self.max_order + 1):
            if self.bins[o]:
                c = self.bins[o].pop()  # leak: a poisoned chunk is neither returned nor put back
                if c.tag == "poison":
                    warnings.warn("poisoned chunk")
                    return None
                self.outstanding += 1
                return c
        return None

    def pop_sound(self, order: int) -> typing.Optional[Chunk]:
        for o in range(order, self.max_order + 1):
            if self.bins[o]:
                c = self.bins[o].pop()  # clean: near miss, a poisoned chunk goes back to its bin
                if c.tag == "poison":
                    self.bins[o].append(c)
                    continue
                self.outstanding += 1
                return c
        return None

    def trim(self, keep: int) -> int:
        n = 0
        for b in self.bins:
            n += max(0, len(b) - keep)
            del b[keep:]
        return n


class Offloader:
    def __init__(self, arena: Arena):
        self.arena = arena
        self.saved: typing.Dict[int, typing.Tuple[Chunk, torch.Size]] = {}
        self.scratch: typing.Optional[Chunk] = None

    def pack(self, key: int, x: torch.Tensor) -> int:
        c = self.arena.alloc(x.numel(), f"act{key}")  # clean: kept in saved, unpack or drop deallocs
        c.as_shape(*x.shape).copy_(x)
        self.saved[key] = (c, x.shape)
        return key

    def unpack(self, key: int) -> torch.Tensor:
        c, shape = self.saved.pop(key)
        out = c.as_shape(*shape).clone()
        self.arena.dealloc(c)
        return out

    def drop(self) -> None:
        for c, _ in self.saved.values():
            self.arena.dealloc(c)
        self.saved.clear()

    def quantize(self, x: torch.Tensor, bits: int = 8) -> torch.Tensor:
        c = self.arena.alloc(x.numel(), "q")  # leak: all-zero input returns early
        v = c.as_shape(*x.shape)
        v.copy_(x)
        peak = v.abs().max()
        if peak == 0:
            return torch.zeros_like(x, dtype=torch.int8)
        v.mul_((2 ** (bits - 1) - 1) / peak).round_()
        out = v.to(torch.int8)
        self.arena.dealloc(c)
        return out

    def relu_sum(self, x: torch.Tensor) -> torch.Tensor:
        c = self.arena.alloc(x.numel())  # clean: near miss, v is rebound but c is what goes back
        v = c.as_shape(*x.shape)
        v.copy_(x)
        v = v.relu()
        v = v + x
        self.arena.dealloc(c)
        return v.sum()

    def grow_scratch(self, numel: int) -> torch.Tensor:
        if self.scratch is None or self.scratch.buf.numel() < numel:
            self.scratch = self.arena.alloc(numel, "scratch")  # leak: the smaller scratch is overwritten
        return self.scratch.as_shape(numel)

    def end_step(self) -> None:
        if self.scratch is not None:
            self.arena.dealloc(self.scratch)
            self.scratch = None

    def double_buffered(self, xs: typing.List[torch.Tensor]) -> float:
        cur = self.arena.alloc(xs[0].numel(), "ping")  # clean: near miss, swapped with nxt, both are dealloced
        nxt = self.arena.alloc(xs[0].numel(), "pong")  # clean: near miss, swapped with cur, both are dealloced
        acc = 0.0
        for x in xs:
            nxt.as_shape(*x.shape).copy_(x)
            cur, nxt = nxt, cur
            acc += float(cur.buf[: x.numel()].sum())
        self.arena.dealloc(cur)
        self.arena.dealloc(nxt)
        return acc

    def chain(self, x: torch.Tensor, n: int) -> torch.Tensor:
        prev = self.arena.alloc(x.numel(), "chain0")  # leak: prev = nxt drops the former chunk
        prev.as_shape(*x.shape).copy_(x)
        for i in range(n):
            nxt = self.arena.alloc(x.numel(), f"chain{i + 1}")  # leak: becomes prev and is dropped by the next turn
            torch.tanh(prev.as_shape(*x.shape), out=nxt.as_shape(*x.shape))
            prev = nxt
        out = prev.as_shape(*x.shape).clone()
        self.arena.dealloc(prev)
        return out

    def tanh_chain(self, x: torch.Tensor, n: int) -> torch.Tensor:
        prev = self.arena.alloc(x.numel(), "chain0")  # clean: near miss, dealloced before prev moves on
        prev.as_shape(*x.shape).copy_(x)
        for i in range(n):
            nxt = self.arena.alloc(x.numel(), f"chain{i + 1}")  # clean: becomes prev, dealloced next turn or at the end
            torch.tanh(prev.as_shape(*x.shape), out=nxt.as_shape(*x.shape))
            self.arena.dealloc(prev)
            prev = nxt
        out = prev.as_shape(*x.shape).clone()
        self.arena.dealloc(prev)
        return out
