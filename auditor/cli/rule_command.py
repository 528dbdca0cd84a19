"""`poolaudit rule`."""

from pathlib import Path

import click

from auditor.cli.completion import rule_codes
from auditor.cli.manual import manual
from auditor.cli.new_rule import CannotScaffold, scaffold
from auditor.rule import Rule, all_rules
from auditor.selection import check_codes, matches
from auditor.settings_file import SettingsError

MANUAL = manual(
    {
        "poolaudit rule PA102": "One rule.",
        "poolaudit rule PA1": "Every rule about balance.",
        "poolaudit rule --all | less": "All of them.",
        "poolaudit rule --new lease-in-global PA901": "Begin one of your own.",
    },
    {"rules/, tests/fixtures/rules/": "Where --new writes, in a checkout of poolaudit."},
)


@click.command("rule", epilog=MANUAL)
@click.argument("code", required=False, shell_complete=rule_codes)
@click.option("--all", "every", is_flag=True, help="Explain every rule.")
@click.option(
    "--new",
    "name",
    metavar="NAME",
    help="Write a new rule and its fixtures into this checkout; CODE is its code (default: the next PA9xx).",
)
def command(code: str | None, every: bool, name: str | None) -> int:
    """Explain the rule CODE: what it finds, why it matters, bad code, good code, whether it is on by default.

    A prefix such as PA1 explains every rule that it covers. With --new a rule is begun instead of explained.

    \b
    Exit status:
      0  the rule was explained, or begun
      2  wrong use, or no such rule
    """
    if name is not None:
        return _begin(name, code, every=every)
    if every == (code is not None):
        raise click.UsageError("name one rule (poolaudit rule PA101) or ask for --all")
    wanted = "ALL" if code is None else code.upper()
    try:
        check_codes([wanted], tuple(rule.meta.code for rule in all_rules()))
    except SettingsError as error:
        raise click.UsageError(str(error)) from error
    chosen = [rule for rule in all_rules() if matches(rule.meta.code, wanted)]
    click.echo("\n\n".join(page(rule) for rule in chosen))
    return 0


def _begin(name: str, code: str | None, *, every: bool) -> int:
    if every:
        raise click.UsageError("--new and --all do not go together")
    try:
        written = scaffold(Path.cwd(), name, code.upper() if code else None, all_rules())
    except CannotScaffold as error:
        raise click.UsageError(str(error)) from error
    for file in written:
        click.echo(f"wrote {file.relative_to(Path.cwd())}")
    click.echo("It works as it is; docs/how-to-add-a-rule.md says what to change, and in which order.")
    return 0


def page(rule: Rule) -> str:
    """A rule's page: its docstring, its examples, how it runs."""
    default = "on by default" if rule.meta.default else "off by default; turn it on with --select"
    return "\n\n".join(
        [
            rule.page,
            "Bad:",
            _indented(rule.bad),
            "Good:",
            _indented(rule.good),
            f"Severity: {rule.meta.severity}. {default[0].upper()}{default[1:]}.",
        ]
    )


def _indented(code: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in code.strip("\n").splitlines())
