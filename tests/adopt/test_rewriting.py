"""How adopted code looks: constructors of every form, docstrings, layouts, bytes; and what is refused."""

from pathlib import Path

import pytest

from auditor.adopt.adoption import Fate, Outcome
from auditor.adopt.run import Order, Planned, plan, write

IMPORTS = "import torch\nfrom torch import nn\n\n\n"
FORWARD = """\
    def forward(self, x):
        b, n, d = x.shape
        t = torch.zeros(b, n, n)
        t += 1
        return t.sum()
"""


def adopted(folder: Path, text: str, *classes: str, data: bytes | None = None) -> tuple[Planned, bytes]:
    """The plan, and the file after it was written."""
    file = folder / "m.py"
    file.write_bytes(text.encode() if data is None else data)
    planned = plan(Order((str(file),), classes, False, str(folder)))
    write(planned)
    return planned, file.read_bytes()


def one(planned: Planned) -> Outcome:
    [outcome] = planned.outcomes
    return outcome


def module(init: str, head: str = "class M(nn.Module):") -> str:
    return f"{IMPORTS}{head}\n{init}\n{FORWARD}"


SIGNATURES = {
    "def __init__(self):": (
        "def __init__(self, enable_memory_pool: bool = False, memory_pool_threshold_mb=None):"
    ),
    "def __init__(self, a, b=2) -> None:": (
        "def __init__(\n        self, a, b=2, enable_memory_pool: bool = False,"
        " memory_pool_threshold_mb=None\n    ) -> None:"
    ),
    "def __init__(self, a, /):": (
        "def __init__(self, a, /, enable_memory_pool: bool = False, memory_pool_threshold_mb=None):"
    ),
    "def __init__(self, *, a):": (
        "def __init__(self, *, a, enable_memory_pool: bool = False, memory_pool_threshold_mb=None):"
    ),
    "def __init__(self, *args):": (
        "def __init__(self, *args, enable_memory_pool: bool = False, memory_pool_threshold_mb=None):"
    ),
    "def __init__(self, a, **kwargs):": (
        "def __init__(\n        self, a, enable_memory_pool: bool = False,"
        " memory_pool_threshold_mb=None, **kwargs\n    ):"
    ),
    "def __init__(self, a, *args, c=3, **kw):": (
        "def __init__(\n"
        "        self, a, *args, c=3, enable_memory_pool: bool = False, memory_pool_threshold_mb=None,"
        " **kw\n    ):"
    ),
    "def __init__(self, a: int | None = None):": (
        "def __init__(\n        self, a: int | None = None,\n        enable_memory_pool: bool = False,\n"
        "        memory_pool_threshold_mb: float | None = None,\n    ):"
    ),
    "def __init__(self, a=(1, 2)):": (
        "def __init__(self, a=(1, 2), enable_memory_pool: bool = False, memory_pool_threshold_mb=None):"
    ),
    "def __init__(self, a=(1 + 2)):": (
        "def __init__(self, a=(1 + 2), enable_memory_pool: bool = False, memory_pool_threshold_mb=None):"
    ),
    "def __init__(\n        self,\n        a,  # width\n    ):": (
        "def __init__(\n        self,\n        a,  # width\n"
        "        enable_memory_pool: bool = False,\n        memory_pool_threshold_mb=None,\n    ):"
    ),
    "def __init__(\n        self,\n        a  # width\n    ):": (
        "def __init__(\n        self,\n        a,  # width\n"
        "        enable_memory_pool: bool = False,\n        memory_pool_threshold_mb=None\n    ):"
    ),
    "def __init__(self,\n                 a=1):": (
        "def __init__(self,\n                 a=1,\n                 enable_memory_pool: bool = False,\n"
        "                 memory_pool_threshold_mb=None):"
    ),
    "def __init__(\n        self,\n        a,\n        **kwargs,\n    ):": (
        "def __init__(\n        self,\n        a,\n"
        "        enable_memory_pool: bool = False,\n        memory_pool_threshold_mb=None,\n"
        "        **kwargs,\n    ):"
    ),
}


@pytest.mark.parametrize("signature", SIGNATURES)
def test_the_switch_is_last_and_positional_callers_notice_nothing(tmp_path: Path, signature: str) -> None:
    text = module(f"    {signature}\n        super().__init__()\n")
    planned, data = adopted(tmp_path, text)
    assert one(planned).fate is Fate.ADOPTED, one(planned).reason
    body = "        super().__init__()\n"
    body += "        self._init_memory_pool(enable_memory_pool, memory_pool_threshold_mb)\n"
    assert f"    {SIGNATURES[signature]}\n{body}" in data.decode()
    compile(data, "m.py", "exec")


