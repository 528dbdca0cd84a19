from __future__ import annotations

import os
import tempfile
from typing import List, Optional

from .buffers import CommBuffers, FlatBuffer
from .reducer import Grad, OverlapReducer, ParamSync


class Trainer:
    def __init__(self, workdir: str, buffers: CommBuffers) -> None:
        self.buffers = buffers
        self.reducer = OverlapReducer(buffers)
        self.params = ParamSync(buffers)
        self.spare: Optional[FlatBuffer] = buffers.obtain()  # clean: process lifetime, shutdown relinquishes
        self.metrics = open(os.path.join(workdir, "metrics.tsv"), "a")  # clean: closed by shutdown
        self.workdir = workdir

    def step(self, grads: List[Grad]) -> int:
        for g in grads:
            self.reducer.push(g)
        out = self.reducer.finish()
        self.metrics.write(f"{len(out)}\n")
        return len(out)

    def borrow_spare(self) -> FlatBuffer:
        """The spare if it is there, else a fresh buffer."""
        if self.spare is not None:
            buf, self.spare = self.spare, None
            return buf
        return self.buffers.obtain()  # clean: handed to the caller

    def return_spare(self, buf: FlatBuffer) -> None:
        if self.spare is None:
            buf.used = 0
            self.spare = buf
        else:
            self.buffers.relinquish(buf)

    def clip(self, grads: List[Grad], limit: float) -> bool:
        buf = self.borrow_spare()  # leak: within the limit it returns without return_spare
        for g in grads:
            buf.pack(g)
        if max(buf.data[:buf.used], default=0.0) <= limit:
            return False
        self.return_spare(buf)
        return True

    def scale(self, grads: List[Grad], factor: float) -> List[float]:
        buf = self.borrow_spare()  # clean: returned in the finally
        try:
            for g in grads:
                if not buf.pack(g):
                    return []
            return [x * factor for x in buf.data[:buf.used]]
        finally:
            self.return_spare(buf)

    def save(self, step: int, shards: List[str]) -> int:
        written = 0
        for i, shard in enumerate(shards):
            out = open(os.path.join(self.workdir, f"{step}.{i}"), "w")  # leak: continue for an empty shard skips close
            if not shard:
                continue
            written += out.write(shard)
            out.close()
        return written

    def shutdown(self) -> None:
        self.metrics.close()
        if self.spare is not None:
            self.buffers.relinquish(self.spare)
            self.spare = None


def demo() -> None:
    with tempfile.TemporaryDirectory() as d:
        buffers = CommBuffers(6, 8)
        t = Trainer(d, buffers)  # clean: shutdown
        t.step([[1.0] * 5, [2.0] * 5, [3.0] * 2])
        t.clip([[5.0]], 1.0)
        t.scale([[1.0]], 2.0)
        t.save(1, ["abc"])
        t.reducer.push_overlapped([[1.0]])
        t.reducer.reduce_one([1.0])
        t.reducer.reduce_if_finite([1.0])
        t.params.open_group("w")
        t.params.forget_stale([])
        t.params.broadcast([[1.0]])
        t.params.checksum([[1.0]])
        t.params.two_phase([1.0], [[1.0]])
        t.shutdown()
        assert len(buffers) == 6


if __name__ == "__main__":
    demo()
