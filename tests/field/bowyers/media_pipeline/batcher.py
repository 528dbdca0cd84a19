"""Collects pictures of several clips to batches for the encoder."""
from __future__ import annotations

import logging
import queue
import threading
from dataclasses import dataclass, field
from typing import Optional

import torch

from .decode import Decoder, Packet
from .frames import Surface, SurfacePool

log = logging.getLogger(__name__)


@dataclass
class ClipTask:
    clip_id: str
    surfaces: list[Surface] = field(default_factory=list)
    cancelled: bool = False


class ClipBatcher:
    """Takes surfaces for a clip, lets a thread encode it, lets the surfaces go."""

    def __init__(self, pool: SurfacePool) -> None:
        self._pool = pool
        self._queue: "queue.Queue[Optional[ClipTask]]" = queue.Queue()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self.encoded: dict[str, torch.Tensor] = {}

    def start(self) -> None:
        self._thread.start()

    def submit(self, clip_id: str, frames: list[torch.Tensor]) -> Optional[ClipTask]:
        surfaces = self._pool.obtain_many(len(frames))  # leak: the loop skips cancelled tasks
        if not surfaces:
            return None
        for surface, frame in zip(surfaces, frames):
            surface.pixels.copy_(frame)
        task = ClipTask(clip_id, surfaces)
        self._queue.put(task)
        return task

    def _loop(self) -> None:
        while True:
            task = self._queue.get()
            if task is None:
                return
            if task.cancelled:
                log.info("clip %s was cancelled", task.clip_id)
                continue
            batch = torch.stack([s.pixels for s in task.surfaces]).float()
            self.encoded[task.clip_id] = batch.mean(dim=(2, 3))
            for surface in task.surfaces:
                self._pool.unref(surface)

    def stop(self) -> None:
        self._queue.put(None)
        self._thread.join()


class PreviewWall:
    """A grid of the newest picture of each camera; one reference per tile."""

    def __init__(self, pool: SurfacePool) -> None:
        self._pool = pool
        self._tiles: dict[str, Surface] = {}

    def show(self, camera: str, surface: Surface) -> None:
        old = self._tiles.get(camera)
        self._tiles[camera] = self._pool.add_ref(surface)  # clean: near miss, replaced or on clear()
        if old is not None:
            self._pool.unref(old)

    def clear(self) -> None:
        for surface in self._tiles.values():
            self._pool.unref(surface)
        self._tiles = {}


class FreezeFrame:
    """Holds one picture of each camera until thaw()."""

    def __init__(self, pool: SurfacePool) -> None:
        self._pool = pool
        self._frozen: dict[str, Surface] = {}

    def freeze(self, camera: str, surface: Surface) -> None:
        self._frozen[camera] = self._pool.add_ref(surface)  # leak: a second freeze replaces a held ref

    def thaw(self, camera: str) -> bool:
        surface = self._frozen.pop(camera, None)
        if surface is None:
            return False
        self._pool.unref(surface)
        return True


def key_tiles(decoder: Decoder, wall: PreviewWall, packets: dict[str, Packet]) -> int:
    shown = 0
    for camera, packet in packets.items():
        picture = decoder.decode_key(packet)  # clean: near miss, the wall adds its own reference
        if picture is None:
            continue
        wall.show(camera, picture)
        decoder.pool.unref(picture)
        shown += 1
    return shown


def key_freeze(decoder: Decoder, frozen: FreezeFrame, packets: dict[str, Packet]) -> int:
    held = 0
    for camera, packet in packets.items():
        picture = decoder.decode_key(packet)  # leak: freeze() adds its own, this one stays
        if picture is not None:
            frozen.freeze(camera, picture)
            held += 1
    return held


def pad_batch(pool: SurfacePool, clip: list[torch.Tensor], size: int) -> torch.Tensor:
    """Fill up a short clip with black pictures."""
    fill = list(pool.obtain_up_to(size - len(clip)))  # clean: all let go after the stack
    for surface in fill:
        surface.pixels.zero_()
    batch = torch.stack(clip + [s.pixels for s in fill])
    for surface in fill:
        pool.unref(surface)
    return batch


def black_rows(pool: SurfacePool, n: int) -> list[torch.Tensor]:
    rows = []
    for surface in pool.obtain_up_to(n):  # leak: a row is cloned and its surface dropped
        surface.pixels.zero_()
        rows.append(surface.pixels[:, :1].clone())
    return rows
