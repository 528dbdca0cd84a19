"""Clip sampling for video-language training: hardware decoder sessions and reusable frame planes."""
from __future__ import annotations

import contextlib
import logging
import threading
from dataclasses import dataclass
from typing import Iterable, Iterator, Optional, Sequence

import numpy as np

_log = logging.getLogger("video")


class DecodeError(ValueError):
    pass


class NoSession(RuntimeError):
    pass


class DecoderBank:
    """The card allows `limit` sessions; a token is the session's number, counted by a semaphore."""

    def __init__(self, limit: int):
        self._sem = threading.Semaphore(limit)
        self._lock = threading.Lock()
        self._next = 0
        self.alive: set[int] = set()

    def open_session(self, wait: float = 10.0) -> int:
        if not self._sem.acquire(timeout=wait):  # clean: released by close_session()
            raise NoSession(f"waited {wait}s")
        with self._lock:
            self._next += 1
            self.alive.add(self._next)
            return self._next

    def open_codec(self, codec: str) -> int:
        token = self.open_session()  # leak: an unsupported codec raises with the session open
        if codec not in ("h264", "hevc", "av1"):
            raise DecodeError(codec)
        return token

    def close_session(self, token: int) -> None:
        with self._lock:
            self.alive.discard(token)
        self._sem.release()

    @contextlib.contextmanager
    def session(self, wait: float = 10.0) -> Iterator[int]:
        token = self.open_session(wait)  # clean: closed in finally
        try:
            yield token
        finally:
            self.close_session(token)


class PlaneStore:
    """Planes by (height, width)."""

    def __init__(self, per_size: int = 16):
        self.per_size = per_size
        self.shelf: dict[tuple[int, int], list[np.ndarray]] = {}
        self.out = 0

    def fetch(self, h: int, w: int) -> np.ndarray:
        self.out += 1
        shelf = self.shelf.setdefault((h, w), [])
        if shelf:
            return shelf.pop()  # clean: handed to the caller
        return np.empty((h, w, 3), np.uint8)

    def put(self, plane: np.ndarray) -> None:
        self.out -= 1
        shelf = self.shelf[plane.shape[:2]]
        if len(shelf) < self.per_size:
            shelf.append(plane)

    @contextlib.contextmanager
    def scratch(self, h: int, w: int) -> Iterator[np.ndarray]:
        plane = self.fetch(h, w)  # leak: put follows the yield without finally, a DecodeError in the body passes it by
        yield plane
        self.put(plane)


@dataclass
class Clip:
    path: str
    height: int
    width: int
    frames: int
    codec: str = "h264"


class Reader:
    """Decodes one clip; holds a session from the first frame to `close`."""

    def __init__(self, bank: DecoderBank, backend, clip: Clip):
        self.bank = bank
        self.backend = backend
        self.clip = clip
        self.token: Optional[int] = None

    def read(self, index: int, into: np.ndarray) -> None:
        if self.token is None:
            self.token = self.bank.open_session()  # clean: near miss, opened on first use and closed in close() when set
        if not self.backend.decode(self.token, self.clip.path, index, into):
            raise DecodeError(f"{self.clip.path}@{index}")

    def close(self) -> None:
        if self.token is not None:
            self.bank.close_session(self.token)
            self.token = None

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *exc) -> None:
        self.close()


class ClipSampler:
    def __init__(self, bank: DecoderBank, planes: PlaneStore, backend):
        self.bank = bank
        self.planes = planes
        self.backend = backend

    def _grab(self, reader: Reader, index: int) -> np.ndarray:
        plane = self.planes.fetch(reader.clip.height, reader.clip.width)  # clean: near miss, put back on both errors of read and else returned
        try:
            reader.read(index, plane)
        except (DecodeError, NoSession):
            self.planes.put(plane)
            raise
        return plane

    def sample(self, clip: Clip, indices: Sequence[int]) -> list[np.ndarray]:
        """Copies of the frames that decode."""
        out: list[np.ndarray] = []
        with Reader(self.bank, self.backend, clip) as reader:
            for i in indices:
                try:
                    plane = self._grab(reader, i)  # clean: put back after the copy
                except DecodeError as e:
                    _log.debug("%s", e)
                    continue
                out.append(plane.copy())
                self.planes.put(plane)
        return out

    def mean_frame(self, clip: Clip, indices: Iterable[int]) -> np.ndarray:
        acc = np.zeros((clip.height, clip.width, 3), np.float32)
        n = 0
        with Reader(self.bank, self.backend, clip) as reader:
            for i in indices:
                acc += self._grab(reader, i)  # leak: the plane is added to the sum and dropped
                n += 1
        return acc / max(n, 1)

    def difference(self, clip: Clip) -> float:
        prev: Optional[np.ndarray] = None
        total = 0.0
        with Reader(self.bank, self.backend, clip) as reader:
            for i in range(clip.frames):
                cur = self._grab(reader, i)  # leak: prev is rebound to cur each round and only the last is put back
                if prev is not None:
                    total += float(np.abs(cur.astype(np.int16) - prev).mean())
                prev = cur
        if prev is not None:
            self.planes.put(prev)
        return total / max(clip.frames - 1, 1)

    def scene_cuts(self, clip: Clip, threshold: float) -> list[int]:
        cuts: list[int] = []
        with self.planes.scratch(clip.height, clip.width) as ref:  # clean: with statement
            with self.bank.session() as token:  # clean: with statement
                for i in range(clip.frames):
                    if not self.backend.decode(token, clip.path, i, ref):
                        raise DecodeError(clip.path)
                    if i and float(ref.mean()) > threshold:
                        cuts.append(i)
        return cuts

    def thumbnail(self, clip: Clip) -> Optional[np.ndarray]:
        token = self.bank.open_codec(clip.codec)  # leak: a failed first frame returns None with the session open
        small = np.zeros((clip.height, clip.width, 3), np.uint8)
        if not self.backend.decode(token, clip.path, 0, small):
            return None
        self.bank.close_session(token)
        return small[::4, ::4]
