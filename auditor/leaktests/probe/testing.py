"""Runs pytest over one generated file, in a process that has done nothing else."""

import faulthandler
import gc
import os
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module


def make_ready() -> None:
    """Import what every file of tests needs, and freeze it: forks then search through none of torch's half a
    million objects, and load none of pytest's own plugins.
    """
    import torch._dynamo  # noqa: F401 - what checkpointing, compiling and pickling import on their first use

    with suppress(ImportError):  # planning goes without it, and the gate has asked for it
        from _pytest.config import default_plugins

        for name in default_plugins:
            import_module(f"_pytest.{name}")
    gc.collect()
    gc.freeze()


def run_tests(arguments: Sequence[str], limit: float, device: str) -> int:
    """pytest's exit status; what hangs is ended a little before the limit, with the stack of every thread."""
    import pytest
    import torch

    os.environ["POOLAUDIT_DEVICE"] = device
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = (
        "1"  # plugins may cost more than the tests, which need none
    )
    if device == "cpu":
        torch.set_num_threads(1)  # steps are small: more threads only wait for each other

    ours = os.fdopen(os.dup(2), "w")  # pytest puts a file of its own in the place of standard error
    faulthandler.dump_traceback_later(limit * 0.9, exit=True, file=ours)
    return int(pytest.main(list(arguments)))
