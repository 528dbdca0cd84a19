"""Runs pytest over one generated file, in a process that has done nothing else."""

import faulthandler
from collections.abc import Sequence


def run_tests(arguments: Sequence[str], limit: float) -> int:
    """pytest's exit status; what hangs is ended a little before the limit, with the stack of every thread."""
    import pytest

    faulthandler.dump_traceback_later(limit * 0.9, exit=True)
    return int(pytest.main(list(arguments)))
