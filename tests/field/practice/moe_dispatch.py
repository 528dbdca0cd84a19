import enum
import logging
from typing import NamedTuple, Optional, Protocol

import torch
import torch.distributed as dist
import torch.nn as nn

logger = logging.getLogger(__name__)


class DispatchMode(enum.Enum):
    LOCAL = enum.auto()
    ALLTOALL = enum.auto()
    LOW_LATENCY = enum.auto()


class Workspace(Protocol):
    def borrow(self, rows: int) -> torch.Tensor: ...

    def give_back(self, buf: torch.Tensor) -> None: ...


class ExpertWorkspace:
    """Row buffers in powers of two."""

    def __init__(self, hidden: int, device: str = "cuda", dtype=torch.bfloat16):
        self.hidden, self.device, self.dtype = hidden, device, dtype
        self.classes: dict[int, list[torch.Tensor]] = {}
        self.out: set[int] = set()

    def borrow(self, rows: int) -> torch.Tensor:
        size = 1 << max(rows - 1, 0).bit_length()
        free = self.classes.setdefault(size, [])
        buf = free.pop() if free else torch.empty(size, self.hidden, device=self.device, dtype=self.dtype)
        self.out.add(id(buf))
        return buf

    def give_back(self, buf: torch.Tensor) -> None:
        self.out.discard(id(buf))
        self.classes[buf.shape[0]].append(buf)

    def trim(self, keep: int) -> int:
        dropped = 0
        for free in self.classes.values():
            while len(free) > keep:
                free.pop()  # clean: near miss, trimming is meant to hand the memory to torch
                dropped += 1
        return dropped


class Dispatched(NamedTuple):
    rows: torch.Tensor
    splits: list[int]
    pooled: bool


class TokenDispatcher:
    def __init__(self, ws: Workspace, mode: DispatchMode, group=None):
        self.ws = ws
        self.mode = mode
        self.group = group

    def dispatch(self, x: torch.Tensor, splits: list[int]) -> Dispatched:
        if self.mode is DispatchMode.LOCAL:
            return Dispatched(x, splits, False)
        recv = self.ws.borrow(sum(splits))  # clean: handed to the caller, marked as pooled
        dist.all_to_all_single(recv[: sum(splits)], x, splits, group=self.group)
        return Dispatched(recv, splits, True)

    def combine(self, d: Dispatched, y: torch.Tensor) -> torch.Tensor:
        if d.pooled:
            out = torch.empty_like(y)
            dist.all_to_all_single(out, y, None, d.splits, group=self.group)
            self.ws.give_back(d.rows)
            return out
        return y

    def abort(self, d: Dispatched) -> None:
        if d.pooled:
            self.ws.give_back(d.rows)


class MoELayer(nn.Module):
    def __init__(self, experts: nn.ModuleList, router: nn.Module, ws: ExpertWorkspace, mode: DispatchMode):
        super().__init__()
        self.experts, self.router, self.ws = experts, router, ws
        self.dispatcher = TokenDispatcher(ws, mode)
        self.shared_scratch: Optional[torch.Tensor] = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        idx = self.router(x).argmax(-1)
        splits = torch.bincount(idx, minlength=len(self.experts)).tolist()
        d = self.dispatcher.dispatch(x[idx.argsort()], splits)  # clean: near miss, combine() gives back what is marked as pooled
        parts = [e(p) for e, p in zip(self.experts, d.rows[: sum(splits)].split(splits))]
        return self.dispatcher.combine(d, torch.cat(parts))

    def forward_capped(self, x: torch.Tensor, cap: int) -> torch.Tensor:
        idx = self.router(x).argmax(-1)
        splits = torch.bincount(idx, minlength=len(self.experts)).tolist()
        d = self.dispatcher.dispatch(x[idx.argsort()], splits)  # leak: over capacity the input is returned and the rows are kept
        if max(splits) > cap:
            logger.warning("expert over capacity: %d > %d", max(splits), cap)
            return x
        return self.dispatcher.combine(d, d.rows[: sum(splits)])

    def forward_nonempty(self, x: torch.Tensor, splits: list[int]) -> torch.Tensor:
        d = self.dispatcher.dispatch(x, splits)  # clean: near miss, abort() on the odd path
        if sum(splits) == 0:
            self.dispatcher.abort(d)
            return x
        return self.dispatcher.combine(d, d.rows[: sum(splits)])

    def permute(self, x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        buf = self.ws.borrow(x.shape[0])  # leak: rebound to its slice, then to a copy
        buf = buf[: x.shape[0]]
        torch.index_select(x, 0, order, out=buf)
        buf = buf.clone()
        return buf

    def permute_inplace(self, x: torch.Tensor, order: torch.Tensor) -> None:
        buf = self.ws.borrow(x.shape[0])  # clean: near miss, the slice is another name, buf goes back
        rows = buf[: x.shape[0]]
        torch.index_select(x, 0, order, out=rows)
        x.copy_(rows)
        self.ws.give_back(buf)

    def shared(self, x: torch.Tensor) -> torch.Tensor:
        if self.shared_scratch is None:
            self.shared_scratch = self.ws.borrow(x.shape[0])  # clean: cached once, unload() gives it back
        s = self.shared_scratch[: x.shape[0]]
        s.copy_(x)
        return s.mul_(2).clone()

    def unload(self) -> None:
        if self.shared_scratch is not None:
            self.ws.give_back(self.shared_scratch)
            self.shared_scratch = None

    def gate_up(self, x: torch.Tensor, fused: bool) -> torch.Tensor:
        gate = self.ws.borrow(x.shape[0])  # clean: given back at the end
        up = None
        if not fused:
            up = self.ws.borrow(x.shape[0])  # leak: the guard at the end tests the opposite
            up[: x.shape[0]].copy_(x)
        gate[: x.shape[0]].copy_(x)
        out = gate[: x.shape[0]].sigmoid()
        if fused and up is not None:
            self.ws.give_back(up)
        self.ws.give_back(gate)
        return out

    def gate_only(self, x: torch.Tensor, fused: bool) -> torch.Tensor:
        up = None if fused else self.ws.borrow(x.shape[0])  # clean: near miss, given back whenever it is there
        y = x.sigmoid() if up is None else up[: x.shape[0]].copy_(x).sigmoid()
        if up is not None:
            self.ws.give_back(up)
        return y

    def expert_stats(self, x: torch.Tensor) -> list[float]:
        stats = []
        for e in self.experts:
            tmp = self.ws.borrow(x.shape[0])  # leak: break on nan leaves the last one out
            tmp[: x.shape[0]].copy_(e(x))
            m = float(tmp.float().mean())
            if m != m:
                break
            stats.append(m)
            self.ws.give_back(tmp)
        return stats
