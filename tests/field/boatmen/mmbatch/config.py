from dataclasses import dataclass


@dataclass(frozen=True)
class MMConfig:
    tile: int = 448
    max_tiles: int = 12
    canvases: int = 32
    workers: int = 4
    max_bytes: int = 20 << 20
    fetch_connections: int = 8

    def tiles_for(self, w, h):
        cols = -(-w // self.tile)
        rows = -(-h // self.tile)
        return min(self.max_tiles, cols * rows)
