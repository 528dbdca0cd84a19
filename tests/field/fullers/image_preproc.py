"""CPU image preprocessing over recycled byte buffers."""
from __future__ import annotations

import logging
from typing import Dict, List, Optional, Sequence

logger = logging.getLogger(__name__)
HEADER = 4


class BufferPool:
    """Recycles bytearrays by size class."""

    def __init__(self) -> None:
        self._free: Dict[int, List[bytearray]] = {}
        self.outstanding = 0

    @staticmethod
    def _size_class(n: int) -> int:
        size = 64
        while size < n:
            size *= 2
        return size

    def borrow(self, nbytes: int) -> bytearray:
        size = self._size_class(nbytes)
        stack = self._free.get(size)
        self.outstanding += 1
        return stack.pop() if stack else bytearray(size)

    def give_back(self, buf: bytearray) -> None:
        self.outstanding -= 1
        self._free.setdefault(len(buf), []).append(buf)


class TileSet:
    def __init__(self, pool: BufferPool, tiles: List[bytearray]) -> None:
        self._pool = pool
        self.tiles = tiles

    def close(self) -> None:
        while self.tiles:
            self._pool.give_back(self.tiles.pop())


class Preprocessor:
    def __init__(self, pool: BufferPool, min_bytes: int = 8) -> None:
        self.pool = pool
        self.min_bytes = min_bytes

    def decode(self, raw: bytes) -> bytearray:
        buf = self.pool.borrow(len(raw))  # clean: returned to the caller
        buf[: len(raw)] = raw
        return buf

    def decode_checked(self, raw: bytes) -> Optional[bytearray]:
        buf = self.pool.borrow(len(raw))  # leak: a short image is answered with None after the buffer was taken
        if len(raw) < self.min_bytes:
            logger.warning("image of %d bytes refused", len(raw))
            return None
        buf[: len(raw)] = raw
        return buf

    def decode_or_none(self, raw: bytes) -> Optional[bytearray]:
        if len(raw) < self.min_bytes:
            return None
        return self.decode(raw)  # clean: returned to the caller

    def thumbnail(self, raw: bytes, n: int = 16) -> bytes:
        buf = self.decode(raw)  # leak: copied from and dropped
        return bytes(buf[:n])

    def digest(self, raw: bytes) -> int:
        buf = self.decode(raw)  # clean: given back before the return
        total = sum(buf) & 0xFFFF
        self.pool.give_back(buf)
        return total

    def resize(self, raw: bytes, factor: int) -> bytearray:
        src = self.decode(raw)  # clean: given back before the return
        dst = self.pool.borrow(max(1, len(raw) // factor))  # clean: returned to the caller
        for i in range(len(raw) // factor):
            dst[i] = src[i * factor]
        self.pool.give_back(src)
        return dst

    def to_rgb(self, buf: bytearray, mode: str) -> bytearray:
        """Takes `buf` over; the buffer returned is the only one left to the caller."""
        if mode == "RGB":
            return buf
        out = self.pool.borrow(len(buf) * 3)  # clean: returned to the caller
        for ch in range(3):
            out[ch::3] = bytes(len(out[ch::3]))
        self.pool.give_back(buf)
        return out

    def histogram(self, raw: bytes, mode: str) -> List[int]:
        buf = self.decode(raw)  # clean: near miss, to_rgb takes it over and hands back what replaces it
        buf = self.to_rgb(buf, mode)  # clean: given back before the return
        bins = [0] * 4
        for byte in buf:
            bins[byte >> 6] += 1
        self.pool.give_back(buf)
        return bins

    def canvas(self, raw: bytes, alpha: bool) -> bytearray:
        board = self.pool.borrow(len(raw) * 3)  # leak: rebound to the wider board when alpha is asked for
        if alpha:
            board = self.pool.borrow(len(raw) * 4)  # clean: returned to the caller
        board[: len(raw)] = raw
        return board

    def batch(self, raws: Sequence[bytes]) -> List[bytes]:
        rows: List[bytes] = []
        skipped = 0
        for raw in raws:
            buf = self.decode(raw)  # leak: a blank image is skipped without giving the buffer back
            if not any(buf[:HEADER]):
                skipped += 1
                continue
            rows.append(bytes(buf[HEADER : len(raw)]))
            self.pool.give_back(buf)
        if skipped:
            logger.info("skipped %d blank images", skipped)
        return rows

    def batch_valid(self, raws: Sequence[bytes]) -> List[bytes]:
        rows: List[bytes] = []
        for raw in raws:
            buf = self.decode_or_none(raw)  # clean: near miss, the first continue has nothing and the second gives back
            if buf is None:
                continue
            if not any(buf[:HEADER]):
                self.pool.give_back(buf)
                continue
            rows.append(bytes(buf[HEADER : len(raw)]))
            self.pool.give_back(buf)
        return rows

    def tile(self, raw: bytes, n: int) -> TileSet:
        step = max(1, len(raw) // n)
        tiles: List[bytearray] = []
        for start in range(0, step * n, step):
            piece = self.pool.borrow(step)  # clean: moved into the tile set whose close gives it back
            piece[:step] = raw[start : start + step].ljust(step, b"\0")
            tiles.append(piece)
        return TileSet(self.pool, tiles)

    def encode_tiles(self, raw: bytes, n: int) -> List[bytes]:
        tiles = self.tile(raw, n)  # clean: closed by the finally
        try:
            return [bytes(t) for t in tiles.tiles]
        finally:
            tiles.close()

    def tile_energy(self, raw: bytes, n: int) -> int:
        tiles = self.tile(raw, n)  # leak: summed up and dropped without close
        return max(sum(t) for t in tiles.tiles)

    def normalize(self, buf: bytearray, inplace: bool) -> bytearray:
        out = buf if inplace else self.pool.borrow(len(buf))  # clean: returned to the caller
        peak = max(buf) or 1
        for i, byte in enumerate(buf):
            out[i] = byte * 255 // peak
        return out

    def features(self, raw: bytes, inplace: bool) -> List[float]:
        buf = self.decode(raw)  # clean: given back at the end
        norm = self.normalize(buf, inplace)  # clean: near miss, given back whenever it is a buffer of its own
        feats = [b / 255 for b in norm[: self.min_bytes]]
        if norm is not buf:
            self.pool.give_back(norm)
        self.pool.give_back(buf)
        return feats

    def mean(self, raw: bytes) -> float:
        buf = self.decode(raw)  # clean: given back before the return
        norm = self.normalize(buf, inplace=False)  # leak: only the source buffer is given back
        value = sum(norm) / len(norm)
        self.pool.give_back(buf)
        return value


def main() -> None:
    pool = BufferPool()
    pre = Preprocessor(pool)
    raw = bytes(range(1, 100))
    pre.digest(raw)
    pre.histogram(raw, "L")
    pool.give_back(pre.resize(raw, 2))  # clean: given back by the call around it
    assert len(pre.encode_tiles(raw, 4)) == 4
    assert len(pre.batch_valid([raw, b"x", bytes(20)])) == 1
    pre.features(raw, True)
    pre.features(raw, False)
    assert pool.outstanding == 0


if __name__ == "__main__":
    main()
