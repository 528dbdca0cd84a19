"""Asynchronous checkpoints: shards are staged in host memory and written."""

import logging
import queue
import threading
from pathlib import Path
from typing import Dict, List, Optional, Tuple

import torch

log = logging.getLogger("ckpt")


class DiskFull(OSError):
    pass


class HostStage:
    """A few large host tensors, plus a writer lock per checkpoint directory."""

    def __init__(self, count: int, numel: int) -> None:
        self._tensors = [torch.empty(numel) for _ in range(count)]
        self._dirs: Dict[Path, int] = {}
        self._cv = threading.Condition()

    def claim(self, block: bool = True) -> Optional[torch.Tensor]:
        with self._cv:
            while not self._tensors:
                if not block:
                    return None
                self._cv.wait()
            return self._tensors.pop()  # clean: returned

    def unclaim(self, t: torch.Tensor) -> None:
        with self._cv:
            self._tensors.append(t)
            self._cv.notify()

    def open_dir(self, path: Path) -> Path:
        self._dirs[path] = self._dirs.get(path, 0) + 1  # clean: the path is returned for shut_dir
        return path

    def shut_dir(self, path: Path) -> None:
        self._dirs[path] -= 1


class Checkpointer:
    def __init__(self, stage: HostStage, root: Path, quota: int) -> None:
        self.stage = stage
        self.root = root
        self.quota = quota
        self._todo: "queue.Queue[Optional[Tuple[Path, str, torch.Tensor]]]" = queue.Queue()

    def _write(self, path: Path, name: str, data: torch.Tensor) -> None:
        if self.quota < data.numel():
            raise DiskFull(str(path))
        self.quota -= data.numel()
        torch.save(data, path / f"{name}.pt")

    def save_async(self, step: int, shards: Dict[str, torch.Tensor]) -> None:
        for name, shard in shards.items():
            path = self.stage.open_dir(self.root / str(step))  # clean: one count for each shard, the writer shuts it after the write
            staged = self.stage.claim()  # clean: queued for the writer, which unclaims in its finally
            staged[: shard.numel()].copy_(shard.flatten())
            self._todo.put((path, name, staged))

    def try_save(self, step: int, name: str, shard: torch.Tensor) -> bool:
        path = self.stage.open_dir(self.root / str(step))  # leak: no staging tensor free means False, and the directory's count stays up
        staged = self.stage.claim(block=False)  # clean: None, or queued for the writer
        if staged is None:
            return False
        staged[: shard.numel()].copy_(shard.flatten())
        self._todo.put((path, name, staged))
        return True

    def writer(self) -> None:
        while (item := self._todo.get()) is not None:
            path, name, staged = item
            try:
                self._write(path, name, staged)
            except DiskFull:
                log.error("%s/%s was not written", path, name)
            finally:
                self.stage.unclaim(staged)
                self.stage.shut_dir(path)

    def save_now(self, step: int, shards: List[torch.Tensor]) -> int:
        path = self.stage.open_dir(self.root / str(step))  # clean: shut by the finally
        written = 0
        try:
            for i, shard in enumerate(shards):
                staged = self.stage.claim()  # leak: DiskFull goes to the handler outside of the loop, which does not know the tensor
                staged[: shard.numel()].copy_(shard.flatten())
                self._write(path, str(i), staged)
                self.stage.unclaim(staged)
                written += 1
        except DiskFull:
            log.error("stopped after %d shards", written)
        finally:
            self.stage.shut_dir(path)
        return written

    def save_chunked(self, step: int, flat: torch.Tensor) -> None:
        staged = self.stage.claim()  # leak: each turn of the loop claims anew under the same name, only the last is unclaimed
        size = staged.numel()
        for start in range(0, flat.numel(), size):
            part = flat[start : start + size]
            staged[: part.numel()].copy_(part)
            torch.save(staged, self.root / f"{step}-{start}.pt")
            staged = self.stage.claim()  # leak: overwritten by the next turn; only the very last one reaches unclaim
        self.stage.unclaim(staged)
