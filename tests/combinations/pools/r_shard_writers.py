# take: await P.open_shard(key)
# give: await P.close_shard(key)
# gets: value
# type: ShardWriterTable
import asyncio
from pathlib import Path


class ShardWriterTable:
    """One file handle for each checkpoint shard, shared by the tensors that land in it."""

    def __init__(self, root, mode="ab"):
        self.root = Path(root)
        self.mode = mode
        self._fh = {}
        self._users = {}
        self._mu = asyncio.Lock()

    def _open(self, name):
        path = self.root / f"{name}.distcp"
        path.parent.mkdir(parents=True, exist_ok=True)
        return open(path, self.mode)

    async def open_shard(self, name):
        async with self._mu:
            fh = self._fh.get(name)
            if fh is None:
                fh = self._open(name)
                self._fh[name] = fh
                self._users[name] = 0
            self._users[name] += 1
            return fh

    async def close_shard(self, name):
        async with self._mu:
            self._users[name] -= 1
            if self._users[name]:
                return
            del self._users[name]
            self._fh.pop(name).close()
