"""Workspaces of the sampler: temperature, top-p, penalties and logprobs on borrowed rows."""
from __future__ import annotations

from typing import Dict, List, Optional

import torch


class Workspace:
    """Scratch tensors by shape class. `small` holds [batch, 64], `wide` holds [batch, vocab]."""

    def __init__(self, batch: int, vocab: int, copies: int) -> None:
        self.batch = batch
        self.vocab = vocab
        self._bins: Dict[str, List[torch.Tensor]] = {
            "small": [torch.empty(batch, 64) for _ in range(copies)],
            "wide": [torch.empty(batch, vocab) for _ in range(copies)],
        }

    def rent(self, kind: str) -> Optional[torch.Tensor]:
        shelf = self._bins[kind]
        return shelf.pop() if shelf else None

    def unrent(self, kind: str, tensor: torch.Tensor) -> None:
        self._bins[kind].append(tensor)

    def resize(self, vocab: int) -> int:
        """Drops idle wide tensors and makes as many of the new width."""
        idle = len(self._bins["wide"])
        self._bins["wide"] = [torch.empty(self.batch, vocab) for _ in range(idle)]
        self.vocab = vocab
        return idle


class Rented:
    """A rented tensor and whether this object has to return it."""

    def __init__(self, ws: Workspace, kind: str, tensor: torch.Tensor, owned: bool) -> None:
        self.ws, self.kind, self.tensor, self.owned = ws, kind, tensor, owned

    def done(self) -> None:
        if self.owned:
            self.ws.unrent(self.kind, self.tensor)
            self.owned = False


class Sampler:
    def __init__(self, ws: Workspace, top_p: float = 0.95) -> None:
        self.ws = ws
        self.top_p = top_p
        self.spilled = 0

    # -- building blocks -------------------------------------------------------------------------

    def _scaled(self, logits: torch.Tensor, temperature: float) -> Optional[torch.Tensor]:
        """A wide tensor of the workspace; the caller returns it."""
        out = self.ws.rent("wide")  # clean: handed to the caller
        if out is None:
            self.spilled += 1
            return None
        torch.div(logits, max(temperature, 1e-5), out=out)
        return out

    def _penalised(self, logits: torch.Tensor, counts: torch.Tensor, alpha: float) -> Optional[torch.Tensor]:
        out = self._scaled(logits, 1.0)  # clean: handed on
        if out is not None:
            out.sub_(alpha * counts)
        return out

    def _maybe_scaled(self, logits: torch.Tensor, temperature: float) -> Optional[Rented]:
        if temperature == 1.0:
            return Rented(self.ws, "wide", logits, owned=False)
        out = self._scaled(logits, temperature)  # clean: near miss, the Rented owns it and done() returns it
        if out is None:
            return None
        return Rented(self.ws, "wide", out, owned=True)

    # -- sampling --------------------------------------------------------------------------------

    def greedy(self, logits: torch.Tensor) -> List[int]:
        return logits.argmax(dim=-1).tolist()

    def sample(self, logits: torch.Tensor, temperature: float) -> List[int]:
        rented = self._maybe_scaled(logits, temperature)  # clean: done() before the return
        if rented is None:
            return self.greedy(logits)
        probs = torch.softmax(rented.tensor, dim=-1)
        rented.done()
        return torch.multinomial(probs, 1).flatten().tolist()

    def sample_penalised(self, logits: torch.Tensor, counts: torch.Tensor, temperature: float) -> List[int]:
        work = self._penalised(logits, counts, 0.5)  # leak: rebound to the scaled tensor, the first is lost
        if work is None:
            return self.greedy(logits)
        work = self._scaled(work, temperature)  # clean: returned to the workspace before the draw
        if work is None:
            return self.greedy(logits)
        probs = torch.softmax(work, dim=-1)
        self.ws.unrent("wide", work)
        return torch.multinomial(probs, 1).flatten().tolist()

    def sample_top_p(self, logits: torch.Tensor, temperature: float) -> List[int]:
        owned = temperature != 1.0
        work = self._scaled(logits, temperature) if owned else logits  # clean: near miss, flag returns it
        if work is None:
            return self.greedy(logits)
        order = work.argsort(dim=-1, descending=True)
        probs = torch.softmax(work.gather(-1, order), dim=-1)
        if owned:
            self.ws.unrent("wide", work)
        keep = probs.cumsum(dim=-1) - probs < self.top_p
        pick = torch.multinomial(probs * keep, 1)
        return order.gather(-1, pick).flatten().tolist()

    def sample_min_p(self, logits: torch.Tensor, temperature: float, min_p: float) -> List[int]:
        owned = temperature != 1.0
        work = self._scaled(logits, temperature) if owned else logits  # leak: min_p 0 returns before unrent
        if work is None:
            return self.greedy(logits)
        probs = torch.softmax(work, dim=-1)
        if min_p == 0.0:
            return torch.multinomial(probs, 1).flatten().tolist()
        keep = probs >= min_p * probs.max(dim=-1, keepdim=True).values
        if owned:
            self.ws.unrent("wide", work)
        return torch.multinomial(probs * keep, 1).flatten().tolist()

    # -- logprobs --------------------------------------------------------------------------------

    def entropy(self, logits: torch.Tensor) -> float:
        rented = self._maybe_scaled(logits, 0.7)  # leak: read, and done() is never called
        if rented is None:
            return 0.0
        p = torch.softmax(rented.tensor, dim=-1)
        return float(-(p * p.log()).sum())

    def contrast(self, expert: torch.Tensor, amateur: torch.Tensor, clamp: bool) -> List[int]:
        """Contrastive decoding of two models."""
        base = self._scaled(expert, 1.0)  # clean: returned on each of the three ways
        if base is None:
            return self.greedy(expert)
        other = self._scaled(amateur, 2.0)  # leak: the clamped variant returns the expert's tensor only
        if other is None:
            self.ws.unrent("wide", base)
            return self.greedy(expert)
        base.sub_(other)
        picks = base.argmax(dim=-1).tolist()
        if clamp:
            self.ws.unrent("wide", base)
            return [min(p, self.ws.vocab - 1) for p in picks]
        self.ws.unrent("wide", base)
        self.ws.unrent("wide", other)
        return picks
