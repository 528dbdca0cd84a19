"""The BAD of the lifetime rules grows and their GOOD does not, run on the CPU."""

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from auditor.rule import all_rules

torch = pytest.importorskip("torch")
PAGES = {rule.meta.code: rule for rule in all_rules()}


def run(code: str, kind: str) -> SimpleNamespace:
    """The names that a rule's example defines."""
    names: dict[str, Any] = {}
    exec(getattr(PAGES[code], kind), names)
    return SimpleNamespace(**names)


def nodes(tensor: Any) -> int:
    """How many nodes the graph behind a tensor has."""
    waiting, seen = [tensor.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [parent for parent, _ in node.next_functions]
    return len(seen)


def batches(count: int) -> list[tuple[Any, Any]]:
    return [(torch.ones(2, 4), torch.zeros(2, 1)) for _ in range(count)]


def training(count: int) -> tuple[Any, ...]:
    model = torch.nn.Linear(4, 1)
    return model, batches(count), torch.nn.functional.mse_loss, torch.optim.SGD(model.parameters(), 0.01)


def resident_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


def test_pa501_nodes_grow_with_the_steps() -> None:
    bad = [nodes(run("PA501", "bad").train(*training(steps))) for steps in (4, 8, 12)]
    assert bad[1] - bad[0] == bad[2] - bad[1] > 0
    assert run("PA501", "good").train(*training(8)).grad_fn is None


class Recurrent(torch.nn.Module):
    """A cell that counts the nodes behind the state it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = torch.nn.GRUCell(4, 4)
        self.behind: list[int] = []

    def forward(self, x: Any, hidden: Any) -> Any:
        self.behind.append(nodes(hidden))
        hidden = self.cell(x, hidden)
        return hidden[:, :1], hidden


@pytest.mark.parametrize(("kind", "grows"), [("bad", True), ("good", False)])
def test_pa502_the_graph_behind_the_state_grows(kind: str, grows: bool) -> None:
    model = Recurrent()
    still = torch.optim.SGD(model.parameters(), 0.0)  # a step in place would fail the retained graph
    still.step = lambda: None  # type: ignore[method-assign,assignment]
    run("PA502", kind).train(model, batches(6), torch.nn.functional.mse_loss, still, torch.zeros(2, 4))
    assert (model.behind == sorted(set(model.behind))) is grows
    assert (model.behind[-1] > 10) is grows


@pytest.mark.parametrize(("kind", "hooks"), [("bad", 3), ("good", 0)])
def test_pa503_each_call_leaves_a_hook(kind: str, hooks: int) -> None:
    encoder = torch.nn.Sequential()
    encoder.layer4 = torch.nn.Linear(4, 4)
    for _ in range(3):
        run("PA503", kind).features(encoder, torch.ones(1, 4))
    assert len(encoder.layer4._forward_hooks) == hooks


@pytest.mark.parametrize(("kind", "alive"), [("bad", True), ("good", False)])
def test_pa504_the_module_outlives_its_last_name(kind: str, alive: bool) -> None:
    example = run("PA504", kind)
    module = example.Decoder()
    module(torch.ones(4))
    seen = weakref.ref(module)
    del module
    gc.collect()
    assert (seen() is not None) is alive


@pytest.mark.parametrize(("kind", "held"), [("bad", True), ("good", False)])
def test_pa505_the_failed_call_is_held_while_it_is_tried_again(
    kind: str, held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "OutOfMemoryError", MemoryError)
    activations: list[Any] = []
    while_retried: list[bool] = []

    def model(batch: Any) -> Any:
        if activations:
            while_retried.append(activations[0]() is not None)
            return batch
        activation = batch * 2
        activations.append(weakref.ref(activation))
        raise MemoryError

    assert run("PA505", kind).forward(model, torch.ones(4)).shape == (4,)
    assert while_retried == [held, held]


@pytest.mark.parametrize(("kind", "alive"), [("bad", True), ("good", False)])
def test_pa506_the_output_waits_for_the_collector(kind: str, alive: bool) -> None:
    function = run("PA506", kind).Exp
    gc.disable()
    try:
        x = torch.ones(4, requires_grad=True)
        y = function.apply(x)
        node = weakref.ref(y.grad_fn)
        del y
        assert (node() is not None) is alive
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize(("kind", "alive"), [("bad", True), ("good", False)])
def test_pa507_parameters_and_their_gradients_hold_each_other(kind: str, alive: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.Tanh())
    run("PA507", kind).curvature(model, batches(2), torch.nn.functional.mse_loss)
    seen = weakref.ref(model[0].weight)
    del model
    gc.collect()
    assert (seen() is not None) is alive


@pytest.mark.parametrize(("kind", "kept"), [("bad", 40), ("good", 0)])
def test_pa508_a_tensor_for_each_length(kind: str, kept: int) -> None:
    module = run("PA508", kind).Causal()
    before = resident_tensors()
    for n in range(1, 41):
        module(torch.zeros(n, n))
    assert resident_tensors() - before == kept


@pytest.mark.parametrize(("kind", "alive"), [("bad", True), ("good", False)])
def test_pa509_no_collector_frees_the_tensor(kind: str, alive: bool) -> None:
    encoder = torch.nn.Linear(4, 4)
    features = run("PA509", kind).normalised(encoder, torch.ones(1, 4))
    features.sum().backward()
    seen = weakref.ref(features)
    del features
    gc.collect()
    assert (seen() is not None) is alive


@pytest.mark.parametrize(("kind", "graph"), [("bad", True), ("good", False)])
def test_pa512_each_pass_saves_for_a_backward_that_never_comes(kind: str, graph: bool) -> None:
    class Watched(torch.nn.Linear):
        saved = 0

        def forward(self, x: Any) -> Any:
            out = super().forward(x)
            self.saved += out.grad_fn is not None
            return out

    model = Watched(4, 2)
    run("PA512", kind).accuracy(model, [(torch.ones(3, 4), torch.zeros(3))] * 5)
    assert model.saved == (5 if graph else 0)
