# take: P.unrack()
# give: P.rerack(X)
# gets: optional
# type: CollateTrays
import numpy as np


class CollateTrays:
    """Process-wide (class level) collate trays; instances are mere handles."""

    depth = 12
    shape = (8, 4096)
    _rack = None
    _out = {}

    @classmethod
    def _ensure(cls):
        if cls._rack is None:
            cls._rack = [np.zeros(cls.shape, np.int32) for _ in range(cls.depth)]

    @classmethod
    def unrack(cls):
        cls._ensure()
        if cls._rack:
            tray = cls._rack.pop(0)
            cls._out[id(tray)] = tray
            return tray

    @classmethod
    def rerack(cls, tray):
        if cls._out.pop(id(tray), None) is None:
            raise ValueError("foreign tray")
        cls._rack.append(tray)
