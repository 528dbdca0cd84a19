"""Admission: a counted turnstile for each class of traffic, with tickets as context managers."""
import asyncio


class Ticket:
    def __init__(self, stile, weight):
        self.stile = stile
        self.weight = weight
        self.keep = False

    def __enter__(self):
        return self

    def __exit__(self, et, ev, tb):
        if self.keep:
            return False
        self.stile.exit(self)
        return False


class Turnstile:
    def __init__(self, width):
        self.width = width
        self._inside = 0
        self._waiters = []

    def admit(self, weight=1):
        """A ticket, or None when it is full."""
        if self._inside + weight > self.width:
            return None
        self._inside += weight
        return Ticket(self, weight)

    def exit(self, ticket):
        self._inside -= ticket.weight
        while self._waiters and self._inside < self.width:
            fut = self._waiters.pop(0)
            if not fut.done():
                fut.set_result(None)

    async def admit_wait(self, weight=1):
        while True:
            ticket = self.admit(weight)  # clean: returned to the caller
            if ticket is not None:
                return ticket
            fut = asyncio.get_running_loop().create_future()
            self._waiters.append(fut)
            await fut

    async def admit_class(self, weight, allowed):
        ticket = await self.admit_wait(weight)  # leak: a disallowed class is told no with its ticket counted
        if not allowed(weight):
            return None
        return ticket
