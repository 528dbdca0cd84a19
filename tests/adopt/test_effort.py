"""The effort that an audit states is what adopting takes."""

import os
from pathlib import Path

from auditor.adopt.adoption import Fate
from auditor.adopt.run import Order, plan
from auditor.config import Settings
from auditor.engine import Request, audit

UNPOOLED = Path(__file__).parents[2] / "examples" / "unpooled"


def test_the_audit_states_as_many_edits_as_adopt_makes() -> None:
    path = os.path.relpath(UNPOOLED)
    rows = audit(Request((path,), Settings(), UNPOOLED, effort=True)).run.classes
    stated = {row.name: row.edits for row in rows if row.edits is not None}
    made = {}
    for name in stated:
        outcomes = plan(Order((path,), (name,), False, str(UNPOOLED))).outcomes
        made |= {each.entry.name: len(each.edits) for each in outcomes if each.entry.name == name}
    assert stated == made
    assert stated == {
        "BiasedAttention": 6,
        "ChunkedAttention": 7,
        "SegmentSummary": 7,
        "SlopedBias": 6,
        "SummaryBlock": 5,
    }


def test_what_adopt_refuses_has_no_effort(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(
        "import torch\nfrom torch import nn\n\n\nclass M(nn.Module):\n"
        "    def __init__(self):\n        self.a = 1\n\n"
        "    def forward(self, x):\n        b, n, d = x.shape\n"
        "        t = torch.zeros(b, n, n)\n        return t.sum()\n"
    )
    [row] = audit(Request((str(tmp_path),), Settings(), tmp_path, effort=True)).run.classes
    assert (row.support, row.priority, row.edits) == ("none", "high", None)
    [outcome] = plan(Order((str(tmp_path),), (), False, str(tmp_path))).outcomes
    assert outcome.fate is Fate.REFUSED
