"""Sweeps in parts: what was measured is kept, and begun anew once what is judged has changed."""

import torch

from auditor.leaktests.support import set_seed
from tests.leaktests.sweep import Kept


def test_a_sweep_goes_on_where_it_ended_until_the_code_changes(tmp_path, capsys):
    judged = tmp_path / "support.py"
    judged.write_text("first")
    kept = Kept(tmp_path / "kept.jsonl", [judged], minutes=5)
    kept.add("a 4", {"pass": "ledger"})
    assert not kept.time_is_up
    assert Kept(tmp_path / "kept.jsonl", [judged], 5).rows == {"a 4": {"key": "a 4", "pass": "ledger"}}

    judged.write_text("second")
    assert Kept(tmp_path / "kept.jsonl", [judged], 5).rows == {}
    assert capsys.readouterr().out == "kept.jsonl is about other code: begun anew\n"


def test_a_part_ends_when_its_processor_time_is_up(tmp_path):
    assert Kept(tmp_path / "kept.jsonl", [], minutes=-1).time_is_up


def test_seeding_gives_the_numbers_that_torch_gives():
    torch.manual_seed(7)
    expected = torch.randn(4)
    set_seed(7)
    assert torch.equal(torch.randn(4), expected)
