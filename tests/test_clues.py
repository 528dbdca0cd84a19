"""Which files the flow analysis reads."""

import pytest

from auditor.config import AnalysisSettings, ProtocolSettings
from auditor.protocols.clues import clues
from auditor.protocols.load import in_force
from auditor.source.clue import is_relevant
from auditor.source.searched import Listed


def relevant(text: str, settings: AnalysisSettings | None = None) -> bool:
    return is_relevant(Listed(text.encode()), clues(in_force(settings or AnalysisSettings())))


@pytest.mark.parametrize(
    "text",
    [
        "b = pool.acquire(8)",
        "b = self.allocate (8)",
        "def try_allocate_blocks(self): ...",
        "x = self._allocate_tensor(s)",
        "stack.callback(pool.release, b)",
        "f = allocator.free",
        "class BufferPool:\n    def get(self): ...",
        "p = TensorPool(8)",
        "b = self.pool.get_buffer(8)",
        "b = pools[0].inner.get_buffer(8)",
        "m.get_new_blocks(3)",
        "class Port:\n    def dock(self): ...\n    def undock(self, ship): ...",
        "class Desk:\n    def pick_worker(self): ...\n    def let_go(self, worker): ...",
        "def take_context(size): ...\ndef drop_context(context): ...",
        "class A:\n    def f(self, lane):\n        lane.status = 'idle'\n        self.n = 1",
    ],
)
def test_pool_code(text: str) -> None:
    assert relevant(text)


@pytest.mark.parametrize(
    "text",
    [
        "current(x); parent(x); different(x)",
        "x.freeze(); y.spin(); z.opinion()",
        "self.pooler = Pooler(c)\nclass MaxPooling: ...",
        "self.down = nn.AdaptiveAvgPool1d(1)",
        "# it may allocate, free or release memory\n",
        "f = open('x')",
        "queue.put(1); d.get(2)",
        "    def unpack(self, rows): ...\n    def close(self): ...\n    def decode(self, text): ...",
        "x = 1\ndef drop_context(x): ...",
        "def flatten_rows(x): ...\ndef unflatten_rows(x): ...",
        "class A:\n    def __enter__(self): ...\n    def __exit__(self, *error): ...",
    ],
)
def test_other_code(text: str) -> None:
    assert not relevant(text)


def test_protocols_that_are_on_count() -> None:
    assert relevant("f = open('x')", AnalysisSettings(enable_protocols=("files",)))
    own = ProtocolSettings(
        "rows", acquire=("*.fetch_row",), release=("*.drop_row(0)",), lease=("db.row_scope",)
    )
    settings = AnalysisSettings(protocols=(own,))
    for text in ("r = t.fetch_row(1)", "t.drop_row(r)", "with db.row_scope() as r: ..."):
        assert relevant(text, settings)
        assert not relevant(text)
