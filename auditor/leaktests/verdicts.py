"""Which findings the tests aimed at them reproduced."""

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from auditor.leaktests.plan import Plan, Variation
from auditor.leaktests.proofs import CONFIRMED, NOT_REPRODUCED, NOT_RUN
from auditor.leaktests.render import aim_name, file_name
from auditor.leaktests.running import Case, FileRun

_LEAKS = ("leak_support.errors.Leak", "leak_support.errors.CycleGarbage")
_RANK = (NOT_RUN, NOT_REPRODUCED, CONFIRMED)


def proofs_of(plans: Sequence[Plan], runs: Sequence[FileRun]) -> dict[str, str]:
    """By fingerprint, the most that any plan's test showed."""
    by_file: Mapping[str, FileRun] = {run.file.name: run for run in runs}
    found: dict[str, str] = {}
    for plan in plans:
        run = by_file.get(file_name(plan))
        for variation in plan.aimed:
            said = _said(variation, run.cases if run else ())
            best = found.get(variation.fingerprint, NOT_RUN)
            found[variation.fingerprint] = max(said, best, key=_RANK.index)
    return found


def _said(variation: Variation, cases: Sequence[Case]) -> str:
    wanted = aim_name(variation)
    case = next((case for case in cases if case.name == wanted), None)
    if case is None or case.outcome in ("error", "skipped"):
        return NOT_RUN
    if case.outcome == "passed":
        return NOT_REPRODUCED
    if not case.message.startswith(_LEAKS):
        return NOT_RUN  # it failed before it could leak
    return CONFIRMED if _names(case.message, variation) else NOT_REPRODUCED


def _names(message: str, variation: Variation) -> bool:
    """Whether the finding's own line is among those that the failure blames: another leak proves nothing."""
    path, _, line = variation.where.rpartition(":")
    end = "/".join(PurePosixPath(path).parts[-2:])
    return re.search(rf"(?:^|[\s/]){re.escape(end)}:{line}\b", message) is not None
