"""Video generation / analysis stream: ring of decoded frames."""
from __future__ import annotations

import logging
from collections import deque
from typing import Callable, Deque, Generator, Generic, Iterable, List, Optional, TypeVar

import numpy as np
import torch

logger = logging.getLogger("video")
F = TypeVar("F")


class Recycler(Generic[F]):
    def __init__(self, make: Callable[[], F], n: int) -> None:
        self._spare: Deque[F] = deque(make() for _ in range(n))

    def obtain(self) -> F:
        return self._spare.popleft()  # clean: handed out

    def recycle(self, item: F) -> None:
        self._spare.append(item)

    def empty(self) -> bool:
        return not self._spare


class FrameRecycler(Recycler[torch.Tensor]):
    def __init__(self, n: int, h: int, w: int) -> None:
        super().__init__(lambda: torch.empty(h, w, 3, dtype=torch.uint8), n)

    def obtain_from(self, raw: np.ndarray) -> torch.Tensor:
        frame = self.obtain()  # clean: handed to the caller
        frame.copy_(torch.from_numpy(raw))
        return frame


class Decoder:
    def __init__(self, source: Iterable[np.ndarray], frames: FrameRecycler) -> None:
        self.source = source
        self.frames = frames

    def __iter__(self) -> Generator[torch.Tensor, None, None]:
        """The consumer recycles."""
        for raw in self.source:
            if raw.size == 0:
                continue
            yield self.frames.obtain_from(raw)  # clean: handed to the consumer of the generator

    def own_frames(self) -> Generator[torch.Tensor, None, None]:
        """The generator recycles after each yield."""
        for raw in self.source:
            frame = self.frames.obtain_from(raw)  # clean: finally around the yield
            try:
                yield frame
            finally:
                self.frames.recycle(frame)

    def keyframes(self, every: int) -> Generator[torch.Tensor, None, None]:
        for i, raw in enumerate(self.source):
            frame = self.frames.obtain_from(raw)  # leak: frames between the key frames are neither yielded nor recycled
            if i % every:
                continue
            yield frame


class Stream:
    WINDOW = 8

    def __init__(self, dec: Decoder, frames: FrameRecycler, model: Callable[[torch.Tensor], torch.Tensor]):
        self.dec = dec
        self.frames = frames
        self.model = model
        self.window: Deque[torch.Tensor] = deque()
        self.reference: Optional[torch.Tensor] = None
        self.history: List[torch.Tensor] = []

    def push(self, raw: np.ndarray) -> None:
        if len(self.window) == self.WINDOW:
            self.frames.recycle(self.window.popleft())
        self.window.append(self.frames.obtain_from(raw))  # clean: near miss, the oldest was recycled first; stop() empties the window

    def stop(self) -> None:
        while self.window:
            self.frames.recycle(self.window.popleft())
        if self.reference is not None:
            self.frames.recycle(self.reference)
            self.reference = None

    def set_reference(self, raw: np.ndarray) -> None:
        old = self.reference
        self.reference = self.frames.obtain_from(raw)  # clean: near miss, the old one is recycled afterwards
        if old is not None:
            self.frames.recycle(old)

    def mean_level(self) -> List[float]:
        levels: List[float] = []
        for frame in self.dec:
            levels.append(frame.float().mean().item())
            self.frames.recycle(frame)
        return levels

    def thumbnail(self, raw: np.ndarray) -> torch.Tensor:
        frame = self.frames.obtain_from(raw)  # leak: only a converted copy is returned
        return frame[::8, ::8].float().clone()

    def thumbnail_once(self, raw: np.ndarray) -> torch.Tensor:
        frame = self.frames.obtain_from(raw)  # clean: recycled before the copy is returned
        small = frame[::8, ::8].float()
        self.frames.recycle(frame)
        return small

    def diff(self, a: np.ndarray, b: np.ndarray) -> Optional[torch.Tensor]:
        fa = self.frames.obtain_from(a)  # clean: near miss, recycled on the early return and at the end
        if self.frames.empty():
            self.frames.recycle(fa)
            return None
        fb = self.frames.obtain_from(b)  # clean: recycled at the end
        out = fa.int() - fb.int()
        self.frames.recycle(fa)
        self.frames.recycle(fb)
        return out

    def motion(self, a: np.ndarray, b: np.ndarray) -> float:
        fa = self.frames.obtain_from(a)  # leak: an empty recycler returns 0.0 with the first frame held
        if self.frames.empty():
            return 0.0
        fb = self.frames.obtain_from(b)  # clean: recycled below
        m = (fa.int() - fb.int()).abs().float().mean().item()
        for f in (fa, fb):
            self.frames.recycle(f)
        return m

    def clip(self, raws: Iterable[np.ndarray]) -> torch.Tensor:
        got = [self.frames.obtain_from(r) for r in raws]  # clean: each recycled after the stack
        clip = torch.stack(got)
        for f in got:
            self.frames.recycle(f)
        return clip

    def highlights(self, raws: Iterable[np.ndarray], thr: float) -> List[float]:
        scores: List[float] = []
        for r in raws:
            frame = self.frames.obtain_from(r)  # leak: the normalised copy takes the name, its recycling puts a stranger in the ring
            frame = frame.float() / 255
            s = self.model(frame).item()
            if s > thr:
                scores.append(s)
            self.frames.recycle(frame)
        return scores

    def remember(self, raw: np.ndarray) -> int:
        self.history.append(self.frames.obtain_from(raw))  # leak: forget() clears the list and recycles none of it
        return len(self.history)

    def forget(self) -> None:
        self.history.clear()

    def restart(self) -> None:
        self.stop()
        if not self.frames.empty():
            self.window.append(self.frames.obtain())  # clean: the new frame is in the window
            logger.debug("restarted")


def annotate(frames: FrameRecycler, raw: np.ndarray, draw: Optional[Callable[[torch.Tensor], None]]) -> bool:
    frame = frames.obtain_from(raw)  # leak: recycled only where a draw function was given
    if draw is None:
        return False
    draw(frame)
    frames.recycle(frame)
    return True
