"""High-resolution images are cut into tiles; each tile travels in a pooled canvas."""
from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Callable, Iterator, Optional, Sequence


class Canvas:
    __slots__ = ("pixels", "row", "col")

    def __init__(self, side: int) -> None:
        self.pixels = bytearray(side * side)
        self.row = self.col = 0


class CanvasPool:
    def __init__(self, count: int, side: int) -> None:
        self.side = side
        self._shelf = [Canvas(side) for _ in range(count)]

    def loan(self) -> Optional[Canvas]:
        return self._shelf.pop() if self._shelf else None

    def reshelve(self, canvas: Canvas) -> None:
        self._shelf.append(canvas)

    @property
    def on_shelf(self) -> int:
        return len(self._shelf)


class PoolExhausted(RuntimeError):
    pass


class TilePool:
    """CanvasPool with raising semantics."""

    def __init__(self, inner: CanvasPool) -> None:
        self._inner = inner

    def take_tile(self, row: int, col: int) -> Canvas:
        canvas = self._inner.loan()  # clean: handed to the caller
        if canvas is None:
            raise PoolExhausted("tiles")
        canvas.row, canvas.col = row, col
        return canvas

    def drop_tile(self, canvas: Canvas) -> None:
        self._inner.reshelve(canvas)

    @contextmanager
    def tile(self, row: int, col: int) -> Iterator[Canvas]:
        canvas = self.take_tile(row, col)  # clean: finally
        try:
            yield canvas
        finally:
            self.drop_tile(canvas)


@dataclass
class Image:
    width: int
    height: int
    data: bytes


class Tiler:
    """Wraps TilePool once more with the geometry."""

    def __init__(self, tiles: TilePool, side: int) -> None:
        self.tiles = tiles
        self.side = side

    def cut(self, image: Image, row: int, col: int) -> Canvas:
        """The canvas is given up with ``discard``."""
        canvas = self.tiles.take_tile(row, col)  # clean: handed to the caller
        start = (row * self.side) * image.width + col * self.side
        chunk = image.data[start : start + self.side]
        canvas.pixels[: len(chunk)] = chunk
        return canvas

    def discard(self, canvas: Canvas) -> None:
        self.tiles.drop_tile(canvas)

    def cut_if_busy(self, image: Image, row: int, col: int, floor: int) -> Optional[Canvas]:
        canvas = self.cut(image, row, col)  # leak: a flat tile gives None and the canvas is lost
        if max(canvas.pixels) - min(canvas.pixels) < floor:
            return None
        return canvas

    def cut_row(self, image: Image, row: int) -> list[Canvas]:
        out: list[Canvas] = []
        try:
            for col in range(image.width // self.side):
                out.append(self.cut(image, row, col))  # clean: near miss, exhaustion is survived but discards the row
        except PoolExhausted:
            for canvas in out:
                self.discard(canvas)
            return []
        return out

    def cut_column(self, image: Image, col: int) -> list[Canvas]:
        try:
            return [self.cut(image, row, col) for row in range(image.height // self.side)]  # leak: exhaustion is survived and the cut tiles vanish with the list
        except PoolExhausted:
            return []

    def mean(self, image: Image, row: int, col: int) -> float:
        canvas = self.cut(image, row, col)  # clean: discarded after the sum
        value = sum(canvas.pixels) / len(canvas.pixels)
        self.discard(canvas)
        return value

    def corners(self, image: Image) -> list[int]:
        last_row = image.height // self.side - 1
        values = []
        for row in (0, last_row):
            values.append(self.cut(image, row, 0).pixels[0])  # leak: the canvas is a temporary, only a pixel is read
        return values


class Describer:
    def __init__(self, tiler: Tiler, encode: Callable[[bytes], float]) -> None:
        self.tiler = tiler
        self.encode = encode

    def describe_tile(self, image: Image, row: int, col: int) -> Optional[float]:
        canvas = self.tiler.cut_if_busy(image, row, col, 2)  # clean: discarded, or None
        if canvas is None:
            return None
        value = self.encode(bytes(canvas.pixels))
        self.tiler.discard(canvas)
        return value

    def describe_row(self, image: Image, row: int) -> list[float]:
        tiles = self.tiler.cut_row(image, row)  # clean: near miss, popped from the list one by one and discarded
        values: list[float] = []
        while tiles:
            canvas = tiles.pop()
            values.append(self.encode(bytes(canvas.pixels)))
            self.tiler.discard(canvas)
        return values[::-1]

    def brightest(self, image: Image, row: int) -> Optional[int]:
        best: Optional[Canvas] = None
        for canvas in self.tiler.cut_row(image, row):  # clean: near miss, the loser of each comparison is discarded and the winner at the end
            if best is None:
                best = canvas
            elif sum(canvas.pixels) > sum(best.pixels):
                self.tiler.discard(best)
                best = canvas
            else:
                self.tiler.discard(canvas)
        if best is None:
            return None
        col = best.col
        self.tiler.discard(best)
        return col

    def darkest(self, image: Image, row: int) -> Optional[int]:
        best: Optional[Canvas] = None
        for canvas in self.tiler.cut_row(image, row):  # leak: a new minimum rebinds best without discarding the old one
            if best is None or sum(canvas.pixels) < sum(best.pixels):
                best = canvas
            else:
                self.tiler.discard(canvas)
        if best is None:
            return None
        col = best.col
        self.tiler.discard(best)
        return col

    def overview(self, image: Image) -> float:
        with self.tiler.tiles.tile(0, 0) as canvas:  # clean: with
            canvas.pixels[0] = image.data[0] if image.data else 0
            if not image.data:
                return 0.0
            return self.encode(bytes(canvas.pixels))

    def mosaic(self, image: Image, spots: Sequence[tuple[int, int]]) -> bytes:
        with ExitStack() as stack:
            parts = []
            for row, col in spots:
                canvas = self.tiler.cut(image, row, col)  # clean: near miss, the exit stack's callback discards
                stack.callback(self.tiler.discard, canvas)
                if not any(canvas.pixels):
                    continue
                parts.append(bytes(canvas.pixels))
            return b"".join(parts)

    def stitched(self, image: Image, spots: Sequence[tuple[int, int]]) -> bytes:
        with ExitStack() as stack:
            parts = []
            for row, col in spots:
                canvas = self.tiler.cut(image, row, col)  # leak: a blank tile continues before its callback is pushed
                if not any(canvas.pixels):
                    continue
                stack.callback(self.tiler.discard, canvas)
                parts.append(bytes(canvas.pixels))
            return b"".join(parts)


def main() -> None:
    pool = CanvasPool(4, 2)
    tiler = Tiler(TilePool(pool), 2)
    image = Image(6, 4, bytes(range(24)))
    desc = Describer(tiler, lambda b: float(sum(b)))
    print(desc.describe_row(image, 0), desc.brightest(image, 1), tiler.mean(image, 1, 1))
    print(desc.overview(image), len(desc.mosaic(image, [(0, 0), (1, 2)])))
    for canvas in tiler.cut_row(image, 1):  # clean: discarded on every pass
        tiler.discard(canvas)
    print("on shelf", pool.on_shelf)


if __name__ == "__main__":
    main()
