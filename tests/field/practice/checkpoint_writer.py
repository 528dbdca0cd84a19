"""Asynchronous distributed checkpoints: snapshot to host, write in a worker thread."""
from __future__ import annotations

import hashlib
import io
import logging
import os
import pathlib
import queue
import tempfile
import threading
from typing import Mapping, NamedTuple

import torch

logger = logging.getLogger("ckpt")


class Snapshot(NamedTuple):
    step: int
    tensors: dict[str, torch.Tensor]


class HostCache:
    """Host copies keyed by shape; a checkpoint every N steps reuses the same memory."""

    def __init__(self, cap: int = 4096) -> None:
        self._by_meta: dict[tuple, list[torch.Tensor]] = {}
        self._lent = 0
        self._cap = cap

    def checkout_tensor(self, like: torch.Tensor) -> torch.Tensor | None:
        if self._lent == self._cap:
            return None
        self._lent += 1
        lst = self._by_meta.get((like.shape, like.dtype))
        return lst.pop() if lst else torch.empty(like.shape, dtype=like.dtype)

    def checkin_tensor(self, t: torch.Tensor) -> None:
        self._lent -= 1
        self._by_meta.setdefault((t.shape, t.dtype), []).append(t)


class CheckpointWriter:
    def __init__(self, root: pathlib.Path, cache: HostCache, rank: int = 0) -> None:
        self.root = root
        self.cache = cache
        self.rank = rank
        self._q: queue.Queue[Snapshot | None] = queue.Queue(maxsize=2)
        self._slots = threading.BoundedSemaphore(2)
        self._worker = threading.Thread(target=self._run, daemon=True)
        self._worker.start()

    # -- producer
    def save(self, step: int, state: Mapping[str, torch.Tensor]) -> bool:
        if not self._slots.acquire(timeout=30):  # clean: near miss, the worker releases after writing
            logger.warning("writer is behind, skipping step %d", step)
            return False
        snap: dict[str, torch.Tensor] = {}
        for k, v in state.items():
            host = self.cache.checkout_tensor(v)  # clean: travels in the snapshot, the worker checks it in
            if host is None:
                host = torch.empty_like(v, device="cpu")
            host.copy_(v, non_blocking=True)
            snap[k] = host
        self._q.put(Snapshot(step, snap))
        return True

    # -- consumer
    def _run(self) -> None:
        while (snap := self._q.get()) is not None:
            self._write(snap)
            for t in snap.tensors.values():
                self.cache.checkin_tensor(t)
            self._slots.release()

    def _write(self, snap: Snapshot) -> None:
        tmp = self.root / f".{snap.step}.{self.rank}.tmp"
        with open(tmp, "wb") as fh:  # clean: with block
            torch.save(snap.tensors, fh)
            fh.flush()
            os.fsync(fh.fileno())
        tmp.rename(self.root / f"{snap.step}.{self.rank}.pt")

    def stop(self) -> None:
        self._q.put(None)
        self._worker.join()

    # -- odds and ends
    def digest(self, state: Mapping[str, torch.Tensor]) -> str | None:
        h = hashlib.sha256()
        for k in sorted(state):
            host = self.cache.checkout_tensor(state[k])  # leak: sparse tensors are skipped after the checkout
            if host is None:
                return None
            if state[k].is_sparse:
                continue
            host.copy_(state[k])
            h.update(host.numpy().tobytes())
            self.cache.checkin_tensor(host)
        return h.hexdigest()

    def diff(self, a: torch.Tensor, b: torch.Tensor) -> float:
        ha = self.cache.checkout_tensor(a)  # leak: dropped when there is none for b
        hb = self.cache.checkout_tensor(b)  # clean: None in the early return's second case, checked in otherwise
        if ha is None:
            if hb is not None:
                self.cache.checkin_tensor(hb)
            return -1.0
        if hb is None:
            return -1.0
        ha.copy_(a)
        hb.copy_(b)
        d = (ha - hb).abs().max().item()
        self.cache.checkin_tensor(ha)
        self.cache.checkin_tensor(hb)
        return d

    def max_diff(self, a: torch.Tensor, b: torch.Tensor) -> float:
        ha = self.cache.checkout_tensor(a)  # clean: near miss, checked in by the loop over what is there
        hb = self.cache.checkout_tensor(b)  # clean: near miss, the same loop
        d = -1.0
        if ha is not None and hb is not None:
            ha.copy_(a)
            hb.copy_(b)
            d = (ha - hb).abs().max().item()
        for h in (ha, hb):
            if h is not None:
                self.cache.checkin_tensor(h)
        return d

    def read_step(self) -> int:
        fh = open(self.root / "latest")  # leak: a file that is no number returns -1 with the file open
        text = fh.read().strip()
        if not text.isdigit():
            return -1
        fh.close()
        return int(text)

    def write_step(self, step: int) -> None:
        fh = tempfile.NamedTemporaryFile("w", dir=self.root, delete=False)  # clean: closed before the rename
        fh.write(str(step))
        fh.close()
        os.replace(fh.name, self.root / "latest")

    def copy_metadata(self, names: list[str], dst: io.TextIOBase) -> int:
        n = 0
        for name in names:
            fh = open(self.root / name)  # clean: near miss, closed on the break and at the end of the turn
            line = fh.readline()
            if not line:
                fh.close()
                break
            n += dst.write(line)
            fh.close()
        return n

    def pause(self) -> None:
        self._slots.acquire()  # clean: near miss, resume() is the other half

    def resume(self) -> None:
        self._slots.release()
