"""Gradient buckets reduced through a fixed set of communication buffers."""
from __future__ import annotations

from typing import Callable, Dict, List, Optional, Tuple

try:
    import torch.distributed as dist
except ImportError:  # pragma: no cover
    dist = None


class CommBuffer:
    def __init__(self, index: int, numel: int) -> None:
        self.index = index
        self.data = [0.0] * numel
        self.used = 0


class CommBufferPool:
    """One bit per buffer in a mask; allocate returns None when all bits are set."""

    def __init__(self, count: int, numel: int) -> None:
        self._bufs = [CommBuffer(i, numel) for i in range(count)]
        self._mask = 0

    def allocate(self) -> Optional[CommBuffer]:
        for buf in self._bufs:
            if not self._mask >> buf.index & 1:
                self._mask |= 1 << buf.index
                buf.used = 0
                return buf
        return None

    def deallocate(self, buf: CommBuffer) -> None:
        self._mask &= ~(1 << buf.index)

    def allocate_pair(self) -> Optional[Tuple[CommBuffer, CommBuffer]]:
        src = self.allocate()  # clean: near miss, deallocated when the other half is refused
        dst = self.allocate()  # clean: near miss, returned with the first or deallocated in the loop
        if src is not None and dst is not None:
            return src, dst
        for buf in (src, dst):
            if buf is not None:
                self.deallocate(buf)
        return None

    def busy(self) -> int:
        return bin(self._mask).count("1")


class Work:
    """An asynchronous reduction; wait runs the completion hook once."""

    def __init__(self, buf: CommBuffer, world: int, hook: Optional[Callable[[CommBuffer], None]] = None) -> None:
        self.buf = buf
        self.world = world
        self._hook = hook

    def wait(self) -> List[float]:
        out = [v / self.world for v in self.buf.data[: self.buf.used]]
        hook, self._hook = self._hook, None
        if hook is not None:
            hook(self.buf)
        return out


class Reducer:
    def __init__(self, pool: CommBufferPool, world: int) -> None:
        self.pool = pool
        self.world = world
        self.works: List[Work] = []
        self.open_bucket: Optional[CommBuffer] = None
        self.by_name: Dict[str, CommBuffer] = {}

    @staticmethod
    def _pack(buf: CommBuffer, grad: List[float]) -> bool:
        end = buf.used + len(grad)
        if end > len(buf.data):
            return False
        buf.data[buf.used:end] = grad
        buf.used = end
        return True

    def reduce_async(self, grad: List[float]) -> Optional[Work]:
        buf = self.pool.allocate()  # clean: near miss, the work's completion hook deallocates
        if buf is None:
            return None
        if not self._pack(buf, grad):
            self.pool.deallocate(buf)
            return None
        work = Work(buf, self.world, hook=self.pool.deallocate)
        self.works.append(work)
        return work

    def reduce_now(self, grad: List[float]) -> List[float]:
        buf = self.pool.allocate()  # leak: a gradient that does not fit is returned as it came, buffer and all forgotten
        if buf is None or not self._pack(buf, grad):
            return grad
        out = Work(buf, self.world).wait()
        self.pool.deallocate(buf)
        return out

    def reduce_queued(self, grads: List[List[float]]) -> int:
        queued: List[Work] = []
        for grad in grads:
            buf = self.pool.allocate()  # leak: the works carry no hook and waiting for them deallocates nothing
            if buf is None:
                break
            self._pack(buf, grad[: len(buf.data)])
            queued.append(Work(buf, self.world))
        return sum(len(w.wait()) for w in queued)

    def finish(self) -> List[List[float]]:
        outs: List[List[float]] = []
        while self.works:
            outs.append(self.works.pop(0).wait())
        return outs

    def add(self, grad: List[float]) -> Optional[List[float]]:
        """Packs into the open bucket; a full bucket is reduced and returned, the caller then adds again."""
        if self.open_bucket is None:
            self.open_bucket = self.pool.allocate()  # clean: near miss, allocated only when none is open, close_bucket deallocates
        if self.open_bucket is None or self._pack(self.open_bucket, grad):
            return None
        return self.close_bucket()

    def close_bucket(self) -> Optional[List[float]]:
        bucket, self.open_bucket = self.open_bucket, None
        if bucket is None:
            return None
        out = Work(bucket, self.world).wait()
        self.pool.deallocate(bucket)
        return out

    def exchange(self, grad: List[float]) -> List[float]:
        pair = self.pool.allocate_pair()  # leak: only the source half is deallocated
        if pair is None:
            return grad
        src, dst = pair
        self._pack(src, grad)
        self._pack(dst, src.data[: src.used])
        out = Work(dst, self.world).wait()
        self.pool.deallocate(src)
        return out

    def stash(self, name: str, grad: List[float]) -> bool:
        buf = self.by_name.get(name) or self.pool.allocate()  # clean: near miss, the name's own buffer is used again, unstash deallocates
        if buf is None:
            return False
        self.by_name[name] = buf
        buf.used = 0
        return self._pack(buf, grad)

    def unstash(self, name: str) -> None:
        buf = self.by_name.pop(name, None)
        if buf is not None:
            self.pool.deallocate(buf)


def main() -> None:
    pool = CommBufferPool(4, 4)
    red = Reducer(pool, 2)
    red.reduce_async([2.0, 4.0])
    print(red.finish(), red.reduce_now([2.0]), red.add([1.0] * 3), red.add([1.0] * 3), red.close_bucket())
    print(red.stash("w", [1.0]), red.stash("w", [2.0]))
    red.unstash("w")
    print(pool.busy(), dist is not None and dist.is_available())


if __name__ == "__main__":
    main()
