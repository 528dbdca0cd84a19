# take: P.lend_cursor()
# give: P.cursor_home(X)
# gets: value
# type: CursorDesk
from dataclasses import dataclass, field
from typing import List


@dataclass
class Cursor:
    shard: int
    offset: int = 0
    lent: bool = False


@dataclass
class CursorDesk:
    shards: int
    epoch: int = 0
    cursors: List[Cursor] = field(default_factory=list)

    def __post_init__(self):
        self.cursors.extend(Cursor(s) for s in range(self.shards))

    def lend_cursor(self):
        """The least advanced cursor which no worker reads from."""
        home = [c for c in self.cursors if not c.lent]
        if not home:
            raise LookupError("all cursors are out; fewer loader workers than shards, please")
        best = min(home, key=lambda c: c.offset)
        best.lent = True
        return best

    def cursor_home(self, cursor):
        if not cursor.lent:
            raise LookupError(f"cursor of shard {cursor.shard} wasn't out")
        cursor.lent = False
