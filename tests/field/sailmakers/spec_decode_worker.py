"""Speculative decoding worker: draft proposals, tree verification and the scratch tensors for both."""
from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import Dict, Iterator, List, Optional, Tuple

import torch
import torch.nn.functional as F

logger = logging.getLogger(__name__)

Shape = Tuple[int, ...]


class ScratchCache:
    """Tensors kept by (shape, dtype). rent() makes a new one while the byte budget allows it."""

    def __init__(self, device: str, budget: int):
        self.device = device
        self.budget = budget
        self.bytes = 0
        self._idle: Dict[Tuple[Shape, torch.dtype], List[torch.Tensor]] = {}

    def rent(self, *shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
        t = self.try_rent(*shape, dtype=dtype)  # clean: returned to the caller
        if t is None:
            raise MemoryError(f"scratch budget exhausted for {shape}")
        return t

    def try_rent(self, *shape: int, dtype: torch.dtype = torch.float16) -> Optional[torch.Tensor]:
        bucket = self._idle.get((shape, dtype))
        if bucket:
            return bucket.pop()  # clean: returned to the caller
        t = torch.empty(shape, dtype=dtype, device="meta")
        size = t.numel() * t.element_size()
        if self.bytes + size > self.budget:
            return None
        self.bytes += size
        return torch.empty(shape, dtype=dtype, device=self.device)

    def unrent(self, t: Optional[torch.Tensor]) -> None:
        if t is None:
            return
        self._idle.setdefault((tuple(t.shape), t.dtype), []).append(t)

    @contextmanager
    def scratch(self, *shape: int, dtype: torch.dtype = torch.float16) -> Iterator[torch.Tensor]:
        t = self.rent(*shape, dtype=dtype)  # clean: unrent in finally
        try:
            yield t
        finally:
            self.unrent(t)


class DraftRunner:
    def __init__(self, model, cache: ScratchCache, k: int, vocab: int):
        self.model = model
        self.cache = cache
        self.k = k
        self.vocab = vocab
        self.hidden: Optional[torch.Tensor] = None

    def capture_hidden(self, h: torch.Tensor) -> None:
        """Target hidden states of the last verified step, needed by the next EAGLE proposal."""
        keep = self.cache.rent(*h.shape, dtype=h.dtype)  # clean: near miss, previous one is unrent before it is replaced
        keep.copy_(h)
        self.cache.unrent(self.hidden)
        self.hidden = keep

    def step_logits(self, ids: torch.Tensor) -> torch.Tensor:
        """The caller owns the returned tensor."""
        out = self.cache.rent(ids.shape[0], self.vocab)  # clean: returned to the caller
        self.model.forward_into(ids, self.hidden, out)
        return out

    def propose(self, ids: torch.Tensor) -> torch.Tensor:
        toks = []
        for _ in range(self.k):
            logits = self.step_logits(ids)  # clean: unrent after argmax
            ids = logits.argmax(-1)
            self.cache.unrent(logits)
            toks.append(ids)
        return torch.stack(toks, 1)

    def propose_with_probs(self, ids: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        toks, probs = [], []
        for _ in range(self.k):
            p = self.step_logits(ids).softmax(-1)  # leak: softmax copies and the rented logits are dropped
            ids = torch.multinomial(p, 1).squeeze(-1)
            toks.append(ids)
            probs.append(p)
        return torch.stack(toks, 1), torch.stack(probs, 1)

    def confident_prefix(self, ids: torch.Tensor, threshold: float) -> List[torch.Tensor]:
        toks = []
        for _ in range(self.k):
            logits = self.step_logits(ids)  # leak: break at low confidence comes before unrent
            top = logits.float().softmax(-1).amax(-1)
            if top.min() < threshold:
                break
            ids = logits.argmax(-1)
            toks.append(ids)
            self.cache.unrent(logits)
        return toks

    def close(self) -> None:
        self.cache.unrent(self.hidden)
        self.hidden = None


class TreeVerifier:
    def __init__(self, target, cache: ScratchCache, vocab: int):
        self.target = target
        self.cache = cache
        self.vocab = vocab
        self._masks: Dict[int, torch.Tensor] = {}

    def mask_for(self, n: int) -> torch.Tensor:
        m = self._masks.get(n)
        if m is None:
            m = self.cache.rent(n, n, dtype=torch.bool)  # clean: near miss, kept in self._masks, which reset() empties
            m.fill_(True).tril_()
            self._masks[n] = m
        return m

    def reset(self) -> None:
        while self._masks:
            _, m = self._masks.popitem()
            self.cache.unrent(m)

    def verify_greedy(self, draft: torch.Tensor) -> torch.Tensor:
        b, k = draft.shape
        with self.cache.scratch(b, k, self.vocab) as logits:  # clean: context manager
            self.target.forward_into(draft, self.mask_for(k), logits)
            return (logits.argmax(-1) == draft).int().cumprod(-1).sum(-1)

    def verify_sampled(self, draft: torch.Tensor, q: torch.Tensor) -> Optional[torch.Tensor]:
        b, k = draft.shape
        mask = self.mask_for(k)
        logits = self.cache.try_rent(b, k, self.vocab)  # clean: near miss, both exits after it unrent it
        if logits is None:
            return None
        rand = self.cache.try_rent(b, k, dtype=torch.float32)  # clean: unrent at the end
        if rand is None:
            self.cache.unrent(logits)
            return None
        self.target.forward_into(draft, mask, logits)
        rand.uniform_()
        p = F.softmax(logits.float(), -1)
        ratio = (p / q).gather(-1, draft[..., None]).squeeze(-1)
        accepted = (rand < ratio).int().cumprod(-1).sum(-1)
        self.cache.unrent(rand)
        self.cache.unrent(logits)
        return accepted

    def verify_typical(self, draft: torch.Tensor, eps: float) -> Optional[torch.Tensor]:
        b, k = draft.shape
        mask = self.mask_for(k)
        logits = self.cache.try_rent(b, k, self.vocab)  # leak: lost when the entropy buffer is not available
        if logits is None:
            return None
        ent = self.cache.try_rent(b, k, dtype=torch.float32)  # clean: unrent at the end
        if ent is None:
            return None
        self.target.forward_into(draft, mask, logits)
        torch.special.entr(logits.float().softmax(-1)).sum(-1, out=ent)
        ok = (ent < eps).int().cumprod(-1).sum(-1)
        self.cache.unrent(ent)
        self.cache.unrent(logits)
        return ok


class SpecWorker:
    def __init__(self, draft: DraftRunner, verifier: TreeVerifier, cache: ScratchCache):
        self.draft = draft
        self.verifier = verifier
        self.cache = cache
        self.bonus: Optional[torch.Tensor] = None

    def step(self, ids: torch.Tensor, sampled: bool) -> Optional[torch.Tensor]:
        if not sampled:
            return self.verifier.verify_greedy(self.draft.propose(ids))
        toks, q = self.draft.propose_with_probs(ids)
        return self.verifier.verify_sampled(toks, q)

    def sample_bonus(self, ids: torch.Tensor) -> torch.Tensor:
        self.bonus = self.draft.step_logits(ids)  # leak: the previous step's self.bonus is overwritten
        return self.bonus.argmax(-1)

    def stream(self, ids: torch.Tensor, steps: int) -> Iterator[torch.Tensor]:
        hist = self.cache.rent(steps, ids.shape[0], dtype=torch.int64)  # leak: the eos return skips unrent
        for i in range(steps):
            logits = self.draft.step_logits(ids)  # clean: unrent before the yield
            ids = logits.argmax(-1)
            self.cache.unrent(logits)
            hist[i] = ids
            yield ids
            if self._all_eos(hist[:i + 1]):
                return
        self.cache.unrent(hist)

    def _all_eos(self, hist: torch.Tensor) -> bool:
        return bool((hist == self.draft.model.eos).any(0).all())

    def shutdown(self) -> None:
        self.cache.unrent(self.bonus)
        self.bonus = None
        self.draft.close()
        self.verifier.reset()
