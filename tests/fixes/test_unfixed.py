"""A finding that is left says what stands in the way of its fix."""

from pathlib import Path

import pytest

from tests.fixes.test_fix_fixtures import fixed

SHARED_LINE = """\
def f(pool):
    n = 8; buf = pool.acquire(n)
    buf.fill(0)
"""
READ_LIST = """\
def f(pool, items, workers):
    blocks = []
    for item in items:
        block = pool.acquire(item.size)
        blocks.append(block)
    workers.warn(blocks[0])
    assert workers.ready
    return blocks
"""
KEPT_COUNT = """\
class Block:
    def __init__(self, pool):
        self.pool, self.count = pool, 1

    def ref_count_up(self):
        self.count += 1

    def ref_count_down(self):
        self.count -= 1
        if self.count == 0:
            self.pool.free(self)


def kept(block: Block, channel):
    block.ref_count_up()
    if channel.is_closed:
        block.ref_count_down()
        return
    channel.note(block.count)
"""


TOLD_OR_TAKEN = """\
class Pool:
    def __init__(self, n):
        self._free = [bytearray(8) for _ in range(n)]

    def borrow(self):
        return self._free.pop()

    def give_back(self, buf):
        self._free.append(buf)


def norm(pool: Pool, values, out=None):
    if out is None:
        out = pool.borrow()
    own = out is None
    out[:] = values
    result = bytes(out)
    if own:
        pool.give_back(out)
    return result
"""


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        (TOLD_OR_TAKEN, "PA101", "`out` may be the caller's"),
        (SHARED_LINE, "PA101", "other statements share the line of the acquire"),
        (READ_LIST, "PA103", "`block` goes into a container that is read or handed on before it is lost"),
        (KEPT_COUNT, "PA102", "`block` is not given back in the same block, so that it may be meant to stay"),
    ],
)
def test_what_stands_in_the_way_is_said(text: str, code: str, said: str, tmp_path: Path) -> None:
    _, plan = fixed(tmp_path / "code.py", text, code)
    (left,) = plan.repaired.left
    assert left.reason.startswith(f"no fix could be built: {said}")


def test_a_rule_without_fixes_says_so(tmp_path: Path) -> None:
    text = "import torch\n\n\ndef run(model, batches):\n    for batch in batches:\n        model(batch)\n"
    text += "        torch.cuda.empty_cache()\n"
    _, plan = fixed(tmp_path / "code.py", text, "PA511")
    (left,) = plan.repaired.left
    assert left.reason == "no fix could be built: what to do about this rule is for the author to choose"
