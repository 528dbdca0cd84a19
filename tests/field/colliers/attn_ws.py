"""Ring attention with a pooled workspace (split-KV partials, lse, rotary tables)."""
from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Optional, Sequence

log = logging.getLogger("attn")


class Tensor(list):
    """Row of floats; enough for the reference path."""

    def clone(self) -> "Tensor":
        return Tensor(self)

    def zero_(self) -> "Tensor":
        for i in range(len(self)):
            self[i] = 0.0
        return self


class Workspace:
    def __init__(self, max_floats: int) -> None:
        self.max_floats = max_floats
        self.in_use = 0
        self._bins: dict[int, list[Tensor]] = {}

    def get_tensor(self, n: int, zero: bool = False) -> Tensor:
        if self.in_use + n > self.max_floats:
            raise MemoryError("workspace")
        bin_ = self._bins.setdefault(n, [])
        t = bin_.pop() if bin_ else Tensor([0.0] * n)
        self.in_use += n
        return t.zero_() if zero else t

    def put_tensor(self, t: Tensor) -> None:
        self.in_use -= len(t)
        self._bins[len(t)].append(t)


@dataclass
class Partial:
    out: Tensor
    lse: Tensor

    def free(self, ws: Workspace) -> None:
        ws.put_tensor(self.out)
        ws.put_tensor(self.lse)


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b))


