from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Iterable, Iterator, Optional

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Bucket:
    storage: torch.Tensor
    filled: int = 0

    def append(self, tensor: torch.Tensor) -> bool:
        n = tensor.numel()
        if self.filled + n > self.storage.numel():
            return False
        self.storage[self.filled : self.filled + n].copy_(tensor.reshape(-1))
        self.filled += n
        return True


class BucketPool:
    def __init__(self, count: int, numel: int, device: torch.device) -> None:
        self._free = [Bucket(torch.empty(numel, dtype=torch.bfloat16, device=device)) for _ in range(count)]
        self.lent = 0

    def get(self) -> Bucket:
        self.lent += 1
        return self._free.pop()

    def put(self, bucket: Bucket) -> None:
        bucket.filled = 0
        self.lent -= 1
        self._free.append(bucket)

    @contextmanager
    def borrowed(self) -> Iterator[Bucket]:
        bucket = self.get()  # clean: put back in finally
        try:
            yield bucket
        finally:
            self.put(bucket)


class IpcRegistry:
    def __init__(self) -> None:
        self._next = 0
        self.exported: dict[int, torch.Tensor] = {}

    def export(self, tensor: torch.Tensor) -> int:
        self._next += 1
        self.exported[self._next] = tensor
        return self._next

    def unexport(self, handle: int) -> None:
        self.exported.pop(handle)


class GenerationGate:
    def __init__(self) -> None:
        self._holds = 0

    def pause(self) -> None:
        self._holds += 1

    def resume(self) -> None:
        self._holds -= 1

    @property
    def open(self) -> bool:
        return self._holds == 0


class InferenceClient:
    def __init__(self, url: str) -> None:
        self.url = url
        self.version = 0
        self.loaded: dict[str, int] = {}

    def load(self, handle: int, names: list[str], version: int) -> bool:
        if version < self.version:
            return False
        self.loaded.update({name: handle for name in names})
        self.version = version
        return True


class WeightPublisher:
    def __init__(self, pool: BucketPool, ipc: IpcRegistry, gate: GenerationGate,
                 clients: list[InferenceClient], group: Optional[dist.ProcessGroup] = None) -> None:
        self.pool = pool
        self.ipc = ipc
        self.gate = gate
        self.clients = clients
        self.group = group
        self.version = 0
        self._handles: dict[str, int] = {}
        self._inflight: list[tuple[Bucket, dist.Work]] = []

    def publish(self, params: Iterable[tuple[str, torch.Tensor]]) -> bool:
        self.version += 1
        self.gate.pause()  # leak: a refused flush returns without resume
        bucket = self.pool.get()  # clean: near miss, put back on both returns, also when replaced
        names: list[str] = []
        for name, tensor in params:
            if not bucket.append(tensor):
                if not self._flush(bucket, names):
                    self.pool.put(bucket)
                    return False
                self.pool.put(bucket)
                bucket = self.pool.get()  # clean: near miss, the earlier one was put back just above
                bucket.append(tensor)
                names = []
            names.append(name)
        ok = self._flush(bucket, names)
        self.pool.put(bucket)
        self.gate.resume()
        return ok

    def _flush(self, bucket: Bucket, names: list[str]) -> bool:
        if not names:
            return True
        handle = self.ipc.export(bucket.storage[: bucket.filled])  # leak: a client that refuses returns before unexport
        for client in self.clients:
            if not client.load(handle, names, self.version):
                logger.error("%s refused version %d", client.url, self.version)
                return False
        self.ipc.unexport(handle)
        return True

    def publish_one(self, name: str, tensor: torch.Tensor) -> int:
        self.gate.pause()  # clean: near miss, resumed in finally
        try:
            stale = self._handles.pop(name, None)
            if stale is not None:
                self.ipc.unexport(stale)
            self._handles[name] = self.ipc.export(tensor)  # clean: near miss, an older handle was popped and unexported
            accepted = 0
            for client in self.clients:
                if not client.load(self._handles[name], [name], self.version):
                    continue
                accepted += 1
            return accepted
        finally:
            self.gate.resume()

    def republish(self, tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            self._handles[name] = self.ipc.export(tensor)  # leak: the handle exported for this name before is overwritten

    def withdraw(self) -> None:
        for handle in self._handles.values():
            self.ipc.unexport(handle)
        self._handles.clear()

    def broadcast(self, params: Iterable[tuple[str, torch.Tensor]], src: int) -> None:
        bucket: Optional[Bucket] = None
        for name, tensor in params:
            if tensor.numel() == 0:
                continue
            if bucket is None:
                bucket = self.pool.get()  # clean: near miss, launched when full or at the end, reaped by wait
            if not bucket.append(tensor):
                self._launch(bucket, src)
                bucket = self.pool.get()  # clean: near miss, the full one is in _inflight already
                bucket.append(tensor)
        if bucket is not None:
            self._launch(bucket, src)
        self.wait()

    def _launch(self, bucket: Bucket, src: int) -> None:
        work = dist.broadcast(bucket.storage[: bucket.filled], src, group=self.group, async_op=True)
        self._inflight.append((bucket, work))

    def wait(self) -> None:
        for bucket, work in self._inflight:
            work.wait()
            self.pool.put(bucket)
        self._inflight.clear()

    def checksum(self, params: dict[str, torch.Tensor]) -> float:
        with self.pool.borrowed() as bucket:  # clean: near miss, return inside the with still puts it back
            for tensor in params.values():
                if not bucket.append(tensor):
                    return float("nan")
            return float(bucket.storage[: bucket.filled].float().sum())

    def pack_deltas(self, deltas: dict[str, torch.Tensor], threshold: float) -> Optional[torch.Tensor]:
        bucket = self.pool.get()  # leak: the caller gets a clone and the bucket stays lent
        for tensor in deltas.values():
            if tensor.abs().max() < threshold:
                continue
            if not bucket.append(tensor):
                self.pool.put(bucket)
                return None
        return bucket.storage[: bucket.filled].clone()


def sync_if_idle(publisher: WeightPublisher, params: dict[str, torch.Tensor], pending: int) -> bool:
    publisher.gate.pause()  # clean: near miss, resumed on the busy return and at the end
    if pending:
        publisher.gate.resume()
        return False
    publisher.withdraw()
    publisher.broadcast(params.items(), src=0)
    publisher.gate.resume()
    return True
