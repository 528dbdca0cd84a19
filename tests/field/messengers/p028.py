"""Striped locks of an account service, used by coroutines."""
import asyncio


class Stripes:
    def __init__(self, count):
        self._owner = [None] * count
        self._changed = asyncio.Condition()

    def index(self, account):
        return hash(account) % len(self._owner)

    async def lock(self, account):
        i = self.index(account)
        async with self._changed:
            await self._changed.wait_for(lambda: self._owner[i] is None)
            self._owner[i] = account
        return i

    async def unlock(self, i):
        async with self._changed:
            self._owner[i] = None
            self._changed.notify_all()


class Locked:
    def __init__(self, stripes, account):
        self.stripes = stripes
        self.account = account
        self.stripe = None

    async def __aenter__(self):
        self.stripe = await self.stripes.lock(self.account)  # clean: __aexit__ unlocks
        return self.stripe

    async def __aexit__(self, kind, exc, tb):
        await self.stripes.unlock(self.stripe)


class Accounts:
    def __init__(self, stripes, store):
        self.stripes = stripes
        self.store = store

    async def deposit(self, account, amount):
        async with Locked(self.stripes, account):  # clean: async with
            balance = await self.store.read(account)
            if balance is None:
                return None
            await self.store.write(account, balance + amount)
            return balance + amount

    async def close(self, account):
        stripe = await self.stripes.lock(account)  # leak: a balance that is left returns locked
        balance = await self.store.read(account)
        if balance:
            return False
        await self.store.delete(account)
        await self.stripes.unlock(stripe)
        return True

    async def freeze(self, account, seconds):
        stripe = await self.stripes.lock(account)  # clean: unlocked after the sleep
        await asyncio.sleep(seconds)
        await self.stripes.unlock(stripe)

    async def peek(self, account):
        guard = Locked(self.stripes, account)
        await guard.__aenter__()  # leak: __aexit__ is never awaited
        return await self.store.read(account)
