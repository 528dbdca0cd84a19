"""Gradient buckets and communication buffers for data-parallel training."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Callable, Dict, List, Optional


class CommBuffer:
    def __init__(self, n: int) -> None:
        self.data = [0.0] * n
        self.filled = 0

    def write(self, grads: List[float]) -> None:
        self.data[self.filled:self.filled + len(grads)] = grads
        self.filled += len(grads)


class CommBufferPool:
    def __init__(self, n: int, size: int) -> None:
        self.size = size
        self._bufs = [CommBuffer(size) for _ in range(n)]

    def obtain(self) -> CommBuffer:
        if not self._bufs:
            raise MemoryError("no communication buffer")
        return self._bufs.pop()

    def surrender(self, buf: CommBuffer) -> None:
        buf.filled = 0
        self._bufs.append(buf)

    def __len__(self) -> int:
        return len(self._bufs)


@dataclass
class Work:
    buf: CommBuffer
    done: Callable[[CommBuffer], None]

    def wait(self) -> float:
        total = sum(self.data_view())
        self.done(self.buf)
        return total

    def data_view(self) -> List[float]:
        return self.buf.data[: self.buf.filled]


class Reducer:
    def __init__(self, pool: CommBufferPool) -> None:
        self.pool = pool
        self.open: Optional[CommBuffer] = None
        self.works: List[Work] = []
        self.residual: Dict[str, CommBuffer] = {}

    def add(self, grads: List[float]) -> None:
        if self.open is not None and self.open.filled + len(grads) > self.pool.size:
            self.flush()
        if self.open is None:
            self.open = self.pool.obtain()  # clean: near miss, obtained only where none is open; flush moves it on
        self.open.write(grads)

    def flush(self) -> None:
        if self.open is None:
            return
        self.works.append(Work(self.open, self.pool.surrender))
        self.open = None

    def synchronize(self) -> float:
        self.flush()
        total = 0.0
        while self.works:
            total += self.works.pop().wait()
        return total

    def reduce_now(self, grads: List[float], skip_nan: bool) -> Optional[float]:
        buf = self.pool.obtain()  # leak: a NaN batch is skipped without surrender
        buf.write(grads)
        if skip_nan and any(g != g for g in grads):
            return None
        total = sum(buf.data[: buf.filled])
        self.pool.surrender(buf)
        return total

    def reduce_async(self, grads: List[float]) -> Work:
        buf = self.pool.obtain()  # clean: moved into a work whose wait surrenders it
        buf.write(grads)
        return Work(buf, self.pool.surrender)

    def reduce_local(self, grads: List[float]) -> Work:
        buf = self.pool.obtain()  # leak: the work's done callback does nothing
        buf.write(grads)
        return Work(buf, lambda _buf: None)

    def norm(self, grads: List[float]) -> float:
        work = self.reduce_async(grads)  # leak: only the view is read; the work is never waited for
        return sum(g * g for g in work.data_view()) ** 0.5

    def mean(self, grads: List[float]) -> float:
        work = self.reduce_async(grads)  # clean: waited for
        return work.wait() / max(len(grads), 1)

    def compress(self, name: str, grads: List[float]) -> None:
        self.residual[name] = self.pool.obtain()  # leak: the next step's residual of that name overwrites it
        self.residual[name].write(grads)

    def clear_residuals(self) -> None:
        for name in list(self.residual):
            self.pool.surrender(self.residual.pop(name))


class Trainer:
    def __init__(self, pool: CommBufferPool) -> None:
        self.pool = pool
        self.reducer = Reducer(pool)
        self.scratch = pool.obtain()  # clean: held for the trainer's life, surrendered in close

    def close(self) -> None:
        self.pool.surrender(self.scratch)

    def step(self, micro: List[List[float]], sync: bool) -> float:
        buf = self.pool.obtain() if sync else None  # clean: near miss, surrendered under the same flag
        total = 0.0
        for grads in micro:
            total += sum(grads)
            if sync:
                buf.write(grads)
        if sync:
            self.pool.surrender(buf)
        return total

    def step_overflow(self, micro: List[List[float]], limit: float) -> float:
        total = 0.0
        buf = self.pool.obtain()  # leak: when it is full it is replaced and not surrendered
        for grads in micro:
            if buf.filled + len(grads) > self.pool.size:
                total += sum(buf.data)
                buf = self.pool.obtain()  # leak: replaced in its turn by the next full one
            buf.write(grads)
        total += sum(buf.data[: buf.filled])
        self.pool.surrender(buf)
        return min(total, limit)

    def step_rolled(self, micro: List[List[float]]) -> float:
        total = 0.0
        buf = self.pool.obtain()  # clean: near miss, surrendered before it is replaced
        for grads in micro:
            if buf.filled + len(grads) > self.pool.size:
                total += sum(buf.data)
                self.pool.surrender(buf)
                buf = self.pool.obtain()  # clean: near miss, surrendered before the next or after the loop
            buf.write(grads)
        total += sum(buf.data[: buf.filled])
        self.pool.surrender(buf)
        return total

    def try_step(self, grads: List[float]) -> bool:
        try:
            send = self.pool.obtain()  # leak: MemoryError of the second is caught without surrendering the first
            recv = self.pool.obtain()  # clean: surrendered at the end
        except MemoryError:
            return False
        send.write(grads)
        recv.write(send.data[: send.filled])
        self.pool.surrender(send)
        self.pool.surrender(recv)
        return True


if __name__ == "__main__":
    p = CommBufferPool(4, 4)
    t = Trainer(p)
    t.reducer.add([1.0, 2.0]); t.reducer.add([3.0, 4.0, 5.0])
    print(t.reducer.synchronize(), t.step([[1.0]], True), t.step_rolled([[1.0] * 3] * 3), t.try_step([1.0]), t.reducer.mean([2.0]))
    t.close()
    print(len(p))
