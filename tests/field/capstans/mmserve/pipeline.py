from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Callable, Iterable, Iterator

import torch
from torch import Tensor

from .canvas import CountedCanvases
from .preprocess import Preprocessor

Tower = Callable[[Tensor], Tensor]


class Pipeline:
    def __init__(self, canvases: CountedCanvases, pre: Preprocessor, tower: Tower, workers: int = 2) -> None:
        self.canvases = canvases
        self.pre = pre
        self.tower = tower
        self.exec = ThreadPoolExecutor(workers)
        self.queued: dict[str, Tensor] = {}

    def encode(self, img: Tensor) -> Tensor:
        canvas = self.pre.to_canvas(img)  # clean: folded in finally
        try:
            return self.tower(canvas[None])[0]
        finally:
            self.canvases.fold(canvas)

    def encode_tiled(self, img: Tensor, n: int) -> Tensor | None:
        tiles = self.pre.tiles(img, n)  # clean: every tile is folded in finally, or None
        if tiles is None:
            return None
        try:
            return self.tower(torch.stack(tiles))
        finally:
            for t in tiles:
                self.canvases.fold(t)

    def enqueue(self, key: str, img: Tensor) -> bool:
        canvas = self.pre.to_canvas(img)  # leak: an image queued already returns False with a second canvas
        if key in self.queued:
            return False
        self.queued[key] = canvas
        return True

    def flush(self) -> dict[str, Tensor]:
        out: dict[str, Tensor] = {}
        while self.queued:
            key, canvas = self.queued.popitem()
            try:
                out[key] = self.tower(canvas[None])[0]
            finally:
                self.canvases.fold(canvas)
        return out

    def encode_later(self, img: Tensor) -> Future:
        canvas = self.pre.to_canvas(img)  # clean: near miss, the callback folds it when the future is done
        fut = self.exec.submit(self.tower, canvas[None])
        fut.add_done_callback(lambda _f: self.canvases.fold(canvas))
        return fut

    def encode_stream(self, imgs: Iterable[Tensor]) -> Iterator[Tensor]:
        for img in imgs:
            canvas = self.pre.to_canvas(img)  # leak: continue for a tower without output skips fold
            emb = self.tower(canvas[None])
            if emb.numel() == 0:
                continue
            self.canvases.fold(canvas)
            yield emb[0]
