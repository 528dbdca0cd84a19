"""The engine: groups of beams by request id, stepped together."""
import logging
from collections import deque
from typing import Deque, Dict, List, Tuple

from .beams import Beam, BeamGroup
from .pool import NoRow, PagePool, PoolDry, Rows

log = logging.getLogger(__name__)


class Engine:
    def __init__(self, model, pool: PagePool, rows: Rows) -> None:
        self.model, self.pool, self.rows = model, pool, rows
        self.groups: Dict[str, BeamGroup] = {}
        self.saved: Dict[str, Beam] = {}
        self.retry: Deque[Tuple[str, List[int], int]] = deque()

    def start(self, rid: str, tokens: List[int], width: int) -> bool:
        if rid in self.groups:
            return True
        pages = self.pool.alloc_run(-(-len(tokens) // self.pool.page_size))  # leak: a full batch returns False with the pages allocated
        if pages is None:
            return False
        row = self.rows.take_row()  # clean: the root beam owns it and the group retires the root
        if row is None:
            return False
        root = Beam(self.pool, self.rows, pages, row, tokens)
        self.groups[rid] = BeamGroup(root, width)
        return True

    def resume(self, rid: str, key: str, width: int) -> bool:
        """Goes on from a beam that was saved; it is the group's afterwards."""
        if rid in self.groups or key not in self.saved:
            return False
        self.groups[rid] = BeamGroup(self.saved.pop(key), width)
        return True

    def save_best(self, rid: str, key: str) -> None:
        try:
            copy = self.groups[rid].best().fork()  # clean: near miss, stored under the key, and what was there before is retired
        except NoRow:
            return
        previous = self.saved.get(key)
        if previous is not None:
            previous.retire()
        self.saved[key] = copy

    def step(self) -> List[str]:
        ended = []
        for rid, group in list(self.groups.items()):
            if group.finished:
                continue
            ranked, floor = self.model.expand(group.beams)
            try:
                group.advance(ranked, floor)
            except (PoolDry, NoRow) as exc:
                log.info("%s is started over: %r", rid, exc)
                tokens = self.finish(rid)
                self.retry.append((rid, tokens, group.width))
                continue
            group.harvest()
            if group.finished:
                ended.append(rid)
        return ended

    def retry_one(self) -> bool:
        if not self.retry:
            return False
        rid, tokens, width = self.retry[0]
        if self.start(rid, tokens, width):
            self.retry.popleft()
            return True
        return False

    def finish(self, rid: str) -> List[int]:
        self.retry = deque(r for r in self.retry if r[0] != rid)
        group = self.groups.pop(rid, None)
        if group is None:
            return []
        tokens = list(group.best().tokens) if group.beams or group.done else []
        group.close()
        return tokens

    def shutdown(self) -> None:
        for rid in list(self.groups):
            self.finish(rid)
        for beam in self.saved.values():
            beam.retire()
        self.saved.clear()
