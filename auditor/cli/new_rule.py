"""Scaffolding: the files of a new rule, written into a checkout of poolaudit."""

import re
from pathlib import Path

from auditor.atomic import write_atomically
from auditor.cli.rule_template import FIXTURE, RULE
from auditor.rule import Rule

_NAME = re.compile(r"[a-z][a-z0-9]*(?:-[a-z0-9]+)+")
_CODE = re.compile(r"PA[1-9]\d\d")
_OWN_FAMILY = "PA9"  # no code of the contract begins so

_ABOUT_LEASES = ("PA1", "PA2", "PA5")


class CannotScaffold(Exception):
    """The name or the code will not do, or the folders are not there; the message says what would."""


def scaffold(root: Path, name: str, code: str | None, rules: tuple[Rule, ...]) -> tuple[Path, ...]:
    """Write the rule and its fixture below `root`; returns what was written."""
    _check_name(name, rules)
    chosen = _code(code, rules)
    module = name.replace("-", "_")
    rule = root / "rules" / f"{module}.py"
    fixture = _fixture(root / "tests" / "fixtures", chosen, module)
    for folder in (rule.parent, root / "tests" / "fixtures"):
        if not folder.is_dir():
            raise CannotScaffold(f"no folder {folder}: run this at the root of a checkout of poolaudit")
    for file in (rule, fixture):
        if file.exists():
            raise CannotScaffold(f"{file} exists already; remove it or choose another name or code")
    fixture.parent.mkdir(exist_ok=True, parents=True)
    write_atomically(rule, RULE.format(code=chosen, name=name).encode())
    write_atomically(fixture, FIXTURE.format(code=chosen, name=name).encode())
    return rule, fixture


def _fixture(fixtures: Path, code: str, module: str) -> Path:
    """Rules about single leases have one file each, the others a folder that is audited as a project."""
    if code.startswith(_ABOUT_LEASES):
        return fixtures / "rules" / f"{code.lower()}_{module}.py"
    return fixtures / "adoption" / code.lower() / "cases.py"


def _check_name(name: str, rules: tuple[Rule, ...]) -> None:
    if not _NAME.fullmatch(name):
        raise CannotScaffold(
            f"`{name}` is no name for a rule: name the fault, in small letters joined by hyphens, "
            "such as early-exit-leak"
        )
    for rule in rules:
        if rule.meta.name == name:
            raise CannotScaffold(f"{rule.meta.code} is called `{name}` already")


def _code(code: str | None, rules: tuple[Rule, ...]) -> str:
    """`code`, or the first free one of the family that is left for rules of one's own."""
    taken = {rule.meta.code: rule.meta.name for rule in rules}
    if code is None:
        return next(
            f"{_OWN_FAMILY}{number:02}"
            for number in range(1, 100)
            if f"{_OWN_FAMILY}{number:02}" not in taken
        )
    if not _CODE.fullmatch(code):
        raise CannotScaffold(f"`{code}` is no code: PA and three digits, such as {_OWN_FAMILY}01")
    if code in taken:
        raise CannotScaffold(f"{code} is taken by `{taken[code]}`")
    return code
