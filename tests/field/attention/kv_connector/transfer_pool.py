import queue
from dataclasses import dataclass
from typing import List, Optional

import torch


@dataclass
class TransferBuffer:
    index: int
    data: torch.Tensor
    tag: str = ""


class TransferBufferPool:
    def __init__(self, count: int, elems: int):
        self._q: "queue.Queue[TransferBuffer]" = queue.Queue()
        for i in range(count):
            self._q.put(TransferBuffer(i, torch.empty(elems)))

    def acquire(self, timeout: Optional[float] = None) -> TransferBuffer:
        return self._q.get(timeout=timeout)

    def try_acquire(self) -> Optional[TransferBuffer]:
        try:
            return self._q.get_nowait()
        except queue.Empty:
            return None

    def release(self, buf: TransferBuffer) -> None:
        buf.tag = ""
        self._q.put(buf)

    def release_all(self, bufs: List[TransferBuffer]) -> None:
        for b in bufs:
            self.release(b)
