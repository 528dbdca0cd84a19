"""Decoded tiles by key. A tile with references isn't evicted."""
import logging
from collections import OrderedDict

log = logging.getLogger("tiles.cache")


class Tile:
    def __init__(self, key, region, shape):
        self.key = key
        self.region = region
        self.shape = shape
        self.refs = 0
        self.doomed = False

    def tensor(self):
        n = self.shape[0] * self.shape[1] * 3
        return self.region.mem[:n].view(*self.shape, 3)


class TileCache:
    def __init__(self, regions, max_tiles):
        self._regions = regions
        self._max = max_tiles
        self._tiles = OrderedDict()
        self.hits = self.misses = 0

    def lookup(self, key):
        """The tile with a reference for the caller, or None."""
        tile = self._tiles.get(key)
        if tile is None:
            self.misses += 1
            return None
        self.hits += 1
        self._tiles.move_to_end(key)
        tile.refs += 1
        return tile

    def insert(self, key, region, shape):
        """Takes the region over; returns the tile with a reference for the caller."""
        tile = self._tiles.get(key)
        if tile is not None:
            log.debug("%s was loaded twice", key)
            self._regions.drop(region)
        else:
            self._evict()
            tile = self._tiles[key] = Tile(key, region, shape)
        tile.refs += 1
        return tile

    def release(self, tile):
        tile.refs -= 1
        if tile.refs == 0 and tile.doomed:
            self._regions.drop(tile.region)

    def _evict(self):
        for key in list(self._tiles):
            if len(self._tiles) < self._max:
                return
            if self._tiles[key].refs == 0:
                self._regions.drop(self._tiles.pop(key).region)

    def invalidate(self, slide):
        for key in [k for k in self._tiles if k[0] == slide]:
            tile = self._tiles.pop(key)
            tile.doomed = True
            if tile.refs == 0:
                self._regions.drop(tile.region)
