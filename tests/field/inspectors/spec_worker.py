"""Draft/verify worker for speculative decoding with shelved scratch tensors."""
from __future__ import annotations

import bisect
from typing import Optional

import torch


class ScratchShelf:
    """Scratch rows by power-of-two width."""

    def __init__(self, widths: list[int], copies: int) -> None:
        self.widths = sorted(widths)
        self._shelves: dict[int, list[torch.Tensor]] = {
            w: [torch.empty(w) for _ in range(copies)] for w in self.widths
        }

    def fetch(self, need: int) -> Optional[torch.Tensor]:
        at = bisect.bisect_left(self.widths, need)
        for width in self.widths[at:]:
            if self._shelves[width]:
                return self._shelves[width].pop()
        return None

    def fetch_zeroed(self, need: int, device: str) -> Optional[torch.Tensor]:
        row = self.fetch(need)  # clean: near miss, a row on the wrong device is shelved again
        if row is None:
            return None
        if row.device.type != device:
            self.shelve(row)
            return None
        row.zero_()
        return row

    def shelve(self, row: torch.Tensor) -> None:
        self._shelves[row.numel()].append(row)


class DraftModel:
    def __init__(self, net, shelf: ScratchShelf, vocab: int) -> None:
        self.net = net
        self.shelf = shelf
        self.vocab = vocab

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """Hidden row of the last position; the caller shelves it."""
        row = self.shelf.fetch(self.net.width)  # clean: returned to the caller
        self.net.encode(tokens, out=row)
        return row

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.hidden(tokens)  # clean: shelved after the projection
        out = self.shelf.fetch(self.vocab)  # clean: near miss, the pooled logits go to the caller
        self.net.project(hidden, out=out)
        self.shelf.shelve(hidden)
        return out

    def snapshot(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.hidden(tokens)  # leak: cloned and dropped, never shelved
        return hidden.clone()

    def propose(self, tokens: torch.Tensor, k: int) -> list[int]:
        picked: list[int] = []
        for _ in range(k):
            logits = self.logits(tokens)  # leak: the stop token breaks before shelving
            token = int(logits.argmax())
            if token == self.net.eos:
                break
            picked.append(token)
            tokens = torch.cat([tokens, torch.tensor([token])])
            self.shelf.shelve(logits)
        return picked

    def entropy(self, tokens: torch.Tensor) -> float:
        logits = self.logits(tokens)  # leak: rebound to its softmax, the row itself is gone
        logits = torch.softmax(logits, dim=-1)
        return float(-(logits * logits.log()).sum())


class SpecWorker:
    def __init__(self, draft: DraftModel, target, shelf: ScratchShelf) -> None:
        self.draft = draft
        self.target = target
        self.shelf = shelf
        self.tree_mask: Optional[torch.Tensor] = None
        self.bonus: dict[int, torch.Tensor] = {}

    def widen_mask(self, nodes: int) -> torch.Tensor:
        """Keep one mask that is at least nodes*nodes wide."""
        need = nodes * nodes
        if self.tree_mask is None or self.tree_mask.numel() < need:
            wider = self.shelf.fetch_zeroed(need, "cuda")  # clean: near miss, the narrower mask is shelved first
            if wider is not None:
                if self.tree_mask is not None:
                    self.shelf.shelve(self.tree_mask)
                self.tree_mask = wider
        return self.tree_mask

    def verify(self, seq_id: int, tokens: torch.Tensor, k: int) -> list[int]:
        draft = self.draft.propose(tokens, k)
        scores = self.shelf.fetch(self.draft.vocab)  # clean: near miss, both exits shelve it
        if scores is None or not draft:
            if scores is not None:
                self.shelf.shelve(scores)
            return []
        accepted = self.target.score(tokens, draft, out=scores)
        self.shelf.shelve(scores)
        return draft[:accepted]

    def stash_bonus(self, seq_id: int, tokens: torch.Tensor) -> None:
        """Remember the target logits for the bonus token."""
        row = self.draft.logits(tokens)  # clean: near miss, replaced rows are shelved, drop() takes the rest
        stale = self.bonus.get(seq_id)
        if stale is not None:
            self.shelf.shelve(stale)
        self.bonus[seq_id] = row

    def rejection_sample(self, seq_id: int, probs: torch.Tensor) -> int:
        residual = self.shelf.fetch(probs.numel())  # clean: shelved on both branches
        if residual is None:
            return int(probs.argmax())
        torch.sub(probs, self.bonus[seq_id], out=residual)
        if residual.max() <= 0:
            self.shelf.shelve(residual)
            return int(probs.argmax())
        token = int(torch.multinomial(residual.clamp(min=0), 1))
        self.shelf.shelve(residual)
        return token

    def bench(self, lengths: list[int]) -> dict[int, float]:
        timings = {}
        for length in lengths:
            row = self.shelf.fetch(length)  # leak: an unsupported length is skipped with the row out
            if row is None or not self.target.supports(length):
                continue
            timings[length] = self.target.time_step(row)
            self.shelf.shelve(row)
        return timings

    def drop(self, seq_id: int) -> None:
        row = self.bonus.pop(seq_id, None)
        if row is not None:
            self.shelf.shelve(row)

    def close(self) -> None:
        for seq_id in list(self.bonus):
            self.drop(seq_id)
        if self.tree_mask is not None:
            self.shelf.shelve(self.tree_mask)
