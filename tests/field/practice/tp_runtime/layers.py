import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from .buffers import CommBufferPool, scratch, scratch_pair


class ColumnParallelLinear(nn.Module):
    def __init__(self, in_f: int, out_f: int, pool: CommBufferPool, group=None, gather_output: bool = True):
        super().__init__()
        self.world = dist.get_world_size(group) if dist.is_initialized() else 1
        self.weight = nn.Parameter(torch.empty(out_f // self.world, in_f))
        self.pool = pool
        self.group = group
        self.gather_output = gather_output

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, self.weight)
        if not self.gather_output or self.world == 1:
            return y
        gathered = self.pool.get_buffer((self.world, *y.shape), y.dtype)  # leak: transposed copy goes out, the buffer is dropped
        dist.all_gather_into_tensor(gathered, y, group=self.group)
        gathered = gathered.movedim(0, -2).reshape(*y.shape[:-1], -1).contiguous()
        return gathered

    def forward_chunked(self, x: torch.Tensor, chunk: int) -> torch.Tensor:
        outs = []
        for part in x.split(chunk, dim=0):
            with scratch(self.pool, (part.shape[0], self.weight.shape[0]), x.dtype) as y:  # clean: with block
                torch.matmul(part, self.weight.t(), out=y)
                outs.append(y.clone())
        return torch.cat(outs)


class RowParallelLinear(nn.Module):
    def __init__(self, in_f: int, out_f: int, pool: CommBufferPool, group=None, overlap: bool = False):
        super().__init__()
        self.world = dist.get_world_size(group) if dist.is_initialized() else 1
        self.weight = nn.Parameter(torch.empty(out_f, in_f // self.world))
        self.pool = pool
        self.group = group
        self.overlap = overlap

    def _partial(self, x: torch.Tensor) -> torch.Tensor:
        out = self.pool.get_buffer((*x.shape[:-1], self.weight.shape[0]), x.dtype)  # clean: handed to the caller
        torch.matmul(x, self.weight.t(), out=out)
        return out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self._partial(x)  # clean: near miss, scaled in place, copied and returned
        if self.world > 1:
            dist.all_reduce(out, group=self.group)
            out /= 1.0
        result = out.clone()
        self.pool.return_buffer(out)
        return result

    def forward_mean(self, x: torch.Tensor) -> torch.Tensor:
        out = self._partial(x)  # leak: rebound by the division, the pooled tensor is not returned
        dist.all_reduce(out, group=self.group)
        out = out / self.world
        return out

    def norm_of_partial(self, x: torch.Tensor) -> float:
        return self._partial(x).norm().item()  # leak: the pooled tensor is a temporary

    def backward_input(self, grad: torch.Tensor, skip_reduce: bool = False) -> torch.Tensor:
        with scratch_pair(self.pool, grad.shape, grad.dtype, second=self.overlap) as (a, b):  # clean: with block
            a.copy_(grad)
            if b is not None:
                b.zero_()
            if skip_reduce:
                return a @ self.weight
            dist.all_reduce(a, group=self.group)
            return a @ self.weight

    def scatter(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        recv = self.pool.get_buffer((rows // self.world, x.shape[1]), x.dtype)  # leak: not returned when the shapes do not divide
        if rows % self.world:
            raise ValueError(f"{rows} rows do not divide over {self.world} ranks")
        dist.reduce_scatter_tensor(recv, x, group=self.group)
        res = recv.clone()
        self.pool.return_buffer(recv)
        return res
