import itertools
import queue
import threading
import time
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence

import numpy as np
import torch


class PinnedStaging:
    """Fixed set of page-locked host buffers, handed out through a queue."""

    def __init__(self, count: int, nbytes: int, pin: bool = True):
        self._q = queue.Queue()
        for _ in range(count):
            t = torch.empty(nbytes, dtype=torch.uint8)
            self._q.put(t.pin_memory() if pin and torch.cuda.is_available() else t)
        self.nbytes = nbytes

    def checkout(self, timeout=None):
        return self._q.get(timeout=timeout)  # clean: handed to the caller

    def try_checkout(self):
        try:
            return self._q.get_nowait()  # clean: handed to the caller
        except queue.Empty:
            return None

    def checkin(self, buf):
        self._q.put(buf)


class StagedLoader:
    def __init__(self, dataset, staging: PinnedStaging, device="cpu", batch_size=8, collate=None, drop_short=False):
        self.dataset = dataset
        self.staging = staging
        self.device = torch.device(device)
        self.batch_size = batch_size
        self.collate = collate or (lambda rows: np.concatenate([r.reshape(-1) for r in rows]))
        self.drop_short = drop_short
        self.skipped = 0
        self._ready: "queue.Queue[Optional[tuple]]" = queue.Queue(maxsize=4)
        self._stop = threading.Event()

    def _batches(self) -> Iterator[List[Any]]:
        it = iter(self.dataset)
        while chunk := list(itertools.islice(it, self.batch_size)):
            yield chunk

    def __iter__(self):
        for rows in self._batches():
            buf = self.staging.checkout()  # leak: short batches are skipped with the buffer still out
            if self.drop_short and len(rows) < self.batch_size:
                self.skipped += 1
                continue
            flat = torch.from_numpy(self.collate(rows)).view(torch.uint8)
            buf[: flat.numel()].copy_(flat)
            yield buf[: flat.numel()].to(self.device, copy=True)
            self.staging.checkin(buf)

    def iter_sized(self, limit: int):
        """Like __iter__, but stops after `limit` bytes were staged."""
        total = 0
        for rows in self._batches():
            flat = torch.from_numpy(self.collate(rows)).view(torch.uint8)
            if total + flat.numel() > limit:
                break
            buf = self.staging.checkout()  # clean: near miss, the break comes before the checkout
            try:
                buf[: flat.numel()].copy_(flat)
                total += flat.numel()
                yield buf[: flat.numel()].to(self.device, copy=True)
            finally:
                self.staging.checkin(buf)

    def _produce(self) -> None:
        for rows in self._batches():
            if self._stop.is_set():
                break
            buf = self.staging.checkout()  # clean: travels through the queue, stream() checks it in
            flat = torch.from_numpy(self.collate(rows)).view(torch.uint8)
            n = flat.numel()
            buf[:n].copy_(flat)
            self._ready.put((buf, n))
        self._ready.put(None)

    def stream(self):
        t = threading.Thread(target=self._produce, daemon=True)
        t.start()
        while (item := self._ready.get()) is not None:
            buf, n = item
            out = buf[:n].to(self.device, copy=True)
            self.staging.checkin(buf)
            yield out
        t.join()

    def peek(self) -> Optional[int]:
        """Size in bytes of the first batch."""
        buf = self.staging.try_checkout()  # leak: an empty dataset falls out of the loop and the buffer stays out
        if buf is None:
            return None
        for rows in self._batches():
            flat = torch.from_numpy(self.collate(rows)).view(torch.uint8)
            buf[: flat.numel()].copy_(flat)
            self.staging.checkin(buf)
            return int(flat.numel())
        return None

    def prime(self, n: int) -> float:
        """Touch n buffers once so that the first epoch is not slow."""
        t0 = time.perf_counter()
        held = []
        for _ in range(n):
            b = self.staging.try_checkout()  # clean: collected and all checked in below
            if b is None:
                break
            b.zero_()
            held.append(b)
        for b in held:
            self.staging.checkin(b)
        return time.perf_counter() - t0

    def checksum(self, rows: Sequence[np.ndarray]) -> int:
        buf = self.staging.checkout(timeout=5.0)  # leak: for a too large batch ValueError is raised with the buffer out
        flat = torch.from_numpy(self.collate(rows)).view(torch.uint8)
        if flat.numel() > self.staging.nbytes:
            raise ValueError("batch larger than staging buffer")
        buf[: flat.numel()].copy_(flat)
        value = int(buf[: flat.numel()].sum(dtype=torch.int64))
        self.staging.checkin(buf)
        return value

    def transform_inplace(self, rows: Sequence[np.ndarray], fns: Iterable[Callable[[torch.Tensor], None]]) -> torch.Tensor:
        buf = self.staging.checkout()  # clean: checked in in finally
        try:
            flat = torch.from_numpy(self.collate(rows)).view(torch.uint8)
            view = buf[: flat.numel()]
            view.copy_(flat)
            for fn in fns:
                fn(view)
            return view.clone()
        finally:
            self.staging.checkin(buf)


def summary(loader: StagedLoader) -> Dict[str, int]:
    return {"skipped": loader.skipped, "nbytes": loader.staging.nbytes}
