"""Decoding of images into pooled uint8 frames for a training loader."""
from __future__ import annotations

import logging
import queue
import threading
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import torch

logger = logging.getLogger(__name__)


class DecodeError(Exception):
    pass


class FramePool:
    def __init__(self, n: int, hw: Tuple[int, int]) -> None:
        self.hw = hw
        self._q: "queue.LifoQueue[torch.Tensor]" = queue.LifoQueue()
        for _ in range(n):
            self._q.put(torch.empty(3, *hw, dtype=torch.uint8))

    def take_frame(self) -> torch.Tensor:
        return self._q.get()

    def return_frame(self, f: torch.Tensor) -> None:
        self._q.put(f)


class ImageSource:
    def __init__(self, files: Sequence[Path], pool: FramePool, decoder: Callable[[bytes, torch.Tensor], None]) -> None:
        self.files = list(files)
        self.pool = pool
        self.decoder = decoder
        self.failed: List[Path] = []

    def decode(self, path: Path) -> Optional[torch.Tensor]:
        frame = self.pool.take_frame()  # clean: near miss, a decode error returns the frame, success hands it on
        try:
            self.decoder(path.read_bytes(), frame)
        except DecodeError:
            self.pool.return_frame(frame)
            self.failed.append(path)
            return None
        return frame

    def decode_fast(self, path: Path) -> Optional[torch.Tensor]:
        frame = self.pool.take_frame()  # leak: the decode error is noted, the frame not returned
        try:
            self.decoder(path.read_bytes(), frame)
        except DecodeError:
            self.failed.append(path)
            return None
        return frame

    def batch(self, paths: Sequence[Path]) -> torch.Tensor:
        frames = []
        for p in paths:
            f = self.decode(p)  # clean: stacked, then all frames go back
            if f is None:
                continue
            frames.append(f)
        out = torch.stack(frames) if frames else torch.empty(0, 3, *self.pool.hw)
        for f in frames:
            self.pool.return_frame(f)
        return out

    def full_batch(self, paths: Sequence[Path]) -> Optional[torch.Tensor]:
        frames = []
        for p in paths:
            f = self.decode(p)  # leak: one bad image returns None and the frames so far are lost
            if f is None:
                return None
            frames.append(f)
        out = torch.stack(frames)
        for f in frames:
            self.pool.return_frame(f)
        return out

    def mean_color(self, path: Path) -> Optional[List[float]]:
        f = self.decode(path)  # clean: returned to the pool after the mean
        if f is None:
            return None
        mean = f.float().mean(dim=(1, 2)).tolist()
        self.pool.return_frame(f)
        return mean

    def normalized(self, path: Path) -> Optional[torch.Tensor]:
        f = self.decode(path)  # leak: f becomes the float copy, the uint8 frame is lost
        if f is None:
            return None
        f = f.float().div_(255)
        return f


class ThreadedDecoder:
    def __init__(self, source: ImageSource, workers: int = 4) -> None:
        self.source = source
        self.todo: "queue.Queue[Optional[Path]]" = queue.Queue()
        self.done: "queue.Queue[Optional[torch.Tensor]]" = queue.Queue(maxsize=64)
        self.threads = [threading.Thread(target=self._work, daemon=True) for _ in range(workers)]

    def _work(self) -> None:
        while True:
            path = self.todo.get()
            if path is None:
                self.done.put(None)
                return
            frame = self.source.decode(path)  # clean: through the done queue to frames, which returns it
            if frame is None:
                continue
            self.done.put(frame)

    def frames(self) -> Iterator[torch.Tensor]:
        for t in self.threads:
            t.start()
        for p in self.source.files:
            self.todo.put(p)
        for _ in self.threads:
            self.todo.put(None)
        open_workers = len(self.threads)
        while open_workers:
            f = self.done.get()
            if f is None:
                open_workers -= 1
                continue
            copy = f.clone()
            self.source.pool.return_frame(f)
            yield copy


def manifest(path: Path) -> Dict[str, Any]:
    f = open(path)  # clean: closed before the return
    rows = [line.rstrip("\n").split("\t") for line in f]
    f.close()
    return {name: label for name, label in rows}


def count_labels(path: Path, wanted: str) -> int:
    f = open(path)  # leak: a bad row returns -1 with the file open
    n = 0
    for line in f:
        parts = line.rstrip("\n").split("\t")
        if len(parts) != 2:
            return -1
        n += parts[1] == wanted
    f.close()
    return n
