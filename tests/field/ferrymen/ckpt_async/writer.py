"""Writing of shards: a queue of save jobs, each with the regions it still has to put on disk."""
from __future__ import annotations

import hashlib
import json
import os
import queue
import threading
import time
from dataclasses import dataclass, field
from typing import Callable, Mapping, Optional

import torch

from .staging import Region, StagingArena, stage_copy, staged


@dataclass
class SaveJob:
    step: int
    path: str
    regions: dict = field(default_factory=dict)
    on_done: Optional[Callable[[int], None]] = None
    cancelled: bool = False

    def release(self) -> None:
        for region in self.regions.values():
            region.free()
        self.regions.clear()


class ShardWriter:
    def __init__(self, arena: StagingArena, root: str, rank: int, patience: float = 30.0) -> None:
        self.arena = arena
        self.root = root
        self.rank = rank
        self.patience = patience
        self.jobs: "queue.Queue[Optional[SaveJob]]" = queue.Queue()
        self.seconds: list[float] = []
        self.extras: dict[str, Region] = {}
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def submit(self, step: int, state: Mapping[str, torch.Tensor], on_done=None) -> bool:
        job = SaveJob(step, os.path.join(self.root, f"step{step}", f"rank{self.rank}.bin"), on_done=on_done)
        for name, tensor in state.items():
            region = stage_copy(self.arena, tensor, self.patience)  # clean: near miss, the job frees it
            if region is None:
                job.release()
                return False
            job.regions[name] = region
        torch.cuda.synchronize()
        self.jobs.put(job)
        return True

    def submit_delta(self, step: int, state: Mapping[str, torch.Tensor], seen: dict[str, str]) -> int:
        """Only tensors whose digest differs from the last save."""
        job = SaveJob(step, os.path.join(self.root, f"step{step}", f"delta{self.rank}.bin"))
        for name, tensor in state.items():
            region = stage_copy(self.arena, tensor, self.patience)  # leak: unchanged tensors are skipped over
            if region is None:
                continue
            torch.cuda.current_stream().synchronize()
            digest = hashlib.blake2b(region.view().numpy(), digest_size=16).hexdigest()
            if seen.get(name) == digest:
                continue
            seen[name] = digest
            job.regions[name] = region
        changed = len(job.regions)
        self.jobs.put(job)
        return changed

    def _loop(self) -> None:
        while True:
            job = self.jobs.get()
            if job is None:
                return
            began = time.monotonic()
            try:
                if not job.cancelled:
                    self._write(job)
            finally:
                job.release()
            self.seconds.append(time.monotonic() - began)
            if job.on_done is not None:
                job.on_done(job.step)

    def _write(self, job: SaveJob) -> None:
        os.makedirs(os.path.dirname(job.path), exist_ok=True)
        index, offset = {}, 0
        with open(job.path + ".tmp", "wb") as out:  # clean: with closes it
            for name, region in job.regions.items():
                out.write(memoryview(region.view().numpy()))
                index[name] = (offset, region.size)
                offset += region.size
        sidecar = open(job.path + ".json", "w")  # clean: closed below
        json.dump(index, sidecar)
        sidecar.close()
        os.replace(job.path + ".tmp", job.path)

    # small things beside the tensors --------------------------------------------------------------
    def save_one(self, name: str, tensor: torch.Tensor) -> str:
        path = os.path.join(self.root, f"{name}.bin")
        with staged(self.arena, tensor) as data:  # clean: the manager frees it
            with open(path, "wb") as out:  # clean: with closes it
                out.write(data)
        return path

    def set_extra(self, name: str, tensor: torch.Tensor) -> None:
        """Extra tensors (RNG states, loader cursors) are kept until replaced or until close."""
        region = stage_copy(self.arena, tensor, self.patience)  # clean: near miss, the old one is freed first
        if region is None:
            return
        old = self.extras.pop(name, None)
        if old is not None:
            old.free()
        self.extras[name] = region

    def fingerprint(self, tensor: torch.Tensor) -> str:
        region = stage_copy(self.arena, tensor, self.patience)  # leak: only the digest is returned
        if region is None:
            return ""
        torch.cuda.current_stream().synchronize()
        h = hashlib.blake2b(digest_size=8)
        h.update(region.view().numpy())
        return h.hexdigest()

    def note(self, text: str) -> None:
        log = open(os.path.join(self.root, f"rank{self.rank}.log"), "a")  # leak: quiet ranks return first
        stamp = time.strftime("%H:%M:%S")
        if self.rank != 0 and not text.startswith("!"):
            return
        log.write(f"{stamp} {text}\n")
        log.close()

    def close(self) -> None:
        self.jobs.put(None)
        self._thread.join()
        while self.extras:
            _, region = self.extras.popitem()
            region.free()
