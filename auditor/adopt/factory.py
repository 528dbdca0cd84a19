"""A call that makes a tensor, in the words of `_lease_tensor`: shape, dtype, device, value."""

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from auditor.adopt.draft import Refused
from auditor.source.imports import dotted_text

_PLAIN = frozenset(("torch.zeros", "torch.ones", "torch.empty", "torch.full"))
_NEW = frozenset(("new_zeros", "new_ones", "new_empty", "new_full"))
_LIKE = frozenset(("torch.zeros_like", "torch.ones_like", "torch.empty_like", "torch.full_like"))
_UNDERSTOOD = frozenset(("size", "fill_value", "dtype", "device"))
_HARMLESS = {"requires_grad": False, "pin_memory": False, "memory_format": None}

IsSequence = Callable[[ast.expr], bool | None]
Source = Callable[[ast.expr], str]


@dataclass(frozen=True)
class Lent:
    """The arguments of `_lease_tensor` as source, and the source of the value to fill the tensor with."""

    shape: str
    dtype: str
    device: str
    zero: bool
    fill: str | None = None

    @property
    def arguments(self) -> str:
        """As they stand between the parentheses; zeroing is what the mixin does unless told otherwise."""
        without = "" if self.zero else ", zero_init=False"
        return f"{self.shape}, {self.dtype}, {self.device}{without}"


def operation(call: ast.Call, origins: Mapping[str, str]) -> str | None:
    """`torch.zeros`, `torch.empty_like` or `new_full`; None for a call that is no factory we know."""
    if isinstance(call.func, ast.Attribute) and call.func.attr in _NEW:
        return call.func.attr
    text = dotted_text(call.func)
    if text is None:
        return None
    head, dot, rest = text.partition(".")
    resolved = origins.get(head, head) + dot + rest
    return resolved if resolved in _PLAIN or resolved in _LIKE else None


@dataclass(frozen=True)
class Reader:
    """Reads factory calls of one method. `torch` is what the file calls the module torch."""

    torch: str
    source: Source
    is_sequence: IsSequence

    def read(self, call: ast.Call, made_by: str) -> Lent:
        """Raises Refused with the reason where the pool cannot make the same tensor."""
        words = {word.arg: word.value for word in call.keywords}
        if None in words or made_by in _LIKE:
            kind = "`**`" if None in words else "the strides of another tensor, which may not be contiguous"
            raise Refused(f"`{made_by}` takes {kind}")
        for name, value in words.items():
            if name not in _UNDERSTOOD and not _says_nothing(name or "", value):
                raise Refused(f"`{made_by}` is told `{name}={self.source(value)}`, which a pool cannot give")
        sizes = [words["size"]] if "size" in words else list(call.args)
        fill = self._fill(made_by, words, sizes)
        return Lent(
            shape=self._shape(sizes),
            dtype=self._dtype(call, made_by, words, fill),
            device=self._device(call, made_by, words),
            zero=made_by.endswith("zeros"),
            fill=self._value(made_by, fill),
        )

    def _fill(
        self, made_by: str, words: Mapping[str | None, ast.expr], sizes: list[ast.expr]
    ) -> ast.expr | None:
        """The value of `full`, taken out of `sizes` where it stands there."""
        if not made_by.endswith("full"):
            return None
        if "fill_value" in words:
            return words["fill_value"]
        if len(sizes) != 2 or any(isinstance(each, ast.Starred) for each in sizes):
            raise Refused(f"`{made_by}` has arguments that do not say which is the value")
        return sizes.pop()

    def _value(self, made_by: str, fill: ast.expr | None) -> str | None:
        if made_by.endswith("ones"):
            return "1"
        return self.source(fill) if fill is not None else None

    def _shape(self, sizes: list[ast.expr]) -> str:
        if len(sizes) != 1:
            return f"({', '.join(map(self.source, sizes))})" if sizes else "()"
        only = sizes[0]
        if isinstance(only, ast.Starred):
            return f"({self.source(only)},)"
        known = self.is_sequence(only)
        if known is None:
            raise Refused(f"`{self.source(only)}` may be one size or a whole shape")
        return self.source(only) if known else f"({self.source(only)},)"

    def _dtype(
        self,
        call: ast.Call,
        made_by: str,
        words: Mapping[str | None, ast.expr],
        fill: ast.expr | None,
    ) -> str:
        if (given := _given(words, "dtype")) is not None:
            return self.source(given)
        if made_by in _NEW:
            return f"{self._receiver(call)}.dtype"
        if made_by == "torch.full" and fill is not None:
            return self._dtype_of(fill)
        return f"{self.torch}.get_default_dtype()"

    def _dtype_of(self, fill: ast.expr) -> str:
        """`full` without a dtype takes that of its value."""
        match fill:
            case ast.Constant(value=bool()):
                return f"{self.torch}.bool"
            case ast.Constant(value=int()) | ast.UnaryOp(operand=ast.Constant(value=int())):
                return f"{self.torch}.int64"
            case _ if is_number(fill):
                return f"{self.torch}.get_default_dtype()"
        raise Refused(f"the dtype follows from the value `{self.source(fill)}`, which is not known here")

    def _device(self, call: ast.Call, made_by: str, words: Mapping[str | None, ast.expr]) -> str:
        if (given := _given(words, "device")) is not None:
            return self.source(given)
        return f"{self._receiver(call)}.device" if made_by in _NEW else "None"

    def _receiver(self, call: ast.Call) -> str:
        assert isinstance(call.func, ast.Attribute)
        if dotted_text(call.func.value) is None:
            raise Refused(f"`{self.source(call.func.value)}` would be evaluated twice")
        return self.source(call.func.value)


