"""Image preprocessing on a thread pool, results land in pinned canvases."""
import logging
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Dict, List, Optional, Tuple

import torch
import torch.nn.functional as F

logger = logging.getLogger("preproc")


@dataclass
class PreprocConfig:
    size: int = 224
    canvases: int = 32
    workers: int = 4
    mean: Tuple[float, float, float] = (0.485, 0.456, 0.406)


class CanvasPool:
    def __init__(self, n: int, size: int):
        self._q: "SimpleQueue[torch.Tensor]" = SimpleQueue()
        for _ in range(n):
            self._q.put(torch.empty(3, size, size))

    def lend(self) -> Optional[torch.Tensor]:
        try:
            return self._q.get_nowait()  # clean: handed out
        except Empty:
            return None

    def take_back(self, canvas: torch.Tensor) -> None:
        self._q.put(canvas)


class Preprocessor:
    def __init__(self, cfg: PreprocConfig):
        self.cfg = cfg
        self.pool = CanvasPool(cfg.canvases, cfg.size)
        self.exec = ThreadPoolExecutor(cfg.workers)
        self.ready: Dict[str, torch.Tensor] = {}

    def _resize(self, img: torch.Tensor) -> torch.Tensor:
        return F.interpolate(img[None], size=(self.cfg.size, self.cfg.size))[0]

    def _fill(self, canvas: torch.Tensor, img: torch.Tensor) -> torch.Tensor:
        canvas.copy_(self._resize(img))
        canvas.sub_(torch.tensor(self.cfg.mean).view(3, 1, 1))
        return canvas

    def prepare(self, key: str, img: torch.Tensor) -> bool:
        canvas = self.pool.lend()  # clean: stored under its key, discard() or drain() takes it back
        if canvas is None:
            return False
        self.discard(key)
        self.ready[key] = self._fill(canvas, img)
        return True

    def discard(self, key: str) -> None:
        canvas = self.ready.pop(key, None)
        if canvas is not None:
            self.pool.take_back(canvas)

    def drain(self) -> None:
        for key in list(self.ready):
            self.discard(key)

    def fetch(self, img: torch.Tensor) -> torch.Tensor:
        canvas = self.pool.lend()  # clean: near miss, _fill returns the same canvas, it goes back and a copy leaves
        if canvas is None:
            return self._resize(img)
        canvas = self._fill(canvas, img)
        out = canvas.clone()
        self.pool.take_back(canvas)
        return out

    def fetch_scaled(self, img: torch.Tensor, scale: float) -> torch.Tensor:
        canvas = self.pool.lend()  # leak: the product is a new tensor, the lent canvas is lost
        if canvas is None:
            return self._resize(img) * scale
        canvas = self._fill(canvas, img) * scale
        out = canvas.clone()
        self.pool.take_back(canvas)
        return out

    def submit(self, img: torch.Tensor) -> "Optional[Future[float]]":
        canvas = self.pool.lend()  # clean: near miss, the done callback takes it back
        if canvas is None:
            return None
        fut = self.exec.submit(lambda: self._fill(canvas, img).mean().item())
        fut.add_done_callback(lambda _f: self.pool.take_back(canvas))
        return fut

    def means(self, imgs: List[torch.Tensor]) -> List[float]:
        futs = [f for f in map(self.submit, imgs) if f is not None]
        return [f.result() for f in as_completed(futs)]

    def brightest(self, imgs: List[torch.Tensor]) -> int:
        best, arg = float("-inf"), -1
        for i, img in enumerate(imgs):
            canvas = self.pool.lend()  # leak: grey images are skipped with their canvas
            if canvas is None:
                break
            self._fill(canvas, img)
            if canvas.std() < 1e-3:
                continue
            m = canvas.mean().item()
            if m > best:
                best, arg = m, i
            self.pool.take_back(canvas)
        return arg

    def grid(self, imgs: List[torch.Tensor]) -> Optional[torch.Tensor]:
        tiles: List[torch.Tensor] = []
        for img in imgs:
            canvas = self.pool.lend()  # leak: only the first four tiles are given back
            if canvas is None:
                break
            tiles.append(self._fill(canvas, img))
        if not tiles:
            return None
        sheet = torch.cat(tiles, dim=-1)
        for t in tiles[:4]:
            self.pool.take_back(t)
        return sheet

    def mosaic(self, imgs: List[torch.Tensor]) -> torch.Tensor:
        tiles: List[torch.Tensor] = []
        try:
            for img in imgs:
                canvas = self.pool.lend()  # clean: near miss, raise passes the finally that gives all tiles back
                if canvas is None:
                    raise RuntimeError("out of canvases")
                tiles.append(canvas)
                self._fill(canvas, img)
            return torch.cat(tiles, dim=-1)
        finally:
            while tiles:
                self.pool.take_back(tiles.pop())

    def close(self) -> None:
        self.drain()
        self.exec.shutdown()
