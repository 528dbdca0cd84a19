import asyncio
import logging
import os

import torch

from .cache import TileCache
from .handles import HandlePool
from .regions import NoRegion, RegionPool

log = logging.getLogger("tiles.service")


class TruncatedTile(Exception):
    pass


class TileService:
    def __init__(self, layout, model, n_regions=512):
        self.layout = layout
        self.model = model
        self.regions = RegionPool(n_regions, 3 * 256 * 256)
        self.cache = TileCache(self.regions, n_regions - 8)
        self.handles = HandlePool(32)
        self._tasks = set()

    async def _read(self, key):
        path, offset, shape = self.layout.find(key)
        nbytes = shape[0] * shape[1] * 3
        h = await self.handles.checkout(path)  # clean: checked in by the finally
        try:
            region = self.regions.take()  # leak: after a short read TruncatedTile is raised and the region isn't dropped
            got = await asyncio.to_thread(os.preadv, h.fd, [region.view(nbytes)], offset)
            if got < nbytes:
                raise TruncatedTile(key)
            return region, shape
        finally:
            await self.handles.checkin(h)

    async def load(self, key):
        """The tile, with a reference that the caller releases."""
        tile = self.cache.lookup(key)  # clean: goes to the caller
        if tile is not None:
            return tile
        region, shape = await self._read(key)  # clean: near miss, insert() takes it over or drops it
        return self.cache.insert(key, region, shape)  # clean: goes to the caller

    async def embed(self, key):
        tile = await self.load(key)  # clean: released in the finally
        try:
            return self.model(tile.tensor()[None])[0]
        finally:
            self.cache.release(tile)

    async def embed_around(self, keys):
        """The mean over the tiles of a neighbourhood that can be read."""
        got = await asyncio.gather(*(self.load(k) for k in keys), return_exceptions=True)  # clean: near miss, the failures are sorted out and the tiles released
        tiles = [t for t in got if not isinstance(t, BaseException)]
        try:
            if not tiles:
                return None
            return self.model(torch.stack([t.tensor() for t in tiles])).mean(dim=0)
        finally:
            for t in tiles:
                self.cache.release(t)

    async def mosaic(self, keys, side=256):
        rows = []
        for key in keys:
            try:
                tile = await self.load(key)  # leak: a tile at the slide's border is passed over with its reference
            except (TruncatedTile, NoRegion) as e:
                log.info("no tile %s: %r", key, e)
                continue
            if tile.shape != (side, side):
                continue
            rows.append(tile.tensor().clone())
            self.cache.release(tile)
        return torch.cat(rows, dim=1) if rows else None

    async def _fetch_ahead(self, key):
        try:
            await self.load(key)  # leak: the tile that comes back, with a reference, isn't kept by anyone
        except (TruncatedTile, NoRegion):
            log.debug("not fetched ahead: %s", key)

    def fetch_ahead(self, keys):
        for key in keys:
            task = asyncio.ensure_future(self._fetch_ahead(key))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def peek(self, key):
        """The thumbnail of a tile, if it happens to be in memory."""
        tile = self.cache.lookup(key)  # clean: near miss, a miss has no reference and a hit is released
        if tile is None:
            return None
        small = tile.tensor()[::16, ::16].clone()
        self.cache.release(tile)
        return small

    def blank_score(self):
        with self.regions.temp() as region:  # clean: dropped by the context manager
            region.mem.fill_(255)
            return float(self.model(region.mem.view(1, 256, 256, 3)).norm())

    async def stamp(self, path):
        h = await self.handles.checkout(path)  # clean: checked in by the finally
        try:
            return os.fstat(h.fd).st_mtime_ns
        finally:
            await self.handles.checkin(h)

    def slide_changed(self, slide, path):
        self.cache.invalidate(slide)
        self.handles.forget(path)


class Viewport:
    """The tiles that one client looks at."""

    def __init__(self, service):
        self._service = service
        self._shown = {}

    async def move(self, keys):
        for key in [k for k in self._shown if k not in keys]:
            self._service.cache.release(self._shown.pop(key))
        for key in keys:
            try:
                self._shown[key] = await self._service.load(key)  # leak: a tile that was shown before has its entry, and the older reference, overwritten
            except (TruncatedTile, NoRegion):
                log.debug("hole at %s", key)
        return len(self._shown)

    def close(self):
        while self._shown:
            _, tile = self._shown.popitem()
            self._service.cache.release(tile)


class Bookmark:
    """Keeps one tile in memory for as long as somebody has it marked."""

    def __init__(self, service):
        self._service = service
        self._tile = None

    async def set(self, key):
        fresh = await self._service.load(key)  # clean: near miss, clear() releases the one before, and this one later
        self.clear()
        self._tile = fresh

    def clear(self):
        tile, self._tile = self._tile, None
        if tile is not None:
            self._service.cache.release(tile)
