from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .canvas import CountedCanvases


class Preprocessor:
    def __init__(self, canvases: CountedCanvases, side: int) -> None:
        self.canvases = canvases
        self.side = side

    def to_canvas(self, img: Tensor) -> Tensor:
        """The caller folds the canvas."""
        canvas = self.canvases.stretch(3, self.side, self.side)  # clean: returned to the caller
        canvas.copy_(F.interpolate(img[None], size=(self.side, self.side))[0])
        return canvas

    def normalized(self, img: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        canvas = self.to_canvas(img)  # leak: the quotient is a new tensor and the canvas is dropped
        return (canvas - mean) / std

    def normalized_(self, img: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        canvas = self.to_canvas(img)  # clean: near miss, sub_ and div_ give back the same canvas to the caller
        canvas.sub_(mean).div_(std)
        return canvas

    def thumbnail(self, img: Tensor, side: int) -> Tensor:
        canvas = self.to_canvas(img)  # clean: folded in finally after the pooled copy is made
        try:
            return F.adaptive_avg_pool2d(canvas, side).clone()
        finally:
            self.canvases.fold(canvas)

    def tiles(self, img: Tensor, n: int) -> list[Tensor] | None:
        out: list[Tensor] = []
        for strip in torch.chunk(img, n, dim=-1):
            canvas = self.to_canvas(strip)  # leak: a strip of one color returns None with all the canvases so far
            if float(canvas.std()) == 0.0:
                return None
            out.append(canvas)
        return out
