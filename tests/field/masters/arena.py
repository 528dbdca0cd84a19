"""One big device tensor, carved into regions. For everything that is too short-lived for the caching allocator."""
import logging
from contextlib import contextmanager

import torch
from torch import nn

log = logging.getLogger(__name__)
ALIGN, SPLIT = 256, 4096
_SIZES = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 2, torch.int64: 8, torch.uint8: 1}


class ArenaFull(RuntimeError):
    pass


def span(shape, dtype):
    n = _SIZES[dtype]
    for d in shape:
        n *= d
    return (n + ALIGN - 1) // ALIGN * ALIGN


class Region:
    __slots__ = ("off", "size", "name")

    def __init__(self, off, size, name):
        self.off, self.size, self.name = off, size, name

    def __repr__(self):
        return f"<{self.name} {self.off}+{self.size}>"


class Arena:
    def __init__(self, size, device="cuda"):
        self.mem = torch.empty(size, dtype=torch.uint8, device=device)
        self.holes = [(0, size)]
        self.named = {}
        self.peak = self.used = 0

    def alloc(self, size, name="?"):
        best = None
        for j, (_, s) in enumerate(self.holes):
            if s >= size and (best is None or s < self.holes[best][1]):
                best = j
        if best is None:
            raise ArenaFull(f"{name}: {size} of {self.mem.numel()}, {self.used} used")
        off, have = self.holes.pop(best)  # leak: a rest below SPLIT is neither a hole again nor part of the region
        if have - size >= SPLIT:
            self.holes.append((off + size, have - size))
        self.used += size
        self.peak = max(self.peak, self.used)
        return Region(off, size, name)

    def free(self, r):
        off, end, rest = r.off, r.off + r.size, []
        for o, s in self.holes:
            if o + s == off:
                off = o
            elif o == end:
                end = o + s
            else:
                rest.append((o, s))
        rest.append((off, end - off))
        self.holes = rest
        self.used -= r.size

    def view(self, r, shape, dtype):
        n = span(shape, dtype)
        flat = self.mem[r.off:r.off + n].view(dtype)
        return flat[:torch.Size(shape).numel()].view(shape)

    def grow(self, r, size):
        """A larger region with the contents of r, which is gone after that."""
        new = self.alloc(size, r.name)  # clean: returned
        self.mem[new.off:new.off + r.size].copy_(self.mem[r.off:r.off + r.size])
        self.free(r)
        return new

    def persist(self, name, shape, dtype):
        if name in self.named:
            self.free(self.named.pop(name))
        r = self.alloc(span(shape, dtype), name)  # clean: near miss, the one before it was freed and reset() frees this one
        self.named[name] = r
        return self.view(r, shape, dtype)

    def reset(self):
        for r in self.named.values():
            self.free(r)
        self.named.clear()


class Frame:
    """Scratch of one call. keep() takes a tensor's region out of it."""

    def __init__(self, arena, name):
        self.arena, self.name, self.regions = arena, name, []

    def __enter__(self):
        return self

    def tensor(self, shape, dtype=torch.bfloat16):
        r = self.arena.alloc(span(shape, dtype), self.name)  # clean: in the frame's list until exit or keep()
        self.regions.append(r)
        return self.arena.view(r, shape, dtype)

    def keep(self, t):
        off = t.data_ptr() - self.arena.mem.data_ptr()
        for i, r in enumerate(self.regions):
            if r.off == off:
                return self.regions.pop(i)
        raise KeyError(off)

    def __exit__(self, *exc):
        while self.regions:
            self.arena.free(self.regions.pop())


class Mlp(nn.Module):
    def __init__(self, arena, d, h):
        super().__init__()
        self.arena = arena
        self.up, self.down = nn.Linear(d, h, bias=False), nn.Linear(h, d, bias=False)

    def forward(self, x):
        """Returns the result and the region it lies in."""
        with Frame(self.arena, "mlp") as f:  # clean: left regions are freed on exit, the kept one is returned
            h = f.tensor((*x.shape[:-1], self.up.out_features), x.dtype)
            y = f.tensor(x.shape, x.dtype)
            torch.matmul(x, self.up.weight.t(), out=h)
            torch.matmul(nn.functional.gelu(h), self.down.weight.t(), out=y)
            y += x
            return y, f.keep(y)


