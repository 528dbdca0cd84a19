"""Draft and target decoding on tensors carved out of the GPU arena."""
from __future__ import annotations

import logging
from typing import Any, Dict, List, Optional, Tuple

import torch
from gpuarena import ArenaFull, arena

log = logging.getLogger(__name__)


def masked_logits(rows: int, vocab: int, mask: torch.Tensor) -> torch.Tensor:
    logits = arena.carve((rows, vocab))  # leak: the masked copy is returned and the carved tensor is lost
    logits.zero_()
    logits = logits.masked_fill(mask, float("-inf"))
    return logits


def flat_buffer(rows: int, width: int) -> torch.Tensor:
    """Carve a flat buffer; the caller restores it."""
    block = arena.carve((rows, width))  # clean: near miss, the reshaped view still is the carved tensor and goes to the caller
    block.zero_()
    block = block.view(rows * width)
    return block


def score_rows(hidden: torch.Tensor, weight: torch.Tensor) -> List[float]:
    flat = flat_buffer(hidden.shape[0], weight.shape[0])  # clean: near miss, restored through a view of it
    scores = flat.view(hidden.shape[0], weight.shape[0])
    torch.matmul(hidden, weight.t(), out=scores)
    result = scores.amax(dim=1).tolist()
    arena.restore(scores)
    return result


def mean_pool(hidden: torch.Tensor) -> torch.Tensor:
    flat = flat_buffer(hidden.shape[0], hidden.shape[1])  # leak: the arithmetic result is restored instead of the buffer
    flat.copy_(hidden.reshape(-1))
    flat = flat / hidden.shape[0]
    total = flat.view_as(hidden).sum(dim=0)
    arena.restore(flat)
    return total


def softmax_to_host(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    scaled = arena.carve(tuple(logits.shape))  # clean: near miss, only a copy leaves and the carved tensor is restored
    torch.mul(logits, 1.0 / temperature, out=scaled)
    probs = scaled.softmax(dim=-1).cpu()
    arena.restore(scaled)
    return probs


class DraftState:
    """Hidden state and key buffer of the draft model for one stream."""

    def __init__(self, width: int, depth: int) -> None:
        self._width = width
        self._depth = depth
        self._hidden: Optional[torch.Tensor] = None
        self._keys: Optional[torch.Tensor] = None
        self._scratch: Optional[torch.Tensor] = None

    def start(self) -> bool:
        if self._hidden is not None:
            return True
        hidden = arena.carve((self._depth, self._width))  # clean: near miss, restored in the handler, otherwise stored for stop
        try:
            keys = arena.carve((self._depth, self._width))  # clean: stored for stop
        except ArenaFull:
            arena.restore(hidden)
            return False
        self._hidden, self._keys = hidden, keys
        return True

    def scratch(self, rows: int) -> torch.Tensor:
        if self._scratch is None or self._scratch.shape[0] < rows:
            self._scratch = arena.carve((rows, self._width))  # leak: a scratch that is too small is replaced while held
        return self._scratch[:rows]

    def widen(self, width: int) -> None:
        if self._hidden is None:
            return
        wider = arena.carve((self._depth, width))  # clean: near miss, swapped into the field after the old one is restored
        wider[:, : self._width].copy_(self._hidden)
        arena.restore(self._hidden)
        self._hidden = wider
        self._width = width

    def stop(self) -> None:
        for name in ("_hidden", "_keys", "_scratch"):
            tensor = getattr(self, name)
            if tensor is not None:
                arena.restore(tensor)
                setattr(self, name, None)


class Verifier:
    def __init__(self, model: Any, vocab: int) -> None:
        self._model = model
        self._vocab = vocab
        self._windows: Dict[int, torch.Tensor] = {}

    def verify(self, tokens: torch.Tensor, draft: torch.Tensor) -> Tuple[int, torch.Tensor]:
        out = arena.carve((tokens.shape[0], self._vocab))  # leak: the mismatch branch returns without restoring
        self._model.forward(tokens, out=out)
        best = out.argmax(dim=-1)
        wrong = (best != draft).nonzero()
        if wrong.numel():
            first = int(wrong[0])
            return first, best[: first + 1].clone()
        arena.restore(out)
        return draft.shape[0], best

    def window(self, stream: int, size: int) -> None:
        if stream in self._windows:
            return
        self._windows[stream] = arena.carve((size, self._vocab))  # clean: kept per stream and restored by drop

    def drop(self, stream: int) -> None:
        window = self._windows.pop(stream, None)
        if window is not None:
            arena.restore(window)

    def sample(self, tokens: torch.Tensor) -> torch.Tensor:
        with arena.carved((tokens.shape[0], self._vocab)) as out:  # clean: lease gives back by itself
            self._model.forward(tokens, out=out)
            return torch.multinomial(out.softmax(dim=-1), 1).squeeze(-1)

    def publish(self, tokens: torch.Tensor, stream: int) -> None:
        out = arena.carve((tokens.shape[0], self._vocab))  # clean: entrusted to the arena's own reaper
        self._model.forward(tokens, out=out)
        arena.entrust(stream=stream, tensor=out)


def gather_columns(parts: List[torch.Tensor]) -> torch.Tensor:
    rows = parts[0].shape[0]
    merged: Optional[torch.Tensor] = None
    for part in parts:
        column = arena.carve((rows, part.shape[1]))  # leak: concatenation copies the first column, which then is never restored
        column.copy_(part)
        if merged is None:
            merged = column
            continue
        merged = torch.cat([merged, column], dim=1)
        arena.restore(column)
    return merged if merged is None else merged.clone()
