"""Activation offload: saved tensors go to a host arena during forward and come back during backward."""
import bisect
import contextlib
import functools
import weakref
from dataclasses import dataclass, field
from typing import Any, Callable, Iterator, List, Optional

import torch
from torch import nn

GRAIN = 512


class ArenaFull(MemoryError): ...
class Unsupported(TypeError): ...


def up(n: int) -> int:
    return -(-n // GRAIN) * GRAIN


@dataclass(order=True)
class Span:
    off: int
    len: int
    dead: bool = field(default=False, compare=False)
    end = property(lambda self: self.off + self.len)


@dataclass
class Arena:
    size: int
    holes: List[Span] = field(default_factory=list)
    mem: Any = None
    used: int = 0

    def __post_init__(self) -> None:
        self.holes = [Span(0, self.size)]
        self.mem = torch.empty(self.size, dtype=torch.uint8, pin_memory=True)

    def carve(self, n: int) -> Span:
        """First fit."""
        n = up(n)
        for i, h in enumerate(self.holes):
            if h.len == n:
                return self._book(self.holes.pop(i))  # clean: the whole hole is handed out
            if h.len > n:
                self.holes.pop(i)  # clean: near miss, the rest of the hole goes back on the next line, the front is handed out
                self.holes.insert(i, Span(h.off + n, h.len - n))
                return self._book(Span(h.off, n))
        raise ArenaFull(f"{n} of {self.size - self.used} free bytes")

    def carve_tail(self, n: int) -> Optional[Span]:
        """From the far end, for things that live long; leaves the front unfragmented."""
        n = up(n)
        if not self.holes:
            return None
        h = self.holes.pop()  # leak: a last hole that is too small is not put back before the return
        if h.len < n:
            return None
        if h.len > n:
            self.holes.append(Span(h.off, h.len - n))
        return self._book(Span(h.end - n, n))

    def _book(self, s: Span) -> Span:
        self.used += s.len
        return s

    def mend(self, s: Span) -> None:
        if s.dead:
            return
        s.dead = True
        self.used -= s.len
        i = bisect.bisect_left(self.holes, s)
        new = Span(s.off, s.len)
        if i < len(self.holes) and new.end == self.holes[i].off:
            new.len += self.holes.pop(i).len  # clean: merged into the hole that is inserted below
        if i and self.holes[i - 1].end == new.off:
            left = self.holes.pop(i - 1)  # clean: merged as well
            new = Span(left.off, left.len + new.len)
            i -= 1
        self.holes.insert(i, new)

    def bytes(self, s: Span, n: int) -> torch.Tensor:
        return self.mem[s.off:s.off + n]

    @contextlib.contextmanager
    def scratch(self, n: int) -> Iterator[torch.Tensor]:
        s = self.carve(n)  # clean: finally
        try:
            yield self.bytes(s, n)
        finally:
            self.mend(s)


@dataclass
class Packed:
    span: Span
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    nbytes: int


class Offloader:
    """pack() and unpack() are meant for torch.autograd.graph.saved_tensors_hooks."""

    def __init__(self, arena: Arena, floor: int = 1 << 16) -> None:
        self.arena, self.floor = arena, floor
        self.out = 0
        self.kept: dict = {}

    def pack(self, t: torch.Tensor):
        n = t.numel() * t.element_size()
        if n < self.floor or not t.is_cuda:
            return t
        try:
            span = self.arena.carve(n)  # clean: near miss, the finalizer of the Packed mends it when autograd lets go
        except ArenaFull:
            return t
        self.arena.bytes(span, n).copy_(t.contiguous().view(-1).view(torch.uint8), non_blocking=True)
        p = Packed(span, t.shape, t.dtype, t.device, n)
        weakref.finalize(p, self.arena.mend, span)
        self.out += n
        return p

    def unpack(self, p) -> torch.Tensor:
        return p if isinstance(p, torch.Tensor) else self._load(p)

    def _load(self, p: Packed) -> torch.Tensor:
        return self.arena.bytes(p.span, p.nbytes).to(p.device, non_blocking=True).view(p.dtype).view(p.shape)

    def spill(self, name: str, t: torch.Tensor) -> bool:
        """Explicit offload of a named tensor, e.g. optimizer state of a frozen layer."""
        if t.dtype is torch.bool:
            raise Unsupported(name)
        n = t.numel() * t.element_size()
        s = self.arena.carve_tail(n)  # leak: the entry of an earlier spill() under the same name is replaced without mend()
        if s is None:
            return False
        self.arena.bytes(s, n).copy_(t.reshape(-1).view(torch.uint8))
        self.kept[name] = Packed(s, t.shape, t.dtype, t.device, n)
        return True

    def unspill(self, name: str) -> torch.Tensor:
        p = self.kept.pop(name)
        try:
            return self._load(p)
        finally:
            self.arena.mend(p.span)

    def __enter__(self) -> "Offloader":
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)
        self._hooks.__enter__()
        return self

    def __exit__(self, *exc) -> None:
        self._hooks.__exit__(*exc)