class Stack(nn.Module):
    def __init__(self, arena, layers):
        super().__init__()
        self.arena, self.layers = arena, nn.ModuleList(layers)

    def forward(self, x):
        reg = None
        try:
            for layer in self.layers:
                x, nxt = layer(x)  # clean: near miss, freed when the next one is there, the last one is returned
                if reg is not None:
                    self.arena.free(reg)
                reg = nxt
        except ArenaFull:
            if reg is not None:
                self.arena.free(reg)
            raise
        return x, reg


class Scores(nn.Module):
    """Attention weights for the rows that somebody wants to look at."""

    def __init__(self, arena, scale):
        super().__init__()
        self.arena, self.scale = arena, scale

    def forward(self, q, k, mask=None):
        shape = (q.shape[0], q.shape[1], k.shape[1])
        r = self.arena.alloc(span(shape, q.dtype), "scores")  # leak: fully masked rows return before the free
        s = self.arena.view(r, shape, q.dtype)
        torch.bmm(q, k.transpose(1, 2), out=s)
        if mask is not None:
            if not mask.any():
                return torch.zeros(shape[:2], device=q.device)
            s.masked_fill_(~mask, float("-inf"))
        ent = torch.special.entr((s * self.scale).softmax(-1)).sum(-1)
        self.arena.free(r)
        return ent


class Workspace:
    """Per-kernel scratch that only ever grows."""

    def __init__(self, arena):
        self.arena, self.tab = arena, {}

    def get(self, kernel, size):
        r = self.tab.get(kernel)
        if r is None or r.size < size:
            r = self.arena.alloc(size, kernel)  # leak: the smaller one in the table is overwritten and not freed
            self.tab[kernel] = r
        return r

    def close(self):
        for r in self.tab.values():
            self.arena.free(r)
        self.tab.clear()


class History:
    def __init__(self, arena, d, rows=64):
        self.arena, self.d, self.n = arena, d, 0
        self.reg = arena.alloc(span((rows, d), torch.float32), "history")  # clean: grow() frees the old one and close() the last

    def push(self, v):
        if span((self.n + 1, self.d), torch.float32) > self.reg.size:
            self.reg = self.arena.grow(self.reg, 2 * self.reg.size)  # clean: near miss, the rebound one was freed by grow()
        self.arena.view(self.reg, (self.n + 1, self.d), torch.float32)[self.n] = v
        self.n += 1

    def close(self):
        if self.reg is not None:
            self.arena.free(self.reg)
            self.reg = None


def sample(arena, logits, top_p):
    """Nucleus sampling in the arena; on the caching allocator if there is no room."""
    try:
        a = arena.alloc(span(logits.shape, torch.float32), "probs")  # leak: kept when the second alloc raises and we fall back
        b = arena.alloc(span(logits.shape, torch.int64), "order")  # clean: freed below
    except ArenaFull as e:
        log.debug("sampling outside: %s", e)
        return torch.multinomial(logits.float().softmax(-1), 1)
    probs, order = arena.view(a, logits.shape, torch.float32), arena.view(b, logits.shape, torch.int64)
    torch.sort(logits.float().softmax(-1), descending=True, out=(probs, order))
    probs[probs.cumsum(-1) - probs > top_p] = 0
    tok = order.gather(-1, torch.multinomial(probs, 1))
    arena.free(b)
    arena.free(a)
    return tok


@contextmanager
def borrowed(arena, shape, dtype):
    r = arena.alloc(span(shape, dtype), "borrowed")  # clean: freed in the finally
    try:
        yield arena.view(r, shape, dtype)
    finally:
        arena.free(r)


def train_epoch(stack, head, batches, opt, arena):
    skipped, seen = 0, 0
    for x, y in batches:
        h, reg = stack(x)  # leak: a batch with a loss that is not finite is skipped with its region
        loss = nn.functional.mse_loss(head(h), y)
        if not torch.isfinite(loss):
            skipped += 1
            opt.zero_grad(set_to_none=True)
            continue
        loss.backward()
        opt.step()
        arena.free(reg)
        seen += len(x)
    log.info("%d rows, %d batches skipped, peak %d MiB", seen, skipped, arena.peak >> 20)


def column_norms(arena, w):
    with borrowed(arena, w.shape, torch.float32) as t:  # clean: the context manager frees
        t.copy_(w).square_()
        return t.sum(0).sqrt()
