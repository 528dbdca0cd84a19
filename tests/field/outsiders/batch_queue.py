"""Producer/consumer pipeline between the tokenizer threads and the GPU loop."""
from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from typing import Iterable, List, Optional

import torch


@dataclass
class Frame:
    ident: int
    data: torch.Tensor
    used: int = 0


class FramePool:
    def __init__(self, n: int, width: int):
        self._q: "queue.LifoQueue[Frame]" = queue.LifoQueue()
        for i in range(n):
            self._q.put(Frame(i, torch.zeros(width, dtype=torch.int32)))

    def get_frame(self, block: bool = True) -> Frame:
        return self._q.get(block=block)

    def put_frame(self, frame: Frame) -> None:
        frame.used = 0
        self._q.put(frame)


class Tokenizer(threading.Thread):
    def __init__(self, pool: FramePool, out: "queue.Queue[Optional[Frame]]", texts: Iterable[str], limit: int):
        super().__init__(daemon=True)
        self.pool = pool
        self.out = out
        self.texts = texts
        self.limit = limit
        self.skipped = 0

    def encode(self, text: str) -> List[int]:
        return [ord(c) for c in text]

    def run(self) -> None:
        for text in self.texts:
            frame = self.pool.get_frame()  # clean: passed to the consumer over the queue
            ids = self.encode(text)[: self.limit]
            frame.data[: len(ids)] = torch.tensor(ids, dtype=torch.int32)
            frame.used = len(ids)
            self.out.put(frame)
        self.out.put(None)

    def run_filtered(self) -> None:
        for text in self.texts:
            frame = self.pool.get_frame()  # leak: texts over the limit are skipped with the frame already taken
            ids = self.encode(text)
            if len(ids) > self.limit:
                self.skipped += 1
                continue
            frame.data[: len(ids)] = torch.tensor(ids, dtype=torch.int32)
            frame.used = len(ids)
            self.out.put(frame)
        self.out.put(None)

    def run_prechecked(self) -> None:
        for text in self.texts:
            ids = self.encode(text)
            if len(ids) > self.limit:
                self.skipped += 1
                continue
            frame = self.pool.get_frame()  # clean: near miss, the skip comes before the frame is taken
            frame.data[: len(ids)] = torch.tensor(ids, dtype=torch.int32)
            frame.used = len(ids)
            self.out.put(frame)
        self.out.put(None)

    def run_bounded(self) -> None:
        for text in self.texts:
            frame = self.pool.get_frame()  # leak: the handler of a full queue counts and drops the frame
            ids = self.encode(text)[: self.limit]
            frame.used = len(ids)
            try:
                self.out.put_nowait(frame)
            except queue.Full:
                self.skipped += 1

    def run_nowait(self) -> None:
        for text in self.texts:
            frame = self.pool.get_frame()  # clean: near miss, a full queue gives the frame back
            ids = self.encode(text)[: self.limit]
            frame.used = len(ids)
            try:
                self.out.put_nowait(frame)
            except queue.Full:
                self.skipped += 1
                self.pool.put_frame(frame)


class GpuLoop:
    def __init__(self, pool: FramePool, inbox: "queue.Queue[Optional[Frame]]", model: torch.nn.Module):
        self.pool = pool
        self.inbox = inbox
        self.model = model
        self.batch: List[Frame] = []

    def step(self) -> Optional[torch.Tensor]:
        frame = self.inbox.get()
        if frame is None:
            return None
        out = self.model(frame.data[: frame.used])
        self.pool.put_frame(frame)
        return out

    def gather(self, size: int) -> bool:
        while len(self.batch) < size:
            frame = self.inbox.get()
            if frame is None:
                return False
            self.batch.append(frame)
        return True

    def flush(self) -> None:
        for f in self.batch:
            self.model(f.data[: f.used])
            self.pool.put_frame(f)
        self.batch = []

    def pad_batch(self, size: int) -> None:
        while len(self.batch) < size:
            filler = self.pool.get_frame()  # clean: joins the batch that flush() returns
            filler.data.zero_()
            self.batch.append(filler)

    def synthetic(self, n: int) -> float:
        total = 0.0
        pending: List[Frame] = []
        for _ in range(n):
            f = self.pool.get_frame()  # leak: the list is cleared when it is full, without returning the frames
            f.data.fill_(1)
            pending.append(f)
            total += float(f.data.sum())
            if len(pending) == 4:
                pending.clear()
        for f in pending:
            self.pool.put_frame(f)
        return total

    def latency_probe(self) -> bool:
        try:
            f = self.pool.get_frame(block=False)  # clean: near miss, an empty pool raises and otherwise it goes back
        except queue.Empty:
            return False
        self.pool.put_frame(f)
        return True

    def warm(self, widths: List[int]) -> List[float]:
        res = []
        for w in widths:
            f = self.pool.get_frame()  # leak: too wide a request returns the list and keeps the frame
            if w > f.data.numel():
                return res
            res.append(float(self.model(f.data[:w]).sum()))
            self.pool.put_frame(f)
        return res
