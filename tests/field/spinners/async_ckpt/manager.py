"""Snapshots state into staging memory and writes it from a background thread."""
from __future__ import annotations

import logging
import os
import queue
import threading
from dataclasses import dataclass, field
from typing import Callable, Dict, Optional

from .files import RecordFile
from .staging import StagingLease, StagingPool

log = logging.getLogger(__name__)


@dataclass
class SaveRequest:
    step: int
    leases: Dict[str, StagingLease] = field(default_factory=dict)
    on_done: Optional[Callable[[int], None]] = None
    cancelled: bool = False


class AsyncCheckpointer:
    def __init__(self, root: str, pool: StagingPool) -> None:
        self.root = root
        self.pool = pool
        self._queue: "queue.Queue[Optional[SaveRequest]]" = queue.Queue()
        self._last: Optional[StagingLease] = None
        self._thread = threading.Thread(target=self._writer, daemon=True)
        self._thread.start()

    def save(self, step: int, state: Dict[str, bytes],
             on_done: Optional[Callable[[int], None]] = None) -> bool:
        """Stage everything and queue it; False when staging memory is short."""
        req = SaveRequest(step, on_done=on_done)
        for name, data in state.items():
            lease = self.pool.lease(len(data))  # clean: near miss, kept by the request, which is queued or rolled back
            if lease is None:
                self._drop(req)
                return False
            lease.store(data)
            req.leases[name] = lease
        self._queue.put(req)
        return True

    def save_partial(self, step: int, state: Dict[str, bytes]) -> bool:
        req = SaveRequest(step)
        for name, data in state.items():
            lease = self.pool.lease_wait(len(data), timeout=1.0)  # leak: the request is abandoned with the earlier leases when one is None
            if lease is None:
                log.warning("step %d: staging is full, not saved", step)
                return False
            lease.store(data)
            req.leases[name] = lease
        self._queue.put(req)
        return True

    def _drop(self, req: SaveRequest) -> None:
        for lease in req.leases.values():
            self.pool.unlease(lease)
        req.leases.clear()

    def _writer(self) -> None:
        while True:
            req = self._queue.get()
            if req is None:
                return
            try:
                if req.cancelled:
                    continue
                self._write(req)
            except OSError:
                log.exception("step %d was not written", req.step)
            finally:
                self._drop(req)

    def _write(self, req: SaveRequest) -> None:
        rec = RecordFile(os.path.join(self.root, f"step{req.step}.ckpt"))  # leak: an OSError from append is logged by the writer, and the file stays open
        for name, lease in req.leases.items():
            rec.append(name, lease.bytes())
        rec.commit()
        if req.on_done is not None:
            req.on_done(req.step)

    def stage_optimizer(self, data: bytes) -> bool:
        """Keeps the newest optimizer image in staging memory."""
        lease = self.pool.lease(len(data))  # clean: near miss, the previous image is returned before it is replaced
        if lease is None:
            return False
        lease.store(data)
        if self._last is not None:
            self.pool.unlease(self._last)
        self._last = lease
        return True

    def optimizer_image(self) -> Optional[bytes]:
        return self._last.bytes() if self._last is not None else None

    def grow_optimizer(self, nbytes: int) -> bool:
        if self._last is None:
            return False
        bigger = self.pool.resize(self._last, nbytes)  # clean: replaces the lease that resize gave back
        if bigger is None:
            return False
        self._last = bigger
        return True

    def save_rng(self, step: int, blob: bytes, attempts: int = 3) -> bool:
        for attempt in range(attempts):
            lease = self.pool.lease(len(blob))  # leak: a failed attempt goes into the next turn with its lease
            if lease is None:
                continue
            lease.store(blob)
            try:
                self._write(SaveRequest(step, {"rng": lease}))
            except OSError as exc:
                log.warning("attempt %d: %s", attempt, exc)
                continue
            self.pool.unlease(lease)
            return True
        return False

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()
        if self._last is not None:
            self.pool.unlease(self._last)
            self._last = None
