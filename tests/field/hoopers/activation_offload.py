"""Offloading of activations, gradients and optimizer state into a host arena."""
import contextlib
import logging
import math
from collections import defaultdict, deque
from dataclasses import dataclass, field

import torch
from torch import nn

log = logging.getLogger(__name__)

class ArenaFull(RuntimeError):
    pass

@dataclass(eq=False)
class Region:
    offset: int
    nbytes: int
    order: int
    tag: str = ""

class HostArena:
    MIN_ORDER = 12

    def __init__(self, order: int):
        self._mem = torch.empty(1 << order, dtype=torch.uint8)
        self._order = order
        self._bins = defaultdict(list)
        self._bins[order].append(Region(0, 1 << order, order))

    def carve(self, nbytes: int, tag: str = "") -> Region:
        want = max(self.MIN_ORDER, math.ceil(math.log2(max(nbytes, 1))))
        order = want
        while order <= self._order and not self._bins[order]:
            order += 1
        if order > self._order:
            raise ArenaFull(f"{tag}: {nbytes} bytes")
        region = self._bins[order].pop()  # clean: near miss, the upper halves go to the bins and the rest is returned
        while region.order > want:
            order = region.order - 1
            self._bins[order].append(Region(region.offset + (1 << order), 1 << order, order))
            region = Region(region.offset, 1 << order, order)
        region.tag = tag
        return region

    def restore(self, region: Region) -> None:
        self._bins[region.order].append(region)

    def compact(self) -> int:
        """Join buddies of the same order, called between steps."""
        joined = 0
        for order in range(self.MIN_ORDER, self._order):
            bin_ = sorted(self._bins[order], key=lambda r: -r.offset)
            keep = []
            while len(bin_) > 1:
                low = bin_.pop()  # clean: kept or joined
                high = bin_.pop()  # leak: where the two are no buddies only low is kept
                if low.offset ^ (1 << order) != high.offset:
                    keep.append(low)
                    continue
                self._bins[order + 1].append(Region(low.offset, 2 << order, order + 1))
                joined += 1
            self._bins[order] = keep + bin_
        return joined

    def view(self, region: Region, like: torch.Tensor) -> torch.Tensor:
        n = like.numel() * like.element_size()
        return self._mem[region.offset:region.offset + n].view(like.dtype).view(like.shape)

    @contextlib.contextmanager
    def scratch(self, nbytes: int):
        region = self.carve(nbytes, "scratch")  # clean: finally
        try:
            yield region
        finally:
            self.restore(region)

@dataclass(eq=False)
class Packed:
    region: Region
    like: torch.Tensor
    device: torch.device
    done: bool = False

class SavedTensorOffload:
    def __init__(self, arena: HostArena, min_bytes: int = 1 << 20):
        self.arena, self.min_bytes = arena, min_bytes
        self._live = set()

    def pack(self, t: torch.Tensor):
        nbytes = t.numel() * t.element_size()
        if nbytes < self.min_bytes:
            return t
        try:
            region = self.arena.carve(nbytes, "saved")  # clean: near miss, unpack restores it once, sweep what backward did not ask for
        except ArenaFull:
            return t
        packed = Packed(region, torch.empty_like(t, device="meta"), t.device)
        self.arena.view(region, packed.like).copy_(t)
        self._live.add(packed)
        return packed

    def unpack(self, p):
        if isinstance(p, torch.Tensor):
            return p
        out = self.arena.view(p.region, p.like).to(p.device)
        if not p.done:
            p.done = True
            self._live.discard(p)
            self.arena.restore(p.region)
        return out

    def sweep(self) -> int:
        n = len(self._live)
        for p in self._live:
            p.done = True
            self.arena.restore(p.region)
        self._live.clear()
        return n

class OffloadedInput(torch.autograd.Function):
    """Checkpoint: keeps only the input, in host memory, and recomputes."""

    @staticmethod
    def forward(ctx, x, block, arena):
        ctx.region = arena.carve(x.numel() * x.element_size(), "ckpt")  # leak: backward returns before restore when the input wants no gradient
        arena.view(ctx.region, x).copy_(x)
        ctx.block, ctx.arena = block, arena
        ctx.like, ctx.device = torch.empty_like(x, device="meta"), x.device
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx, grad):
        if not ctx.needs_input_grad[0]:
            return None, None, None
        x = ctx.arena.view(ctx.region, ctx.like).to(ctx.device).requires_grad_()
        ctx.arena.restore(ctx.region)
        with torch.enable_grad():
            out = ctx.block(x)
        torch.autograd.backward(out, grad)
        return x.grad, None, None

