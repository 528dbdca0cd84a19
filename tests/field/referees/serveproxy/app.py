from __future__ import annotations

import asyncio

from .router import ProxyRequest, Router


class ProxyApp:
    def __init__(self, router: Router) -> None:
        self.router = router

    async def handle(self, text: str) -> str | None:
        req = ProxyRequest(text, asyncio.get_running_loop().create_future())
        if not await self.router.enqueue(req):  # clean: the queued request is finished by dispatch or drop_cancelled
            return None
        return await req.reply

    async def direct(self, texts: list[str]) -> list[str] | None:
        ticket = self.router.admission.try_admit(sum(map(len, texts)))  # leak: no free replica returns None before the ticket is dismissed
        if ticket is None:
            return None
        replica = self.router.replicas.pick()  # clean: near miss, settled in finally for an answer and for a reset
        if replica is None:
            return None
        try:
            return await replica.call(texts)
        except ConnectionResetError:
            return None
        finally:
            self.router.replicas.settle(replica)
            self.router.admission.dismiss(ticket)

    async def retry(self, text: str, attempts: int) -> str | None:
        for _ in range(attempts):
            replica = self.router.replicas.pick()  # leak: the reset handler goes on to the next attempt without settling
            if replica is None:
                await asyncio.sleep(0.01)
                continue
            try:
                out = await replica.call([text])
            except ConnectionResetError:
                continue
            self.router.replicas.settle(replica)
            return out[0]
        return None

    async def check(self) -> list[str]:
        down: list[str] = []
        for _ in self.router.replicas.replicas:
            replica = self.router.replicas.pick()  # leak: draining replicas are noted by continue and stay counted as busy
            if replica is None:
                break
            if replica.draining:
                down.append(replica.name)
                continue
            self.router.replicas.settle(replica)
        return down
