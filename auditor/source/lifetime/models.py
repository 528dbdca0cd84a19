"""Which calls run a network, go back or make a step: by what else the code does with the same name."""

import ast
import re
from collections.abc import Iterator

from auditor.source.imports import dotted_text
from auditor.source.lifetime.code import Code, calls_in, last_name, text_of

_MODEL = re.compile(
    r"(?:^|[._])(?:model|net|network|encoder|decoder|backbone|generator|discriminator|critic|student"
    r"|teacher|policy_net|module|transformer|unet|vae|classifier|tagger)(?:_[a-z0-9]+)?$|^(?:net|model)[A-Z0-9_]\w*$"
)
_ONLY_MODULES_HAVE = frozenset(("parameters", "train", "zero_grad", "load_state_dict", "named_parameters"))
_BACKWARD = ("backward", "manual_backward")
_STEPS = re.compile(r"(?:^|[._])(?:optim\w*|opt|opt_\w+|\w*_opt|optimizer_\w+|scaler|trainer|solver)$")
_LOSS = re.compile(r"loss|criterion|nll|likelihood|cross_entropy", re.I)


def is_model(code: Code, callee: ast.expr, scope: ast.AST) -> bool:
    """Whether `callee(...)` runs a network: it has parameters to ask for, or the name of one."""
    text = dotted_text(callee)
    if text is None or last_name(callee)[:1].isupper():
        return False
    if text.endswith(".forward"):
        return True
    return bool(_MODEL.search(text)) or text in modules_named(code, scope)


def modules_named(code: Code, scope: ast.AST) -> set[str]:
    """The names below `scope` on which something is called that only modules have."""
    return {
        text_of(call.func.value)
        for call in calls_in(scope)
        if isinstance(call.func, ast.Attribute) and call.func.attr in _ONLY_MODULES_HAVE
    }


def backward_calls(*roots: ast.AST) -> Iterator[ast.Call]:
    """`loss.backward()`, and what wraps it: `accelerator.backward(loss)`, `self.manual_backward(loss)`."""
    return (call for call in calls_in(*roots) if last_name(call.func) in _BACKWARD)


def loss_of(call: ast.Call) -> ast.expr | None:
    """What a backward call goes back from."""
    assert isinstance(call.func, ast.Attribute | ast.Name)
    if call.args and not (isinstance(call.func, ast.Attribute) and _is_scaled(call.func.value)):
        first = call.args[0]
        wraps = (
            isinstance(call.func, ast.Attribute) and _is_holder(call.func.value) and not _is_gradient(first)
        )
        if wraps or isinstance(call.func, ast.Name) or last_name(call.func) == "manual_backward":
            return first
    if not isinstance(call.func, ast.Attribute):
        return None
    receiver = call.func.value
    return receiver.args[0] if _is_scaled(receiver) and isinstance(receiver, ast.Call) else receiver


def _is_scaled(receiver: ast.expr) -> bool:
    """`scaler.scale(loss)`"""
    return isinstance(receiver, ast.Call) and last_name(receiver.func) == "scale" and bool(receiver.args)


def _is_gradient(argument: ast.expr) -> bool:
    """`embedding.backward(weight * later.grad)`: what comes back is handed in, and no loss."""
    return any(isinstance(each, ast.Attribute) and each.attr == "grad" for each in ast.walk(argument))


def _is_holder(receiver: ast.expr) -> bool:
    """`accelerator`, `self.engine`: something that is handed the loss, and no loss itself."""
    return not _LOSS.search(text_of(receiver))


def steps_in(*roots: ast.AST) -> bool:
    """Whether an optimizer makes its step here."""
    return any(
        isinstance(call.func, ast.Attribute)
        and call.func.attr == "step"
        and bool(_STEPS.search(text_of(call.func.value)))
        for call in calls_in(*roots)
    )


def is_loss(callee: ast.expr) -> bool:
    """Whether a call computes a loss, by its name."""
    return bool(_LOSS.search(last_name(callee)))
