"""What is read of a tree without running it: targets, import names, values by name, recipes."""

from pathlib import Path

import pytest

from auditor.leaktests.plan import Argument, Target, Unplanned
from auditor.leaktests.probe.choices import likeliest
from auditor.leaktests.proposals import for_building, for_calling, known_size
from auditor.leaktests.recipes import RecipeError, drafts, read_recipes
from auditor.leaktests.targets import find_targets, import_name
from auditor.source.discover import discover

TREE = {
    "pkg/__init__.py": "",
    "pkg/base.py": (
        "from torch import nn\n\nclass Base(nn.Module):\n    pass\n\nclass SomeConfig:\n    pass\n"
    ),
    "pkg/layers.py": (
        "from torch import Tensor\nfrom torch.autograd import Function\nfrom pkg.base import Base\n\n"
        "class Layer(Base):\n    'A layer.'\n\nclass Double(Function):\n    pass\n\n"
        "def scale(x: Tensor, by: float) -> Tensor:\n    return x * by\n\n"
        "def _hidden(x: Tensor):\n    pass\n\ndef plain(x):\n    pass\n\nclass Plain:\n    pass\n"
    ),
    "pkg/test_layers.py": "from torch import nn\n\nclass OnlyATest(nn.Module):\n    pass\n",
    "broken.py": "class (\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_targets_are_told_by_bases_across_files(tree: Path) -> None:
    found = find_targets(discover([str(tree)], root=str(tree)).files)
    assert [(target.key, target.kind) for target in found.targets] == [
        ("pkg.base:Base", "module"),
        ("pkg.layers:Layer", "module"),
        ("pkg.layers:Double", "autograd"),
        ("pkg.layers:scale", "function"),
    ]
    assert found.configs == ["pkg.base:SomeConfig"]
    assert {target.root for target in found.targets} == {str(tree)}
    assert [(Path(failure.path).name, failure.line) for failure in found.failures] == [("broken.py", 1)]


def test_import_name_is_the_packages(tree: Path) -> None:
    assert import_name(str(tree / "pkg" / "layers.py")) == ("pkg.layers", str(tree))
    assert import_name(str(tree / "pkg" / "__init__.py")) == ("pkg", str(tree))
    assert import_name(str(tree / "broken.py")) == ("broken", str(tree))


@pytest.mark.parametrize(
    ("name", "annotation", "first"),
    [
        ("embed_dim", "int", "64"),
        ("num_heads", "int", "4"),
        ("num_kv_heads", "", "2"),
        ("dim_head", "int", "16"),
        ("segment_lengths", "Sequence[int]", "[16, 32]"),
        ("dropout", "float", "0.1"),
        ("never_heard_of", "bool", "False"),
        ("mode", "Literal['sum', 'mean']", "'sum'"),
    ],
)
def test_values_to_build_with(name: str, annotation: str, first: str) -> None:
    assert for_building(name, annotation)[0] == first


@pytest.mark.parametrize(
    ("name", "annotation", "doc", "first"),
    [
        ("hidden_states", "Tensor", "", "torch.randn(b, n, 64, device=device)"),
        ("q_BNHD", "Tensor", "", "torch.randn(b, n, 4, 16, device=device)"),
        ("q", "Tensor", "q is (b, h, n, d), as everywhere", "torch.randn(b, 4, n, 16, device=device)"),
        ("tokens_BN", "Tensor", "", "torch.randint(0, 100, (b, n,), device=device)"),
        ("x", "Float[Tensor, 'b n d']", "", "torch.randn(b, n, 64, device=device)"),
        ("input_ids", "Tensor", "", "torch.randint(0, 100, (b, n), device=device)"),
        ("is_causal", "bool", "", "False"),
    ],
)
def test_values_to_feed(name: str, annotation: str, doc: str, first: str) -> None:
    assert for_calling(name, annotation, [doc])[0] == first


def test_only_sizes_are_shrunk() -> None:
    assert known_size("hidden_size") == "64"
    assert known_size("dropout") is None
    assert known_size("nothing_known") is None


def test_the_likeliest_combination_comes_first_and_equal_ranks_early() -> None:
    order = list(likeliest([3, 3, 3], 27))
    assert order[0] == (0, 0, 0)
    assert len(set(order)) == len(order) == 27
    assert order.index((1, 1, 1)) < order.index((0, 1, 2))
    assert list(likeliest([2, 0], 10)) == []
    assert list(likeliest([], 10)) == [()]
    assert len(list(likeliest([9, 9], 5))) == 5


def test_recipes_are_read(tmp_path: Path) -> None:
    file = tmp_path / "recipes.toml"
    file.write_text(
        "[[recipe]]\ntarget = 'm:A'\nbuild = { dim = '8' }\nshapes = [[2, 4]]\n"
        "[[recipe]]\ntarget = 'm:B'\nskip = 'no'\n"
    )
    recipes = read_recipes(file)
    assert recipes["m:A"].build == {"dim": "8"}
    assert recipes["m:A"].shapes == ((2, 4),)
    assert recipes["m:B"].skip == "no"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("recipes = 1", "may only hold [[recipe]] tables"),
        ("[[recipe]]\nbuild = {}", "missing required field `target`"),
        ("[[recipe]]\ntarget = 'm:A'\nbuilt = {}", "its keys are target, build"),
        ("[[recipe]]\ntarget = 'A'", "must be `package.module:Name`"),
        ("[[recipe]]\ntarget = 'm:A'\nfeed = { x = '1 +' }", "feed.x = '1 +' is not a Python expression"),
        ("[[recipe]]\ntarget = 'm:A'\n[[recipe]]\ntarget = 'm:A'", "`m:A` has a recipe already"),
        ("[[", "not valid TOML"),
    ],
)
def test_wrong_recipes_say_what_and_where(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "recipes.toml"
    file.write_text(text)
    with pytest.raises(RecipeError) as error:
        read_recipes(file)
    assert said in str(error.value)
    assert str(file) in str(error.value)


def test_drafts_are_recipes_that_can_be_read_back(tmp_path: Path) -> None:
    target = Target("a.py", 3, "a", "A", "module", "/")
    entry = Unplanned(
        target,
        "TypeError: no\nluck",
        9,
        attempts=("A(dim=64): TypeError",),
        build=(Argument("dim", "64"), Argument("word", "'it''s'")),
        feed=(Argument("x", 'torch.randn(b, "n")'),),
    )
    done = Unplanned(target, "nothing to run", abstract=True)
    text = drafts([entry, done])
    file = tmp_path / "recipes.toml"
    file.write_text(text)
    recipe = read_recipes(file)["a:A"]
    assert recipe.build == {"dim": "64", "word": "'it''s'"}
    assert recipe.feed == {"x": 'torch.randn(b, "n")'}
    assert "# a.py:3: TypeError: no luck\n#   tried: A(dim=64): TypeError\n" in text
