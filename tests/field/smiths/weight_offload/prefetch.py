from __future__ import annotations

import queue
import threading
from typing import List, Optional

from .offloader import LayerOffloader, TransferError
from .staging import PinnedBuffer


class Prefetcher:
    """Double buffering: a thread fills staging buffers, the forward pass consumes them in order."""

    def __init__(self, off: LayerOffloader, depth: int = 2) -> None:
        self.off = off
        self.ready: "queue.Queue[Optional[tuple]]" = queue.Queue(depth)
        self.errors: List[str] = []

    def _produce(self, names: List[str]) -> None:
        for name in names:
            buf = self.off.staging.borrow()  # clean: near miss, queued for the consumer that gives it back
            buf.used = min(len(self.off.layers[name]) // 2, self.off.staging.nbytes)
            self.ready.put((name, buf))
        self.ready.put(None)

    def run(self, names: List[str]) -> int:
        thread = threading.Thread(target=self._produce, args=(names,), daemon=True)
        thread.start()
        n = 0
        while True:
            item = self.ready.get()
            if item is None:
                break
            name, buf = item
            self.off.device[name] = bytes(buf.mem[: buf.used])
            self.off.staging.give_back(buf)
            n += 1
        thread.join()
        return n

    def run_sync(self, names: List[str]) -> int:
        done = 0
        for name in names:
            stream = self.off.streams.get_stream()  # leak: the handled transfer error moves on to the next layer
            if stream is None:
                break
            buf = self.off.staging.borrow()  # clean: finally
            try:
                buf.used = len(self.off.layers[name]) // 2
                self.off._copy(stream, name, buf)
            except TransferError:
                self.errors.append(name)
                continue
            finally:
                self.off.staging.give_back(buf)
            self.off.streams.put_stream(stream)
            done += 1
        return done


class ResidentLayer:
    """Keeps the newest staged copy of one layer for fast restores."""

    def __init__(self, off: LayerOffloader, name: str) -> None:
        self.off = off
        self.name = name
        self.stage: Optional[PinnedBuffer] = None

    def refresh(self) -> None:
        fresh = self.off.staging.borrow(timeout=5.0)  # clean: near miss, the stage held before goes back first
        fresh.used = len(self.off.layers[self.name]) // 2
        if self.stage is not None:
            self.off.staging.give_back(self.stage)
        self.stage = fresh

    def close(self) -> None:
        stage, self.stage = self.stage, None
        if stage is not None:
            self.off.staging.give_back(stage)


def main() -> None:
    from .staging import CopyStreams, PinnedStaging

    staging, streams = PinnedStaging(3, 64), CopyStreams(2)
    off = LayerOffloader(staging, streams, {f"l{i}": list(range(8)) for i in range(6)})
    assert off.load("l0") and off.load_packed("l1")
    assert off.start("l2")  # clean: finish_all
    off.finish_all()
    print(off.load_many(["l3", "l4"], 64), Prefetcher(off).run(list(off.layers)))
    layer = ResidentLayer(off, "l5")
    layer.refresh()
    layer.refresh()
    layer.close()
    print("borrowed:", staging.borrowed, "busy streams:", streams.busy)


if __name__ == "__main__":
    main()
