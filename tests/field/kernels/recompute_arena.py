"""Segment recompute with a mark/rewind arena and a streaming chunk loader."""
import torch
from torch import nn


class Arena:
    """Bump allocation of slices; spare slices are kept per length in tuples."""

    def __init__(self, numel):
        self.base = torch.empty(numel)
        self.top = 0
        self.spare = {}

    def obtain(self, n):
        if self.spare.get(n):
            head, *tail = self.spare[n]
            self.spare[n] = tuple(tail)  # clean: near miss, the head leaves the store and goes to the caller
            return head
        if self.top + n > self.base.numel():
            return None
        piece = self.base[self.top : self.top + n]
        self.top += n
        return piece

    def relinquish(self, piece):
        self.spare[piece.numel()] = self.spare.get(piece.numel(), ()) + (piece,)

    def obtain_or_new(self, n):
        """A slice and a flag saying whether the arena owns it."""
        piece = self.obtain(n)  # clean: near miss, handed to the caller with its flag
        if piece is None:
            return torch.empty(n), False
        return piece, True


class SegmentFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, body, arena):
        ctx.body, ctx.arena, ctx.shape = body, arena, x.shape
        piece, owned = arena.obtain_or_new(x.numel())  # clean: near miss, backward relinquishes under the same flag
        piece.copy_(x.reshape(-1))
        ctx.piece, ctx.owned = piece, owned
        with torch.no_grad():
            return body(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.piece.view(ctx.shape).clone().requires_grad_(True)
        if ctx.owned:
            ctx.arena.relinquish(ctx.piece)
        with torch.enable_grad():
            y = ctx.body(x)
        (gx,) = torch.autograd.grad(y, x, grad)
        return gx, None, None


class SquareFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, arena):
        ctx.arena, ctx.shape = arena, x.shape
        ctx.piece, ctx.owned = arena.obtain_or_new(x.numel())  # leak: backward never looks at the flag nor relinquishes the piece
        ctx.piece.copy_(x.reshape(-1))
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad * ctx.piece.view(ctx.shape), None


class Segment(nn.Module):
    def __init__(self, body, arena):
        super().__init__()
        self.body = body
        self.arena = arena
        self.trace = []

    def forward(self, x):
        if torch.is_grad_enabled():
            return SegmentFunction.apply(x, self.body, self.arena)
        return self.body(x)

    def remember(self, x):
        piece = self.arena.obtain(x.numel())  # clean: near miss, the trace is emptied into the arena by forget
        if piece is None:
            return False
        piece.copy_(x.reshape(-1))
        self.trace.append(piece)
        return True

    def forget(self):
        for piece in self.trace:
            self.arena.relinquish(piece)
        self.trace.clear()

    def last_only(self, x):
        """Keep just the newest activation in the trace."""
        piece = self.arena.obtain(x.numel())  # leak: the older pieces of the trace are dropped by the reassignment
        if piece is None:
            return
        piece.copy_(x.reshape(-1))
        self.trace = [piece]

    @torch.no_grad()
    def residual_norm(self, x):
        piece = self.arena.obtain(x.numel())  # leak: rebound to the difference, so the arena gets a foreign tensor back
        if piece is None:
            return float((self.body(x) - x).norm())
        piece.copy_(x.reshape(-1))
        piece = self.body(x).reshape(-1) - piece
        self.arena.relinquish(piece)
        return float(piece.norm())

    @torch.no_grad()
    def repeat_until(self, x, tol, rounds=8):
        piece = self.arena.obtain(x.numel())  # leak: the convergence return comes before the relinquish
        if piece is None:
            return x
        for _ in range(rounds):
            piece.copy_(x.reshape(-1))
            x = self.body(x)
            if (x.reshape(-1) - piece).abs().max() < tol:
                return x
        self.arena.relinquish(piece)
        return x


class ChunkStream:
    """Copies long documents into arena slices, chunk by chunk."""

    def __init__(self, docs, chunk, arena):
        self.docs, self.chunk, self.arena = docs, chunk, arena

    def __iter__(self):
        for doc in self.docs:
            for at in range(0, len(doc), self.chunk):
                piece = self.arena.obtain(self.chunk)  # clean: near miss, the consumer borrows it over the yield and the finally relinquishes
                if piece is None:
                    return
                try:
                    part = doc[at : at + self.chunk]
                    piece.zero_()
                    piece[: len(part)].copy_(part)
                    yield piece
                finally:
                    self.arena.relinquish(piece)

    def owned(self):
        """Yield slices that the consumer must relinquish."""
        for doc in self.docs:
            if len(doc) < self.chunk:
                continue
            piece = self.arena.obtain(self.chunk)  # clean: near miss, yielded to the consumer who owns it
            if piece is None:
                return
            piece.copy_(doc[: self.chunk])
            yield piece


def find_first(stream, value):
    for i, piece in enumerate(stream.owned()):  # leak: the found piece is not relinquished before the return
        if (piece == value).any():
            return i
        stream.arena.relinquish(piece)
    return -1
