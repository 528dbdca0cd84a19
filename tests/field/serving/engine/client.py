import contextlib
import typing as t

from .core import EngineCore
from .request import EngineRequest


class LLM:
    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.held_prefix: t.Dict[str, t.List[int]] = {}

    @contextlib.contextmanager
    def prefix(self, rid: str, n: int) -> t.Iterator[t.List[int]]:
        blocks = self.core.borrow_prefix(rid, n) or []  # clean: given back after the block
        try:
            yield blocks
        finally:
            self.core.store.dealloc_blocks(blocks)

    def overlap(self, a: str, b: str, n: int) -> int:
        with self.prefix(a, n) as x, self.prefix(b, n) as y:  # clean: with statement
            return len(set(x) & set(y))

    def hold(self, rid: str, n: int) -> bool:
        if rid in self.held_prefix:
            return True
        blocks = self.core.borrow_prefix(rid, n)  # clean: in the table, drop_holds gives all of them back
        if blocks is None:
            return False
        self.held_prefix[rid] = blocks
        return True

    def drop_holds(self) -> None:
        while self.held_prefix:
            _, blocks = self.held_prefix.popitem()
            self.core.store.dealloc_blocks(blocks)

    def describe(self, rid: str, n: int) -> str:
        blocks = self.core.borrow_prefix(rid, n)  # leak: the text of the block list is all that remains
        return f"{rid}: {blocks}" if blocks is not None else rid

    def preview(self, prompts: t.List[t.List[int]]) -> t.List[str]:
        seen = []
        for i, p in enumerate(prompts):
            req = EngineRequest(f"preview-{i}", p)
            sid = self.core.ids.reserve_id()  # leak: an empty prompt is passed over with its id reserved
            if sid is None:
                break
            if not p:
                continue
            req.seq_id = sid
            seen.append(req.rid)
            self.core.ids.unreserve_id(sid)
        return seen
