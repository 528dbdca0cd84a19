"""Memory tiers: device, host, disk. All of them speak allocate/free in chunks."""
from __future__ import annotations

import logging
import os
from typing import Dict, List, Optional, Protocol

import torch

logger = logging.getLogger(__name__)


class Tier(Protocol):
    name: str

    def allocate(self, n: int) -> Optional[List[int]]: ...

    def free(self, chunks: List[int]) -> None: ...

    def read(self, chunk: int) -> torch.Tensor: ...

    def write(self, chunk: int, data: torch.Tensor) -> None: ...


class TensorTier:
    def __init__(self, name: str, chunks: int, chunk_numel: int, device: str = "cpu") -> None:
        self.name = name
        self.data = torch.zeros(chunks, chunk_numel, device=device)
        self._free = set(range(chunks))

    def allocate(self, n: int) -> Optional[List[int]]:
        if len(self._free) < n:
            return None
        return [self._free.pop() for _ in range(n)]  # clean: the list goes to the caller

    def allocate_one_by_one(self, n: int) -> Optional[List[int]]:
        got: List[int] = []
        for _ in range(n):
            if not self._free:
                logger.debug("%s full after %d of %d chunks", self.name, len(got), n)
                return None
            got.append(self._free.pop())  # leak: chunks popped before the tier ran out are dropped with the list
        return got

    def free(self, chunks: List[int]) -> None:
        self._free.update(chunks)

    def read(self, chunk: int) -> torch.Tensor:
        return self.data[chunk]

    def write(self, chunk: int, data: torch.Tensor) -> None:
        self.data[chunk].copy_(data)


class DiskTier:
    def __init__(self, path: str, chunks: int, chunk_numel: int) -> None:
        self.name = "disk"
        self.numel = chunk_numel
        self._free = list(range(chunks))
        self._fh = open(path, "w+b")  # clean: close() closes it
        self.written: Dict[int, int] = {}

    def allocate(self, n: int) -> Optional[List[int]]:
        if len(self._free) < n:
            return None
        out, self._free = self._free[:n], self._free[n:]  # clean: split in two, the caller gets the first part
        return out

    def free(self, chunks: List[int]) -> None:
        self._free.extend(chunks)
        for c in chunks:
            self.written.pop(c, None)

    def read(self, chunk: int) -> torch.Tensor:
        self._fh.seek(chunk * self.numel * 4)
        return torch.frombuffer(bytearray(self._fh.read(self.numel * 4)), dtype=torch.float32)

    def write(self, chunk: int, data: torch.Tensor) -> None:
        self._fh.seek(chunk * self.numel * 4)
        self._fh.write(data.float().cpu().numpy().tobytes())
        self.written[chunk] = data.numel()

    def close(self) -> None:
        self._fh.flush()
        os.fsync(self._fh.fileno())
        self._fh.close()
