"""Cross-encoder reranker service; all temporaries live in a scratch store keyed by shape."""
import logging
import threading
from typing import Dict, List, NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F

logger = logging.getLogger(__name__)


class Shape(NamedTuple):
    rows: int
    cols: int


class Scratch:
    def __init__(self, device: torch.device, budget: int):
        self.device = device
        self.budget = budget
        self.lent = 0
        self._by_shape: Dict[Shape, List[torch.Tensor]] = {}
        self._mutex = threading.Lock()

    def lend(self, rows: int, cols: int) -> Optional[torch.Tensor]:
        key = Shape(rows, cols)
        with self._mutex:
            stack = self._by_shape.setdefault(key, [])
            if stack:
                self.lent += rows * cols
                return stack.pop()
            if self.lent + rows * cols > self.budget:
                return None
            self.lent += rows * cols
        return torch.empty(rows, cols, device=self.device)

    def lend_zeroed(self, rows: int, cols: int) -> Optional[torch.Tensor]:
        t = self.lend(rows, cols)  # clean: returned to the caller
        if t is not None:
            t.zero_()
        return t

    def take_home(self, t: Optional[torch.Tensor]) -> None:
        if t is None:
            return
        with self._mutex:
            self.lent -= t.numel()
            self._by_shape[Shape(*t.shape)].append(t)


class Workspace:
    """Collects what one request borrowed."""

    def __init__(self, scratch: Scratch):
        self.scratch = scratch
        self._mine: List[torch.Tensor] = []

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        while self._mine:
            self.scratch.take_home(self._mine.pop())
        return False

    def new(self, rows: int, cols: int) -> torch.Tensor:
        t = self.scratch.lend(rows, cols)  # clean: kept in _mine, which __exit__ empties
        if t is None:
            raise MemoryError("scratch budget")
        self._mine.append(t)
        return t

    def new_pair(self, rows: int, cols: int) -> Tuple[torch.Tensor, torch.Tensor]:
        a = self.scratch.lend(rows, cols)  # leak: lost when the second one is over the budget
        if a is None:
            raise MemoryError("scratch budget")
        b = self.scratch.lend(rows, cols)  # clean: recorded in _mine
        if b is None:
            raise MemoryError("scratch budget")
        self._mine += [a, b]
        return a, b


class Reranker:
    def __init__(self, scratch: Scratch, encoder, dim: int):
        self.scratch = scratch
        self.encoder = encoder
        self.dim = dim

    def _project(self, texts) -> torch.Tensor:
        out = self.scratch.lend(len(texts), self.dim)  # clean: returned to the caller
        if out is None:
            raise MemoryError("scratch budget")
        self.encoder(texts, out=out)
        return out

    def _normed(self, texts) -> torch.Tensor:
        raw = self._project(texts)  # leak: F.normalize makes a new tensor and the pooled one is dropped
        return F.normalize(raw, dim=-1)

    def _normed_inplace(self, texts) -> torch.Tensor:
        raw = self._project(texts)  # clean: near miss, normalised in place and returned
        raw.div_(raw.norm(dim=-1, keepdim=True).clamp_min_(1e-6))
        return raw

    def score(self, query: str, docs: List[str]) -> List[float]:
        q = self._normed_inplace([query])  # clean: taken home in finally
        try:
            d = self._normed_inplace(docs)  # clean: taken home after the product
            scores = (d @ q.t()).squeeze(-1).tolist()
            self.scratch.take_home(d)
            return scores
        finally:
            self.scratch.take_home(q)

    def score_chunked(self, query: str, docs: List[str], step: int = 64) -> List[float]:
        scores: List[float] = []
        d = None
        q = self._normed_inplace([query])  # clean: taken home in finally
        try:
            for lo in range(0, len(docs), step):
                d = self._normed_inplace(docs[lo:lo + step])  # leak: rebound each turn, only the last is taken home
                scores += (d @ q.t()).squeeze(-1).tolist()
            return scores
        finally:
            self.scratch.take_home(d)
            self.scratch.take_home(q)

    def export(self, texts) -> torch.Tensor:
        return self._project(texts).cpu().clone()  # leak: copied to the host, the pooled tensor is dropped

    def dedupe(self, docs: List[str], threshold: float) -> List[int]:
        emb = self._normed_inplace(docs)  # leak: the two small cases return with it
        if len(docs) < 2:
            return list(range(len(docs)))
        sim = self.scratch.lend(len(docs), len(docs))  # clean: taken home below, None falls back to the loop
        keep: List[int] = []
        if sim is None:
            for i in range(len(docs)):
                if all(float(emb[i] @ emb[j]) < threshold for j in keep):
                    keep.append(i)
        else:
            torch.mm(emb, emb.t(), out=sim)
            for i in range(len(docs)):
                if all(float(sim[i, j]) < threshold for j in keep):
                    keep.append(i)
            self.scratch.take_home(sim)
        self.scratch.take_home(emb)
        return keep

    def mix(self, docs: List[str], weights: Optional[torch.Tensor]) -> torch.Tensor:
        with Workspace(self.scratch) as ws:
            x = ws.new(len(docs), self.dim)  # clean: workspace takes it home
            self.encoder(docs, out=x)
            if weights is None:
                return x.mean(0)
            y, z = ws.new_pair(len(docs), self.dim)  # clean: workspace takes both home
            torch.mul(x, weights[:, None], out=y)
            torch.sub(y, x, out=z)
            return z.sum(0)

    def ensemble(self, texts, heads) -> Optional[torch.Tensor]:
        parts = []
        for head in heads:
            p = self.scratch.lend(len(texts), self.dim)  # leak: earlier parts lost when one head fails
            if p is None or not head(texts, out=p):
                self.scratch.take_home(p)
                logger.warning("head %s gave nothing", head)
                return None
            parts.append(p)
        total = torch.stack(parts).mean(0)
        for p in parts:
            self.scratch.take_home(p)
        return total
