"""Picture operations that draw on canvases."""
from __future__ import annotations

from typing import Iterable, List, Optional

from .canvas import Canvas, CanvasDepot, Size


def fit(box: Size, picture: Size) -> Size:
    ratio = min(box[0] / picture[0], box[1] / picture[1], 1.0)
    return max(1, int(picture[0] * ratio)), max(1, int(picture[1] * ratio))


def resample(depot: CanvasDepot, rgba: bytes, picture: Size, box: Size) -> Canvas:
    """Nearest neighbour into a lent canvas; the caller recycles it."""
    size = fit(box, picture)
    canvas = depot.lend(size)  # clean: handed to the caller
    for y in range(size[1]):
        sy = y * picture[1] // size[1]
        for x in range(size[0]):
            sx = x * picture[0] // size[0]
            s = 4 * (sy * picture[0] + sx)
            d = 4 * (y * size[0] + x)
            canvas.pixels[d : d + 4] = rgba[s : s + 4]
    return canvas


def letterbox(depot: CanvasDepot, inner: Canvas, box: Size) -> Canvas:
    """Centres a canvas in a larger one. The inner canvas is recycled here."""
    outer = depot.lend(box)  # clean: handed to the caller
    left = (box[0] - inner.size[0]) // 2
    top = (box[1] - inner.size[1]) // 2
    row = inner.size[0] * 4
    for y in range(inner.size[1]):
        d = 4 * ((top + y) * box[0] + left)
        outer.pixels[d : d + row] = inner.pixels[y * row : (y + 1) * row]
    inner.recycle()
    return outer


def tint(depot: CanvasDepot, src: Canvas, colour: bytes) -> Canvas:
    """A tinted copy; the source stays with the caller."""
    out = depot.lend(src.size)  # clean: handed to the caller
    for i in range(0, len(src.pixels), 4):
        for c in range(3):
            out.pixels[i + c] = (src.pixels[i + c] + colour[c]) // 2
        out.pixels[i + 3] = src.pixels[i + 3]
    return out


def mosaic(depot: CanvasDepot, tiles: Iterable[Canvas], across: int) -> Optional[Canvas]:
    """Lays tiles out in a grid and recycles them."""
    todo: List[Canvas] = list(tiles)
    if not todo:
        return None
    w, h = todo[0].size
    down = (len(todo) + across - 1) // across
    sheet = depot.lend((w * across, h * down))  # clean: handed to the caller
    for n, tile in enumerate(todo):
        x, y = (n % across) * w, (n // across) * h
        for r in range(min(h, tile.size[1])):
            d = 4 * ((y + r) * w * across + x)
            sheet.pixels[d : d + 4 * w] = tile.pixels[4 * r * w : 4 * (r + 1) * w]
        tile.recycle()
    return sheet
