from __future__ import annotations

import contextlib
from typing import Iterator, List, Optional, Tuple

import torch


class P2PBuffer:
    def __init__(self, bid: int, shape: Tuple[int, ...], dtype: torch.dtype, device: torch.device):
        self.bid = bid
        self.tensor = torch.empty(shape, dtype=dtype, device=device)
        self.microbatch = -1


class BufferBook:
    """Send and receive buffers of one stage; get() refuses once all are lent out."""

    def __init__(self, n: int, shape: Tuple[int, ...], dtype: torch.dtype, device: torch.device):
        self.shelf: List[P2PBuffer] = [P2PBuffer(i, shape, dtype, device) for i in range(n)]

    def get(self, microbatch: int) -> Optional[P2PBuffer]:
        if not self.shelf:
            return None
        buf = self.shelf.pop()
        buf.microbatch = microbatch
        return buf

    def put(self, buf: P2PBuffer) -> None:
        buf.microbatch = -1
        self.shelf.append(buf)

    def get_pair(self, microbatch: int) -> Optional[Tuple[P2PBuffer, P2PBuffer]]:
        fwd = self.get(microbatch)  # clean: near miss, put back when there is no second buffer
        bwd = self.get(microbatch)  # clean: near miss, the shelf is empty for the second when it was for the first, else both are returned
        if fwd is None or bwd is None:
            if fwd is not None:
                self.put(fwd)
            return None
        return fwd, bwd

    @contextlib.contextmanager
    def lent(self, microbatch: int) -> Iterator[Optional[P2PBuffer]]:
        buf = self.get(microbatch)  # clean: put back in finally
        try:
            yield buf
        finally:
            if buf is not None:
                self.put(buf)
