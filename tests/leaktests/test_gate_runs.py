"""Runs of generated tests: what hangs, crashes or ends the interpreter has a name, and the next file runs."""

from pathlib import Path

import pytest

from auditor.leaktests.running import TestOrder, run_files
from auditor.leaktests.workshop import workshop

FILES = {
    "test_a_hangs.py": "import time\n\ndef test_it():\n    time.sleep(600)\n",
    "test_b_crashes.py": "import os\n\ndef test_it():\n    os.kill(os.getpid(), 11)\n",
    "test_c_ends.py": "import os\n\ndef test_it():\n    os._exit(7)\n",
    "test_d_cannot_be_imported.py": "import no_such_module\n",
    "test_f_breaks_off.py": "def test_good():\n    pass\n\ndef test_bad():\n    raise KeyboardInterrupt\n",
    "test_g_leaves_a_child.py": "import os, time\n\ndef test_it(tmp_path):\n    if os.fork() == 0:\n"
    "        while True:\n            (tmp_path / str(time.time_ns())).touch()\n",
    "test_e_fails.py": "def test_good():\n    pass\n\ndef test_bad():\n    assert 1 == 2\n",
}


@pytest.mark.slow
def test_every_end_has_a_name(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    with workshop() as shop:
        runs = run_files(TestOrder(sorted(tmp_path.glob("test_*.py")), "cpu", 20.0), shop)
    hangs, crashes, ends, not_imported, fails, broken_off, left = runs
    assert [(case.name, case.outcome) for case in hangs.cases] == [("process", "error")]
    assert hangs.cases[0].message.startswith("the tests hung and were ended after 20 seconds\n")
    assert 'test_a_hangs.py", line 4 in test_it' in hangs.cases[0].message
    assert crashes.cases[0].message.startswith("the tests crashed the interpreter (SIGSEGV)")
    assert ends.cases[0].message.startswith("the tests ended the interpreter (status 7)")
    assert not_imported.cases[0].outcome == "error"
    assert "No module named 'no_such_module'" in not_imported.cases[0].message
    assert [(case.name, case.outcome) for case in fails.cases] == [
        ("test_good", "passed"),
        ("test_bad", "failed"),
    ]
    assert fails.cases[1].message == "assert 1 == 2"
    assert [(case.name, case.outcome) for case in broken_off.bad] == [("process", "error")]
    assert broken_off.bad[0].message.startswith("the tests were broken off (pytest's status 2)")
    assert [case.outcome for case in left.cases] == ["passed"]
