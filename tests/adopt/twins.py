"""A package before and after adoption, both importable, and what must not differ between them."""

import importlib
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch

from auditor.adopt.run import Done, Order, Planned, left, plan, write

Result = list[torch.Tensor]


def adopt(folder: Path, *classes: str, vendor: bool = False) -> tuple[Planned, Done]:
    """Adopt in place, as the command does."""
    planned = plan(Order((str(folder),), classes, vendor, str(folder)))
    done = write(planned)
    return left(planned, done), done


def twin(source: Path, at: Path, name: str) -> Path:
    """A copy of a package under another name, so that both can be imported."""
    return Path(shutil.copytree(source, at / name, ignore=shutil.ignore_patterns("__pycache__")))


@contextmanager
def importable(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def module(name: str) -> ModuleType:
    return importlib.import_module(name)


def ran(model: torch.nn.Module, call: Callable[[torch.nn.Module], object], *, train: bool) -> Result:
    """Outputs, then the gradients of all parameters, of one call."""
    model.train(train)
    model.zero_grad(set_to_none=True)
    torch.manual_seed(7)  # for dropout
    outputs = [each for each in _tensors(call(model)) if each.is_floating_point()]
    total = sum((each.double() * each.detach().double().cos()).sum() for each in outputs)
    if isinstance(total, torch.Tensor) and total.requires_grad:
        total.backward()
    gradients = [
        torch.zeros(()) if each.grad is None else each.grad.clone() for _, each in model.named_parameters()
    ]
    return [each.detach().clone() for each in outputs] + gradients


def _tensors(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [one for each in value for one in _tensors(each)] if isinstance(value, list | tuple) else []


def identical(one: Result, other: Result) -> bool:
    """Bit for bit, NaN included."""
    if len(one) != len(other):
        return False
    return all(
        a.dtype == b.dtype and a.shape == b.shape and bool(torch.equal(_bits(a), _bits(b)))
        for a, b in zip(one, other, strict=True)
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
