"""Named asyncio locks; a name's lock exists only while somebody wants it."""
import asyncio
from contextlib import asynccontextmanager


class NamedLocks:
    def __init__(self):
        self._entries = {}

    async def lock(self, name):
        entry = self._entries.setdefault(name, [asyncio.Lock(), 0])
        entry[1] += 1
        await entry[0].acquire()

    def unlock(self, name):
        entry = self._entries[name]
        entry[0].release()
        entry[1] -= 1
        if entry[1] == 0:
            del self._entries[name]

    @asynccontextmanager
    async def hold(self, name):
        await self.lock(name)
        try:
            yield
        finally:
            self.unlock(name)


class ProfileService:
    def __init__(self, locks, repo):
        self.locks = locks
        self.repo = repo

    async def rename(self, user, name):
        async with self.locks.hold(user):  # clean: the with unlocks
            profile = await self.repo.load(user)
            profile["name"] = name
            await self.repo.save(user, profile)

    async def set_mail(self, user, mail):
        await self.locks.lock(user)  # leak: an unchanged address returns with the user locked
        profile = await self.repo.load(user)
        if profile.get("mail") == mail:
            return False
        profile["mail"] = mail
        await self.repo.save(user, profile)
        self.locks.unlock(user)
        return True

    async def delete(self, user):
        await self.locks.lock(user)  # clean: unlocked in finally
        try:
            await self.repo.delete(user)
        finally:
            self.locks.unlock(user)

    async def touch_all(self, users):
        for user in users:
            await self.locks.lock(user)  # leak: the first user without a profile breaks the loop
            if await self.repo.load(user) is None:
                break
            await self.repo.touch(user)
            self.locks.unlock(user)
