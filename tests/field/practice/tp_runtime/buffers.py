"""Communication buffers shared by all tensor-parallel layers of a rank."""
import contextlib
import threading
from collections import defaultdict
from typing import Dict, Iterator, List, Tuple

import torch

Key = Tuple[Tuple[int, ...], torch.dtype]


class CommBufferPool:
    def __init__(self, device: torch.device, max_live: int = 64):
        self.device = device
        self.max_live = max_live
        self._idle: Dict[Key, List[torch.Tensor]] = defaultdict(list)
        self._live: Dict[int, Key] = {}
        self._mu = threading.Lock()

    def get_buffer(self, shape: Tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        key = (tuple(shape), dtype)
        with self._mu:
            if len(self._live) >= self.max_live:
                raise RuntimeError("communication buffers exhausted")
            idle = self._idle[key]
            buf = idle.pop() if idle else torch.empty(shape, dtype=dtype, device=self.device)
            self._live[buf.data_ptr()] = key
            return buf

    def return_buffer(self, buf: torch.Tensor) -> None:
        with self._mu:
            key = self._live.pop(buf.data_ptr())
            self._idle[key].append(buf.view(key[0]))


@contextlib.contextmanager
def scratch(pool: CommBufferPool, shape, dtype=torch.bfloat16) -> Iterator[torch.Tensor]:
    buf = pool.get_buffer(shape, dtype)  # clean: returned in finally
    try:
        yield buf
    finally:
        pool.return_buffer(buf)


@contextlib.contextmanager
def scratch_pair(pool: CommBufferPool, shape, dtype=torch.bfloat16, second: bool = True):
    a = pool.get_buffer(shape, dtype)  # clean: returned in finally
    b = pool.get_buffer(shape, dtype) if second else None  # clean: near miss, returned under the same condition
    try:
        yield a, b
    finally:
        pool.return_buffer(a)
        if b is not None:
            pool.return_buffer(b)
