"""Plans the targets of one file, one answer a line.

It runs code that nobody has checked: whatever that does, the answers written so far stand, and the one begun
last names the culprit.
"""

import faulthandler
import importlib
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import msgspec
import torch

from auditor.leaktests.plan import Answer, Plan, Request, Target, Unplanned
from auditor.leaktests.probe.planning import plan_for
from auditor.leaktests.probe.running import said

Tell = Callable[[Answer], None]


def answer(request_file: Path, answers_file: Path) -> int:
    """Answer a request; its status is 0, for what goes wrong is in the answers."""
    request = msgspec.json.decode(request_file.read_bytes(), type=Request)
    with answers_file.open("ab", buffering=0) as answers:
        _probe(request, lambda entry: _write(answers.write, entry))
    return 0


def _write(write: Callable[[bytes], object], entry: Answer) -> None:
    write(msgspec.json.encode(entry) + b"\n")


def _probe(request: Request, tell: Tell) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    first = request.targets[0]
    sys.path.insert(0, first.root)
    tell(Answer(begun=f"{first.module}:"))
    faulthandler.dump_traceback_later(request.seconds * 2, exit=True)
    module = _import(request, tell)
    if module is None:
        return
    for target in request.targets:
        tell(Answer(begun=target.key))
        faulthandler.dump_traceback_later(request.seconds, exit=True)
        tell(_planned(target, module, request))
        faulthandler.cancel_dump_traceback_later()


def _import(request: Request, tell: Tell) -> ModuleType | None:
    started = time.monotonic()
    name = request.targets[0].module
    try:
        module = importlib.import_module(name)
    except BaseException as error:  # SystemExit too: it ends this file, not the run
        reason = f"{name} cannot be imported: {said(error)}"
        for target in request.targets:
            tell(Answer(unplanned=Unplanned(target, reason, attempts=_place(error))))
        return None
    tell(Answer(imported=time.monotonic() - started))
    return module


def _planned(target: Target, module: ModuleType, request: Request) -> Answer:
    try:
        result = plan_for(target, module, request)
    except BaseException as error:  # SystemExit too: it ends this target, not the run
        return Answer(
            unplanned=Unplanned(target, f"while it was tried: {said(error)}", attempts=_place(error))
        )
    return Answer(plan=result) if isinstance(result, Plan) else Answer(unplanned=result)


def _place(error: BaseException) -> tuple[str, ...]:
    """The last lines of a stack, for the report."""
    entries = traceback.extract_tb(error.__traceback__)[-3:]
    return tuple(f"{entry.filename}:{entry.lineno} in {entry.name}" for entry in entries)
