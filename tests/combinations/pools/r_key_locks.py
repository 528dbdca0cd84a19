# take: await P.enter(key)
# give: P.leave(key)
# gets: nothing
# type: ConversationGate
import asyncio


class ConversationGate:
    """One request at a time for each conversation id; locks vanish with their last waiter."""

    def __init__(self):
        self._gates = {}
        self._interest = {}

    def _forget(self, cid):
        self._interest[cid] -= 1
        if not self._interest[cid]:
            del self._interest[cid]
            del self._gates[cid]

    async def enter(self, cid):
        gate = self._gates.setdefault(cid, asyncio.Lock())
        self._interest[cid] = self._interest.get(cid, 0) + 1
        try:
            await gate.acquire()
        except BaseException:
            self._forget(cid)
            raise

    def leave(self, cid):
        self._gates[cid].release()
        self._forget(cid)
