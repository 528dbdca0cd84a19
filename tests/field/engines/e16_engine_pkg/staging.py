"""Worker-side row buffers for sampled logits."""
from __future__ import annotations

import torch


class RowBuffers:
    def __init__(self, rows: int, vocab: int) -> None:
        self._rows = [torch.zeros(vocab) for _ in range(rows)]

    def acquire_row(self) -> torch.Tensor | None:
        return self._rows.pop() if self._rows else None  # clean: returned

    def release_row(self, row: torch.Tensor) -> None:
        self._rows.append(row)


def softmax_row(bufs: RowBuffers, raw: torch.Tensor) -> torch.Tensor | None:
    """Probabilities of ``raw`` in a pooled row that the caller releases."""
    row = bufs.acquire_row()  # clean: handed to the caller
    if row is None:
        return None
    torch.softmax(raw, dim=-1, out=row)
    return row


def sample(bufs: RowBuffers, raw: torch.Tensor, top_p: float) -> int:
    probs = softmax_row(bufs, raw)  # leak: renormalising rebinds the name, what is released is not the pooled row
    if probs is None:
        return int(raw.argmax())
    if top_p < 1.0:
        probs = torch.where(probs >= probs.max() * (1 - top_p), probs, torch.zeros_like(probs))
    token = int(torch.multinomial(probs, 1))
    bufs.release_row(probs)
    return token


def entropy(bufs: RowBuffers, raw: torch.Tensor) -> float:
    probs = softmax_row(bufs, raw)  # clean: near miss, the product goes to a name of its own
    if probs is None:
        return 0.0
    terms = probs * torch.log(probs.clamp_min(1e-9))
    bufs.release_row(probs)
    return -float(terms.sum())