@dataclass
class Ring:
    """Double buffer for one layer's parameters."""
    arena: Arena
    nbytes: int
    a: Optional[Span] = None
    b: Optional[Span] = None

    def open(self) -> "Ring":
        self.a = self.arena.carve(self.nbytes)  # leak: ArenaFull for the second half leaves open(), and the handler in stream_layers() has no ring to close
        self.b = self.arena.carve(self.nbytes)  # clean: close() mends both
        return self

    def flip(self) -> None:
        self.a, self.b = self.b, self.a

    def close(self) -> None:
        for s in (self.a, self.b):
            if s is not None:
                self.arena.mend(s)
        self.a = self.b = None


def stream_layers(arena: Arena, layers: List[nn.Module], x: torch.Tensor, nbytes: int) -> torch.Tensor:
    try:
        ring = Ring(arena, nbytes).open()  # clean: closed in the finally below
    except ArenaFull:
        return nn.Sequential(*layers)(x)
    try:
        for layer in layers:
            arena.bytes(ring.a, nbytes).copy_(layer.packed, non_blocking=True)
            x = layer.run(x, arena.bytes(ring.b, nbytes))
            ring.flip()
        return x
    finally:
        ring.close()


class StreamedLinear(nn.Module):
    """Linear layer whose weight sits in the arena and visits the GPU for the time of one call."""

    def __init__(self, arena: Arena, weight: torch.Tensor) -> None:
        super().__init__()
        self.arena, self.shape, self.dtype = arena, weight.shape, weight.dtype
        self.n = weight.numel() * weight.element_size()
        self.span: Optional[Span] = arena.carve(self.n)  # clean: release() mends it and so does a resize()
        arena.bytes(self.span, self.n).copy_(weight.reshape(-1).view(torch.uint8))
        self.patch: Optional[Span] = None

    def weight(self) -> torch.Tensor:
        return self.arena.bytes(self.span, self.n).to("cuda", non_blocking=True).view(self.dtype).view(self.shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.weight().t()
        if self.patch is not None:
            y = y + self.arena.bytes(self.patch, y.shape[-1] * 2).to("cuda").view(torch.float16)
        return y

    def set_bias(self, bias: torch.Tensor) -> None:
        if self.patch is None:
            self.patch = self.arena.carve(bias.numel() * 2)  # leak: release() mends the weight's span only
        self.arena.bytes(self.patch, bias.numel() * 2).copy_(bias.half().view(torch.uint8))

    def resize(self, weight: torch.Tensor) -> None:
        n = weight.numel() * weight.element_size()
        fresh = self.arena.carve(n)  # clean: near miss, the old span is mended before the new one takes its name
        self.arena.bytes(fresh, n).copy_(weight.reshape(-1).view(torch.uint8))
        self.release()
        self.span, self.n, self.shape, self.dtype = fresh, n, weight.shape, weight.dtype

    def release(self) -> None:
        if self.span is not None:
            self.arena.mend(self.span)
            self.span = None


def reduce_on_host(arena: Arena, grads: List[torch.Tensor], op: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Optional[torch.Tensor]:
    spans: List[Span] = []
    for g in grads:
        if g.is_sparse:
            for s in spans:
                arena.mend(s)
            return None
        try:
            s = arena.carve(g.numel() * 4)  # leak: the handler for a full arena returns with the spans of the earlier gradients
        except ArenaFull:
            return None
        spans.append(s)
        arena.bytes(s, g.numel() * 4).copy_(g.float().reshape(-1).view(torch.uint8))
    out = functools.reduce(op, (arena.bytes(s, s.len).view(torch.float32) for s in spans)).clone()
    for s in spans:
        arena.mend(s)
    return out


def histogram(arena: Arena, t: torch.Tensor, bins: int = 64) -> torch.Tensor:
    with arena.scratch(t.numel() * 4) as buf:  # clean: with
        return torch.histc(buf.view(torch.float32).copy_(t.reshape(-1)), bins)
