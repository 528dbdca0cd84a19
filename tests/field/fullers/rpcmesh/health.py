from __future__ import annotations

from typing import List, Sequence, Set

from .channels import ChannelManager, LeaseTimeout


class Monitor:
    def __init__(self, mgr: ChannelManager) -> None:
        self.mgr = mgr
        self.down: Set[str] = set()

    async def check(self, target: str) -> bool:
        try:
            channel = await self.mgr.lease(target, timeout=0.05)  # clean: near miss, the handler runs when no lease was had
        except LeaseTimeout:
            return False
        healthy = channel.healthy
        self.mgr.give_back(channel)
        return healthy

    async def sweep(self, targets: Sequence[str]) -> None:
        for target in targets:
            channel = await self.mgr.lease(target)  # leak: a target that does not answer is skipped with its channel leased
            try:
                await channel.unary("ping", None)
            except ConnectionError:
                self.down.add(target)
                continue
            self.down.discard(target)
            self.mgr.give_back(channel)

    async def sweep_strict(self, targets: Sequence[str]) -> List[str]:
        answered: List[str] = []
        for target in targets:
            channel = await self.mgr.lease(target)  # clean: near miss, the finally runs on continue too
            try:
                await channel.unary("ping", None)
            except ConnectionError:
                self.down.add(target)
                continue
            finally:
                self.mgr.give_back(channel)
            answered.append(target)
        return answered

    async def latency_probe(self, targets: Sequence[str]) -> int:
        channel = await self.mgr.lease_healthy(targets)  # clean: None-checked and given back
        if channel is None:
            return -1
        await channel.unary("ping", None)
        self.mgr.give_back(channel)
        return 0
