import logging
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

from .packets import Bitstreams, Packet
from .sessions import EncSession, Farm, NoSession

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rung:
    name: str
    codec: str
    height: int


class Job:
    """Encodes every frame once per rung of its ladder."""

    def __init__(self, job_id: str, farm: Farm, pool: Bitstreams, scale: Callable[[Any, int], Any]) -> None:
        self.job_id = job_id
        self.farm = farm
        self.pool = pool
        self.scale = scale
        self.rungs: List[Tuple[Rung, EncSession]] = []
        self.preview: Optional[EncSession] = None
        self.delayed = self.starved = 0

    def add_rung(self, rung: Rung) -> None:
        self.rungs.append((rung, self.farm.open(rung.codec)))  # clean: the list is walked by close()

    def start_preview(self) -> None:
        if self.preview is None:
            self.preview = self.farm.open("mjpeg")  # leak: close() walks the rungs and leaves the preview session open

    def snapshot(self, frame: Any) -> bytes:
        self.start_preview()
        out = bytearray(1 << 18)
        n = self.preview.encode(self.scale(frame, 180), out)
        return bytes(out[:n])

    def encode(self, frame: Any, pts: int) -> Iterator[Packet]:
        """The packets of one frame. The consumer releases them."""
        for rung, session in self.rungs:
            buf = self.pool.get()  # leak: while the encoder fills its pipeline it returns nothing, and the continue forgets the buffer
            if buf is None:
                self.starved += 1
                continue
            n = session.encode(self.scale(frame, rung.height), buf)
            if n == 0:
                self.delayed += 1
                continue
            yield Packet(self.pool, buf, n, rung.name, pts)

    def flush(self) -> List[Packet]:
        tail: List[Packet] = []
        for rung, session in self.rungs:
            while True:
                buf = self.pool.get()  # clean: near miss, put back on the empty answer that ends the loop, otherwise in a packet
                if buf is None:
                    return tail
                n = session.encode(None, buf)
                if n == 0:
                    self.pool.put(buf)
                    break
                tail.append(Packet(self.pool, buf, n, rung.name, -1))
        return tail

    def close(self) -> None:
        while self.rungs:
            _, session = self.rungs.pop()
            self.farm.close(session)


def open_job(job_id: str, ladder: List[Rung], farm: Farm, pool: Bitstreams, scale: Callable[[Any, int], Any]) -> Job:
    """A job with all of its rungs, or NoSession and nothing."""
    job = Job(job_id, farm, pool, scale)
    try:
        for rung in ladder:
            job.add_rung(rung)
    except NoSession:
        job.close()
        raise
    return job


def trial(ladder: List[Rung], farm: Farm, frame: Any) -> Dict[str, int]:
    """Encode one frame per rung and see how large it gets; used to choose bitrates."""
    opened: Dict[str, EncSession] = {}
    for rung in ladder:
        try:
            opened[rung.name] = farm.open(rung.codec)  # leak: when a later rung finds no session the handler returns without closing those in the table
        except NoSession:
            log.info("no trial, the farm is full")
            return {}
    sizes = {}
    scratch = bytearray(1 << 22)
    for name, session in opened.items():
        sizes[name] = session.encode(frame, scratch)
        farm.close(session)
    return sizes
