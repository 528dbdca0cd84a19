"""Recipes: what a person says of building and feeding a target, read from TOML, and drafts to complete."""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from auditor.leaktests.plan import Argument, Recipe, Unplanned

_HEAD = """\
# Recipes for `poolaudit leaktests` and `poolaudit gate` (docs/leaktests.md).
# Every value is Python text. `b`, `n` (sequences, tokens in each), `device` and `torch` are there; other
# names need a line in `imports`. `skip = "why"` instead of values leaves a target out.
"""
_KEYS = "target, build, feed, args, shapes, scenarios, imports, method, skip"


class RecipeError(Exception):
    """A recipes file that cannot be used; the message names file, recipe and way out."""


def read_recipes(file: Path) -> dict[str, Recipe]:
    """The recipes of a file, by target."""
    try:
        whole = tomllib.loads(file.read_text("utf-8-sig"))
    except OSError as error:
        raise RecipeError(f"{file}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RecipeError(f"{file}: not valid TOML: {error}") from error
    unknown = [key for key in whole if key != "recipe"]
    entries = whole.get("recipe", [])
    if unknown or not isinstance(entries, list):
        raise RecipeError(f"{file}: has `{(unknown or ['recipe'])[0]}`; it may only hold [[recipe]] tables")
    found: dict[str, Recipe] = {}
    for number, entry in enumerate(entries):
        recipe = _recipe(entry, f"{file}: recipe[{number}]")
        if recipe.target in found:
            raise RecipeError(f"{file}: recipe[{number}]: `{recipe.target}` has a recipe already")
        found[recipe.target] = recipe
    return found


def _recipe(entry: Any, where: str) -> Recipe:
    try:
        recipe = msgspec.convert(entry, Recipe)
    except msgspec.ValidationError as error:
        raise RecipeError(f"{where}: {error}; its keys are {_KEYS}") from error
    if ":" not in recipe.target:
        raise RecipeError(f"{where}: target `{recipe.target}` must be `package.module:Name`")
    for name, text in _values(recipe):
        try:
            compile(text, "recipe", "eval")
        except (SyntaxError, ValueError) as error:
            raise RecipeError(f"{where}: {name} = {text!r} is not a Python expression: {error}") from error
    return recipe


def _values(recipe: Recipe) -> list[tuple[str, str]]:
    parts: Mapping[str, Mapping[str, str]] = {"build": recipe.build, "feed": recipe.feed}
    named = [(f"{part}.{name}", text) for part, values in parts.items() for name, text in values.items()]
    return [*named, *((f"args[{place}]", text) for place, text in enumerate(recipe.args))]


def drafts(unplanned: Sequence[Unplanned]) -> str:
    """A recipe to complete for each target without a plan, with what was tried and how it ended."""
    return "\n".join([_HEAD, *(_draft(entry) for entry in unplanned if not entry.abstract)])


def _draft(entry: Unplanned) -> str:
    lines = [f"# {entry.target.path}:{entry.target.line}: {_one_line(entry.reason)}"]
    lines += [f"#   tried: {_one_line(attempt)}" for attempt in entry.attempts]
    lines += ["[[recipe]]", f"target = {_quoted(entry.target.key)}"]
    if entry.target.kind == "module":
        lines.append(f"build = {_table(entry.build)}")
    if any(argument.positional for argument in entry.feed):
        texts = ", ".join(_quoted(argument.value) for argument in entry.feed)
        lines.append(f"args = [{texts}]")
    else:
        lines.append(f"feed = {_table(entry.feed)}")
    lines.append('# skip = "say why it needs no test"')
    return "\n".join(lines) + "\n"


def _table(arguments: Sequence[Argument]) -> str:
    inside = ", ".join(f"{a.name} = {_quoted(a.value)}" for a in arguments if not a.positional)
    return f"{{ {inside} }}" if inside else "{}"


def _quoted(text: str) -> str:
    """A TOML string: literal where that can hold the text."""
    if "'" not in text and "\n" not in text:
        return f"'{text}'"
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _one_line(text: str) -> str:
    return " ".join(text.split())
