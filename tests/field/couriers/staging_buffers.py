"""Pinned host staging buffers for the upload path of the predictor."""
from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import torch


def _bucket(numel: int) -> int:
    return 1 << max(8, (numel - 1).bit_length())


class StagingPool:
    """Size-class buckets of pinned buffers. get() pops or allocates, put() returns."""

    def __init__(self, dtype: torch.dtype = torch.float32, limit: int = 64) -> None:
        self.dtype = dtype
        self.limit = limit
        self._buckets: dict[int, list[torch.Tensor]] = defaultdict(list)
        self._outstanding = 0

    def get(self, numel: int) -> torch.Tensor:
        size = _bucket(numel)
        stack = self._buckets[size]
        if stack:
            buf = stack.pop()  # clean: returned to the caller
        else:
            buf = torch.empty(size, dtype=self.dtype, pin_memory=True)
        self._outstanding += 1
        return buf

    def get_or_none(self, numel: int) -> torch.Tensor | None:
        if self._outstanding >= self.limit:
            return None
        return self.get(numel)  # clean: passed on to the caller

    def put(self, buf: torch.Tensor) -> None:
        self._outstanding -= 1
        self._buckets[buf.numel()].append(buf)

    def trim(self, keep: int) -> None:
        for stack in self._buckets.values():
            del stack[keep:]


@dataclass
class Upload:
    key: str
    host: torch.Tensor
    length: int
    done: torch.cuda.Event | None = None


@dataclass
class Predictor:
    pool: StagingPool
    model: torch.nn.Module
    device: torch.device
    pending: list[Upload] = field(default_factory=list)
    by_key: dict[str, torch.Tensor] = field(default_factory=dict)

    def upload(self, x: torch.Tensor) -> torch.Tensor:
        buf = self.pool.get(x.numel())  # clean: put back after the blocking copy
        host = buf[: x.numel()].view(x.shape)
        host.copy_(x)
        dev = host.to(self.device)
        self.pool.put(buf)
        return dev

    def upload_async(self, key: str, x: torch.Tensor) -> torch.Tensor:
        buf = self.pool.get(x.numel())  # clean: near miss, goes to pending with its event, reap() puts it back
        view = buf[: x.numel()].view(x.shape)
        view.copy_(x)
        dev = view.to(self.device, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        self.pending.append(Upload(key, buf, x.numel(), done))
        return dev

    def reap(self) -> int:
        keep: list[Upload] = []
        for up in self.pending:
            if up.done is None or up.done.query():
                self.pool.put(up.host)
            else:
                keep.append(up)
        n = len(self.pending) - len(keep)
        self.pending = keep
        return n

    def upload_padded(self, x: torch.Tensor, width: int) -> torch.Tensor:
        buf = self.pool.get(x.shape[0] * width)  # leak: rebound to its own padded view's clone, the pooled buffer is gone
        buf = buf[: x.shape[0] * width].view(x.shape[0], width).clone()
        buf.zero_()
        buf[:, : x.shape[1]] = x
        return buf.to(self.device)

    def stage_rows(self, rows: list[torch.Tensor]) -> list[torch.Tensor]:
        out: list[torch.Tensor] = []
        for row in rows:
            buf = self.pool.get_or_none(row.numel())  # leak: rows with NaN are skipped by continue without put
            if buf is None:
                out.append(row.to(self.device))
                continue
            staged = buf[: row.numel()]
            staged.copy_(row.reshape(-1))
            if torch.isnan(staged).any():
                continue
            out.append(staged.to(self.device).view(row.shape))
            self.pool.put(buf)
        return out

    def predict_pair(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor | None:
        left = self.pool.get_or_none(a.numel())  # leak: not put back when there is no buffer for b
        if left is None:
            return None
        right = self.pool.get_or_none(b.numel())  # clean: put back after the model ran
        if right is None:
            return None
        left[: a.numel()].copy_(a.reshape(-1))
        right[: b.numel()].copy_(b.reshape(-1))
        out = self.model(left[: a.numel()].to(self.device), right[: b.numel()].to(self.device))
        self.pool.put(left)
        self.pool.put(right)
        return out

    def remember(self, key: str, x: torch.Tensor) -> None:
        old = self.by_key.pop(key, None)
        if old is not None:
            self.pool.put(old)
        buf = self.pool.get(x.numel())  # clean: near miss, the former buffer of the key went back above, forget() returns this one
        buf[: x.numel()].copy_(x.reshape(-1))
        self.by_key[key] = buf

    def forget(self, key: str) -> None:
        buf = self.by_key.pop(key, None)
        if buf is not None:
            self.pool.put(buf)

    def download(self, dev: torch.Tensor, validate: bool = True) -> list[float]:
        buf = self.pool.get(dev.numel())  # leak: put only when validate is set
        host = buf[: dev.numel()]
        host.copy_(dev.reshape(-1))
        values = host.tolist()
        if validate:
            values = [v if v == v else 0.0 for v in values]
            self.pool.put(buf)
        return values

    def upload_named(self, items: list[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        staged: dict[str, torch.Tensor] = {}
        out: dict[str, torch.Tensor] = {}
        for name, x in items:
            staged[name] = self.pool.get(x.numel())  # leak: a repeated name overwrites the buffer of its first occurrence
            host = staged[name][: x.numel()].view(x.shape)
            host.copy_(x)
            out[name] = host.to(self.device)
        for buf in staged.values():
            self.pool.put(buf)
        return out

    def close(self) -> None:
        torch.cuda.synchronize()
        self.reap()
        for key in list(self.by_key):
            self.forget(key)
