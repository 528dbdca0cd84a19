"""What the tables say that autograd forgets, asked of autograd itself: nothing of the tensor may be saved."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from auditor.adopt import operations as op

Call = Callable[[torch.Tensor], object]

OTHER = torch.randn(4, 4)
INDEX = torch.tensor([[0, 1, 2, 3]])
SPECIAL: dict[str, Call] = {
    "softmax": lambda t: t.softmax(-1),
    "log_softmax": lambda t: t.log_softmax(-1),
    "cumsum": lambda t: t.cumsum(0),
    "roll": lambda t: t.roll(1, 0),
    "flip": lambda t: t.flip(0),
    "repeat": lambda t: t.repeat(2, 1),
    "repeat_interleave": lambda t: t.repeat_interleave(2, 0),
    "tile": lambda t: t.tile(2),
    "masked_fill": lambda t: t.masked_fill(OTHER > 0, 0.0),
    "index_select": lambda t: t.index_select(0, INDEX[0]),
    "new_zeros": lambda t: t.new_zeros(2),
    "new_ones": lambda t: t.new_ones(2),
    "new_empty": lambda t: t.new_empty(2),
    "new_full": lambda t: t.new_full((2,), 1.0),
    **{
        name: lambda t, name=name: getattr(torch, name)(t)
        for name in ("zeros_like", "empty_like", "ones_like", "rand_like", "randn_like")
    },
    "full_like": lambda t: torch.full_like(t, 2.0),
}
BINARY = ("add", "sub", "subtract", "eq", "ne", "lt", "gt", "le", "ge", "logical_and", "logical_or")
BINARY += ("logical_xor", "equal", "allclose")
COLLECTIVE = (
    "all_reduce",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "broadcast",
)


def _call(name: str) -> Call:
    if name in SPECIAL:
        return SPECIAL[name]
    if name in BINARY:
        return lambda t: getattr(t, name)(OTHER)
    return lambda t: getattr(t, name)()


def saves_it(call: Call) -> bool:
    """Whether autograd packs the tensor's own memory while `call` is recorded on it."""
    tensor = (torch.rand(4, 4) + 0.5).requires_grad_().clone()  # tracked, no leaf: in-place is allowed
    own = tensor.untyped_storage().data_ptr()
    saved: list[int] = []

    def pack(each: torch.Tensor) -> torch.Tensor:
        saved.append(each.untyped_storage().data_ptr())
        return each

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda each: each):
        kept = call(tensor)
    assert kept is not NotImplemented
    return own in saved


@pytest.mark.parametrize("name", sorted(op.FORGETS.difference(COLLECTIVE)))
def test_what_is_said_to_forget_forgets(name: str) -> None:
    assert not saves_it(_call(name))


@pytest.mark.parametrize("name", sorted(op.JOINS))
def test_joining_forgets_every_part(name: str) -> None:
    assert not saves_it(lambda t: getattr(torch, name)([t, OTHER]))
    assert not saves_it(lambda t: getattr(torch, name)([OTHER, t]))


@pytest.mark.parametrize("name", ["add", "sub", "subtract"])
def test_the_second_operand_is_forgotten_too(name: str) -> None:
    assert not saves_it(lambda t: getattr(torch, name)(OTHER, t))
    assert not saves_it(lambda t: getattr(OTHER.clone(), name)(t))


@pytest.mark.parametrize("name", ["copy_", "add_", "sub_"])
def test_what_is_read_into_another_tensor_is_forgotten(name: str) -> None:
    assert not saves_it(lambda t: getattr(OTHER.clone(), name)(t))


WRITING: dict[str, Call] = {
    "fill_": lambda t: t.fill_(1.0),
    "zero_": lambda t: t.zero_(),
    "triu_": lambda t: t.triu_(),
    "tril_": lambda t: t.tril_(),
    "fill_diagonal_": lambda t: t.fill_diagonal_(1.0),
    "masked_fill_": lambda t: t.masked_fill_(OTHER > 0, 0.0),
    "copy_": lambda t: t.copy_(OTHER),
    "add_": lambda t: t.add_(OTHER),
    "sub_": lambda t: t.sub_(OTHER),
    "index_add_": lambda t: t.index_add_(0, INDEX[0], OTHER),
    "index_copy_": lambda t: t.index_copy_(0, INDEX[0], OTHER),
    "index_fill_": lambda t: t.index_fill_(0, INDEX[0], 1.0),
    "scatter_": lambda t: t.scatter_(0, INDEX, OTHER[:1]),
    "scatter_add_": lambda t: t.scatter_add_(0, INDEX, OTHER[:1]),
    "masked_scatter_": lambda t: t.masked_scatter_(OTHER > 0, OTHER),
    "index_put_": lambda t: t.index_put_((INDEX[0],), OTHER),
    "neg_": lambda t: t.neg_(),
    "round_": lambda t: t.round_(),
    "floor_": lambda t: t.floor_(),
    "normal_": lambda t: t.normal_(),
    "uniform_": lambda t: t.uniform_(),
    "bernoulli_": lambda t: t.bernoulli_(),
    "random_": lambda t: t.random_(),
}


@pytest.mark.parametrize("name", WRITING)
def test_writing_in_place_saves_nothing_of_the_tensor(name: str) -> None:
    assert not saves_it(WRITING[name])


def test_every_write_is_asked() -> None:
    """Those that are left out hold no gradients, or are known to record."""
    without = {"logical_or_", "logical_and_", "logical_not_", "bitwise_or_", "bitwise_and_"}
    assert (op.FILLS | op.WRITES) - op.RECORDS_ITSELF - without == set(WRITING)


def test_operators_with_numbers_and_sums() -> None:
    for call in (lambda t: t * 3, lambda t: 3 * t, lambda t: t / 3, lambda t: t + OTHER, lambda t: OTHER - t):
        assert not saves_it(call)


def test_the_judge_can_tell() -> None:
    """Operations that do keep their operand are seen to."""
    assert saves_it(lambda t: t.pow(2))
    assert saves_it(lambda t: t @ OTHER.clone().requires_grad_())
    assert saves_it(lambda t: t.exp_())
    assert saves_it(lambda t: F.pad(t[None], (1, 1), mode="reflect"))
