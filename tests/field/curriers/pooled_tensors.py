"""Scratch tensors for attention and sampling, kept in a pool by size."""
from __future__ import annotations

from collections import defaultdict
from typing import Callable, Dict, List, Optional, Sequence

try:
    import torch
except ImportError:  # tests run without it
    torch = None


class Scratch:
    """Stand-in for a flat tensor when torch is missing."""

    def __init__(self, n: int) -> None:
        self.data = torch.zeros(n).tolist() if torch is not None else [0.0] * n

    def copy_(self, src: Sequence[float]) -> "Scratch":
        self.data[: len(src)] = list(src)
        return self

    def clone(self) -> List[float]:
        return list(self.data)

    def scale_(self, f: float) -> "Scratch":
        self.data = [x * f for x in self.data]
        return self


class TensorPool:
    def __init__(self) -> None:
        self._by_size: Dict[int, List[Scratch]] = defaultdict(list)
        self.outstanding = 0

    def borrow(self, n: int) -> Scratch:
        self.outstanding += 1
        bucket = self._by_size[n]
        return bucket.pop() if bucket else Scratch(n)

    def give_back(self, t: Scratch) -> None:
        self.outstanding -= 1
        self._by_size[len(t.data)].append(t)


class Kernels:
    def __init__(self, pool: TensorPool) -> None:
        self.pool = pool

    def scores(self, q: Sequence[float], scale: float) -> Scratch:
        """Scaled scores in a borrowed tensor; the caller gives it back."""
        out = self.pool.borrow(len(q))  # clean: returned to the caller
        out.copy_(q)
        return out.scale_(scale)

    def softmax(self, x: Sequence[float]) -> List[float]:
        tmp = self.pool.borrow(len(x))  # clean: given back after the copy
        total = sum(x) or 1.0
        tmp.copy_([v / total for v in x])
        res = tmp.clone()
        self.pool.give_back(tmp)
        return res

    def attend(self, q: Sequence[float], v: Sequence[float]) -> List[float]:
        s = self.scores(q, 0.5)  # clean: given back in the finally
        try:
            return [a * b for a, b in zip(s.data, v)]
        finally:
            self.pool.give_back(s)

    def attend_cloned(self, q: Sequence[float]) -> List[float]:
        return self.scores(q, 0.5).clone()  # leak: the pooled tensor is cloned and dropped

    def attend_masked(self, q: Sequence[float], mask: Optional[Sequence[float]]) -> List[float]:
        s = self.scores(q, 0.5)  # leak: s is rebound to the masked tensor
        if mask is not None:
            m = self.pool.borrow(len(mask))  # clean: becomes s and is given back
            m.copy_([a * b for a, b in zip(s.data, mask)])
            s = m
        out = s.clone()
        self.pool.give_back(s)
        return out

    def attend_biased(self, q: Sequence[float], bias: Optional[Sequence[float]]) -> List[float]:
        s = self.scores(q, 1.0)  # clean: near miss, given back before the name is rebound
        if bias is not None:
            b = self.pool.borrow(len(bias))  # clean: near miss, becomes s and is given back
            b.copy_([x + y for x, y in zip(s.data, bias)])
            self.pool.give_back(s)
            s = b
        out = s.clone()
        self.pool.give_back(s)
        return out

    def rope(self, x: Sequence[float], out: Optional[Scratch] = None) -> List[float]:
        own = out is None
        if out is None:
            out = self.pool.borrow(len(x))  # clean: near miss, own is true exactly here
        out.copy_([v * 0.9 for v in x])
        res = out.clone()
        if own:
            self.pool.give_back(out)
        return res

    def norm(self, x: Sequence[float], out: Optional[Scratch] = None) -> List[float]:
        if out is None:
            out = self.pool.borrow(len(x))  # leak: own is computed after out was filled in, so it is never true
        own = out is None
        out.copy_(x)
        res = out.clone()
        if own:
            self.pool.give_back(out)
        return res


class Sampler:
    def __init__(self, pool: TensorPool, vocab: int) -> None:
        self.pool = pool
        self.kernels = Kernels(pool)
        self.logits = pool.borrow(vocab)  # clean: held for the sampler's life, given back in close
        self.penalties: Dict[int, Scratch] = {}

    def close(self) -> None:
        self.pool.give_back(self.logits)
        for t in self.penalties.values():
            self.pool.give_back(t)
        self.penalties.clear()

    def set_penalty(self, rid: int, values: Sequence[float]) -> None:
        t = self.penalties.get(rid)
        if t is None:
            t = self.penalties[rid] = self.pool.borrow(len(values))  # clean: in the table, given back in clear_penalty or close
        t.copy_(values)

    def clear_penalty(self, rid: int) -> None:
        t = self.penalties.pop(rid, None)
        if t is not None:
            self.pool.give_back(t)

    def merge(self, parts: List[Sequence[float]]) -> List[float]:
        acc = self.kernels.scores(parts[0], 1.0)  # clean: given back at the end
        for part in parts[1:]:
            cur = self.kernels.scores(part, 1.0)  # leak: a part of another length skips the give_back
            if len(cur.data) != len(acc.data):
                continue
            acc.copy_([a + b for a, b in zip(acc.data, cur.data)])
            self.pool.give_back(cur)
        out = acc.clone()
        self.pool.give_back(acc)
        return out

    def top1(self, x: Sequence[float], accept: Callable[[float], bool]) -> Optional[float]:
        t = self.kernels.scores(x, 1.0)  # leak: a rejected best returns None before the give_back
        best = max(t.data)
        if not accept(best):
            return None
        self.pool.give_back(t)
        return best

    def gumbel(self, x: Sequence[float], greedy: bool) -> float:
        noise = None
        if not greedy:
            noise = self.pool.borrow(len(x))  # clean: near miss, given back under the same guard
            noise.copy_([0.1] * len(x))
        best = max(a + (noise.data[i] if noise is not None else 0.0) for i, a in enumerate(x))
        if not greedy:
            self.pool.give_back(noise)
        return best


if __name__ == "__main__":
    p = TensorPool()
    k = Kernels(p)
    print(k.attend([1, 2], [3, 4]), k.rope([1.0]), k.attend_biased([1, 2], [1, 1]), k.softmax([1, 3]))
    sm = Sampler(p, 4)
    sm.set_penalty(1, [1.0]); sm.clear_penalty(1)
    print(sm.gumbel([1, 2], False), sm.merge([[1, 2], [3, 4]]))
    sm.close()
    print(p.outstanding)
