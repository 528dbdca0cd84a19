"""Workspaces for sampling: a tensor pool by shape, and RNG state counters per request."""
from __future__ import annotations

import logging
from typing import Any, Dict, List, Optional, Tuple

import torch

logger = logging.getLogger(__name__)

_shelf: Dict[Tuple[Any, ...], List[torch.Tensor]] = {}
_out_bytes = 0
_limit_bytes = 1 << 30


def ws_get(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    global _out_bytes
    key = (*shape, dtype)
    if _shelf.get(key):
        t = _shelf[key].pop()  # clean: returned to the caller
    else:
        t = torch.empty(shape, dtype=dtype)
    _out_bytes += t.numel() * t.element_size()
    return t


def ws_try(*shape: int, dtype: torch.dtype = torch.float32) -> Optional[torch.Tensor]:
    n = 1
    for s in shape:
        n *= s
    if _out_bytes + 4 * n > _limit_bytes:
        return None
    return ws_get(*shape, dtype=dtype)  # clean: returned to the caller


def ws_put(t: torch.Tensor) -> None:
    global _out_bytes
    _out_bytes -= t.numel() * t.element_size()
    _shelf.setdefault((*t.shape, t.dtype), []).append(t)


class SeedRegistry:
    """RNG seats: a request with its own seed takes one of a fixed number."""

    def __init__(self, seats: int) -> None:
        self.seats = seats
        self.gens: Dict[int, torch.Generator] = {}

    def seat(self, seed: int) -> int:
        if self.seats == 0:
            return -1
        self.seats -= 1
        h = len(self.gens)
        while h in self.gens:
            h += 1
        self.gens[h] = torch.Generator().manual_seed(seed)
        return h

    def unseat(self, h: int) -> None:
        if self.gens.pop(h, None) is not None:
            self.seats += 1


def scaled(logits: torch.Tensor, temps: torch.Tensor) -> torch.Tensor:
    """Logits over temperature, in a workspace; the caller puts it back."""
    out = ws_get(*logits.shape)  # clean: returned to the caller
    torch.div(logits, temps[:, None], out=out)
    return out


def scaled_inplace_ok(logits: torch.Tensor, temps: torch.Tensor) -> Tuple[torch.Tensor, bool]:
    if bool((temps == 1.0).all()):
        return logits, False
    return scaled(logits, temps), True  # clean: returned with the flag that says so


def greedy(logits: torch.Tensor) -> torch.Tensor:
    return logits.argmax(dim=-1)


def probs_into(dst: torch.Tensor, logits: torch.Tensor, temps: torch.Tensor) -> None:
    dst.copy_(scaled(logits, temps))  # leak: the returned workspace is copied from and dropped
    dst.copy_(dst.softmax(dim=-1))


def entropy(logits: torch.Tensor, temps: torch.Tensor) -> torch.Tensor:
    x, own = scaled_inplace_ok(logits, temps)  # clean: near miss, put back only when the flag says it is a workspace
    p = torch.softmax(x, -1)
    if own:
        ws_put(x)
    return -(p * p.clamp_min(1e-9).log()).sum(-1)


def max_prob(logits: torch.Tensor, temps: torch.Tensor) -> torch.Tensor:
    x, own = scaled_inplace_ok(logits, temps)  # leak: the flag is read the wrong way round
    best = torch.softmax(x, -1).max(-1).values
    if not own:
        return best
    del x
    return best


class Sampler:
    def __init__(self, vocab: int, seeds: SeedRegistry) -> None:
        self.vocab = vocab
        self.seeds = seeds
        self.penalties: Dict[str, torch.Tensor] = {}
        self.seat_of: Dict[str, int] = {}

    def add(self, rid: str, seed: Optional[int]) -> bool:
        if rid in self.penalties:
            return False
        counts = ws_get(self.vocab)  # clean: kept in self.penalties, remove() puts it back
        counts.zero_()
        self.penalties[rid] = counts
        if seed is not None:
            h = self.seeds.seat(seed)  # clean: near miss, -1 is no seat, others wait in seat_of for remove()
            if h >= 0:
                self.seat_of[rid] = h
        return True

    def add_guided(self, rid: str, seed: int, grammar) -> bool:
        h = self.seeds.seat(seed)  # leak: a grammar that does not compile returns with the seat taken
        if h < 0:
            return False
        fsm = grammar.compile(self.vocab)
        if fsm is None:
            logger.warning("grammar of %s does not compile", rid)
            return False
        self.seat_of[rid] = h
        return True

    def remove(self, rid: str) -> None:
        t = self.penalties.pop(rid, None)
        if t is not None:
            ws_put(t)
        h = self.seat_of.pop(rid, None)
        if h is not None:
            self.seeds.unseat(h)

    def top_p(self, logits: torch.Tensor, p: float) -> torch.Tensor:
        cum = ws_try(*logits.shape)  # leak: p of one returns before the workspace is put back
        if cum is None:
            return logits
        if p >= 1.0:
            return logits
        srt, idx = logits.sort(dim=-1, descending=True)
        torch.cumsum(srt.softmax(-1), -1, out=cum)
        srt.masked_fill_(cum > p, float("-inf"))
        ws_put(cum)
        return logits.scatter(-1, idx, srt)

    def chain(self, logits: torch.Tensor, stages: List) -> torch.Tensor:
        cur = ws_get(*logits.shape)  # leak: the first stage's result is rebound over it and it is never put
        cur.copy_(logits)
        for stage in stages:
            nxt = ws_get(*logits.shape)  # leak: each stage's buffer is overwritten by the next one
            stage(cur, nxt)
            cur = nxt
        return cur.clone()

    def chain_swapped(self, logits: torch.Tensor, stages: List) -> torch.Tensor:
        cur = ws_get(*logits.shape)  # clean: near miss, the buffers change names and both are put at the end
        nxt = ws_get(*logits.shape)  # clean: near miss, swapped with cur and put at the end
        cur.copy_(logits)
        for stage in stages:
            stage(cur, nxt)
            cur, nxt = nxt, cur
        res = cur.clone()
        ws_put(cur)
        ws_put(nxt)
        return res
