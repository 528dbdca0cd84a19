"""Values that a parameter may take, likeliest first, from its name, annotation and documented shape."""

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

_SHAPE = re.compile(r"[(\[]((?:\s*[A-Za-z_]\w*\s*(?:,|\Z|(?=[)\]])))+)[)\]]")
_NAMED_SHAPE = re.compile(r"_([A-Z]{1,5})$")
_TYPED_SHAPE = re.compile(r"""(Float|Int|Bool)\w*\[[^\]]*['"]([^'"\]]*)['"]""")
_OTHERS = ("4", "2", "64", "1.0", "None", "True", '"gelu"')


def for_building(name: str, annotation: str) -> list[str]:
    """Values of a constructor's parameter."""
    return _unique([*_named("build", name), *_by_annotation(annotation), *_OTHERS])


def known_size(name: str) -> str | None:
    """The small value of a size that has a name of ours: for defaults that are too large to test with."""
    values = _named("build", name)
    return values[0] if values and values[0].isdigit() else None


def for_calling(name: str, annotation: str, docs: Sequence[str]) -> list[str]:
    """Values of a parameter of forward; `docs` are texts that may write its shape."""
    tensor = "Tensor" in annotation or _TYPED_SHAPE.search(annotation) is not None
    told = [*_told_shapes(name, annotation, docs)]
    if annotation in ("int", "bool", "float") or annotation.startswith(("Literal", "typing.Literal")):
        return _unique([*_scalars(name, annotation), *_named("feed", name), *_named("build", name)])
    if tensor:
        named = [value for value in _named("feed", name) if "torch." in value]
        return _unique([*told, *named, *_table()["tensors"]["values"]])
    typed = [] if told else _by_annotation(annotation)
    if typed:
        return _unique([*_named("feed", name), *_named("build", name), *typed])
    named = _named("feed", name) or ([] if len(name) == 1 else _named("build", name))
    return _unique([*told, *named, *_table()["tensors"]["values"], "None", "n", "1.0"])


def _scalars(name: str, annotation: str) -> list[str]:
    return [*_named("feed", name), *_by_annotation(annotation)]


def _told_shapes(name: str, annotation: str, docs: Sequence[str]) -> Iterator[str]:
    """Shapes in the annotation (`Float['b n d']`), in the name (`q_BNHD`), beside the name in a docstring."""
    if typed := _TYPED_SHAPE.search(annotation):
        yield from _tensor(typed[2].split(), typed[1])
    if suffix := _NAMED_SHAPE.search(name):
        yield from _tensor(suffix[1], "Int" if "token" in name else "Float")
    for doc in docs:
        for line in doc.splitlines():
            if re.search(rf"\b{re.escape(name)}\b", line):
                for shape in _SHAPE.finditer(line):
                    yield from _tensor(
                        [axis.strip() for axis in shape[1].split(",") if axis.strip()], "Float"
                    )


def _tensor(axes: Iterable[str], kind: str) -> Iterator[str]:
    sizes = [_size(axis) for axis in axes]
    if not sizes or None in sizes or len(sizes) > 5:
        return
    if "4" in sizes and sizes[-1] == "64":
        sizes[-1] = "16"  # a last axis beside heads is a head's
    shape = ", ".join(str(size) for size in sizes)
    if kind == "Int":
        yield f"torch.randint(0, 100, ({shape},), device=device)"
    elif kind == "Bool":
        yield f"torch.ones({shape}, dtype=torch.bool, device=device)"
    else:
        yield f"torch.randn({shape}, device=device)"


def _size(axis: str) -> str | None:
    if axis.isdigit():
        return axis
    symbols = _table()["symbols"]
    return next((size for size, names in symbols.items() if axis in names), None)


def _by_annotation(annotation: str) -> list[str]:
    if annotation.startswith(("Literal", "typing.Literal")):
        return re.findall(r"""'[^']*'|"[^"]*"|\b\d+\b""", annotation)
    base = annotation.removesuffix("| None").strip().rpartition(".")[2] or annotation
    known = {
        "int": ["64", "4", "2", "16"],
        "float": ["0.5", "1.0", "0.0"],
        "bool": ["False", "True"],
        "str": ['"gelu"', '"relu"', '"auto"'],
        "Module": ["torch.nn.Linear(64, 64)", "torch.nn.Identity()", "torch.nn.LayerNorm(64)"],
        "device": ["device"],
        "dtype": ["torch.float32"],
    }
    if base in known:
        return known[base]
    lowered = annotation.lower()
    if "callable" in lowered:
        return ["torch.nn.functional.gelu", "torch.nn.GELU", "(lambda x: x)"]
    if re.search(r"(sequence|list|tuple)\[.*int", lowered):
        return ["[16, 32]", "(16, 16)", "[1, 2]"]
    if "tensor" in lowered:
        values: list[str] = _table()["tensors"]["values"]
        return values
    return []


def _named(section: str, name: str) -> list[str]:
    lowered = name.lower().strip("_")
    for group in _table()[section]:
        if any(fnmatchcase(lowered, pattern) for pattern in group["names"]):
            values: list[str] = group["values"]
            return values
    return []


def _unique(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))


@cache
def _table() -> Mapping[str, Any]:
    return tomllib.loads((Path(__file__).parent / "names.toml").read_text("utf-8"))
