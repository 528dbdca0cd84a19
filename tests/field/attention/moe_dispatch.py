import dataclasses
import typing as t

import torch
from torch import nn


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    hidden: int
    experts: int
    top_k: int = 2
    capacity_factor: float = 1.25


class ExpertBufferPool:
    """rent() / restore() of (capacity, hidden) staging tensors."""

    def __init__(self, hidden: int, limit: int = 32):
        self.hidden = hidden
        self.limit = limit
        self._stack: t.List[torch.Tensor] = []
        self._lent = 0

    def rent(self, rows: int) -> torch.Tensor:
        for i, b in enumerate(self._stack):
            if b.shape[0] >= rows:
                self._lent += 1
                return self._stack.pop(i)
        if self._lent >= self.limit:
            raise RuntimeError("expert buffers exhausted")
        self._lent += 1
        return torch.zeros(rows, self.hidden)

    def rent_checked(self, rows: int) -> t.Optional[torch.Tensor]:
        if not self._stack:
            return None
        buf = self._stack.pop()  # leak: a buffer that is too small is neither lent nor put back on the stack
        if buf.shape[0] < rows:
            return None
        self._lent += 1
        return buf

    def rent_largest(self, rows: int) -> t.Optional[torch.Tensor]:
        if not self._stack:
            return None
        buf = self._stack.pop()  # clean: near miss, a small one is pushed back before the refusal
        if buf.shape[0] < rows:
            self._stack.append(buf)
            return None
        self._lent += 1
        return buf

    def restore(self, buf: torch.Tensor) -> None:
        self._lent -= 1
        self._stack.append(buf)


class Experts(nn.Module):
    def __init__(self, cfg: MoEConfig):
        super().__init__()
        self.fc = nn.ModuleList(nn.Linear(cfg.hidden, cfg.hidden) for _ in range(cfg.experts))

    def forward(self, e: int, x: torch.Tensor) -> torch.Tensor:
        return self.fc[e](x)


class Dispatcher:
    def __init__(self, cfg: MoEConfig, pool: ExpertBufferPool):
        self.cfg = cfg
        self.pool = pool
        self.pending: t.Dict[int, torch.Tensor] = {}

    def capacity(self, n: int) -> int:
        return int(self.cfg.capacity_factor * n * self.cfg.top_k / self.cfg.experts) + 1

    def dispatch(self, x: torch.Tensor, idx: torch.Tensor) -> None:
        for e in range(self.cfg.experts):
            rows = (idx == e).nonzero(as_tuple=True)[0]
            buf = self.pool.rent(self.capacity(x.shape[0]))  # leak: experts without tokens skip on with a rented buffer
            if rows.numel() == 0:
                continue
            buf[: rows.numel()] = x[rows]
            self.pending[e] = buf

    def dispatch_nonempty(self, x: torch.Tensor, idx: torch.Tensor) -> None:
        self.reset()
        for e in range(self.cfg.experts):
            rows = (idx == e).nonzero(as_tuple=True)[0]
            if rows.numel() == 0:
                continue
            buf = self.pool.rent(self.capacity(x.shape[0]))  # clean: stored, combine empties the table
            buf[: rows.numel()] = x[rows]
            self.pending[e] = buf

    def combine(self, out: torch.Tensor, idx: torch.Tensor, experts: Experts) -> torch.Tensor:
        for e in list(self.pending):
            buf = self.pending.pop(e)
            rows = (idx == e).nonzero(as_tuple=True)[0]
            out[rows] += experts(e, buf[: rows.numel()])
            self.pool.restore(buf)
        return out

    def reset(self) -> None:
        for buf in self.pending.values():
            self.pool.restore(buf)
        self.pending.clear()


class MoELayer(nn.Module):
    def __init__(self, cfg: MoEConfig, pool: t.Optional[ExpertBufferPool] = None):
        super().__init__()
        self.cfg = cfg
        self.pool = pool
        self.gate = nn.Linear(cfg.hidden, cfg.experts)
        self.experts = Experts(cfg)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        idx = self.gate(x).argmax(-1)
        if self.pool is not None:
            acc = self.pool.rent(x.shape[0])  # clean: near miss, the same guard encloses the hand-back
        else:
            acc = torch.zeros_like(x)
        acc.zero_()
        for e in range(self.cfg.experts):
            m = idx == e
            acc[: x.shape[0]][m] = self.experts(e, x[m])
        y = acc[: x.shape[0]].clone()
        if self.pool is not None:
            self.pool.restore(acc)
        return y

    def forward_shared(self, x: torch.Tensor, shared: nn.Module, fuse: bool) -> torch.Tensor:
        acc = self.pool.rent(x.shape[0])  # leak: only handed back in the fused mode
        acc[: x.shape[0]] = shared(x)
        y = acc[: x.shape[0]] + self.forward(x)
        if fuse:
            self.pool.restore(acc)
        return y

    def aux_loss(self, x: torch.Tensor) -> torch.Tensor:
        buf = self.pool.rent(x.shape[0])  # clean: handed back before the result is built
        buf[: x.shape[0]] = x
        load = self.gate(buf[: x.shape[0]]).softmax(-1).mean(0)
        self.pool.restore(buf)
        return (load * load).sum() * self.cfg.experts

    def dry_run(self, rows: int) -> bool:
        buf = self.pool.rent_largest(rows)  # clean: restored unless None
        if buf is None:
            return False
        self.pool.restore(buf)
        return True

    def dry_run_fast(self, rows: int) -> bool:
        return self.pool.rent_checked(rows) is not None  # leak: the rented buffer is only compared with None
