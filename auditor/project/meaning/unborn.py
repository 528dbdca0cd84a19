"""Objects that nobody has where a method raises: one that was never made, or never entered.

    def __init__(self, pool):
        self.left = pool.acquire()
        self.right = pool.acquire()     # raises: nobody can close what was never made

What they hold by then nobody gives back, unless they are finalised."""

from auditor.ir.ops import Path
from auditor.project.code.entered import ENTERS, EXITS
from auditor.project.code.lineage import Lineage
from auditor.project.code.modules import Function


def dies_with_its_object(lineage: Lineage, function: Function, place: Path) -> bool:
    """Whether what lies at `place`, `self.left`, has no owner once the function raises."""
    cls = function.cls
    if cls is None or len(place) < 2 or place[0] != function.owner:
        return False
    family = lineage.lineage(cls)
    if function.name == "__init__":
        return not any("__del__" in each.methods for each in family)
    return function.name in ENTERS and all(
        name in EXITS or method is function or name == "__init__"
        for each in family
        for name, method in each.methods.items()
        if place[1] in method.text
    )
