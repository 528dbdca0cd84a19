"""What kind of thing a release takes back: a tensor, an object, numbers, or none that was handed out."""

import ast

from auditor.flow.effects import Handle, Value
from auditor.flow.operands import operands
from auditor.ir.ops import Call
from auditor.project.code.modules import Function
from auditor.project.meaning.recognise import Recogniser
from auditor.protocols.vocabulary import split
from auditor.source.nodes import walk

NUMBERS = frozenset(
    {"slot", "slots", "index", "indices", "indexes", "idx", "id", "ids", "loc", "locs", "offset", "offsets"}
)


def numbered(name: str) -> bool:
    """Whether a name says that it holds numbers, whatever the pool is called."""
    return bool(NUMBERS & set(split(name)))


def released_value(recogniser: Recogniser, function: Function, call: Call) -> Value | None:
    """Of the leases that a release takes; None where an object is marked, not handed out."""
    value = _value(recogniser, function, call)
    given = [*call.at.args[:1], *(keyword.value for keyword in call.at.keywords)]
    names = (node for expression in given for node in walk(expression))
    numbers = any(
        numbered(node.id if isinstance(node, ast.Name) else node.attr)
        for node in names
        if isinstance(node, (ast.Name, ast.Attribute))
    )
    return Value.INDEX if value is Value.TENSOR and numbers else value


def _value(recogniser: Recogniser, function: Function, call: Call) -> Value | None:
    for protocol in recogniser.declared:
        if any(recogniser.declares(function, call.at, position, protocol) for position, _ in operands(call)):
            return protocol.value if protocol.handle is Handle.RESULT else None
    for target in recogniser.calls.targets(function, call.at)[0]:
        if target in recogniser.releasing:
            acquires = recogniser.releasing[target][0].acquires
            handles = {half.handle for half in acquires}
            value = acquires[0].value if handles == {Handle.RESULT} else None
            return Value.INDEX if value is Value.TENSOR and of_numpy(acquires[0].function) else value
    source = recogniser.release_source(function, call.at)
    for protocol in recogniser.built_in:
        if source is not None and protocol.name == source[0]:
            return protocol.value if protocol.handle is Handle.RESULT else None
    return None


def of_numpy(function: Function) -> bool:
    """Whether what a pool's own acquire makes are arrays: those hold numbers of blocks, tensors hold data."""
    node = function.node
    if "Tensor" in ast.unparse(getattr(node, "returns", None) or ast.Constant("")):
        return False
    names = {inner.id for inner in walk(node) if isinstance(inner, ast.Name)}
    return bool(names & {"np", "numpy"}) and "torch" not in names


def release_words(recogniser: Recogniser) -> set[str]:
    """Last names of calls that may release."""
    words = {function.name for function in recogniser.releasing}
    for protocol in (*recogniser.declared, *recogniser.built_in):
        words |= {pattern.text.partition("(")[0].rpartition(".")[2] for pattern in protocol.release}
    return words
