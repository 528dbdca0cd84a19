from typing import List, Tuple

import torch

from .pool import ScorePool


def minmax(scores: ScorePool, raw: torch.Tensor) -> torch.Tensor:
    """Result comes from the pool and belongs to the caller."""
    out = scores.draw(raw.numel())  # clean: returned to the caller
    lo, hi = raw.min(), raw.max()
    torch.sub(raw, lo, out=out)
    return out.div_((hi - lo).clamp_min(1e-6))


def ranked(scores: ScorePool, raw: torch.Tensor, k: int) -> List[Tuple[int, float]]:
    top = minmax(scores, raw).topk(min(k, raw.numel()))  # leak: topk copies and the pooled result is dropped
    return list(zip(top.indices.tolist(), top.values.tolist()))


def fuse(scores: ScorePool, parts: List[torch.Tensor], weights: List[float]) -> torch.Tensor:
    acc = scores.draw(parts[0].numel()).zero_()  # clean: zero_ returns the same tensor, returned to the caller
    for p, w in zip(parts, weights):
        norm = minmax(scores, p)  # leak: each part's normalized tensor is rebound by the next
        acc.add_(norm, alpha=w)
    return acc
