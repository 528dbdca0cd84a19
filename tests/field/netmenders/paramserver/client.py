from __future__ import annotations

import zlib
from typing import Callable, Optional

import torch

from .buffers import WireBuffers
from .codec import decode, encode


class PullClient:
    def __init__(self, buffers: WireBuffers, recv_into: Callable[[memoryview], int], send: Callable[[memoryview], bool]):
        self.buffers = buffers
        self.recv_into = recv_into
        self.send = send
        self.version = -1

    def fingerprint(self, t: torch.Tensor) -> int:
        return zlib.crc32(bytes(encode(self.buffers, 0, t) or b""))  # leak: the rented frame is copied to bytes and dropped

    def pull(self, into: torch.Tensor) -> bool:
        buf = self.buffers.rent(into.numel() * into.element_size() + 12)  # clean: given back in finally
        if buf is None:
            return False
        try:
            if self.recv_into(memoryview(buf)) == 0:
                return False
            version, fresh = decode(buf, into)
            if version <= self.version:
                return False
            into.copy_(fresh)
            self.version = version
            return True
        finally:
            self.buffers.unrent(buf)

    def push(self, grad: torch.Tensor, attempts: int = 3) -> bool:
        for _ in range(attempts):
            frame = encode(self.buffers, self.version, grad)  # leak: a refused send rents anew without giving this one back
            if frame is None:
                return False
            if self.send(memoryview(frame)):
                self.buffers.unrent(frame)
                return True
        return False

    def push_one_frame(self, grad: torch.Tensor, attempts: int = 3) -> bool:
        frame: Optional[bytearray] = encode(self.buffers, self.version, grad)  # clean: one frame for all attempts, given back at the end
        if frame is None:
            return False
        sent = False
        for _ in range(attempts):
            sent = self.send(memoryview(frame))
            if sent:
                break
        self.buffers.unrent(frame)
        return sent
