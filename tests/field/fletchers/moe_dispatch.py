"""Expert dispatch/combine on pooled activation tensors."""
from __future__ import annotations

import logging
from collections import defaultdict
from typing import Dict, List, Optional, Sequence, Tuple

try:
    import torch
except ImportError:
    torch = None

logger = logging.getLogger(__name__)


class PooledTensor:
    """Row-major float matrix; backed by torch when it is installed."""
    __slots__ = ("rows", "cols", "data")

    def __init__(self, rows: int, cols: int) -> None:
        self.rows, self.cols = rows, cols
        self.data = torch.empty(rows * cols) if torch is not None else [0.0] * (rows * cols)

    def copy_(self, src: Sequence[float]) -> "PooledTensor":
        for i, v in enumerate(src):
            self.data[i] = v
        return self

    def tolist(self) -> List[float]:
        return [float(v) for v in self.data]


class ActivationPool:

    def __init__(self, max_tensors: int) -> None:
        self.max_tensors = max_tensors
        self.live = 0
        self._idle: Dict[Tuple[int, int], List[PooledTensor]] = defaultdict(list)

    def get_tensor(self, rows: int, cols: int) -> PooledTensor:
        bucket = self._idle[(rows, cols)]
        self.live += 1
        if bucket:
            return bucket.pop()
        if self.live > self.max_tensors:
            logger.warning("activation pool grows to %d", self.live)
        return PooledTensor(rows, cols)

    def put_tensor(self, t: PooledTensor) -> None:
        self.live -= 1
        self._idle[(t.rows, t.cols)].append(t)

    def get_like(self, t: PooledTensor) -> PooledTensor:
        return self.get_tensor(t.rows, t.cols)  # clean: returned

    def get_padded(self, rows: int, cols: int, align: int = 8) -> PooledTensor:
        return self.get_tensor(-(-rows // align) * align, cols)  # clean: returned


class ExpertDispatcher:

    def __init__(self, pool: ActivationPool, num_experts: int, hidden: int, fuse: bool = False) -> None:
        self.pool = pool
        self.num_experts = num_experts
        self.hidden = hidden
        self.fuse = fuse
        self.fused_buf: Optional[PooledTensor] = None
        self.last_input: Optional[PooledTensor] = None

    def _expert_input(self, tokens: Sequence[Sequence[float]]) -> PooledTensor:
        t = self.pool.get_padded(len(tokens), self.hidden)  # clean: returned
        return t.copy_([v for tok in tokens for v in tok])

    def _expert_forward(self, expert: int, x: PooledTensor) -> PooledTensor:
        y = self.pool.get_like(x)  # clean: returned
        y.copy_([v * (expert + 1) for v in x.data])
        return y

    # -- per-expert loops ----------------------------------------------

    def forward(self, routed: Dict[int, List[List[float]]]) -> Dict[int, List[float]]:
        out: Dict[int, List[float]] = {}
        for expert, tokens in routed.items():
            if not tokens:
                continue
            x = self._expert_input(tokens)  # clean: near miss, put back before the continue and at the end
            if expert >= self.num_experts:
                self.pool.put_tensor(x)
                continue
            y = self._expert_forward(expert, x)  # leak: the result is copied to a list, only the input is put back
            out[expert] = y.tolist()
            self.pool.put_tensor(x)
        return out

    def forward_chain(self, tokens: List[List[float]], experts: Sequence[int]) -> List[float]:
        x = self._expert_input(tokens)  # leak: the loop rebinds x to the expert's output
        for e in experts:
            x = self._expert_forward(e, x)  # leak: rebound by the next expert
        out = x.tolist()
        self.pool.put_tensor(x)
        return out

    def forward_pingpong(self, tokens: List[List[float]], experts: Sequence[int]) -> List[float]:
        x = self._expert_input(tokens)  # clean: near miss, put back in the loop before the rebinding
        for e in experts:
            y = self._expert_forward(e, x)  # clean: becomes x, which is put back
            self.pool.put_tensor(x)
            x = y
        try:
            return x.tolist()
        finally:
            self.pool.put_tensor(x)

    # -- out= ----------------------------------------------------------

    def combine(self, parts: Sequence[PooledTensor], out: Optional[PooledTensor] = None) -> List[float]:
        own = out is None
        if own:
            out = self.pool.get_like(parts[0])  # clean: near miss, own guards the put
        out.copy_([sum(vals) for vals in zip(*(p.data for p in parts))])
        result = out.tolist()
        if own:
            self.pool.put_tensor(out)
        return result

    def scale(self, part: PooledTensor, factor: float, inplace: bool = False) -> List[float]:
        out = part if inplace else self.pool.get_like(part)  # leak: with a factor of 1 the early return skips the put
        out.copy_([v * factor for v in part.data])
        if factor == 1.0:
            return out.tolist()
        result = out.tolist()
        if not inplace:
            self.pool.put_tensor(out)
        return result

    # -- fused path ----------------------------------------------------

    def begin(self, rows: int) -> None:
        if self.fuse:
            self.fused_buf = self.pool.get_tensor(rows, self.hidden)  # clean: near miss, the same flag puts it back in end()

    def end(self) -> Optional[List[float]]:
        if not self.fuse:
            return None
        out = self.fused_buf.tolist()
        self.pool.put_tensor(self.fused_buf)
        self.fused_buf = None
        return out

    def layer(self, tokens: List[List[float]]) -> Optional[List[float]]:
        self.begin(len(tokens))
        if self.fuse:
            self.fused_buf.copy_([v for tok in tokens for v in tok])
        return self.end()

    def keep_input(self, tokens: List[List[float]]) -> None:
        self.last_input = self._expert_input(tokens)  # leak: the input kept before is overwritten

    def drop_input(self) -> None:
        if self.last_input is not None:
            self.pool.put_tensor(self.last_input)
            self.last_input = None


class LoadBalancer:

    def __init__(self, dispatcher: ExpertDispatcher) -> None:
        self.d = dispatcher

    def sample_norm(self, tokens: List[List[float]]) -> float:
        return sum(v * v for v in self.d._expert_input(tokens).data)  # leak: a temporary that nobody puts back

    def dry_run(self, tokens: List[List[float]], expert: int) -> Tuple[int, int]:
        x = self.d._expert_input(tokens)  # clean: put back below
        y = self.d._expert_forward(expert, x)  # clean: put back below
        shape = (y.rows, y.cols)
        for t in (x, y):
            self.d.pool.put_tensor(t)
        return shape
