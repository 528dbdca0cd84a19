"""Settings: where they are found, what is wrong with them, which one wins."""

from pathlib import Path

import pytest

from auditor.config import AnalysisSettings, ProtocolSettings, Settings, StandardNames
from auditor.settings_file import SettingsError, effective, nearest_file
from tests.command_line import poolaudit


def settings_of(tmp_path: Path, text: str, name: str = "poolaudit.toml") -> Settings:
    (tmp_path / name).write_text(text)
    return effective(tmp_path).settings


def error_of(tmp_path: Path, text: str, name: str = "poolaudit.toml") -> str:
    with pytest.raises(SettingsError) as caught:
        settings_of(tmp_path, text, name)
    return str(caught.value)


def test_every_key_is_read(tmp_path: Path) -> None:
    settings = settings_of(
        tmp_path,
        """
        select = ["PA1"]
        ignore = ["PA103"]
        exclude = ["generated/"]
        exceptions = "explicit"
        baseline = "known.json"
        recipes = "recipes.toml"
        enable-protocols = ["files"]
        disable-protocols = ["tensor-pools"]
        [per-file-ignores]
        "tests/*" = ["PA3"]
        [standard]
        acquire = "allocate"
        threshold-mb = 16
        default = false
        [[protocols]]
        name = "kv"
        acquire = ["*.allocate"]
        release = ["*.free(0)"]
        handle = "argument 0"
        value = "index"
        """,
    )
    assert settings.select == ("PA1",)
    assert settings.per_file_ignores == {"tests/*": ("PA3",)}
    assert settings.standard.threshold_mb == 16
    assert settings.analysis == AnalysisSettings(
        exceptions="explicit",
        protocols=(
            ProtocolSettings("kv", ("*.allocate",), ("*.free(0)",), handle="argument 0", value="index"),
        ),
        enable_protocols=("files",),
        disable_protocols=("tensor-pools",),
        standard=StandardNames(acquire="allocate", default=False, threshold_mb=16),
    )


def test_pyproject_table(tmp_path: Path) -> None:
    text = "[project]\nname = 'x'\n[tool.poolaudit]\nignore = ['PA103']\n"
    assert settings_of(tmp_path, text, "pyproject.toml").ignore == ("PA103",)


def test_nearest_file_wins_and_a_pyproject_without_our_table_does_not_count(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / "poolaudit.toml").write_text("ignore = ['PA1']\n")
    (tmp_path / "a" / "pyproject.toml").write_text("[project]\nname = 'poolaudit-user'\n")
    assert nearest_file(inner) == tmp_path / "poolaudit.toml"
    (tmp_path / "a" / "pyproject.toml").write_text("[tool.poolaudit]\nignore = []\n")
    assert nearest_file(inner) == tmp_path / "a" / "pyproject.toml"
    (inner / "poolaudit.toml").write_text("")
    assert nearest_file(inner) == inner / "poolaudit.toml"
    assert nearest_file(inner / "module.py") == inner / "poolaudit.toml"