def _given(words: Mapping[str | None, ast.expr], name: str) -> ast.expr | None:
    """A keyword's value; `dtype=None` says as little as no dtype."""
    value = words.get(name)
    return None if isinstance(value, ast.Constant) and value.value is None else value


def _says_nothing(name: str, value: ast.expr) -> bool:
    return (
        name in _HARMLESS and isinstance(value, ast.Constant) and value.value in (_HARMLESS[name], None)
    ) or (name == "layout" and (dotted_text(value) or "").endswith(".strided"))


def is_number(node: ast.expr) -> bool:
    """Whether an expression can only be a Python number: `-1e9`, `float("-inf")`, `torch.finfo(d).min`."""
    match node:
        case ast.Constant(value=value):
            return isinstance(value, int | float | bool)
        case ast.UnaryOp(operand=operand):
            return is_number(operand)
        case ast.BinOp(left=left, right=right):
            return is_number(left) and is_number(right)
        case ast.Call(func=ast.Name(id="float" | "int" | "len")):
            return True
        case ast.Call(func=ast.Attribute(value=ast.Name(id="math"))):
            return True
        case ast.Attribute(value=ast.Call(func=function), attr="min" | "max" | "eps" | "tiny"):
            return (dotted_text(function) or "").rpartition(".")[2] in ("finfo", "iinfo")
        case ast.Attribute(value=ast.Name(id="math" | "np" | "numpy"), attr="inf"):
            return True
    return False


def is_simple(node: ast.expr) -> bool:
    """Whether evaluating it earlier or twice changes nothing: names, fields, sizes, arithmetic on them."""
    match node:
        case ast.Name() | ast.Constant():
            return True
        case ast.Attribute(value=value) | ast.Starred(value=value) | ast.UnaryOp(operand=value):
            return is_simple(value)
        case ast.Subscript(value=value, slice=index):
            return is_simple(value) and is_simple(index)
        case ast.Slice(lower=low, upper=high, step=step):
            return all(each is None or is_simple(each) for each in (low, high, step))
        case ast.BinOp(left=left, right=right):
            return is_simple(left) and is_simple(right)
        case ast.Tuple(elts=elements) | ast.List(elts=elements):
            return all(map(is_simple, elements))
        case ast.Call(func=ast.Attribute(attr="size" | "dim" | "numel"), args=args):
            return all(map(is_simple, args))
        case ast.Call(func=ast.Name(id="len" | "max" | "min" | "int" | "float" | "tuple"), args=args):
            return all(map(is_simple, args))
        case ast.Call(func=ast.Attribute(attr="finfo" | "iinfo" | "device"), args=args):
            return all(map(is_simple, args))
    return False
