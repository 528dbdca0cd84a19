"""Weight updates from the trainer to the rollout workers, bucket by bucket."""
from __future__ import annotations

import logging
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, Dict, Iterable, Iterator, List, Optional, Tuple

import torch

logger = logging.getLogger(__name__)


class BucketPool:
    def __init__(self, nbytes: int, n: int) -> None:
        self.nbytes = nbytes
        self.idle: List[torch.Tensor] = [torch.empty(nbytes, dtype=torch.uint8) for _ in range(n)]

    def grab(self) -> torch.Tensor:
        if not self.idle:
            self.idle.append(torch.empty(self.nbytes, dtype=torch.uint8))
        return self.idle.pop()

    def drop(self, t: torch.Tensor) -> None:
        self.idle.append(t)


@dataclass
class Packed:
    bucket: torch.Tensor
    names: List[str]
    used: int


class BucketScope(AbstractContextManager):
    def __init__(self, pool: BucketPool) -> None:
        self.pool = pool
        self.bucket: Optional[torch.Tensor] = None

    def __enter__(self) -> torch.Tensor:
        self.bucket = self.pool.grab()  # clean: __exit__ drops it
        return self.bucket

    def __exit__(self, *exc: Any) -> None:
        if self.bucket is not None:
            self.pool.drop(self.bucket)
            self.bucket = None


class QuietScope(AbstractContextManager):
    """Like BucketScope, but connection errors end the block silently."""

    def __init__(self, pool: BucketPool) -> None:
        self.pool = pool

    def __enter__(self) -> torch.Tensor:
        self.bucket = self.pool.grab()  # leak: __exit__ returns early on a connection error
        return self.bucket

    def __exit__(self, et, ev, tb) -> bool:
        if et is not None and issubclass(et, ConnectionError):
            logger.warning("link closed: %s", ev)
            return True
        self.pool.drop(self.bucket)
        return False


class WeightSender:
    def __init__(self, pool: BucketPool, link: Any) -> None:
        self.pool = pool
        self.link = link

    def _bytes(self, t: torch.Tensor) -> torch.Tensor:
        return t.detach().contiguous().view(torch.uint8).flatten()

    def pack(self, params: Iterable[Tuple[str, torch.Tensor]]) -> Iterator[Packed]:
        bucket, names, used = self.pool.grab(), [], 0  # clean: near miss, yielded full or at the end, or dropped when empty
        for name, t in params:
            raw = self._bytes(t)
            if used + raw.numel() > self.pool.nbytes and names:
                yield Packed(bucket, names, used)
                bucket, names, used = self.pool.grab(), [], 0  # clean: near miss, the former bucket was yielded to the consumer
            bucket[used:used + raw.numel()].copy_(raw)
            names.append(name)
            used += raw.numel()
        if names:
            yield Packed(bucket, names, used)
        else:
            self.pool.drop(bucket)

    def send_all(self, params: Dict[str, torch.Tensor]) -> int:
        count = 0
        for packed in self.pack(params.items()):  # clean: every bucket is dropped after sending
            self.link.send(packed.names, packed.bucket[:packed.used])
            self.pool.drop(packed.bucket)
            count += 1
        return count

    def send_changed(self, params: Dict[str, torch.Tensor], dirty: set) -> int:
        count = 0
        for packed in self.pack(params.items()):  # leak: buckets without a dirty name are skipped and not dropped
            if not dirty.intersection(packed.names):
                continue
            self.link.send(packed.names, packed.bucket[:packed.used])
            self.pool.drop(packed.bucket)
            count += 1
        return count

    def send_scoped(self, name: str, t: torch.Tensor) -> bool:
        with BucketScope(self.pool) as bucket:  # clean: return inside the with
            raw = self._bytes(t)
            if raw.numel() > self.pool.nbytes:
                return False
            bucket[: raw.numel()].copy_(raw)
            self.link.send([name], bucket[: raw.numel()])
            return True

    def send_group(self, group: Dict[str, torch.Tensor]) -> None:
        with ExitStack() as stack:
            staged = []
            for name, t in group.items():
                b = stack.enter_context(BucketScope(self.pool))  # clean: near miss, the stack exits all scopes
                raw = self._bytes(t)
                if raw.numel() > self.pool.nbytes:
                    raise ValueError(f"{name} does not fit")
                b[: raw.numel()].copy_(raw)
                staged.append((name, b[: raw.numel()]))
            for name, view in staged:
                self.link.send([name], view)

    def send_manual(self, group: Dict[str, torch.Tensor]) -> None:
        for name, t in group.items():
            b = self.pool.grab()  # leak: too large tensors raise while b is out
            raw = self._bytes(t)
            if raw.numel() > self.pool.nbytes:
                raise ValueError(f"{name} does not fit")
            b[: raw.numel()].copy_(raw)
            self.link.send([name], b[: raw.numel()])
            self.pool.drop(b)

    def checksum(self, t: torch.Tensor) -> int:
        b = self.pool.grab()  # leak: b is rebound to the wide copy, the bucket itself is lost
        raw = self._bytes(t)
        b[: raw.numel()].copy_(raw)
        b = b[: raw.numel()].to(torch.int64)
        total = int(b.sum())
        del b
        return total
