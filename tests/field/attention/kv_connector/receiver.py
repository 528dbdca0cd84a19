"""Decode side of the connector."""
import queue
from typing import Dict, List, Optional

import torch

from .sender import LayerSender
from .transfer_pool import TransferBuffer, TransferBufferPool


class LayerReceiver:
    def __init__(self, pool: TransferBufferPool, inbox: "queue.Queue[Optional[TransferBuffer]]"):
        self.pool = pool
        self.inbox = inbox
        self.staged: Dict[str, TransferBuffer] = {}

    def pump(self, cache: Dict[str, torch.Tensor]) -> int:
        n = 0
        while True:
            buf = self.inbox.get()
            if buf is None:
                return n
            if buf.tag in cache:
                cache[buf.tag].copy_(buf.data[: cache[buf.tag].numel()].view_as(cache[buf.tag]))
                n += 1
            self.pool.release(buf)

    def stage(self, tag: str, data: torch.Tensor) -> None:
        buf = self.pool.acquire(timeout=1.0)  # clean: near miss, a buffer staged under the same tag is released first
        buf.data[: data.numel()].copy_(data.flatten())
        prev = self.staged.pop(tag, None)
        if prev is not None:
            self.pool.release(prev)
        self.staged[tag] = buf

    def unstage_all(self) -> None:
        for b in self.staged.values():
            self.pool.release(b)
        self.staged.clear()

    def collect(self, tags: List[str]) -> List[torch.Tensor]:
        out = []
        for t in tags:
            buf = self.pool.try_acquire()  # leak: tags that are not staged continue with the new buffer in hand
            if buf is None:
                break
            src = self.staged.get(t)
            if src is None:
                continue
            buf.data.copy_(src.data)
            out.append(buf.data.clone())
            self.pool.release(buf)
        return out


def loopback(layers: int, kvs: List[torch.Tensor]) -> int:
    pool = TransferBufferPool(layers, max(k.numel() for k in kvs))
    q: "queue.Queue[Optional[TransferBuffer]]" = queue.Queue()
    tx, rx = LayerSender(pool, q, layers), LayerReceiver(pool, q)
    cache = {f"r0:{i}": torch.zeros_like(k) for i, k in enumerate(kvs)}
    for i, k in enumerate(kvs):
        tx.send_layer("r0", i, k)
    tx.finish()
    return rx.pump(cache)
