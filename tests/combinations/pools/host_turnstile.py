# take: await P.pass_in(key)
# give: P.pass_out(key)
# gets: nothing
# type: HostTurnstile
import asyncio


class HostTurnstile:
    """max concurrent requests for each judge/reward-model host"""

    def __init__(self, per_host=16, special=None):
        self.per_host = per_host
        self.special = special or {}
        self._gates = {}

    def _gate(self, host):
        gate = self._gates.get(host)
        if gate is None:
            gate = asyncio.Semaphore(self.special.get(host, self.per_host))
            self._gates[host] = gate
        return gate

    async def pass_in(self, host):
        await self._gate(host).acquire()

    def pass_out(self, host):
        self._gates[host].release()
