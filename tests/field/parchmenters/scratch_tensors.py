"""Sampling math on tensors cached by shape.

Allocating [batch, vocab] floats on every decode step fragments the caching
allocator when batch sizes vary, so the sampler keeps its own.
"""
from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager

import torch
from torch import Tensor


class ShapeCache:
    def __init__(self, device: str = "cuda", per_shape: int = 8):
        self.device = device
        self.per_shape = per_shape
        self._bins: dict[tuple, list[Tensor]] = defaultdict(list)
        self.outstanding = 0

    def get(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        self.outstanding += 1
        stack = self._bins[(shape, dtype)]
        if stack:
            return stack.pop()  # clean: returned to the caller
        return torch.empty(shape, dtype=dtype, device=self.device)

    def get_like(self, t: Tensor) -> Tensor:
        return self.get(*t.shape, dtype=t.dtype)  # clean: returned to the caller

    def put(self, t: Tensor) -> None:
        self.outstanding -= 1
        stack = self._bins[(tuple(t.shape), t.dtype)]
        if len(stack) < self.per_shape:
            stack.append(t)

    @contextmanager
    def loan(self, *shape: int, dtype: torch.dtype = torch.float32):
        t = self.get(*shape, dtype=dtype)  # clean: put back in finally
        try:
            yield t
        finally:
            self.put(t)


class SamplerMath:
    def __init__(self, cache: ShapeCache, vocab: int):
        self.cache = cache
        self.vocab = vocab
        self._bias: Tensor | None = None

    # Private helpers return a cached tensor, or the one they got if their name ends in "_".

    def _probs(self, logits: Tensor, temperature: float = 1.0) -> Tensor:
        out = self.cache.get_like(logits)  # clean: returned to the caller
        torch.div(logits, max(temperature, 1e-6), out=out)
        return torch.softmax(out, dim=-1, out=out)

    def _top_k(self, x: Tensor, k: int) -> Tensor:
        out = self.cache.get_like(x)  # clean: returned to the caller
        kth = x.topk(k, dim=-1).values[..., -1:]
        out.copy_(x)
        return out.masked_fill_(x < kth, float("-inf"))

    def _scale_(self, x: Tensor, t: float) -> Tensor:
        return x.div_(t)

    def sample(self, logits: Tensor, temperature: float) -> Tensor:
        probs = self._probs(logits, temperature)  # leak: the drawn tokens are new, the probabilities are never put back
        return torch.multinomial(probs, 1).squeeze(-1)

    def entropy(self, logits: Tensor, active: Tensor) -> Tensor:
        probs = self._probs(logits)  # leak: not put back when no row is active
        if not active.any():
            return logits.new_zeros(logits.shape[0])
        ent = torch.special.entr(probs).sum(-1)
        self.cache.put(probs)
        return ent

    def filtered_sample(self, logits: Tensor, temperature: float, top_k: int) -> Tensor:
        x = self.cache.get_like(logits)  # leak: rebound to the top-k copy, only that one is put back
        x.copy_(logits).div_(temperature)
        if top_k > 0:
            x = self._top_k(x, top_k)  # clean: put back at the end
        x.exp_()
        tokens = torch.multinomial(x, 1).squeeze(-1)
        self.cache.put(x)
        return tokens

    def scaled_max(self, logits: Tensor, temperature: float) -> Tensor:
        x = self.cache.get_like(logits)  # clean: near miss, _scale_ works in place and gives the same tensor
        x.copy_(logits)
        x = self._scale_(x, temperature)
        top = x.view(-1, self.vocab).amax(-1)
        self.cache.put(x)
        return top

    def kl(self, logits: Tensor, ref: Tensor) -> Tensor | None:
        p = self._probs(logits)  # leak: not put back when the reference has another shape
        if ref.shape != logits.shape:
            return None
        q = self._probs(ref)  # clean: put back at the end
        out = (p * (p.clamp_min(1e-9).log() - q.clamp_min(1e-9).log())).sum(-1)
        self.cache.put(p)
        self.cache.put(q)
        return out

    def stacked(self, steps: list[Tensor]) -> Tensor:
        return torch.stack([self._probs(s) for s in steps])  # leak: stack copies, the list of cached tensors is dropped

    def averaged(self, steps: list[Tensor]) -> Tensor:
        parts = [self._probs(s) for s in steps]  # clean: near miss, stack copies and the parts are put back
        mean = torch.stack(parts).mean(0)
        while parts:
            self.cache.put(parts.pop())
        return mean

    def scores(self, logits: Tensor, out: Tensor | None = None) -> Tensor:
        """Best token of each row; ``out`` is work space if the caller has some."""
        if out is None:
            out = self.cache.get_like(logits)  # leak: work space of its own is dropped at the return
        torch.add(logits, self._bias if self._bias is not None else 0.0, out=out)
        return out.argmax(-1)

    def ranks(self, logits: Tensor, tokens: Tensor, out: Tensor | None = None) -> Tensor:
        mine = out is None
        if mine:
            out = self.cache.get(*logits.shape, dtype=torch.bool)  # clean: near miss, put back under the same flag
        torch.gt(logits, logits.gather(-1, tokens.unsqueeze(-1)), out=out)
        rank = out.sum(-1)
        if mine:
            self.cache.put(out)
        return rank

    def set_bias(self, bias: dict[int, float]) -> None:
        if self._bias is None:
            self._bias = self.cache.get(self.vocab)  # clean: kept in self._bias, which clear_bias() puts back
        self._bias.zero_()
        for tok, b in bias.items():
            self._bias[tok] = b

    def clear_bias(self) -> None:
        if self._bias is not None:
            self.cache.put(self._bias)
            self._bias = None

    def repetition(self, logits: Tensor, history: Tensor, penalty: float) -> None:
        with self.cache.loan(*logits.shape, dtype=torch.bool) as seen:  # clean: the context manager puts it back
            seen.zero_()
            seen.scatter_(-1, history, True)
            if not seen.any():
                return
            logits.copy_(torch.where(seen, logits / penalty, logits))
