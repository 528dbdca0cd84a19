"""Prefill side: copies layers into transfer buffers and posts them."""
import logging
import queue
from typing import Dict, List, Optional

import torch

from .transfer_pool import TransferBuffer, TransferBufferPool

logger = logging.getLogger(__name__)


class LayerSender:
    def __init__(self, pool: TransferBufferPool, out: "queue.Queue[Optional[TransferBuffer]]", layers: int):
        self.pool = pool
        self.out = out
        self.layers = layers
        self.posted: Dict[str, List[TransferBuffer]] = {}

    def _fill(self, kv: torch.Tensor, tag: str) -> TransferBuffer:
        buf = self.pool.acquire()  # clean: handed to the caller
        buf.data[: kv.numel()].copy_(kv.flatten())
        buf.tag = tag
        return buf

    def send_layer(self, rid: str, layer: int, kv: torch.Tensor) -> None:
        self.out.put(self._fill(kv, f"{rid}:{layer}"))  # clean: the receiving side releases what it takes from the queue

    def send_request(self, rid: str, kvs: List[torch.Tensor]) -> bool:
        bufs = []
        for i, kv in enumerate(kvs):
            buf = self._fill(kv, f"{rid}:{i}")  # leak: an abort half way returns with the filled buffers in a local list
            if kv.isnan().any():
                logger.error("request %s layer %d has NaN", rid, i)
                return False
            bufs.append(buf)
        for b in bufs:
            self.out.put(b)
        return True

    def send_request_checked(self, rid: str, kvs: List[torch.Tensor]) -> bool:
        bufs: List[TransferBuffer] = []
        for i, kv in enumerate(kvs):
            buf = self.pool.try_acquire()  # clean: near miss, shortage gives the collected ones back, else they are posted
            if buf is None:
                self.pool.release_all(bufs)
                return False
            buf.data[: kv.numel()].copy_(kv.flatten())
            buf.tag = f"{rid}:{i}"
            bufs.append(buf)
        for b in bufs:
            self.out.put(b)
        return True

    def hold(self, rid: str, kv: torch.Tensor) -> None:
        self.posted.setdefault(rid, []).append(self._fill(kv, rid))  # clean: acknowledge releases the list of the request

    def acknowledge(self, rid: str) -> None:
        self.pool.release_all(self.posted.pop(rid, []))

    def fingerprint(self, kv: torch.Tensor) -> int:
        buf = self._fill(kv, "fp")  # clean: released after reading
        value = hash(tuple(buf.data[:8].tolist()))
        self.pool.release(buf)
        return value

    def preview(self, kv: torch.Tensor) -> torch.Tensor:
        return self._fill(kv, "preview").data[:16].clone()  # leak: the filled buffer is dropped after the copy

    def finish(self) -> None:
        self.out.put(None)
