# Producer side of the KV transfer: copies layers into staging buffers and ships them from a thread.
import logging
import queue
import threading
from dataclasses import dataclass
from typing import Dict, List, Optional

import torch

logger = logging.getLogger("kv.connector")


@dataclass
class TransferJob:
    request_id: str
    layer: int
    buf: torch.Tensor
    done: Optional[threading.Event] = None


class StagingPool:
    def __init__(self, count: int, nbytes: int):
        self._q: "queue.SimpleQueue[torch.Tensor]" = queue.SimpleQueue()
        for _ in range(count):
            self._q.put(torch.empty(nbytes, dtype=torch.uint8))

    def get_buffer(self, timeout: Optional[float] = None) -> Optional[torch.Tensor]:
        try:
            return self._q.get(timeout=timeout)
        except queue.Empty:
            return None

    def return_buffer(self, buf: torch.Tensor) -> None:
        self._q.put(buf)


class Transport:
    def __init__(self, up: bool = True):
        self.up = up
        self.sent = 0

    def send(self, rid: str, layer: int, data: torch.Tensor) -> bool:
        if not self.up:
            return False
        self.sent += data.numel()
        return True


class KVProducer:
    def __init__(self, pool: StagingPool, transport: Transport, max_inflight: int = 16):
        self.pool = pool
        self.transport = transport
        self.jobs: "queue.Queue[Optional[TransferJob]]" = queue.Queue()
        self.held: Dict[str, List[torch.Tensor]] = {}
        self.max_inflight = max_inflight
        self.closing = False
        self._thread = threading.Thread(target=self._loop, daemon=True)

    def start(self):
        self._thread.start()

    def _loop(self):
        while True:
            job = self.jobs.get()
            if job is None:
                return
            try:
                if not self.transport.send(job.request_id, job.layer, job.buf):
                    logger.warning("layer %d of %s not sent", job.layer, job.request_id)
            finally:
                self.pool.return_buffer(job.buf)
                if job.done is not None:
                    job.done.set()

    def save_layer(self, rid: str, layer: int, kv: torch.Tensor) -> bool:
        buf = self.pool.get_buffer(timeout=1.0)  # clean: given to the sender thread, which returns it
        if buf is None:
            return False
        flat = kv.reshape(-1).view(torch.uint8)
        buf[: flat.numel()].copy_(flat)
        self.jobs.put(TransferJob(rid, layer, buf))
        return True

    def save_layer_bounded(self, rid: str, layer: int, kv: torch.Tensor) -> bool:
        buf = self.pool.get_buffer(timeout=1.0)  # leak: when too many jobs are in flight the buffer is dropped
        if buf is None:
            return False
        flat = kv.reshape(-1).view(torch.uint8)
        buf[: flat.numel()].copy_(flat)
        if self.jobs.qsize() >= self.max_inflight:
            logger.info("backlog full, %s/%d is recomputed at the consumer", rid, layer)
            return False
        self.jobs.put(TransferJob(rid, layer, buf))
        return True

    def save_now(self, rid: str, layer: int, kv: torch.Tensor) -> bool:
        buf = self.pool.get_buffer()  # clean: returned in the finally
        assert buf is not None
        try:
            flat = kv.reshape(-1).view(torch.uint8)
            if flat.numel() > buf.numel():
                return False
            staged = buf[: flat.numel()]
            staged.copy_(flat)
            return self.transport.send(rid, layer, staged)
        finally:
            self.pool.return_buffer(buf)

    def save_all(self, rid: str, layers: List[torch.Tensor]) -> int:
        n = 0
        for i, kv in enumerate(layers):
            buf = self.pool.get_buffer(timeout=0.1)  # leak: the break when the send fails skips the return
            if buf is None:
                break
            flat = kv.reshape(-1).view(torch.uint8)
            buf[: flat.numel()].copy_(flat)
            if not self.transport.send(rid, i, buf):
                break
            self.pool.return_buffer(buf)
            n += 1
        return n

    def hold(self, rid: str, kv: torch.Tensor) -> None:
        buf = self.pool.get_buffer()  # clean: kept per request until drop
        flat = kv.reshape(-1).view(torch.uint8)
        buf[: flat.numel()].copy_(flat)
        self.held.setdefault(rid, []).append(buf)

    def drop(self, rid: str) -> None:
        for buf in self.held.pop(rid, ()):
            self.pool.return_buffer(buf)

    def _pair(self) -> Optional[tuple]:
        k = self.pool.get_buffer(timeout=0.5)  # leak: not returned when the second one cannot be had
        if k is None:
            return None
        v = self.pool.get_buffer(timeout=0.5)  # clean: None on failure, else handed to the caller
        if v is None:
            return None
        return k, v

    def save_pair(self, rid: str, layer: int, key: torch.Tensor, value: torch.Tensor) -> bool:
        pair = self._pair()  # clean: both halves are returned after the sends
        if pair is None:
            return False
        kb, vb = pair
        kb[: key.numel()].copy_(key.flatten())
        vb[: value.numel()].copy_(value.flatten())
        ok = self.transport.send(rid, 2 * layer, kb) and self.transport.send(rid, 2 * layer + 1, vb)
        self.pool.return_buffer(kb)
        self.pool.return_buffer(vb)
        return ok

    def checksum(self, key: torch.Tensor, value: torch.Tensor) -> int:
        pair = self._pair()  # leak: only the first half is returned
        if pair is None:
            return 0
        pair[0][: key.numel()].copy_(key.flatten())
        pair[1][: value.numel()].copy_(value.flatten())
        total = int(pair[0].sum()) ^ int(pair[1].sum())
        self.pool.return_buffer(pair[0])
        return total

    def flush(self, rid: str, kv: torch.Tensor) -> None:
        evt = threading.Event()
        buf = self.pool.get_buffer()  # clean: near miss, returned here when closing, else by the thread
        buf.zero_()
        if self.closing:
            self.pool.return_buffer(buf)
            return
        self.jobs.put(TransferJob(rid, -1, buf, evt))
        evt.wait()

    def shutdown(self):
        self.closing = True
        self.jobs.put(None)
        self._thread.join()
        for rid in list(self.held):
            self.drop(rid)
