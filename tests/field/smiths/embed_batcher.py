"""Embedding batches over a ring of pinned host buffers; ownership travels with the batch."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, Iterator, List, Optional, Sequence


@dataclass(eq=False)
class HostBuffer:
    rows: int
    data: List[float] = field(default_factory=list)


class BufferRing:
    def __init__(self, count: int, rows: int) -> None:
        self._ring = [HostBuffer(rows) for _ in range(count)]
        self.claimed = 0

    def claim(self) -> Optional[HostBuffer]:
        if not self._ring:
            return None
        self.claimed += 1
        return self._ring.pop()

    def unclaim(self, buf: HostBuffer) -> None:
        buf.data.clear()
        self.claimed -= 1
        self._ring.append(buf)


class Batch:
    """Rows of a host buffer. Only the owner's release() puts the buffer back."""

    def __init__(self, ring: BufferRing, buf: HostBuffer, owns: bool = True) -> None:
        self.ring = ring
        self.buf = buf
        self.owns = owns

    def view(self) -> "Batch":
        return Batch(self.ring, self.buf, owns=False)

    def take(self) -> HostBuffer:
        """The caller becomes the owner of the buffer."""
        self.owns = False
        return self.buf

    def release(self) -> None:
        if self.owns:
            self.owns = False
            self.ring.unclaim(self.buf)

    def __enter__(self) -> "Batch":
        return self

    def __exit__(self, *exc) -> None:
        self.release()


class Embedder:
    def __init__(self, ring: BufferRing, dim: int = 2) -> None:
        self.ring = ring
        self.dim = dim
        self.ready: Dict[int, Batch] = {}

    def make_batch(self, texts: Sequence[str]) -> Optional[Batch]:
        buf = self.ring.claim()  # clean: the returned batch owns it
        if buf is None:
            return None
        buf.data.extend(float(len(t)) for t in texts)
        return Batch(self.ring, buf)

    def encode(self, texts: Sequence[str], buf: Optional[HostBuffer] = None) -> Optional[List[float]]:
        mine = False
        if buf is None:
            buf = self.ring.claim()  # clean: near miss, unclaimed under the flag
            if buf is None:
                return None
            mine = True
        buf.data[:] = [float(len(t)) for t in texts]
        out = list(buf.data)
        if mine:
            self.ring.unclaim(buf)
        return out

    def encode_into(self, texts: Sequence[str], buf: Optional[HostBuffer] = None, keep: bool = False) -> List[float]:
        mine = buf is None
        if mine:
            buf = self.ring.claim()  # leak: with keep set nobody gets the buffer and it stays claimed
        if buf is None:
            return []
        buf.data[:] = [float(len(t)) for t in texts]
        out = list(buf.data)
        if mine and not keep:
            self.ring.unclaim(buf)
        return out

    def mean(self, texts: Sequence[str]) -> float:
        batch = self.make_batch(texts)  # clean: near miss, the view owns nothing and the batch is released
        if batch is None:
            return 0.0
        view = batch.view()
        total = sum(view.buf.data) / max(1, len(texts))
        view.release()
        batch.release()
        return total

    def peak(self, texts: Sequence[str]) -> float:
        batch = self.make_batch(texts)  # leak: only the view, which owns nothing, is released
        if batch is None:
            return 0.0
        view = batch.view()
        top = max(view.buf.data, default=0.0)
        view.release()
        return top

    def drain(self, texts: Sequence[str]) -> int:
        batch = self.make_batch(texts)  # clean: near miss, take() moves the buffer out and it is unclaimed here
        if batch is None:
            return 0
        buf = batch.take()
        n = len(buf.data)
        self.ring.unclaim(buf)
        batch.release()
        return n

    def swap_out(self, texts: Sequence[str]) -> List[float]:
        batch = self.make_batch(texts)  # leak: after take() the release does nothing and the buffer is dropped
        if batch is None:
            return []
        data = list(batch.take().data)
        batch.release()
        return data

    def batches(self, texts: Sequence[str], size: int) -> Iterator[Batch]:
        for i in range(0, len(texts), size):
            batch = self.make_batch(texts[i : i + size])  # clean: near miss, each one yielded is the consumer's to release
            if batch is None:
                return
            yield batch

    def embed_all(self, texts: Sequence[str], size: int) -> List[float]:
        out: List[float] = []
        for batch in self.batches(texts, size):  # clean: with releases each one
            with batch:
                if not any(batch.buf.data):
                    continue
                out.extend(batch.buf.data)
        return out

    def embed_nonempty(self, texts: Sequence[str], size: int) -> List[float]:
        out: List[float] = []
        for batch in self.batches(texts, size):  # leak: an all-empty batch is skipped by continue
            if not any(batch.buf.data):
                continue
            out.extend(batch.buf.data)
            batch.release()
        return out

    def queue_batch(self, key: int, texts: Sequence[str]) -> bool:
        batch = self.make_batch(texts)  # clean: near miss, the entry replaced is released
        if batch is None:
            return False
        stale = self.ready.pop(key, None)
        if stale is not None:
            stale.release()
        self.ready[key] = batch
        return True

    def fetch(self, key: int) -> List[float]:
        batch = self.ready.pop(key, None)
        if batch is None:
            return []
        with batch:
            return list(batch.buf.data)


def main() -> None:
    emb = Embedder(BufferRing(3, 8))
    print(emb.encode(["a", "bb"]), emb.mean(["a", "bbb"]), emb.drain(["x"]))
    print(emb.embed_all(["", "", "abc", "d"], 2))
    emb.queue_batch(1, ["q"])
    emb.queue_batch(1, ["qq"])
    print(emb.fetch(1), "claimed:", emb.ring.claimed)


if __name__ == "__main__":
    main()