def test_poolaudit_toml_comes_before_pyproject(tmp_path: Path) -> None:
    (tmp_path / "poolaudit.toml").write_text("")
    (tmp_path / "pyproject.toml").write_text("[tool.poolaudit]\n")
    assert nearest_file(tmp_path) == tmp_path / "poolaudit.toml"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("selct = []", "unknown key `selct`; did you mean `select`?"),
        ("[tool.poolaudit]\nselect = []", "a [tool] table belongs in a pyproject.toml"),
        ("per_file_ignores = {}", "unknown key `per_file_ignores`; did you mean `per-file-ignores`?"),
        ("[standard]\nthresholdmb = 1", "unknown key `standard.thresholdmb`; did you mean `threshold-mb`?"),
        (
            "[[protocols]]\nname = 'a'\naquire = []",
            "unknown key `protocols[0].aquire`; did you mean `acquire`?",
        ),
        ("select = 'PA1'", "select: expected `array`, got `str`"),
        ("ignore = [1]", "ignore[0]: expected `str`, got `int`"),
        ("exceptions = 'all'", "exceptions: invalid enum value 'all'"),
        ("[[protocols]]\nacquire = ['a']", "protocols[0]: object missing required field `name`"),
        ("[[protocols]]\nname = 'a'\nacquire = ['x']", "protocols[0] `a`: has `acquire` without `release`"),
        ("[[protocols]]\nname = 'a'", "protocols[0] `a`: needs `acquire` or `lease`"),
        (
            "[[protocols]]\nname = 'a'\nlease = ['x']\nhandle = 'first'",
            "protocols[0] `a`: handle 'first': use result, receiver, argument N, argument NAME or none",
        ),
        (
            "[[protocols]]\nname = 'a'\nlease = ['x']\nhandle = 'argument -1'",
            "protocols[0] `a`: handle 'argument -1': use result, receiver, argument N, argument NAME or none",
        ),
        (
            "[[protocols]]\nname = 'a'\nacquire = ['x(0)']\nrelease = ['y']",
            "pattern 'x(0)': what an acquire fills is said by `handle`, not in parentheses",
        ),
        (
            "[[protocols]]\nname = 'a'\nacquire = ['$.x']\nrelease = ['y']",
            "pattern '$.x': $ is a lease, and there is none before this call; write a dotted name",
        ),
        (
            "[[protocols]]\nname = 'a'\nacquire = ['x']\nrelease = ['$.y(1)']",
            "pattern '$.y(1)': $ is the lease itself and is what is given back; write ()",
        ),
        (
            "[[protocols]]\nname = 'a'\nlease = ['x']\nvalue = 'int'",
            "protocols[0] `a`: value 'int': use tensor, object or index",
        ),
        (
            "[[protocols]]\nname = 'a'\nlease = ['x']\n[[protocols]]\nname = 'a'\nlease = ['y']",
            "protocols[1] `a`: the name is already taken by protocols[0]",
        ),
        ("[[protocols]]\nname = 'a'\nlease = ['x(']", "protocols[0] `a`: pattern 'x('"),
        (
            "enable-protocols = ['file']",
            "enable-protocols: no built-in protocol is called `file`; did you mean `files`?",
        ),
        ("disable-protocols = ['tensors']", "did you mean `tensor-pools`?"),
        ("select = [", "not valid TOML"),
    ],
)
def test_bad_settings_name_file_and_key(tmp_path: Path, text: str, said: str) -> None:
    message = error_of(tmp_path, text)
    assert message.startswith(f"{tmp_path / 'poolaudit.toml'}: ")
    assert said in message


def test_bad_pyproject(tmp_path: Path) -> None:
    assert "tool.poolaudit must be a table" in error_of(tmp_path, "tool.poolaudit = 3", "pyproject.toml")
    (tmp_path / "pyproject.toml").write_bytes(b"[tool.poolaudit]\nx = '\xff'")
    with pytest.raises(SettingsError, match="must be UTF-8"):
        effective(tmp_path)


def test_a_broken_pyproject_that_is_not_about_us_is_not_our_business(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.other\n")
    assert nearest_file(tmp_path) != tmp_path / "pyproject.toml"


def test_origins_and_precedence(tmp_path: Path) -> None:
    file = tmp_path / "poolaudit.toml"
    file.write_text("ignore = ['PA103']\nselect = ['PA1']\n")
    found = effective(tmp_path, overrides={"select": ("PA3",)})
    assert found.settings.select == ("PA3",)
    assert found.settings.ignore == ("PA103",)
    assert (found.origins["select"], found.origins["ignore"], found.origins["exclude"]) == (
        "command line",
        str(file),
        "default",
    )
    assert effective(tmp_path, isolated=True).settings == Settings()


def test_config_command_shows_values_and_origins(tmp_path: Path) -> None:
    (tmp_path / "poolaudit.toml").write_text("ignore = ['PA103']\n")
    done = poolaudit("config", cwd=tmp_path)
    lines = done.out.splitlines()
    assert done.status == 0
    assert lines[0].split("  # ")[0].rstrip() == "select = null"
    assert lines[1].startswith('ignore = ["PA103"]')
    assert lines[1].endswith(f"# {tmp_path / 'poolaudit.toml'}")
    assert len(lines) == 11
    assert "PA103" not in poolaudit("config", "--isolated", cwd=tmp_path).out


def test_bad_settings_end_the_command_with_status_2(tmp_path: Path) -> None:
    (tmp_path / "poolaudit.toml").write_text("selct = []\n")
    for command in ("audit", "config"):
        done = poolaudit(command, cwd=tmp_path)
        assert done.status == 2
        assert "did you mean `select`?" in done.err
    assert poolaudit("config", "--config", "missing.toml", cwd=tmp_path).status == 2
