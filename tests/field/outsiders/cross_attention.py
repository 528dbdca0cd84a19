import logging
from typing import Optional, Tuple

import torch
import torch.nn as nn

log = logging.getLogger(__name__)


class ScratchMixin:
    """Adds a scratch arena. Subclasses call _scratch/_unscratch."""

    _arena: Optional["Arena"] = None

    def attach_arena(self, arena: "Arena") -> None:
        self._arena = arena

    def _scratch(self, *shape: int) -> torch.Tensor:
        if self._arena is None:
            return torch.empty(*shape)
        return self._arena.take(*shape)  # clean: passed on, _unscratch asks for the arena as well

    def _unscratch(self, t: torch.Tensor) -> None:
        if self._arena is not None:
            self._arena.return_(t)


class Arena:
    def __init__(self) -> None:
        self._stacks: dict = {}
        self.high_water = 0
        self.current = 0

    def take(self, *shape: int) -> torch.Tensor:
        self.current += 1
        self.high_water = max(self.high_water, self.current)
        stack = self._stacks.get(shape)
        return stack.pop() if stack else torch.empty(*shape)

    def return_(self, t: torch.Tensor) -> None:
        self.current -= 1
        self._stacks.setdefault(tuple(t.shape), []).append(t)


class CrossAttention(ScratchMixin, nn.Module):
    def __init__(self, dim: int, ctx_dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.scale = (dim // heads) ** -0.5
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_kv = nn.Linear(ctx_dim, 2 * dim, bias=False)
        self.out = nn.Linear(dim, dim)
        self._kv: Optional[torch.Tensor] = None

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        return x.view(b, t, self.heads, d // self.heads).transpose(1, 2)

    def cache_context(self, ctx: torch.Tensor) -> None:
        self.drop_context()
        self._kv = self._scratch(ctx.shape[0], ctx.shape[1], self.to_kv.out_features)  # clean: drop_context() gives it back
        self._kv.copy_(self.to_kv(ctx))

    def drop_context(self) -> None:
        if self._kv is not None:
            self._unscratch(self._kv)
            self._kv = None

    def forward(self, x: torch.Tensor, ctx: torch.Tensor, mask: Optional[torch.Tensor] = None) -> torch.Tensor:
        q = self._heads(self.to_q(x))
        kv = self._kv if self._kv is not None else self.to_kv(ctx)
        k, v = (self._heads(t) for t in kv.chunk(2, dim=-1))
        s = self._scratch(x.shape[0], self.heads, x.shape[1], ctx.shape[1])  # clean: in-place steps, then unscratch
        torch.matmul(q, k.transpose(-1, -2), out=s)
        s.mul_(self.scale)
        if mask is not None:
            s.masked_fill_(~mask, float("-inf"))
        o = s.softmax(-1) @ v
        self._unscratch(s)
        return self.out(o.transpose(1, 2).flatten(2))


class GatedCrossAttention(CrossAttention):
    def __init__(self, dim: int, ctx_dim: int, heads: int, threshold: float = 1e-3):
        super().__init__(dim, ctx_dim, heads)
        self.gate = nn.Parameter(torch.zeros(1))
        self.threshold = threshold

    def forward(self, x: torch.Tensor, ctx: torch.Tensor, mask: Optional[torch.Tensor] = None) -> torch.Tensor:
        g = self.gate.tanh()
        buf = self._scratch(*x.shape)  # leak: a closed gate returns x and keeps the scratch
        if abs(float(g)) < self.threshold:
            return x
        buf.copy_(super().forward(x, ctx, mask))
        y = x + g * buf
        self._unscratch(buf)
        return y


class DualCrossAttention(nn.Module):
    """Text and image branch; both write into scratch owned here."""

    def __init__(self, text: CrossAttention, image: CrossAttention, arena: Arena):
        super().__init__()
        self.text = text
        self.image = image
        self.arena = arena

    def _branch(self, attn: CrossAttention, x: torch.Tensor, ctx: torch.Tensor) -> torch.Tensor:
        buf = self.arena.take(*x.shape)  # clean: the caller owns the filled buffer
        buf.copy_(attn(x, ctx))
        return buf

    def forward(self, x: torch.Tensor, ctx: Tuple[torch.Tensor, torch.Tensor], w: float = 0.5) -> torch.Tensor:
        a = self._branch(self.text, x, ctx[0])  # clean: near miss, lerp_ stays in the lease, a copy is returned
        b = self._branch(self.image, x, ctx[1])  # clean: returned to the arena after the blend
        a = a.lerp_(b, w)
        out = x + a
        self.arena.return_(a)
        self.arena.return_(b)
        return out

    def forward_sum(self, x: torch.Tensor, ctx: Tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        a = self._branch(self.text, x, ctx[0])  # leak: the sum takes over the name and the sum is returned to the arena
        b = self._branch(self.image, x, ctx[1])  # clean: returned under its own name
        a = a + b
        out = x + a
        self.arena.return_(a)
        self.arena.return_(b)
        return out

    def similarity(self, x: torch.Tensor, ctx: Tuple[torch.Tensor, torch.Tensor]) -> float:
        return float(torch.cosine_similarity(
            self._branch(self.text, x, ctx[0]),  # leak: only the similarity remains
            self._branch(self.image, x, ctx[1]),  # leak: only the similarity remains
            dim=-1,
        ).mean())
