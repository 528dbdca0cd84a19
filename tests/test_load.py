"""From bytes to text: every codec and every way to fail, each with its line."""

import ast
import codecs
import encodings.aliases

import pytest

from auditor.source.load import Unreadable, decode, line_of, lines_of


def failure(data: bytes) -> tuple[int, str]:
    with pytest.raises(Unreadable) as caught:
        decode(data)
    return caught.value.line, str(caught.value)


def test_utf8_with_and_without_mark() -> None:
    assert decode("x = 'é'\n".encode()) == "x = 'é'\n"
    assert decode(codecs.BOM_UTF8 + b"x = 1\n") == "x = 1\n"
    assert decode(codecs.BOM_UTF8 + b"# coding: utf-8\nx = 1\n") == "# coding: utf-8\nx = 1\n"
    assert decode(b"") == ""


@pytest.mark.parametrize(
    "head",
    [
        b"# coding: latin-1\n",
        b"#!/usr/bin/python\n# -*- coding: latin-1 -*-\n",
        b"\n# vim: set fileencoding=latin-1 :\n",
        b" \t\x0c# coding=latin-1\r\n",
        b"# caf\xe9\n# coding: latin-1\n",
    ],
)
def test_cookie(head: bytes) -> None:
    text = decode(head + b"x = '\xe9'\n")
    assert text.endswith("x = 'é'\n")


@pytest.mark.parametrize(
    "head",
    [
        b"x = 1\n# coding: latin-1\n",
        b"\n\n# coding: latin-1\n",
        b"s = 'coding: latin-1'\n",
        b"# codingx: latin-1\n",
    ],
)
def test_what_is_no_cookie(head: bytes) -> None:
    assert failure(head + b"\xe9")[1].startswith("not valid UTF-8, and no encoding is declared")


def test_every_codec_of_python_gives_text_or_a_named_failure() -> None:
    names = sorted(
        {*encodings.aliases.aliases, *encodings.aliases.aliases.values(), "undefined", "punycode", "idna"}
    )
    read = 0
    for name in names:
        data = f"# coding: {name}\nx = 1\n".encode()
        try:
            text = decode(data)
        except Unreadable as error:
            assert error.line in (1, 2)
            assert str(error)
        else:
            read += 1
            assert isinstance(text, str)
    assert read > 200  # most spell ASCII as ASCII


def test_codecs_decode_as_python_itself_does() -> None:
    for name in (
        "latin-1",
        "cp1252",
        "koi8-r",
        "shift_jis",
        "gb18030",
        "euc_kr",
        "big5",
        "iso8859-15",
        "mac_roman",
    ):
        sample = {"shift_jis": "ソ", "gb18030": "汉", "euc_kr": "한", "big5": "漢", "koi8-r": "ж"}.get(
            name, "é"
        )
        data = f"# coding: {name}\ns = '{sample}'\n".encode(name)
        [assignment] = ast.parse(data).body
        assert isinstance(assignment, ast.Assign)
        assert ast.literal_eval(assignment.value) == sample
        assert decode(data).splitlines()[1] == f"s = '{sample}'"


@pytest.mark.parametrize(
    ("data", "line", "said"),
    [
        (b"x = 1\ny = '\xff'\n", 2, "not valid UTF-8, and no encoding is declared: invalid start byte"),
        (b"# coding: nonsense\n", 1, "declares the unknown encoding nonsense"),
        (b"#!x\n# coding: hex\n", 2, "declares hex, which is not a text encoding"),
        (b"# coding: ascii\n\xe9\n", 1, "is not valid ascii, the encoding it declares"),
        (codecs.BOM_UTF8 + b"# coding: latin-1\n", 1, "byte order mark but declares the encoding latin-1"),
        (b"x = 1\n\0\n", 2, "contains a null byte"),
        ("x = 1\n".encode("utf-16"), 1, "not valid UTF-8"),
    ],
)
def test_failures(data: bytes, line: int, said: str) -> None:
    assert failure(data)[0] == line
    assert said in failure(data)[1]


def test_lines_end_where_python_says() -> None:
    text = "a\r\nb\rc\nd\x0ce\u2028f"
    assert lines_of(text) == ["a", "b", "c", "d\x0ce\u2028f"]
    assert [line_of(text, text.index(letter)) for letter in "abcdef"] == [1, 2, 3, 4, 4, 4]