class RingAttention:
    def __init__(self, ws: Workspace, dim: int, *, causal: bool = True, soft_cap: float = 0.0) -> None:
        self.ws = ws
        self.dim = dim
        self.causal = causal
        self.soft_cap = soft_cap
        self.saved_lse: Optional[Tensor] = None
        self.rot: Optional[Tensor] = None

    # -- callees that hand out workspace tensors ------------------------------
    def scores(self, q: Tensor, ks: list[Tensor]) -> Tensor:
        s = self.ws.get_tensor(len(ks))  # clean: returned to the caller
        for i, k in enumerate(ks):
            s[i] = _dot(q, k) / math.sqrt(self.dim)
        return s

    def capped_scores(self, q: Tensor, ks: list[Tensor]) -> Tensor:
        s = self.scores(q, ks)  # clean: capped in place or not, returned to the caller
        if self.soft_cap <= 0:
            return s
        for i in range(len(s)):
            s[i] = self.soft_cap * math.tanh(s[i] / self.soft_cap)
        return s

    def softmax(self, s: Tensor) -> Tensor:
        p = self.ws.get_tensor(len(s))  # clean: returned to the caller
        m = max(s)
        for i, x in enumerate(s):
            p[i] = math.exp(x - m)
        z = sum(p)
        for i in range(len(p)):
            p[i] /= z
        return p

    # -- users ----------------------------------------------------------------
    def probs(self, q: Tensor, ks: list[Tensor]) -> Tensor:
        """Detached copy for logging."""
        s = self.scores(q, ks)  # clean: put after the softmax
        p = self.softmax(s)  # leak: cloned and dropped
        self.ws.put_tensor(s)
        return p.clone()

    def attend(self, q: Tensor, ks: list[Tensor], vs: list[Tensor]) -> Tensor:
        s = self.capped_scores(q, ks)  # leak: rebound by the softmax result
        s = self.softmax(s)  # clean: put before the return
        o = self.ws.get_tensor(self.dim, zero=True)  # clean: returned to the caller
        for w, v in zip(s, vs):
            for d in range(self.dim):
                o[d] += w * v[d]
        self.ws.put_tensor(s)
        return o

    def output(self, q: Tensor, ks: list[Tensor], vs: list[Tensor]) -> list[float]:
        o = self.attend(q, ks, vs)  # leak: copied to a plain list and dropped
        return [round(x, 6) for x in o]

    def output_into(self, q: Tensor, ks: list[Tensor], vs: list[Tensor], dst: list[float]) -> None:
        o = self.attend(q, ks, vs)  # clean: copied and put
        dst[:] = o
        self.ws.put_tensor(o)

    # -- split kv ---------------------------------------------------------------
    def partial(self, q: Tensor, ks: list[Tensor], vs: list[Tensor]) -> Optional[Partial]:
        lse = self.ws.get_tensor(1)  # leak: a fully masked split returns None without it being put
        if not ks:
            return None
        s = self.scores(q, ks)  # clean: put after use
        m = max(s)
        lse[0] = m + math.log(sum(math.exp(x - m) for x in s))
        out = self.ws.get_tensor(self.dim, zero=True)  # clean: moved into the Partial
        for x, v in zip(s, vs):
            for d in range(self.dim):
                out[d] += math.exp(x - lse[0]) * v[d]
        self.ws.put_tensor(s)
        return Partial(out, lse)

    def merge(self, a: Partial, b: Partial) -> Partial:
        """Consumes both."""
        lse = self.ws.get_tensor(1)  # clean: moved into the result
        lse[0] = max(a.lse[0], b.lse[0]) + math.log1p(math.exp(-abs(a.lse[0] - b.lse[0])))
        out = self.ws.get_tensor(self.dim)  # clean: moved into the result
        wa, wb = math.exp(a.lse[0] - lse[0]), math.exp(b.lse[0] - lse[0])
        for d in range(self.dim):
            out[d] = wa * a.out[d] + wb * b.out[d]
        a.free(self.ws)
        b.free(self.ws)
        return Partial(out, lse)

    def split_kv(self, q: Tensor, ks: list[Tensor], vs: list[Tensor], n: int) -> list[float]:
        acc: Optional[Partial] = None
        step = max(1, len(ks) // n)
        for i in range(0, len(ks), step):
            part = self.partial(q, ks[i:i + step], vs[i:i + step])  # clean: near miss, becomes acc or is consumed by merge
            if part is None:
                continue
            acc = part if acc is None else self.merge(acc, part)  # clean: near miss, merge consumes the old acc
        if acc is None:
            return [0.0] * self.dim
        res = list(acc.out)
        acc.free(self.ws)
        return res

    # -- backward state -----------------------------------------------------------
    def save_lse(self, q: Tensor, ks: list[Tensor]) -> None:
        if self.saved_lse is not None:
            self.ws.put_tensor(self.saved_lse)
        self.saved_lse = self.ws.get_tensor(1)  # clean: near miss, the former one is put first
        self.saved_lse[0] = math.log(max(1e-9, sum(_dot(q, k) for k in ks) ** 2))

    def backward(self) -> float:
        lse, self.saved_lse = self.saved_lse, None
        if lse is None:
            return 0.0
        g = lse[0]
        self.ws.put_tensor(lse)
        return g

    def set_rotary(self, n: int) -> Tensor:
        if self.rot is None or len(self.rot) < n:
            self.rot = self.ws.get_tensor(n)  # leak: growing overwrites the shorter table
            for i in range(n):
                self.rot[i] = math.cos(i)
        return self.rot

    def alibi(self, n: int, slopes: Optional[Tensor] = None) -> float:
        own = slopes is None
        if slopes is None:
            slopes = self.ws.get_tensor(n)  # clean: near miss, put by the own flag
            for i in range(n):
                slopes[i] = 2.0 ** -i
        total = sum(slopes)
        if own:
            self.ws.put_tensor(slopes)
        return total

    def alibi_cached(self, n: int, slopes: Optional[Tensor] = None, cache: bool = False) -> float:
        own = slopes is None and not cache
        if slopes is None:
            slopes = self.ws.get_tensor(n)  # leak: with cache set nobody owns it, it is neither kept nor put
        total = sum(slopes)
        if own:
            self.ws.put_tensor(slopes)
        return total


if __name__ == "__main__":
    ws = Workspace(4096)
    ra = RingAttention(ws, 4, soft_cap=5.0)
    q = Tensor([1.0, 0.0, 0.5, 0.2])
    ks = [Tensor([0.1 * i, 0.2, 0.3, 0.4]) for i in range(6)]
    dst: list[float] = []
    print(ra.split_kv(q, ks, ks, 3), ra.alibi(4))
    ra.save_lse(q, ks); ra.save_lse(q, ks); ra.backward()
    print(ws.in_use)
    ra.output_into(q, ks, ks, dst)
    print(ws.in_use, dst)
