"""Fixed-size communication buffers, registered once with the communicator."""
from __future__ import annotations

import threading
from collections import deque
from typing import Any, Optional, Sequence, Tuple

try:
    import torch
except ImportError:  # unit tests on CPU boxes
    torch = None

Tensor = Any


def _new_buffer(shape: Sequence[int], dtype, device) -> Tensor:
    if torch is None:
        return bytearray(8)
    return torch.empty(tuple(shape), dtype=dtype, device=device)


class CommBufferPool:
    def __init__(self, shape: Sequence[int], dtype=None, device: str = "cuda", count: int = 8) -> None:
        self.shape = tuple(shape)
        self._free = deque(_new_buffer(shape, dtype, device) for _ in range(count))
        self._cv = threading.Condition()
        self.outstanding = 0

    def acquire(self, timeout: Optional[float] = 30.0) -> Tensor:
        with self._cv:
            if not self._cv.wait_for(lambda: bool(self._free), timeout):
                raise TimeoutError("no communication buffer within %ss" % timeout)
            self.outstanding += 1
            return self._free.popleft()

    def try_acquire(self) -> Optional[Tensor]:
        with self._cv:
            if not self._free:
                return None
            self.outstanding += 1
            return self._free.popleft()

    def release(self, buf: Tensor) -> None:
        with self._cv:
            self.outstanding -= 1
            self._free.append(buf)
            self._cv.notify()

    def acquire_kv(self) -> Optional[Tuple[Tensor, Tensor]]:
        k = self.acquire()  # clean: returned in the pair, or released when the second is missing
        v = self.try_acquire()  # clean: near miss, None-checked, otherwise returned in the pair
        if v is None:
            self.release(k)
            return None
        return k, v
