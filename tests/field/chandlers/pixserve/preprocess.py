from __future__ import annotations

import io
import logging

import torch
from PIL import Image, UnidentifiedImageError
from torchvision.transforms.functional import pil_to_tensor

from .slabs import PixelSlabs, Slab

logger = logging.getLogger(__name__)


class Preprocessor:
    def __init__(self, slabs: PixelSlabs) -> None:
        self.slabs = slabs

    def load(self, blob: bytes) -> Slab | None:
        slab = self.slabs.lend()  # clean: near miss, reclaimed in the handler, else returned to the caller
        if slab is None:
            return None
        try:
            img = Image.open(io.BytesIO(blob)).convert("RGB").resize((self.slabs.side, self.slabs.side))
            slab.pixels.copy_(pil_to_tensor(img).float().div_(255))
        except (UnidentifiedImageError, OSError):
            self.slabs.reclaim(slab)
            return None
        return slab

    def tiles(self, blob: bytes, grid: int) -> list[Slab]:
        img = Image.open(io.BytesIO(blob)).convert("RGB")
        step_x, step_y = img.width // grid, img.height // grid
        out: list[Slab] = []
        for k in range(grid * grid):
            slab = self.slabs.lend()  # leak: running out half way returns an empty list and forgets the tiles already lent
            if slab is None:
                logger.info("no slabs for a %dx%d grid", grid, grid)
                return []
            x, y = (k % grid) * step_x, (k // grid) * step_y
            crop = img.crop((x, y, x + step_x, y + step_y)).resize((self.slabs.side, self.slabs.side))
            slab.pixels.copy_(pil_to_tensor(crop).float().div_(255))
            out.append(slab)
        return out

    def mean_color(self, blob: bytes) -> torch.Tensor | None:
        slab = self.load(blob)  # leak: load lends a slab, only its mean is kept
        if slab is None:
            return None
        return slab.pixels.mean(dim=(1, 2))

    def is_blank(self, blob: bytes, eps: float = 1e-3) -> bool:
        slab = self.load(blob)  # clean: near miss, reclaimed after the deviation is read, None holds nothing
        if slab is None:
            return True
        blank = float(slab.pixels.std()) < eps
        self.slabs.reclaim(slab)
        return blank
