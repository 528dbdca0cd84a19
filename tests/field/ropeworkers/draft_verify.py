"""Speculative decoding worker: draft model proposals, target verification, pooled scratch tensors."""
from __future__ import annotations

from collections import defaultdict
from typing import Dict, List, Optional, Tuple

import torch
from torch import Tensor


class ScratchCache:
    """Tensors kept by (shape, dtype); `grab` hands one out, `stash` takes it back."""

    def __init__(self, device: torch.device, cap: int = 64):
        self.device = device
        self.cap = cap
        self._by_key: Dict[Tuple, List[Tensor]] = defaultdict(list)
        self.outstanding = 0

    def grab(self, shape: Tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        self.outstanding += 1
        bucket = self._by_key[(tuple(shape), dtype)]
        if bucket:
            return bucket.pop()
        return torch.empty(shape, dtype=dtype, device=self.device)

    def grab_if_cached(self, shape: Tuple[int, ...], dtype: torch.dtype = torch.float32) -> Optional[Tensor]:
        bucket = self._by_key.get((tuple(shape), dtype))
        if not bucket:
            return None
        self.outstanding += 1
        return bucket.pop()

    def stash(self, t: Tensor) -> None:
        self.outstanding -= 1
        bucket = self._by_key[(tuple(t.shape), t.dtype)]
        if len(bucket) < self.cap:
            bucket.append(t)


class DraftState:
    def __init__(self, k: int):
        self.k = k
        self.hidden: Optional[Tensor] = None
        self.tokens: Optional[Tensor] = None


class SpecWorker:
    def __init__(self, draft, target, scratch: ScratchCache, vocab: int, k: int = 4):
        self.draft = draft
        self.target = target
        self.scratch = scratch
        self.vocab = vocab
        self.k = k
        self.states: Dict[int, DraftState] = {}
        self._bonus: Optional[Tensor] = None

    # -- helpers ----------------------------------------------------------

    def _softmax_into_scratch(self, logits: Tensor) -> Tensor:
        out = self.scratch.grab(tuple(logits.shape))  # clean: returned to the caller, who stashes it
        torch.softmax(logits, dim=-1, out=out)
        return out

    def _residual(self, p: Tensor, q: Tensor) -> Tensor:
        """Normalised max(p - q, 0), in a scratch tensor."""
        r = self.scratch.grab(tuple(p.shape))  # clean: returned to the caller, who stashes it
        torch.sub(p, q, out=r)
        r.clamp_(min=0)
        r.div_(r.sum(-1, keepdim=True).clamp_(min=1e-9))
        return r

    # -- proposing --------------------------------------------------------

    def propose(self, ids: Tensor) -> Tensor:
        bsz = ids.shape[0]
        toks = self.scratch.grab((bsz, self.k), torch.int64)  # clean: near miss, a clone is returned and the scratch itself is stashed
        cur = ids
        for i in range(self.k):
            logits = self.draft(cur)
            cur = logits.argmax(-1, keepdim=True)
            toks[:, i:i + 1].copy_(cur)
        out = toks.clone()
        self.scratch.stash(toks)
        return out

    def propose_sampled(self, ids: Tensor, temperature: float) -> Tuple[Tensor, Tensor]:
        bsz = ids.shape[0]
        toks = torch.empty(bsz, self.k, dtype=torch.int64)
        probs = torch.empty(bsz, self.k, self.vocab)
        cur = ids
        for i in range(self.k):
            p = self._softmax_into_scratch(self.draft(cur) / temperature)  # leak: copied into probs and dropped
            probs[:, i].copy_(p)
            cur = torch.multinomial(p, 1)
            toks[:, i:i + 1] = cur
        return toks, probs

    def propose_early_exit(self, ids: Tensor, floor: float) -> List[int]:
        picked: List[int] = []
        cur = ids
        for _ in range(self.k):
            p = self._softmax_into_scratch(self.draft(cur))  # leak: break on low confidence leaves it out of the cache
            conf, tok = p.max(-1)
            if conf.item() < floor:
                break
            picked.append(int(tok.item()))
            cur = tok.view(1, 1)
            self.scratch.stash(p)
        return picked

    # -- verification -----------------------------------------------------

    def verify_greedy(self, ids: Tensor, drafted: Tensor) -> int:
        logits = self.target(torch.cat([ids, drafted], dim=1))[:, -drafted.shape[1] - 1:-1]
        same = self.scratch.grab(tuple(drafted.shape), torch.bool)  # clean: stashed before both returns
        torch.eq(logits.argmax(-1), drafted, out=same)
        if bool(same.all()):
            self.scratch.stash(same)
            return drafted.shape[1]
        n = int(same.long().cumprod(-1).sum().item())
        self.scratch.stash(same)
        return n

    def verify_sampled(self, logits: Tensor, draft_probs: Tensor, drafted: Tensor) -> Tuple[int, int]:
        target_p = self._softmax_into_scratch(logits)  # clean: stashed in finally
        try:
            for i in range(self.k):
                tok = int(drafted[0, i])
                ratio = target_p[0, i, tok] / draft_probs[0, i, tok].clamp(min=1e-9)
                if torch.rand(()) < ratio:
                    continue
                res = self._residual(target_p[0, i], draft_probs[0, i])  # clean: stashed before the return
                nxt = int(torch.multinomial(res, 1))
                self.scratch.stash(res)
                return i, nxt
            return self.k, int(torch.multinomial(target_p[0, -1], 1))
        finally:
            self.scratch.stash(target_p)

    def verify_typical(self, logits: Tensor, drafted: Tensor, eps: float) -> int:
        p = self._softmax_into_scratch(logits)  # leak: overwritten by the entropy-scaled tensor
        h = -(p * p.clamp(min=1e-9).log()).sum(-1, keepdim=True)
        if float(h.max()) > 4.0:
            p = self._softmax_into_scratch(logits / 2.0)  # clean: stashed at the end
        keep = p.gather(-1, drafted.unsqueeze(-1)).squeeze(-1) > eps * torch.exp(-h.squeeze(-1))
        self.scratch.stash(p)
        return int(keep.long().cumprod(-1).sum())

    def verify_tempered(self, logits: Tensor, drafted: Tensor, t: float) -> Tensor:
        p = self._softmax_into_scratch(logits)  # clean: near miss, stashed just before the name is bound again
        if t != 1.0:
            self.scratch.stash(p)
            p = self._softmax_into_scratch(logits / t)  # clean: stashed at the end
        picked = p.gather(-1, drafted.unsqueeze(-1)).squeeze(-1).clone()
        self.scratch.stash(p)
        return picked

    # -- state kept across steps ------------------------------------------

    def begin(self, rid: int, width: int) -> None:
        if rid in self.states:
            return
        st = DraftState(self.k)
        st.hidden = self.scratch.grab((self.k, width))  # clean: held by the state, which end() empties
        st.tokens = self.scratch.grab((self.k,), torch.int64)  # leak: end() stashes hidden only
        self.states[rid] = st

    def resize(self, rid: int, width: int) -> None:
        st = self.states[rid]
        if st.hidden is not None and st.hidden.shape[1] == width:
            return
        if st.hidden is not None:
            self.scratch.stash(st.hidden)
        st.hidden = self.scratch.grab((self.k, width))  # clean: near miss, the state's former tensor was stashed above

    def end(self, rid: int) -> None:
        st = self.states.pop(rid)
        if st.hidden is not None:
            self.scratch.stash(st.hidden)
        st.hidden = st.tokens = None

    def set_bonus(self, logits: Tensor) -> None:
        self._bonus = self._softmax_into_scratch(logits)  # leak: a bonus that was never read is overwritten

    def read_bonus(self) -> Optional[int]:
        p, self._bonus = self._bonus, None
        if p is None:
            return None
        tok = int(p.argmax(-1))
        self.scratch.stash(p)
        return tok
