"""What is looked for in a file is found there, whether its words are asked first or not."""

import pytest

from auditor.source.searched import Listed, Searched

TEXT = b"x = model.eval()\nself.on_hook(pre_alloc, 'gr\xc3\xb6\xc3\x9fe')\n# out of memory: <<\n"


@pytest.mark.parametrize(
    ("needle", "there"),
    [
        (b".eval()", True),
        (b"eval", True),
        (b"val()", True),
        (b"_hook(", True),
        (b"hook(pre", True),
        (b"alloc", True),
        (b"gr\xc3\xb6\xc3\x9fe", True),
        (b"out of memory", True),
        (b"<<", True),
        (b"#", True),
        (b".eval(x)", False),
        (b".hook(", False),
        (b"(alloc", False),
        (b"of  memory", False),
        (b">>", False),
        (b"allocate", False),
    ],
)
def test_what_is_looked_for_in_a_file_is_found_as_it_stands(needle: bytes, there: bool) -> None:
    assert Searched(TEXT).has(needle) is there
    assert Listed(TEXT).has(needle) is there
