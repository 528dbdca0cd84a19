"""PA205 against autograd itself: what it calls unsafe breaks a gradient, what it calls safe never does."""

import ast
import importlib.util
from collections.abc import Callable
from types import ModuleType

import pytest

from auditor.config import Settings
from tests.marked_code import FIXTURES, audited, places

torch = pytest.importorskip("torch")

FILE = FIXTURES / "autograd" / "functions.py"


def _module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("autograd_functions", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _functions() -> dict[str, range]:
    """Functions of the fixture that are called with (pool, x, w), with their lines."""
    nodes = [
        node for node in ast.parse(FILE.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)
    ]
    return {
        node.name: range(node.lineno, (node.end_lineno or node.lineno) + 1)
        for node in nodes
        if [arg.arg for arg in node.args.args] == ["pool", "x", "w"]
    }


MODULE, FUNCTIONS = _module(), _functions()


class Pool:
    """Overwrites a block the moment it comes back, behind the back of autograd's version counter."""

    def __init__(self, poison: bool) -> None:
        self.poison = poison
        self.blocks: set[int] = set()

    def allocate(self, shape: "torch.Size", dtype: "torch.dtype") -> "torch.Tensor":
        block = torch.zeros(shape, dtype=dtype)
        self.blocks.add(block.untyped_storage().data_ptr())
        return block

    def deallocate(self, tensor: "torch.Tensor") -> None:
        if self.poison:
            tensor.detach().numpy()[:] = float("nan")


def _gradients(function: Callable[..., object], poison: bool) -> tuple[list["torch.Tensor | None"], bool]:
    """The gradients of x and w, and whether autograd kept a block of the pool for them."""
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(4, 4, dtype=torch.float64, generator=generator).add(0.5).requires_grad_()
    w = torch.rand(4, 4, dtype=torch.float64, generator=generator).add(0.5).requires_grad_()
    pool = Pool(poison)
    kept: set[int] = set()

    def pack(tensor: "torch.Tensor") -> "torch.Tensor":
        kept.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = function(pool, x, w)
        weights = torch.arange(1.0, 100.0, dtype=torch.float64)
        if out is not None:
            (out.flatten() * weights[: out.numel()]).sum().backward()
    return [x.grad, w.grad], bool(kept & pool.blocks)


def _same(one: "torch.Tensor | None", other: "torch.Tensor | None") -> bool:
    return one is other if one is None or other is None else bool(torch.equal(one, other))


@pytest.fixture(scope="module")
def called_unsafe() -> set[str]:
    run = audited(FIXTURES / "autograd", FILE.name, Settings(select=("PA205",)))
    lines = {line for _, line, _ in places(run)}
    return {name for name, span in FUNCTIONS.items() if lines & set(span)}


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_the_verdict_is_autograds(name: str, called_unsafe: set[str]) -> None:
    function = getattr(MODULE, name)
    right, kept = _gradients(function, poison=False)
    poisoned, _ = _gradients(function, poison=True)
    broken = not all(_same(one, other) for one, other in zip(right, poisoned, strict=True))
    assert (name in called_unsafe) == broken
    assert kept or not broken, "a gradient broke though no block was kept"


def test_both_verdicts_are_well_represented(called_unsafe: set[str]) -> None:
    assert len(FUNCTIONS) >= 30
    assert 12 <= len(called_unsafe) <= len(FUNCTIONS) - 12