@pytest.mark.parametrize(
    "call",
    [
        "super().__init__()",
        "super(M, self).__init__()",
        "nn.Module.__init__(self)",
        "super().__init__()  # base",
    ],
)
def test_initialisation_follows_the_base_s(tmp_path: Path, call: str) -> None:
    _, data = adopted(tmp_path, module(f"    def __init__(self):\n        {call}\n        self.a = 1\n"))
    after = f"        {call}\n        self._init_memory_pool(enable_memory_pool, memory_pool_threshold_mb)\n"
    assert after + "        self.a = 1\n" in data.decode()


REFUSED = {
    "no super": (module("    def __init__(self):\n        self.a = 1\n"), "never calls `super().__init__()`"),
    "super sometimes": (
        module("    def __init__(self, a):\n        if a:\n            super().__init__()\n"),
        "only under a condition",
    ),
    "a dataclass": (
        "from dataclasses import dataclass\n" + module("    a: int\n", "@dataclass\nclass M(nn.Module):"),
        "it is a dataclass",
    ),
    "a dataclass with arguments": (
        "import dataclasses\n"
        + module("    a: int\n", "@dataclasses.dataclass(eq=False)\nclass M(nn.Module):"),
        "it is a dataclass",
    ),
    "scripted elsewhere": (
        module("") + "\n\nfast = torch.jit.script(M())\n",
        "m.py:14 compiles it by torch.jit",
    ),
    "a scripted method": (
        module("").replace("    def forward", "    @torch.jit.export\n    def forward"),
        "its `forward` is compiled by torch.jit.script",
    ),
    "a script module": (module("", "class M(torch.jit.ScriptModule):"), "it is a ScriptModule"),
    "its own allocator": (
        module("    def _allocate_tensor(self, shape):\n        return torch.empty(shape)\n"),
        "it has its own `_allocate_tensor`",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_take_the_mixin_is_refused_with_the_reason(tmp_path: Path, name: str) -> None:
    text, reason = REFUSED[name]
    planned, data = adopted(tmp_path, text, "M")
    assert one(planned).fate is Fate.REFUSED
    assert reason in one(planned).reason
    assert data == text.encode()


LAYOUTS = {
    "a fill": (
        "        t = torch.full((b, n, n), -1.0, dtype=x.dtype)\n        return t.sum()\n",
        "        with self._lease_tensor((b, n, n), x.dtype, None, zero_init=False) as t:\n"
        "            t.fill_(-1.0)\n            return t.sum()\n",
    ),
    "two at once": (
        "        t = torch.zeros(b, n, n)\n        u = torch.ones(b, n, n, dtype=x.dtype)\n"
        "        t += u\n        return t.sum() + u.sum()\n",
        "        with (\n"
        "            self._lease_tensor((b, n, n), torch.get_default_dtype(), None) as t,\n"
        "            self._lease_tensor((b, n, n), x.dtype, None, zero_init=False) as u,\n"
        "        ):\n            u.fill_(1)\n            t += u\n            return t.sum() + u.sum()\n",
    ),
    "only as long as it lives": (
        "        t = torch.zeros(b, n, n, dtype=x.dtype)\n        t[0] = 1  # first\n\n        # then\n"
        "        y = t.sum()\n        # at last\n        return y\n",
        "        with self._lease_tensor((b, n, n), x.dtype, None) as t:\n            t[0] = 1  # first\n\n"
        "            # then\n            y = t.sum()\n        # at last\n        return y\n",
    ),
    "strings stay": (
        '        t = torch.zeros(b, n, n, dtype=x.dtype)\n        s = """one\n  two"""\n'
        "        return t.sum(), s\n",
        "        with self._lease_tensor((b, n, n), x.dtype, None) as t:\n"
        '            s = """one\n  two"""\n            return t.sum(), s\n',
    ),
    "comments between arguments": (
        "        t = torch.zeros(\n            b, n,  # rows\n            n,\n"
        "            dtype=x.dtype,\n        )\n"
        "        return t.sum()\n",
        "        # rows\n        with self._lease_tensor((b, n, n), x.dtype, None) as t:\n"
        "            return t.sum()\n",
    ),
    "a header that is long": (
        "        t = torch.zeros((b, x.attention_heads_of_this_module_and_its_kin, n),"
        " dtype=x.kind_of_the_weights,"
        " device=x.place_of_weights)\n        return t.sum()\n",
        "        with self._lease_tensor(\n            (b,"
        " x.attention_heads_of_this_module_and_its_kin, n),\n"
        "            x.kind_of_the_weights,\n            x.place_of_weights,\n        ) as t:\n"
        "            return t.sum()\n",
    ),
    "an annotation": (
        "        t: torch.Tensor = torch.zeros(b, n, n, dtype=x.dtype)\n        return t.sum()\n",
        "        t: torch.Tensor\n        with self._lease_tensor((b, n, n), x.dtype, None) as t:\n"
        "            return t.sum()\n",
    ),
    "a backslash": (
        "        t = torch.zeros(b, n, n, dtype=x.dtype)\n        y = t.sum() + \\\n            1\n"
        "        return y\n",
        "        with self._lease_tensor((b, n, n), x.dtype, None) as t:\n            y = t.sum() + \\\n"
        "                1\n        return y\n",
    ),
    "characters that are several bytes": (
        "        é = 'ü'; t = 0\n        m = x + torch.ones(n, n, dtype=x.dtype)  # größer\n"
        "        return m, é, t\n",
        "        é = 'ü'; t = 0\n"
        "        with self._lease_tensor((n, n), x.dtype, None, zero_init=False) as ones:\n"
        "            m = x + ones.fill_(1)  # größer\n        return m, é, t\n",
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_life_of_a_temporary_becomes_a_with(tmp_path: Path, name: str) -> None:
    before, after = LAYOUTS[name]
    head = f"{IMPORTS}class M(nn.Module):\n    def forward(self, x):\n        b, n, d = x.shape\n"
    planned, data = adopted(tmp_path, head + before, "M")
    assert one(planned).fate is Fate.ADOPTED, one(planned).reason
    assert data.decode().endswith("        b, n, d = x.shape\n" + after)


DOCUMENTED = {
    "google": ("Args:\n        a: width\n    ", "        a: width\n        enable_memory_pool: take"),
    "google, typed": (
        "Args:\n        a (int): width\n\n    Returns: nothing\n    ",
        "a (int): width\n        enable_memory_pool (bool): take",
    ),
    "numpy": (
        "Parameters\n    ----------\n    a : int\n        Width.\n\n    Returns\n    -------\n    x\n    ",
        "        Width.\n    enable_memory_pool : bool\n",
    ),
    "sphinx": (":param a: width\n        of it\n    ", "        of it\n    :param enable_memory_pool: take"),
}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_docstrings_are_extended_in_their_own_style(tmp_path: Path, name: str) -> None:
    text, expected = DOCUMENTED[name]
    _, data = adopted(
        tmp_path,
        module(f'    """It.\n\n    {text}"""\n\n    def __init__(self, a):\n        super().__init__()\n'),
    )
    assert expected in data.decode()


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("indent", ["    ", "\t", "  "])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_line_ends_indentation_and_marks_stay(tmp_path: Path, newline: str, indent: str, mark: bytes) -> None:
    text = module("    def __init__(self, a):\n        super().__init__()\n").replace("    ", indent)
    data = mark + text.replace("\n", newline).encode()
    planned, after = adopted(tmp_path, "", data=data)
    assert one(planned).fate is Fate.ADOPTED
    assert after.startswith(mark + b"import torch")
    decoded = after.removeprefix(mark).decode()
    assert decoded.count("\n") == decoded.count(newline)
    assert f"{indent * 3}return t.sum(){newline}" in decoded
    again, same = adopted(tmp_path, "", data=after)
    assert (one(again).fate, same) == (Fate.ALREADY, after)


def test_an_encoding_that_is_not_utf8_stays(tmp_path: Path) -> None:
    data = ("# coding: latin-1\n" + module("    name = 'Größe'\n")).encode("latin-1")
    planned, after = adopted(tmp_path, "", data=data)
    assert one(planned).fate is Fate.ADOPTED
    assert "Größe" in after.decode("latin-1")


def test_a_pooled_base_is_adopted_first_and_handed_the_switch(tmp_path: Path) -> None:
    text = module("    def __init__(self, a):\n        super().__init__()\n") + (
        "\n\nclass Wide(M):\n    def __init__(self, a):\n        super().__init__(2 * a)\n"
    )
    planned, data = adopted(tmp_path, text, "Wide")
    assert [(each.entry.name, each.fate) for each in planned.outcomes] == [
        ("M", Fate.ADOPTED),
        ("Wide", Fate.ADOPTED),
    ]
    assert "class Wide(M):\n" in data.decode()
    assert "2 * a,\n            enable_memory_pool=enable_memory_pool,\n" in data.decode()
    compile(data, "m.py", "exec")
    again, same = adopted(tmp_path, data.decode(), "Wide")
    assert (one(again).fate, same) == (Fate.ALREADY, data)
