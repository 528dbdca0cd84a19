from __future__ import annotations

import logging
from typing import Dict, List

from .conns import ConnPool, Worker

logger = logging.getLogger(__name__)


class Prober:
    def __init__(self, pool: ConnPool) -> None:
        self.pool = pool
        self.load: Dict[str, float] = {}

    async def probe(self, worker: Worker) -> bool:
        conn = await self.pool.checkout(worker)  # leak: a failed ping marks it broken and returns without checkin
        try:
            reply = await conn.call("ping", None)
        except ConnectionError as e:
            logger.warning("%s is down: %s", worker.name, e)
            conn.broken = True
            return False
        self.load[worker.name] = reply["load"]
        self.pool.checkin(conn)
        return True

    async def idle_count(self, workers: List[Worker]) -> int:
        n = 0
        for worker in workers:
            conn = await self.pool.checkout_now(worker)  # leak: counted and never checked in
            if conn is not None:
                n += 1
        return n
