"""Page-locked staging buffers between the image preprocessor and the device."""
from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Iterable, Iterator, Optional, Sequence

try:
    import torch
except ImportError:
    torch = None


def _host_bytes(nbytes: int):
    if torch is not None and torch.cuda.is_available():
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    return bytearray(nbytes)


@dataclass
class PinnedBuffer:
    storage: object
    nbytes: int
    used: int = 0

    def write(self, payload: bytes) -> int:
        n = min(len(payload), self.nbytes)
        if isinstance(self.storage, bytearray):
            self.storage[:n] = payload[:n]
        else:
            self.storage[:n].copy_(torch.frombuffer(bytearray(payload[:n]), dtype=torch.uint8))
        self.used = n
        return n

    def tobytes(self) -> bytes:
        if isinstance(self.storage, bytearray):
            return bytes(self.storage[: self.used])
        return bytes(self.storage[: self.used].tolist())


class StagingPool:
    def __init__(self, count: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._idle = [PinnedBuffer(_host_bytes(nbytes), nbytes) for _ in range(count)]
        self._cond = threading.Condition()

    def checkout(self, timeout: Optional[float] = None) -> Optional[PinnedBuffer]:
        with self._cond:
            if not self._cond.wait_for(lambda: bool(self._idle), timeout):
                return None
            buf = self._idle.pop()
            buf.used = 0
            return buf

    def try_checkout(self) -> Optional[PinnedBuffer]:
        return self.checkout(timeout=0)  # clean: handed to the caller

    def checkin(self, buf: PinnedBuffer) -> None:
        with self._cond:
            self._idle.append(buf)
            self._cond.notify()

    @property
    def idle(self) -> int:
        return len(self._idle)


class PixelStager:
    def __init__(self, pool: StagingPool) -> None:
        self.pool = pool
        self.rejected = 0

    def stage(self, pixels: bytes) -> Optional[PinnedBuffer]:
        """Pixels in a pinned buffer that the caller checks in; None when it is busy or too big."""
        buf = self.pool.checkout(timeout=0.5)  # clean: returned, or checked in when too big
        if buf is None:
            return None
        if len(pixels) > buf.nbytes:
            self.rejected += 1
            self.pool.checkin(buf)
            return None
        buf.write(pixels)
        return buf

    def upload(self, pixels: bytes) -> Optional[bytes]:
        staged = self.stage(pixels)  # clean: checked in after the copy
        if staged is None:
            return None
        device = staged.tobytes()
        self.pool.checkin(staged)
        return device

    def upload_batch(self, images: Sequence[bytes]) -> list[bytes]:
        out: list[bytes] = []
        for pixels in images:
            staged = self.stage(pixels)  # leak: copied to the device list, the pinned buffer is forgotten
            if staged is None:
                continue
            out.append(staged.tobytes())
        return out

    def upload_unique(self, images: Sequence[bytes]) -> dict[bytes, int]:
        seen: dict[bytes, int] = {}
        for pixels in images:
            staged = self.stage(pixels)  # leak: a duplicate continues without checkin
            if staged is None:
                continue
            digest = staged.tobytes()
            if digest in seen:
                continue
            seen[digest] = staged.used
            self.pool.checkin(staged)
        return seen

    def upload_sorted(self, images: Sequence[bytes]) -> list[int]:
        sizes: list[int] = []
        for pixels in images:
            staged = self.stage(pixels)  # clean: near miss, continue sits inside try and finally checks in
            if staged is None:
                continue
            try:
                if staged.used == 0:
                    continue
                sizes.append(staged.used)
            finally:
                self.pool.checkin(staged)
        return sorted(sizes)


class PairStager:
    """Source and mask have to be resident together."""

    def __init__(self, pool: StagingPool) -> None:
        self.pool = pool

    def stage_pair(self, image: bytes, mask: bytes) -> Optional[tuple[PinnedBuffer, PinnedBuffer]]:
        src = self.pool.try_checkout()  # clean: near miss, checked in when the second one is missing
        if src is None:
            return None
        msk = self.pool.try_checkout()  # clean: returned in the pair
        if msk is None:
            self.pool.checkin(src)
            return None
        src.write(image)
        msk.write(mask)
        return src, msk

    def inpaint(self, image: bytes, mask: bytes) -> Optional[bytes]:
        pair = self.stage_pair(image, mask)  # clean: both halves are checked in
        if pair is None:
            return None
        src, msk = pair
        out = bytes(a & b for a, b in zip(src.tobytes(), msk.tobytes()))
        for buf in (src, msk):
            self.pool.checkin(buf)
        return out

    def mask_bytes(self, image: bytes, mask: bytes) -> int:
        pair = self.stage_pair(image, mask)  # leak: only the mask is checked in, the source is lost
        if pair is None:
            return 0
        _, msk = pair
        used = msk.used
        self.pool.checkin(msk)
        return used


def read_with_fallback(pool: StagingPool, payload: bytes) -> bytes:
    """Pageable copy when no pinned buffer is idle."""
    buf = pool.try_checkout()  # clean: near miss, the fallback path has none to check in
    if buf is None:
        return bytes(payload)
    try:
        buf.write(payload)
        return buf.tobytes()
    finally:
        pool.checkin(buf)


def grow_until_fits(pools: Sequence[StagingPool], payload: bytes) -> Optional[bytes]:
    pool = pools[0]
    buf = pool.checkout()  # leak: rebound by the bigger pool's buffer
    if buf is not None and len(payload) > buf.nbytes and len(pools) > 1:
        pool = pools[1]
        buf = pool.checkout()  # clean: checked in to the pool it came from
    if buf is None:
        return None
    buf.write(payload)
    data = buf.tobytes()
    pool.checkin(buf)
    return data


def drain(pool: StagingPool, payloads: Iterable[bytes]) -> Iterator[int]:
    buf = pool.checkout()  # clean: near miss, one buffer for the whole generator, finally covers early close
    assert buf is not None
    try:
        for payload in payloads:
            yield buf.write(payload)
    finally:
        pool.checkin(buf)


def main() -> None:
    pool = StagingPool(2, 16)
    stager = PixelStager(pool)
    stager.upload(b"pixels")
    stager.upload(b"p" * 32)
    stager.upload_sorted([b"ab", b"", b"c"])
    PairStager(pool).inpaint(b"abcd", b"\xff\xff\xff\xff")
    read_with_fallback(pool, b"xyz")
    print(sum(drain(pool, [b"1", b"22"])), "idle", pool.idle)


if __name__ == "__main__":
    main()
