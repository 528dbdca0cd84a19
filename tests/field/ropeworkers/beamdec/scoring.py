"""Scores in lent buffers."""

import torch

from .arena import LogitBuffers


def log_probs(buffers: LogitBuffers, logits: torch.Tensor) -> torch.Tensor:
    """The result is lent; the caller shelves it."""
    out = buffers.lend(*logits.shape)  # clean: returned to the caller
    torch.log_softmax(logits, -1, out=out)
    return out


def penalised(buffers: LogitBuffers, logits: torch.Tensor, seen: torch.Tensor, alpha: float) -> torch.Tensor:
    lp = log_probs(buffers, logits)  # leak: without a penalty it is cloned for the caller and dropped
    if alpha == 0.0:
        return lp.clone()
    lp[:, seen] -= alpha
    out = lp.clone()
    buffers.shelve(lp)
    return out


def contrast(buffers: LogitBuffers, expert: torch.Tensor, amateur: torch.Tensor, beta: float) -> torch.Tensor:
    e = log_probs(buffers, expert)  # clean: near miss, it is the result, lent to the caller
    a = log_probs(buffers, amateur)  # leak: subtracted from the expert and dropped
    e.sub_(a, alpha=beta)
    return e


def entropy(buffers: LogitBuffers, logits: torch.Tensor) -> float:
    lp = log_probs(buffers, logits)  # clean: shelved before the return
    h = float(-(lp.exp() * lp).sum())
    buffers.shelve(lp)
    return h
