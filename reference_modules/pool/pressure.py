"""Whether the machine runs out of memory, read from Linux where it says so: then idle blocks go back before
new ones are made.
"""

from __future__ import annotations

from pathlib import Path

LOOK_EVERY = 64 << 20
"""Bytes of new blocks between two looks: a look costs about 30 µs, touching that much new memory about 20 ms.
"""
KEEP_FREE = 0.05
"""Share of the machine's memory that stays available to others."""


class Pressure:
    """Says how many idle bytes should go before a new block of some size is made."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._meminfo = root / "proc/meminfo"
        self._group_limit = root / "sys/fs/cgroup/memory.max"
        self._group_used = root / "sys/fs/cgroup/memory.current"
        self._unlooked = LOOK_EVERY

    def before(self, nbytes: int) -> int:
        """Bytes to give back before `nbytes` of new memory are taken: 0 where there is enough or nobody
        knows.
        """
        self._unlooked += nbytes
        if self._unlooked < LOOK_EVERY:
            return 0
        self._unlooked = 0
        return self.missing(nbytes)

    def missing(self, nbytes: int) -> int:
        """By how much `nbytes` more would eat into what should stay available."""
        short = 0
        for total, available in (self._machine(), self._group()):
            short = max(short, nbytes + int(total * KEEP_FREE) - available)
        return short

    def _machine(self) -> tuple[int, int]:
        try:
            lines = self._meminfo.read_text().splitlines()
        except OSError:  # not Linux: no figure, hence no pressure
            return 0, _PLENTY
        fields = {
            name: int(rest.split()[0]) << 10 for name, _, rest in (line.partition(":") for line in lines)
        }
        return fields.get("MemTotal", 0), fields.get("MemAvailable", _PLENTY)

    def _group(self) -> tuple[int, int]:
        try:
            limit, used = self._group_limit.read_text().strip(), self._group_used.read_text()
        except OSError:  # no control group, or an older hierarchy
            return 0, _PLENTY
        if limit == "max":
            return 0, _PLENTY
        return int(limit), int(limit) - int(used)


_PLENTY = 1 << 62
