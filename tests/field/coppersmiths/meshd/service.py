import asyncio
import logging
from typing import Awaitable, Callable, Optional

from .binding import Mesh, MeshBinder
from .inventory import RackSet

log = logging.getLogger(__name__)


class MeshService:
    def __init__(self, racks: RackSet):
        self.racks = racks
        self.binder = MeshBinder(racks)

    async def run_job(self, job: str, n: int, main: Callable[[Mesh], Awaitable[int]]) -> Optional[int]:
        mesh = self.binder.bind(job, n)  # clean: unbound by name in finally
        if mesh is None:
            return None
        try:
            return await main(mesh)
        finally:
            self.binder.unbind(job)

    async def run_smoke(self, probe: Callable[[str, int], Awaitable[bool]]) -> bool:
        tray = self.racks.pull()  # leak: failed probe returns False without slide_in
        if tray is None:
            return True
        if not await probe(tray.rack, tray.pos):
            log.error("smoke failed on %s/%d", tray.rack, tray.pos)
            return False
        self.racks.slide_in(tray)
        return True

    async def run_sweep(self, n: int, probe: Callable[[str, int], Awaitable[bool]]) -> int:
        bad = 0
        for _ in range(n):
            tray = self.racks.pull()  # clean: a bad tray is flagged and slid in like the others
            if tray is None:
                break
            ok = await probe(tray.rack, tray.pos)
            if not ok:
                tray.firmware_ok = False
                bad += 1
            self.racks.slide_in(tray)
        return bad

    async def queue_job(self, job: str, n: int, main: Callable[[Mesh], Awaitable[int]], poll: float = 1.0) -> int:
        mesh = self.binder.bind(job, n)  # clean: loop runs only while it is None
        while mesh is None:
            await asyncio.sleep(poll)
            mesh = self.binder.bind(job, n)  # clean: rebinds a None
        try:
            return await main(mesh)
        finally:
            self.binder.unbind(job)
