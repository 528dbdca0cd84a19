"""What a rule is: metadata, BAD and GOOD examples, a check over the facts, and a fix if there is one; found
by listing the folder."""

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from types import ModuleType

from auditor.case import Case
from auditor.facts import Facts
from auditor.model import Finding, FixOffer, Severity, Span, Step


@dataclass(frozen=True, slots=True)
class Meta:
    """A rule's identity. `default` is whether it runs without being selected."""

    code: str
    name: str
    severity: Severity
    default: bool = True

    def finding(
        self, span: Span, symbol: str, message: str, trace: tuple[Step, ...] = (), fix: FixOffer | None = None
    ) -> Finding:
        return Finding(self.code, self.name, self.severity, span, symbol, message, trace, fix)


@dataclass(frozen=True, slots=True)
class Rule:
    """One file of the `rules` folder, read as a table: its docstring is the page `poolaudit rule` prints.

    `fix` builds the edits that repair one finding, or says None where it cannot.
    """

    meta: Meta
    page: str
    bad: str
    good: str
    check: Callable[[Facts], Iterator[Finding]]
    fix: Callable[[Case], FixOffer | None] | None = None


def _read(module: ModuleType) -> Rule:
    return Rule(
        meta=module.META,
        page=inspect.cleandoc(module.__doc__ or ""),
        bad=module.BAD,
        good=module.GOOD,
        check=module.check,
        fix=getattr(module, "fix", None),
    )


@cache
def all_rules() -> tuple[Rule, ...]:
    """Every rule in the `rules` package, by code."""
    import rules

    names = sorted(
        info.name for info in pkgutil.iter_modules(rules.__path__) if not info.name.startswith("_")
    )
    found = [_read(importlib.import_module(f"rules.{name}")) for name in names]
    return tuple(sorted(found, key=lambda rule: rule.meta.code))
