"""A turn for each actor: one task at a time by key, with async with or by hand."""
import asyncio


class Turn:
    def __init__(self, turns, key):
        self._turns = turns
        self._key = key

    async def __aenter__(self):
        await self._turns.my_turn(self._key)
        return self._key

    async def __aexit__(self, *exc):
        await self._turns.your_turn(self._key)


class Turns:
    def __init__(self):
        self._busy = set()
        self._bell = asyncio.Condition()

    async def my_turn(self, key):
        async with self._bell:
            await self._bell.wait_for(lambda: key not in self._busy)
            self._busy.add(key)

    async def your_turn(self, key):
        async with self._bell:
            self._busy.discard(key)
            self._bell.notify_all()

    def turn(self, key):
        return Turn(self, key)


class Actors:
    def __init__(self, turns, states):
        self.turns = turns
        self.states = states

    async def tell(self, key, event):
        async with self.turns.turn(key):  # clean: async with
            self.states[key] = await event(self.states.get(key))

    async def ask(self, key, question):
        await self.turns.my_turn(key)  # leak: an unknown actor keeps its turn
        if key not in self.states:
            return None
        answer = await question(self.states[key])
        await self.turns.your_turn(key)
        return answer

    async def stop(self, key):
        await self.turns.my_turn(key)  # clean: passed on in finally
        try:
            self.states.pop(key, None)
        finally:
            await self.turns.your_turn(key)


async def sweep(actors, keys, idle):
    for key in keys:
        await actors.turns.my_turn(key)  # leak: actors at work keep the turn
        if not idle(key):
            continue
        actors.states.pop(key, None)
        await actors.turns.your_turn(key)
