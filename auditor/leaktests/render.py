"""A plan as a pytest file that a person would be glad to have written."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from auditor.leaktests.plan import Argument, Plan, Variation
from auditor.leaktests.support_names import used_names

MOST_FAULTS = 400  # the fault pass is quadratic
WIDTH = 100


def file_name(plan: Plan) -> str:
    """`test_leaks_longdoc_dilated_DilatedAttention.py`: unique in its folder, as pytest wants it."""
    module = plan.target.module.replace(".", "_")
    return f"test_leaks_{module}_{plan.target.name.replace('.', '_')}.py"


def render(plan: Plan, folder: Path) -> str:
    """The test file of one plan, to be written into `folder`."""
    body = _template().render(**_facts(plan, folder))
    body = re.sub(r"\n{4,}", "\n\n\n", body).rstrip() + "\n"
    names = ", ".join(used_names(body.partition("device = os.environ")[2]))
    line = f"from leak_support import {names}  # noqa: E402"
    if len(line) > WIDTH:
        inside = "".join(f"    {name},\n" for name in names.split(", "))
        line = f"from leak_support import (  # noqa: E402\n{inside})"
    return body.replace("from leak_support import *", line)


def _template() -> Any:
    loader = FileSystemLoader(Path(__file__).parent / "templates")
    # Python, not HTML: there is nothing to escape, and every value was Python text before.
    environment = Environment(
        loader=loader, undefined=StrictUndefined, autoescape=False, keep_trailing_newline=True
    )
    environment.filters["literal"] = repr
    return environment.get_template("leaks.py.jinja")


def _facts(plan: Plan, folder: Path) -> dict[str, Any]:
    target = plan.target
    owner, _, _ = target.name.partition(".")
    is_built = target.kind == "module" or bool(plan.method)
    on = ".to(device)" if target.kind == "module" else ""
    first = _first(plan.scenarios)
    method = f".{plan.method}" if plan.method else ""
    return {
        "plan": plan,
        "origin": "its recipe" if plan.origin == "recipe" else "its signature",
        "left_out": plan.left_out,
        "paths": _paths(target.root, folder),
        "imports": _imports(plan),
        "shapes": repr(list(plan.shapes)),
        "scenarios": _wrapped_list(plan.scenarios),
        "is_built": is_built,
        "only_aimed": target.kind == "code",
        "callee": f"{owner}.apply" if target.kind == "autograd" else owner,
        "construction": _call(owner, plan.build, 8, "**options"),
        "to_device": f"{on}{method}",
        "arguments": _arguments(plan.feed, 4),
        "switch": ", ".join(argument.text for argument in plan.switch),
        "first": first,
        "cheapest": "no_grad" if "no_grad" in plan.scenarios else first,  # the pass is quadratic
        "faults": 0 < plan.operations <= MOST_FAULTS,
        "pool_scenarios": None
        if plan.pool_scenarios == plan.scenarios
        else _wrapped_list(plan.pool_scenarios),
        "pooled": "pooled" if plan.switch else "build",
        "pool_feed": f"lambda turn: feed(turn + {plan.pool_shape})" if plan.pool_shape else "feed",
        "first_pooled": _first(plan.pool_scenarios or plan.scenarios),
        "pool_gradients": "train" in plan.pool_scenarios,
        "aims": [_aim(plan, variation) for variation in plan.aimed],
    }


def _first(scenarios: Sequence[str]) -> str:
    return "train" if "train" in scenarios else scenarios[0]


def _aim(plan: Plan, variation: Variation) -> dict[str, Any]:
    return {
        "function": aim_name(variation),
        "title": f"{variation.code} {variation.where}",
        "message": _docstring(variation.message),
        "construction": _call(plan.target.name.partition(".")[0], variation.build, 12),
        "then": "".join(f', "{name}"' for name in variation.then),
        "arguments": _arguments(variation.feed, 8),
        "shape": repr(variation.shape) if _names_sizes(variation.feed) else "",
        "scenario": variation.scenario,
        "faults": variation.faults,
        "pools": ", ".join(variation.pools),
        "pools_tuple": f"({', '.join(variation.pools)}{',' if len(variation.pools) == 1 else ''})",
        "line": variation.where,
    }


def _names_sizes(feed: Sequence[Argument]) -> bool:
    return any(re.search(r"\b[bn]\b", argument.value) for argument in feed)


def aim_name(variation: Variation) -> str:
    """The test of one finding: `test_PA102_dilated_line_58_1a2b3c`; the end tells two on a line apart."""
    file, _, line = variation.where.rpartition(":")
    stem = re.sub(r"\W", "_", Path(file).stem)
    return f"test_{variation.code}_{stem}_line_{line}_{variation.fingerprint[:6]}"


def _docstring(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"""', "'''")


def _paths(root: str, folder: Path) -> list[str]:
    """Where the tests find the support and the module; what is installed needs no path."""
    paths = ["str(HERE)"]
    if "site-packages" in Path(root).parts:
        return paths
    relative = Path(os.path.relpath(root, folder))
    ups = [part for part in relative.parts if part == ".."]
    rest = [part for part in relative.parts if part != ".."]
    text = "HERE" if not ups else f"HERE.parents[{len(ups) - 1}]"
    for part in rest:
        text += f' / "{part}"'
    return [*paths, f"str({text})"]


def _imports(plan: Plan) -> list[str]:
    own = f"from {plan.target.module} import {plan.target.name.partition('.')[0]}"
    aimed = [line for variation in plan.aimed for line in variation.imports]
    lines = sorted({f"{line}  # noqa: E402" for line in (*plan.imports, *aimed, own)})
    return ["from leak_support import *", *lines]


def _call(name: str, arguments: Sequence[Argument], indent: int, *more: str) -> str:
    texts = [*(argument.text for argument in arguments), *more]
    line = f"{name}({', '.join(texts)})"
    if len(line) + indent + 20 <= WIDTH:
        return line
    return _opened(name + "(", texts, indent, ")")


def _arguments(arguments: Sequence[Argument], indent: int) -> str:
    """`(positional,), {"name": value}`, one value a line."""
    positional = [argument.value for argument in arguments if argument.positional]
    named = [f'"{argument.name}": {argument.value}' for argument in arguments if not argument.positional]
    first = f"({', '.join(positional)},)" if positional else "()"
    if len(first) + indent > WIDTH:
        first = _opened("(", positional, indent + 4, ")")
    if not named:
        return f"{first}, {{}}"
    return f"{first}, " + _opened("{", named, indent + 4, "}")


def _opened(start: str, items: Sequence[str], indent: int, end: str) -> str:
    inside = "".join(f"{' ' * indent}{item},\n" for item in items)
    return f"{start}\n{inside}{' ' * (indent - 4)}{end}"


def _wrapped_list(items: Sequence[str]) -> str:
    line = "[" + ", ".join(f'"{item}"' for item in items) + "]"
    return line if len(line) < WIDTH - 12 else _opened("[", [f'"{item}"' for item in items], 4, "]")
