"""Asynchronous checkpoint writer.

Tensors are copied to pinned staging buffers, then written by a background thread.
"""

import io
import json
import logging
import os
import queue
import threading
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional

import torch

LOG = logging.getLogger(__name__)


class StagingPool:
    def __init__(self, buffer_bytes: int, n_buffers: int) -> None:
        self.buffer_bytes = buffer_bytes
        self._q: "queue.LifoQueue[torch.Tensor]" = queue.LifoQueue()
        for _ in range(n_buffers):
            self._q.put(torch.empty(buffer_bytes, dtype=torch.uint8))

    def get_buffer(self, block: bool = True) -> Optional[torch.Tensor]:
        try:
            return self._q.get(block)  # clean: handed to the caller
        except queue.Empty:
            return None

    def return_buffer(self, buf: torch.Tensor) -> None:
        self._q.put(buf)


class CheckpointWriter:
    def __init__(self, root: Path, staging: StagingPool, keep: int = 3) -> None:
        self.root = root
        self.staging = staging
        self.keep = keep
        self._jobs: "queue.Queue[Any]" = queue.Queue()
        self._manifest: Optional[io.TextIOBase] = None
        self._index: Optional[io.TextIOBase] = None
        self._thread = threading.Thread(target=self._drain, daemon=True)
        self._thread.start()

    def begin(self, step: int) -> None:
        folder = self.root / f"step_{step:08d}"
        folder.mkdir(parents=True, exist_ok=True)
        self._manifest = open(folder / "manifest.json", "w")  # clean: end() closes it
        self._index = open(folder / "index.txt", "w")  # leak: end() forgets the index

    def end(self) -> None:
        if self._manifest is not None:
            self._manifest.close()
            self._manifest = None
        self._index = None

    def stage(self, name: str, t: torch.Tensor) -> None:
        buf = self.staging.get_buffer()  # clean: queued, the drain thread returns it
        flat = t.detach().cpu().contiguous().view(torch.uint8).view(-1)
        buf[: flat.numel()].copy_(flat)
        self._jobs.put((name, buf, flat.numel()))

    def stage_nowait(self, name: str, t: torch.Tensor) -> bool:
        buf = self.staging.get_buffer(block=False)  # leak: a tensor too large for the buffer returns with it
        if buf is None:
            return False
        flat = t.detach().cpu().contiguous().view(torch.uint8).view(-1)
        if flat.numel() > buf.numel():
            LOG.warning("%s: %d bytes do not fit in a staging buffer", name, flat.numel())
            return False
        buf[: flat.numel()].copy_(flat)
        self._jobs.put((name, buf, flat.numel()))
        return True

    def stage_chunked(self, name: str, t: torch.Tensor) -> int:
        flat = t.detach().cpu().contiguous().view(torch.uint8).view(-1)
        size = self.staging.buffer_bytes
        n = 0
        for off in range(0, flat.numel(), size):
            buf = self.staging.get_buffer()  # clean: every chunk is queued
            chunk = flat[off : off + size]
            buf[: chunk.numel()].copy_(chunk)
            self._jobs.put((f"{name}.{n}", buf, chunk.numel()))
            n += 1
        return n

    def _drain(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            name, buf, n = job
            try:
                with open(self.root / name, "wb") as fh:  # clean: with closes it
                    fh.write(buf[:n].numpy().tobytes())
            except OSError:
                LOG.exception("writing %s", name)
            finally:
                self.staging.return_buffer(buf)

    def write_sync(self, name: str, t: torch.Tensor) -> bool:
        buf = self.staging.get_buffer()  # leak: the handler swallows the error and the buffer
        flat = t.contiguous().view(torch.uint8).view(-1)
        try:
            buf[: flat.numel()].copy_(flat)
            (self.root / name).write_bytes(buf[: flat.numel()].numpy().tobytes())
        except OSError as exc:
            LOG.error("write of %s failed: %s", name, exc)
            return False
        self.staging.return_buffer(buf)
        return True

    def write_sync_retry(self, name: str, t: torch.Tensor, attempts: int = 3) -> bool:
        buf = self.staging.get_buffer()  # clean: near miss, one buffer for all attempts and it goes back on both ends
        flat = t.contiguous().view(torch.uint8).view(-1)
        buf[: flat.numel()].copy_(flat)
        ok = False
        for _ in range(attempts):
            try:
                (self.root / name).write_bytes(buf[: flat.numel()].numpy().tobytes())
                ok = True
                break
            except OSError:
                continue
        self.staging.return_buffer(buf)
        return ok

    def read_meta(self, step: int) -> Mapping[str, Any]:
        fh = open(self.root / f"step_{step:08d}" / "manifest.json")  # leak: the version check returns before the close
        meta = json.load(fh)
        if meta.get("version", 0) < 2:
            return {}
        fh.close()
        return meta

    def header(self, path: Path) -> bytes:
        fd = os.open(path, os.O_RDONLY)  # clean: closed on the finally
        try:
            head = os.read(fd, 64)
            if not head.startswith(b"CKPT"):
                return b""
            return head
        finally:
            os.close(fd)

    def merge(self, parts: List[Path], target: Path) -> int:
        out = open(target, "wb")  # clean: near miss, closed on the empty part too
        total = 0
        for part in parts:
            with part.open("rb") as src:  # clean: with closes it on the early return as well
                data = src.read()
                if not data:
                    out.close()
                    return -1
                total += out.write(data)
        out.close()
        return total

    def latest(self) -> Dict[str, Any]:
        for folder in sorted(self.root.glob("step_*"), reverse=True):
            fh = open(folder / "manifest.json")  # leak: an incomplete checkpoint continues with the file open
            meta = json.load(fh)
            if not meta.get("complete"):
                continue
            fh.close()
            return meta
        return {}

    def shutdown(self) -> None:
        self._jobs.put(None)
        self._thread.join()
