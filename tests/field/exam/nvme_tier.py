"""Two-tier KV store: DRAM frames in front of extents in a file."""
from __future__ import annotations

import errno
import os
from collections import OrderedDict
from dataclasses import dataclass
from types import TracebackType
from typing import Callable, NoReturn, Self

import torch


class TierFull(OSError):
    def __init__(self, tier: str) -> None:
        super().__init__(errno.ENOSPC, f"{tier} tier is full")


@dataclass(slots=True)
class Frame:
    index: int
    data: torch.Tensor


class FramePool:
    def __init__(self, n: int, numel: int) -> None:
        self._data = torch.zeros(n, numel)
        self._next = 0
        self._returned: list[int] = []
        self._n = n

    def acquire_frame(self) -> Frame:
        if self._returned:
            i = self._returned.pop()  # clean: goes to the caller in the frame
        elif self._next < self._n:
            i = self._next
            self._next += 1
        else:
            raise TierFull("dram")
        return Frame(i, self._data[i])

    def relinquish(self, f: Frame) -> None:
        self._returned.append(f.index)


class Extents:
    def __init__(self, path: str, n: int, nbytes: int) -> None:
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT)  # clean: close() closes it
        self.nbytes = nbytes
        self._map = bytearray(n)

    def reserve(self) -> int:
        i = self._map.find(0)
        if i < 0:
            raise TierFull("nvme")
        self._map[i] = 1
        return i

    def unreserve(self, i: int) -> None:
        self._map[i] = 0

    def write(self, i: int, t: torch.Tensor) -> bool:
        raw = t.contiguous().view(torch.uint8).numpy().tobytes()
        return os.pwrite(self.fd, raw[: self.nbytes], i * self.nbytes) == min(len(raw), self.nbytes)

    def read(self, i: int) -> torch.Tensor:
        return torch.frombuffer(bytearray(os.pread(self.fd, self.nbytes, i * self.nbytes)), dtype=torch.float32)

    def close(self) -> None:
        os.close(self.fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, et: type[BaseException] | None, ev: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _fail(msg: str) -> NoReturn:
    raise RuntimeError(msg)


class TieredStore:
    def __init__(self, frames: FramePool, extents: Extents) -> None:
        self.frames = frames
        self.extents = extents
        self.hot: OrderedDict[str, Frame] = OrderedDict()
        self.cold: dict[str, int] = {}

    def put(self, key: str, t: torch.Tensor) -> None:
        if key in self.hot:
            self.hot[key].data[: t.numel()].copy_(t)
            return
        try:
            f = self.frames.acquire_frame()  # clean: kept in hot
        except TierFull:
            self.demote()
            f = self.frames.acquire_frame()  # clean: near miss, the first call took nothing, kept in hot
        f.data[: t.numel()].copy_(t)
        self.hot[key] = f

    def demote(self) -> None:
        key = next(iter(self.hot))
        if key not in self.cold:
            self.cold[key] = self.extents.reserve()  # clean: kept in cold, remove unreserves
        f = self.hot.pop(key)
        self.extents.write(self.cold[key], f.data)
        self.frames.relinquish(f)

    def promote(self, key: str) -> Frame | None:
        if key in self.hot or key not in self.cold:
            return self.hot.get(key)
        f = self.frames.acquire_frame()  # clean: near miss, the extent goes back, the frame is kept in hot
        i = self.cold.pop(key)
        data = self.extents.read(i)
        f.data[: data.numel()].copy_(data)
        self.extents.unreserve(i)
        self.hot[key] = f
        return f

    def promote_verified(self, key: str, check: Callable[[torch.Tensor], bool]) -> bool:
        if key in self.hot:
            return True
        f = self.frames.acquire_frame()  # leak: a failed check returns False with the frame
        i = self.cold.get(key)
        if i is None:
            self.frames.relinquish(f)
            return False
        data = self.extents.read(i)
        f.data[: data.numel()].copy_(data)
        if not check(f.data):
            return False
        del self.cold[key]
        self.extents.unreserve(i)
        self.hot[key] = f
        return True

    def remove(self, key: str) -> None:
        f = self.hot.pop(key, None)
        if f is not None:
            self.frames.relinquish(f)
        i = self.cold.pop(key, None)
        if i is not None:
            self.extents.unreserve(i)

    def clear(self) -> None:
        for key in [*self.hot, *self.cold]:
            self.remove(key)

    def write_through(self, key: str, t: torch.Tensor) -> bool:
        if key in self.cold:
            return self.extents.write(self.cold[key], t)
        i = self.extents.reserve()  # leak: a short write returns False and the extent is not in cold
        if not self.extents.write(i, t):
            return False
        self.cold[key] = i
        return True

    def write_cold(self, key: str, t: torch.Tensor) -> bool:
        if key in self.cold:
            return self.extents.write(self.cold[key], t)
        i = self.extents.reserve()  # clean: near miss, stored or unreserved by the conditional
        ok = self.extents.write(i, t)
        if ok:
            self.cold[key] = i
        else:
            self.extents.unreserve(i)
        return ok

    def write_or_die(self, key: str, t: torch.Tensor) -> None:
        i = self.extents.reserve()  # leak: _fail always raises, the extent is neither stored nor unreserved
        if not self.extents.write(i, t):
            _fail(f"short write for {key}")
        if key in self.cold:
            self.extents.unreserve(self.cold[key])
        self.cold[key] = i

    def mean(self, key: str) -> float:
        i = self.cold.get(key)
        if i is None:
            return 0.0
        f = self.frames.acquire_frame()  # clean: relinquished in finally
        try:
            data = self.extents.read(i)
            f.data[: data.numel()].copy_(data)
            return float(f.data[: data.numel()].mean())
        finally:
            self.frames.relinquish(f)

    def mean_all(self) -> list[float]:
        out = []
        f = None
        for key in self.cold:
            f = self.frames.acquire_frame()  # leak: a frame for each key, one is relinquished after the loop
            data = self.extents.read(self.cold[key])
            f.data[: data.numel()].copy_(data)
            out.append(float(f.data.mean()))
        if f is not None:
            self.frames.relinquish(f)
        return out

    def swap(self, a: str, b: str) -> bool:
        tmp = self.frames.acquire_frame()  # leak: the except branch returns False without relinquish
        try:
            fa, fb = self.hot[a], self.hot[b]
        except KeyError:
            return False
        tmp.data.copy_(fa.data)
        fa.data.copy_(fb.data)
        fb.data.copy_(tmp.data)
        self.frames.relinquish(tmp)
        return True

    def exchange(self, a: str, b: str) -> bool:
        tmp = self.frames.acquire_frame()  # clean: near miss, the return in the handler passes the finally
        try:
            fa, fb = self.hot[a], self.hot[b]
        except KeyError:
            return False
        else:
            tmp.data.copy_(fa.data)
            fa.data.copy_(fb.data)
            fb.data.copy_(tmp.data)
        finally:
            self.frames.relinquish(tmp)
        return True


def snapshot(path: str, n: int, t: torch.Tensor) -> bool:
    with Extents(path, n, 4 * t.numel()) as ex:  # clean: __exit__ closes the descriptor
        i = ex.reserve()  # clean: unreserved
        ok = ex.write(i, t)
        ex.unreserve(i)
        return ok


def probe(path: str, n: int) -> bool:
    ex = Extents(path, n, 4096)  # leak: a full map returns without close
    try:
        i = ex.reserve()  # clean: unreserved
    except TierFull:
        return False
    ex.unreserve(i)
    ex.close()
    return True
