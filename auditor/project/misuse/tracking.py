"""What a search for misuse is given: the project, what its calls mean, and what is known in functions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from auditor.flow.knowledge import Knowledge
from auditor.project.code.modules import Function
from auditor.project.code.project import Project
from auditor.project.meaning.recognise import Recogniser
from auditor.project.misuse.uses import Endings


@dataclass(eq=False)
class Tracking:
    """`calling` gives the files that call one of some names, `known` what is known at a function's nodes."""

    project: Project
    recogniser: Recogniser
    endings: Endings
    calling: Callable[[set[str]], Sequence[str]]
    known: Callable[[Function], dict[int, Knowledge]]
