"""From bytes to text as Python itself would read them; what cannot be read fails with a name and a line."""

import codecs
import hashlib
import os
import re
import stat

from auditor.source.discover import SourceFile

_COOKIE_WITHIN = 4096  # a cookie further right than this would surprise everybody
_COOKIE = re.compile(rb"[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)")
_BLANK = re.compile(rb"[ \t\f]*(?:#.*)?\Z")
_BYTE_LINE_END = re.compile(rb"\r\n|\r|\n")
_LINE_END = re.compile(r"\r\n|\r|\n")


class Unreadable(Exception):
    """A file that gives no text. `line` is 0 where the file as a whole is meant."""

    def __init__(self, message: str, line: int = 0) -> None:
        super().__init__(message)
        self.line = line


def read(file: SourceFile) -> bytes:
    """The bytes of a regular file."""
    try:
        with os.fdopen(_open_without_waiting(file.location), "rb", buffering=0) as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                raise Unreadable("not a regular file")
            return stream.read()
    except OSError as error:
        raise Unreadable(f"cannot be read: {error.strerror}") from error


def _open_without_waiting(location: str) -> int:
    """A descriptor for reading; of a pipe called x.py too, which would else wait for a writer."""
    return os.open(location, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))


def digest(data: bytes) -> str:
    return hashlib.sha256(data, usedforsecurity=False).hexdigest()


def decode(data: bytes) -> str:
    """The text of Python source: byte order mark, PEP 263 cookie, else UTF-8."""
    body = data.removeprefix(codecs.BOM_UTF8)
    name, line = _declared(body)
    if len(body) < len(data) and name and codecs.lookup(name).name not in ("utf-8", "utf-8-sig"):
        raise Unreadable(f"starts with a UTF-8 byte order mark but declares the encoding {name}", line)
    text = _declared_text(body, name, line) if name else _utf8(body)
    if "\0" in text:
        raise Unreadable("contains a null byte", line_of(text, text.index("\0")))
    return text


def encoding_of(data: bytes) -> str:
    """The codec that `decode` reads `data` with, a byte order mark apart."""
    return _declared(data.removeprefix(codecs.BOM_UTF8))[0] or "utf-8"


def _declared(data: bytes) -> tuple[str, int]:
    """The encoding that a comment on the first two lines names, and that line; ("", 0) if none does."""
    if b"coding" not in data[:_COOKIE_WITHIN]:
        return "", 0
    for number, line in enumerate(_BYTE_LINE_END.split(data, 2)[:2], start=1):
        if cookie := _COOKIE.match(line):
            return _known(cookie[1].decode("ascii", "replace"), number), number
        if not _BLANK.match(line):
            break
    return "", 0


def _known(name: str, line: int) -> str:
    try:
        codecs.lookup(name)
    except (LookupError, ValueError) as error:
        raise Unreadable(f"declares the unknown encoding {name}", line) from error
    return name


def _declared_text(data: bytes, name: str, line: int) -> str:
    try:
        return data.decode(name)
    except LookupError as error:
        raise Unreadable(f"declares {name}, which is not a text encoding", line) from error
    except (UnicodeError, ValueError) as error:
        raise Unreadable(f"is not valid {name}, the encoding it declares", line) from error


def _utf8(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = line_of(data[: error.start].decode(), error.start)
        raise Unreadable(f"not valid UTF-8, and no encoding is declared: {error.reason}", line) from error


def line_of(text: str, position: int) -> int:
    """The line, counted from 1, that holds the character at `position`."""
    return len(_LINE_END.findall(text, 0, position)) + 1


def lines_of(text: str) -> list[str]:
    """The lines without their ends, split where Python splits (str.splitlines also splits at form feeds)."""
    return _LINE_END.split(text) if "\r" in text else text.split("\n")