class GradSpill:
    """Gradients of a micro batch go to the host until the step."""

    def __init__(self, arena: HostArena):
        self.arena = arena
        self._held = {}

    def on_grad(self, name: str, param: nn.Parameter) -> None:
        g = param.grad
        if g is None:
            return
        region = self.arena.carve(g.numel() * g.element_size(), name)  # leak: the next micro batch overwrites the entry of the same parameter
        self.arena.view(region, g).copy_(g)
        self._held[name] = (region, g.shape)
        param.grad = None

    def collect(self, params) -> None:
        for name, param in params:
            entry = self._held.pop(name, None)
            if entry is None:
                continue
            region, _shape = entry
            param.grad = self.arena.view(region, param).to(param.device)
            self.arena.restore(region)

class OffloadedAdam:
    def __init__(self, params, arena: HostArena, lr=1e-4, betas=(0.9, 0.95), eps=1e-8):
        self.params, self.arena, self.lr, self.betas, self.eps = list(params), arena, lr, betas, eps
        self.state = {}
        self.t = 0

    def _moments(self, p):
        entry = self.state.get(p)
        if entry is None:
            nbytes = p.numel() * 4
            m = self.arena.carve(nbytes, "adam.m")  # clean: near miss, restored in the handler or kept in the state until close
            try:
                v = self.arena.carve(nbytes, "adam.v")  # clean: kept in the state until close
            except ArenaFull:
                self.arena.restore(m)
                raise
            entry = self.state[p] = (m, v)
        return entry

    def step(self) -> bool:
        self.t += 1
        b1, b2 = self.betas
        for p in self.params:
            if p.grad is None:
                continue
            tmp = self.arena.carve(p.numel() * 4, "adam.tmp")  # leak: a gradient that is not finite returns False with the region out
            g = self.arena.view(tmp, torch.empty(p.shape, device="meta"))
            g.copy_(p.grad)
            if not torch.isfinite(g).all():
                log.warning("step %d skipped", self.t)
                return False
            m, v = (self.arena.view(r, g) for r in self._moments(p))
            m.mul_(b1).add_(g, alpha=1 - b1)
            v.mul_(b2).addcmul_(g, g, value=1 - b2)
            p.data.add_((m / (v.sqrt() + self.eps)).to(p.device), alpha=-self.lr)
            self.arena.restore(tmp)
        return True

    def close(self) -> None:
        for m, v in self.state.values():
            self.arena.restore(m)
            self.arena.restore(v)
        self.state.clear()

class WeightPrefetcher:
    """Stages the next layer while the current one computes."""

    def __init__(self, arena: HostArena, store):
        self.arena, self.store = arena, store
        self._staged = None
        self._writes = deque()

    def prefetch(self, name: str) -> None:
        if self._staged is not None and self._staged[0] == name:
            return
        self.reset()
        region = self.arena.carve(self.store.nbytes(name), name)  # leak: reset() forgets the staged region of a layer that was not taken
        self.store.read_into(name, region)
        self._staged = (name, region)

    def take(self, name: str, param: nn.Parameter) -> bool:
        if self._staged is None or self._staged[0] != name:
            return False
        _, region = self._staged
        self._staged = None
        param.data.copy_(self.arena.view(region, param))
        self.arena.restore(region)
        return True

    def reset(self) -> None:
        if self._staged is not None:
            log.debug("staged %s was not used", self._staged[0])
        self._staged = None

    def write_back(self, name: str, param: nn.Parameter, event) -> None:
        region = self.arena.carve(param.numel() * param.element_size(), name)  # clean: near miss, poll() restores it when its event is done
        self.arena.view(region, param).copy_(param.data, non_blocking=True)
        event.record()
        self._writes.append((event, name, region))

    def poll(self) -> int:
        done = 0
        while self._writes:
            event, name, region = self._writes[0]
            if not event.query():
                break
            self.store.write_from(name, region)
            self._writes.popleft()
            self.arena.restore(region)
            done += 1
        return done
