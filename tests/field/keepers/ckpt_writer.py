"""Background checkpoint writer: tensors are staged in pinned memory and written by a thread."""
from __future__ import annotations

import json
import os
import queue
import threading
from pathlib import Path
from typing import Any, BinaryIO, Dict, List, Optional

import torch

_STOP = object()


class StagingRing:
    """Fixed ring of pinned chunks; take() waits until one is free."""

    def __init__(self, chunks: int, chunk_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        self._free: "queue.Queue[torch.Tensor]" = queue.Queue()
        for _ in range(chunks):
            self._free.put(torch.empty(chunk_bytes, dtype=torch.uint8, pin_memory=True))

    def take(self) -> torch.Tensor:
        return self._free.get()

    def try_take(self) -> Optional[torch.Tensor]:
        try:
            return self._free.get_nowait()
        except queue.Empty:
            return None

    def put(self, chunk: torch.Tensor) -> None:
        self._free.put(chunk)


class ShardFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.handle: BinaryIO = open(path, "wb")  # clean: the handle is closed by ShardFile.close

    def append(self, data: torch.Tensor) -> int:
        offset = self.handle.tell()
        self.handle.write(data.numpy().tobytes())
        return offset

    def close(self) -> None:
        self.handle.flush()
        os.fsync(self.handle.fileno())
        self.handle.close()


class CheckpointWriter:
    def __init__(self, root: Path, ring: StagingRing) -> None:
        self.root = root
        self.ring = ring
        self.jobs: "queue.Queue[Any]" = queue.Queue(maxsize=64)
        self.index: Dict[str, Dict[str, Any]] = {}
        self.files: Dict[str, ShardFile] = {}
        self.failed: List[str] = []
        self.thread = threading.Thread(target=self._loop, daemon=True)
        self.thread.start()

    def _shard(self, name: str) -> ShardFile:
        if name not in self.files:
            self.files[name] = ShardFile(self.root / f"{name}.bin")  # clean: closed for every entry of files in finish
        return self.files[name]

    def submit(self, key: str, tensor: torch.Tensor, shard: str) -> None:
        raw = tensor.contiguous().view(torch.uint8).view(-1)
        for start in range(0, raw.numel(), self.ring.chunk_bytes):
            part = raw[start:start + self.ring.chunk_bytes]
            chunk = self.ring.take()  # clean: near miss, travels in the job and the loop puts it back also after OSError
            chunk[:part.numel()].copy_(part)
            self.jobs.put({"key": key, "shard": shard, "chunk": chunk, "n": part.numel(), "part": start})

    def submit_small(self, key: str, tensor: torch.Tensor, shard: str) -> bool:
        chunk = self.ring.try_take()  # leak: an oversized tensor is refused after the chunk was taken
        if chunk is None:
            return False
        raw = tensor.contiguous().view(torch.uint8).view(-1)
        if raw.numel() > self.ring.chunk_bytes:
            return False
        chunk[:raw.numel()].copy_(raw)
        self.jobs.put({"key": key, "shard": shard, "chunk": chunk, "n": raw.numel(), "part": 0})
        return True

    def submit_if_idle(self, key: str, tensor: torch.Tensor, shard: str) -> bool:
        chunk = self.ring.try_take()  # clean: near miss, put back when the job queue refuses it
        if chunk is None:
            return False
        raw = tensor.contiguous().view(torch.uint8).view(-1)[:self.ring.chunk_bytes]
        chunk[:raw.numel()].copy_(raw)
        job = {"key": key, "shard": shard, "chunk": chunk, "n": raw.numel(), "part": 0}
        try:
            self.jobs.put_nowait(job)
        except queue.Full:
            self.ring.put(chunk)
            return False
        return True

    def submit_latest(self, key: str, tensor: torch.Tensor, shard: str) -> bool:
        chunk = self.ring.take()  # leak: lost with the dropped job when the queue is full
        raw = tensor.contiguous().view(torch.uint8).view(-1)[:self.ring.chunk_bytes]
        chunk[:raw.numel()].copy_(raw)
        try:
            self.jobs.put_nowait({"key": key, "shard": shard, "chunk": chunk, "n": raw.numel(), "part": 0})
        except queue.Full:
            self.failed.append(key)
            return False
        return True

    def _loop(self) -> None:
        while True:
            job = self.jobs.get()
            if job is _STOP:
                return
            try:
                offset = self._shard(job["shard"]).append(job["chunk"][:job["n"]])
                self.index.setdefault(job["key"], {"parts": []})["parts"].append((job["part"], offset, job["n"]))
            except OSError:
                self.failed.append(job["key"])
            finally:
                self.ring.put(job["chunk"])

    def finish(self) -> None:
        self.jobs.put(_STOP)
        self.thread.join()
        for shard in self.files.values():
            shard.close()
        self.files.clear()
        meta = open(self.root / "index.json", "w")  # clean: closed on the next lines
        json.dump(self.index, meta)
        meta.close()

    def write_manifest(self, step: int) -> bool:
        out = open(self.root / f"manifest-{step}.txt", "w")  # leak: left open when a write has failed
        if self.failed:
            out.write("INCOMPLETE\n")
            return False
        for key in sorted(self.index):
            out.write(f"{key}\n")
        out.close()
        return True

    def verify(self, shard: str, digest: int) -> bool:
        chunk = self.ring.take()  # clean: the finally puts it back on every return
        try:
            path = self.root / f"{shard}.bin"
            if not path.exists():
                return False
            with open(path, "rb") as handle:  # clean: closed by with
                data = handle.read(self.ring.chunk_bytes)
            chunk[:len(data)].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            return int(chunk[:len(data)].long().sum()) == digest
        finally:
            self.ring.put(chunk)

    def compare(self, left: torch.Tensor, right: torch.Tensor) -> bool:
        chunk = self.ring.take()  # clean: put back before the second take
        chunk[:left.numel()].copy_(left.view(torch.uint8).view(-1)[:left.numel()])
        total = int(chunk[:left.numel()].long().sum())
        self.ring.put(chunk)
        chunk = self.ring.take()  # clean: near miss, the name is bound anew but the first chunk is already back
        chunk[:right.numel()].copy_(right.view(torch.uint8).view(-1)[:right.numel()])
        other = int(chunk[:right.numel()].long().sum())
        self.ring.put(chunk)
        return total == other

    def part_sums(self, tensor: torch.Tensor) -> List[int]:
        sums: List[int] = []
        chunk: Optional[torch.Tensor] = None
        for part in tensor.view(torch.uint8).view(-1).split(self.ring.chunk_bytes):
            chunk = self.ring.take()  # leak: bound over the previous part's chunk, only the last one is put back
            chunk[:part.numel()].copy_(part)
            sums.append(int(chunk[:part.numel()].long().sum()))
        if chunk is not None:
            self.ring.put(chunk)
        return sums
