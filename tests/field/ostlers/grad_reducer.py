"""Data-parallel gradient reducer: flat buckets from a pool, hooks on parameters, asynchronous all-reduce."""
from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Dict, Iterable, List, Optional, Tuple

import torch
import torch.distributed as dist


class BucketPool:
    """Flat fp32 buffers by size class."""

    def __init__(self, classes: Iterable[int], per_class: int):
        self._lock = threading.Lock()
        self._by_class: Dict[int, List[torch.Tensor]] = {
            c: [torch.zeros(c, device="cuda") for _ in range(per_class)] for c in sorted(classes)
        }

    def _size_class(self, numel: int) -> int:
        for c in self._by_class:
            if numel <= c:
                return c
        raise ValueError(f"no bucket class holds {numel} elements")

    def get_bucket(self, numel: int) -> Optional[torch.Tensor]:
        with self._lock:
            shelf = self._by_class[self._size_class(numel)]
            return shelf.pop() if shelf else None

    def put_bucket(self, flat: torch.Tensor) -> None:
        with self._lock:
            self._by_class[flat.numel()].append(flat)

    def must_get(self, numel: int) -> torch.Tensor:
        flat = self.get_bucket(numel)  # clean: returned, or None with the error
        if flat is None:
            raise RuntimeError(f"no bucket left for {numel} elements")
        return flat


@dataclass
class Bucket:
    params: List[torch.nn.Parameter]
    flat: Optional[torch.Tensor] = None
    work: Optional[dist.Work] = None
    pending: int = 0

    @property
    def numel(self) -> int:
        return sum(p.numel() for p in self.params)


@dataclass
class SideReduce:
    name: str
    flat: torch.Tensor
    work: dist.Work
    target: torch.Tensor = field(repr=False, default=None)


class GradReducer:
    def __init__(self, params: Iterable[torch.nn.Parameter], pool: BucketPool, cap: int, group=None):
        self.pool = pool
        self.group = group
        self.buckets: List[Bucket] = []
        self._of_param: Dict[int, Bucket] = {}
        self._side: List[SideReduce] = []
        self._residual: Dict[str, torch.Tensor] = {}
        current: List[torch.nn.Parameter] = []
        size = 0
        for p in reversed(list(params)):
            if current and size + p.numel() > cap:
                self._seal(current)
                current, size = [], 0
            current.append(p)
            size += p.numel()
        if current:
            self._seal(current)

    def _seal(self, params: List[torch.nn.Parameter]) -> None:
        bucket = Bucket(params, pending=len(params))
        self.buckets.append(bucket)
        for p in params:
            self._of_param[id(p)] = bucket
            p.register_post_accumulate_grad_hook(self._on_grad)

    def _on_grad(self, p: torch.nn.Parameter) -> None:
        bucket = self._of_param[id(p)]
        if bucket.flat is None:
            bucket.flat = self.pool.must_get(bucket.numel)  # clean: near miss, put back by finish
        offset = 0
        for q in bucket.params:
            if q is p:
                bucket.flat[offset : offset + p.numel()].copy_(p.grad.flatten())
                break
            offset += q.numel()
        bucket.pending -= 1
        if bucket.pending == 0:
            bucket.work = dist.all_reduce(bucket.flat, group=self.group, async_op=True)

    def finish(self) -> None:
        """Waits for the buckets and writes the mean back into the gradients."""
        world = dist.get_world_size(self.group)
        for bucket in self.buckets:
            flat, work = bucket.flat, bucket.work
            bucket.flat = bucket.work = None
            bucket.pending = len(bucket.params)
            if flat is None:
                continue
            if work is not None:
                work.wait()
                offset = 0
                for p in bucket.params:
                    p.grad.copy_(flat[offset : offset + p.numel()].view_as(p) / world)
                    offset += p.numel()
            self.pool.put_bucket(flat)

    def any_overflow(self) -> bool:
        flag = self.pool.must_get(1)  # leak: a local overflow returns before the flag buffer is put back
        flag.zero_()
        for b in self.buckets:
            for p in b.params:
                if not torch.isfinite(p.grad).all():
                    flag.fill_(1.0)
        work = dist.all_reduce(flag, group=self.group, async_op=True)
        if float(flag[0]) > 0:
            work.wait()
            return True
        work.wait()
        hit = float(flag[0]) > 0
        self.pool.put_bucket(flag)
        return hit

    def _flatten(self, tensors: List[torch.Tensor]) -> torch.Tensor:
        flat = self.pool.must_get(sum(t.numel() for t in tensors))  # clean: returned to the caller
        offset = 0
        for t in tensors:
            flat[offset : offset + t.numel()].copy_(t.flatten())
            offset += t.numel()
        return flat

    def buffers_agree(self, tensors: List[torch.Tensor]) -> bool:
        mine = self._flatten(tensors)  # clean: put back at the end
        lead = self._flatten(tensors)  # leak: never put back
        dist.broadcast(lead, 0, group=self.group)
        same = torch.allclose(mine, lead)
        self.pool.put_bucket(mine)
        return same

    def start_side(self, name: str, value: torch.Tensor) -> None:
        """All-reduce of a metric that runs next to the backward."""
        flat = self._flatten([value])  # clean: near miss, in _side, put back by collect_side or drop_side
        work = dist.all_reduce(flat, group=self.group, async_op=True)
        self._side.append(SideReduce(name, flat, work, value))

    def collect_side(self) -> Dict[str, float]:
        out: Dict[str, float] = {}
        for side in self._side:
            side.work.wait()
            out[side.name] = float(side.flat[: side.target.numel()].mean())
            self.pool.put_bucket(side.flat)
        self._side = []
        return out

    def drop_side(self, name: str) -> None:
        kept = []
        for side in self._side:
            if side.name != name:
                kept.append(side)
                continue
            side.work.wait()
            self.pool.put_bucket(side.flat)
        self._side = kept

    def update_residual(self, name: str, err: torch.Tensor) -> None:
        """Error feedback of the compressor: keeps what was rounded away."""
        self._residual[name] = self._flatten([err])  # leak: the residual of the last step is overwritten

    def clear_residuals(self) -> None:
        for flat in self._residual.values():
            self.pool.put_bucket(flat)
        self._residual.clear()

    def compress(self, grad: torch.Tensor, out: Optional[torch.Tensor] = None) -> Tuple[torch.Tensor, float]:
        """Sign compression; the mean magnitude goes along. Uses `out` as scratch when given."""
        owned = out is None
        scratch = self.pool.must_get(grad.numel()) if owned else out  # clean: near miss, put back if owned
        view = scratch[: grad.numel()]
        torch.abs(grad.flatten(), out=view)
        scale = float(view.mean())
        if owned:
            self.pool.put_bucket(scratch)
        return torch.sign(grad).to(torch.int8), scale

    def decompress(self, sign: torch.Tensor, scale: float, into: Optional[torch.Tensor]) -> torch.Tensor:
        own = into is None
        if own:
            into = self.pool.must_get(sign.numel())  # leak: put back only when the buffer is not its own
        view = into[: sign.numel()]
        view.copy_(sign.flatten()).mul_(scale)
        result = view.clone().view_as(sign)
        if not own:
            self.pool.put_bucket(into)
        return result
