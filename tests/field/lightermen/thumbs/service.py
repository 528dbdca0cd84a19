"""Turns upload jobs into encoded thumbnails."""
from __future__ import annotations

import logging
import zlib
from dataclasses import dataclass, field
from typing import Dict, List, Optional

from . import ops
from .canvas import Canvas, CanvasDepot, Size

log = logging.getLogger(__name__)


@dataclass
class Job:
    job_id: str
    rgba: bytes
    size: Size
    box: Size
    dark: bool = False
    canvas: Optional[Canvas] = None
    badge: Optional[Canvas] = None
    frames: List[bytes] = field(default_factory=list)


class ThumbService:
    def __init__(self, depot: CanvasDepot) -> None:
        self.depot = depot
        self.jobs: Dict[str, Job] = {}
        self.results: Dict[str, bytes] = {}

    def start(self, job: Job) -> None:
        job.canvas = ops.resample(self.depot, job.rgba, job.size, job.box)  # clean: finish, cancel
        self.jobs[job.job_id] = job

    def start_badged(self, job: Job, badge: bytes, badge_size: Size) -> None:
        self.start(job)
        corner = (job.box[0] // 4, job.box[1] // 4)
        job.badge = ops.resample(self.depot, badge, badge_size, corner)  # leak: finish, cancel drop it

    def finish(self, job_id: str) -> bytes:
        job = self.jobs.pop(job_id)
        canvas = job.canvas
        job.canvas = None
        if job.badge is not None:
            w = job.badge.size[0] * 4
            canvas.pixels[:w] = job.badge.pixels[:w]
            job.badge = None
        data = zlib.compress(bytes(canvas.pixels))
        canvas.recycle()
        self.results[job_id] = data
        return data

    def cancel(self, job_id: str) -> None:
        job = self.jobs.pop(job_id, None)
        if job is None:
            return
        if job.canvas is not None:
            job.canvas.recycle()
            job.canvas = None

    def render(self, job: Job) -> bytes:
        canvas = ops.resample(self.depot, job.rgba, job.size, job.box)  # clean: letterbox or below
        if canvas.size != job.box:
            canvas = ops.letterbox(self.depot, canvas, job.box)  # clean: recycled below
        data = zlib.compress(bytes(canvas.pixels))
        canvas.recycle()
        return data

    def render_dark(self, job: Job) -> bytes:
        canvas = ops.resample(self.depot, job.rgba, job.size, job.box)  # leak: rebound to a tinted copy
        if job.dark:
            canvas = ops.tint(self.depot, canvas, b"\x10\x10\x18")  # clean: recycled below
        data = zlib.compress(bytes(canvas.pixels))
        canvas.recycle()
        return data

    def contact_sheet(self, job: Job, across: int) -> bytes:
        tiles = []
        for rgba in job.frames:
            tiles.append(ops.resample(self.depot, rgba, job.size, job.box))  # clean: near miss, by mosaic
        sheet = ops.mosaic(self.depot, tiles, across)  # clean: recycled below, None without tiles
        if sheet is None:
            return b""
        data = zlib.compress(bytes(sheet.pixels))
        sheet.recycle()
        return data

    def storyboard(self, job: Job, across: int, most: int) -> bytes:
        tiles = []
        for rgba in job.frames:
            tiles.append(ops.resample(self.depot, rgba, job.size, job.box))  # leak: those past `most`
        sheet = ops.mosaic(self.depot, tiles[:most], across)  # leak: returned as bytes, not recycled
        if sheet is None:
            return b""
        return zlib.compress(bytes(sheet.pixels))

    def dominant_colour(self, job: Job) -> bytes:
        canvas = ops.resample(self.depot, job.rgba, job.size, (8, 8))  # leak: transparent ones return
        sums = [0, 0, 0]
        weight = 0
        for i in range(0, len(canvas.pixels), 4):
            alpha = canvas.pixels[i + 3]
            weight += alpha
            for c in range(3):
                sums[c] += canvas.pixels[i + c] * alpha
        if weight == 0:
            log.info("%s is fully transparent", job.job_id)
            return b"\0\0\0"
        canvas.recycle()
        return bytes(s // weight for s in sums)

    def shutdown(self) -> None:
        for job_id in list(self.jobs):
            self.cancel(job_id)
