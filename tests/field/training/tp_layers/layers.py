import torch
import torch.distributed as dist
from torch import nn

from .workspace import ScopedWorkspace, Workspace


class ColumnParallel(nn.Module):
    def __init__(self, d_in, d_out, world, ws: Workspace):
        super().__init__()
        self.w = nn.Parameter(torch.randn(d_out // world, d_in) * 0.02)
        self.world = world
        self.ws = ws

    def _partial(self, x):
        out = self.ws.get_ws(x.shape[0], self.w.shape[0])  # clean: returned to forward
        if out is not None:
            torch.mm(x, self.w.t(), out=out.t)
        return out

    def forward(self, x):
        part = self._partial(x)  # clean: put back after the gather
        if part is None:
            return x @ self.w.t()
        full = [torch.empty_like(part.t) for _ in range(self.world)]
        dist.all_gather(full, part.t)
        self.ws.put_ws(part)
        return torch.cat(full, dim=-1)

    def forward_local(self, x):
        part = self._partial(x)  # leak: single-rank runs return a clone and skip the put
        if part is None:
            return x @ self.w.t()
        if self.world == 1:
            return part.t.clone()
        y = part.t * self.world
        self.ws.put_ws(part)
        return y


class RowParallel(nn.Module):
    def __init__(self, d_in, d_out, world, ws: Workspace, sequence_parallel=False):
        super().__init__()
        self.w = nn.Parameter(torch.randn(d_out, d_in // world) * 0.02)
        self.ws = ws
        self.sequence_parallel = sequence_parallel

    def forward(self, x):
        with ScopedWorkspace(self.ws, x.shape[0], self.w.shape[0]) as out:  # clean: scoped
            if out is None:
                return x @ self.w.t()
            torch.mm(x, self.w.t(), out=out.t)
            dist.all_reduce(out.t)
            return out.t.clone()

    def forward_sp(self, x):
        out = None
        if self.sequence_parallel:
            out = self.ws.get_ws(x.shape[0], self.w.shape[0])  # clean: near miss, put under the same flag
            torch.mm(x, self.w.t(), out=out.t)
            y = out.t.clone()
        else:
            y = x @ self.w.t()
        y = torch.relu(y)
        if self.sequence_parallel:
            self.ws.put_ws(out)
        return y

    def forward_aligned(self, x):
        out = self.ws.get_ws_aligned(x.shape[0], self.w.shape[0])  # leak: put only for the sequence-parallel mode, obtained in both
        if out is None:
            return x @ self.w.t()
        torch.mm(x, self.w.t(), out=out.t)
        y = out.t.clone()
        if self.sequence_parallel:
            self.ws.put_ws(out)
        return y
