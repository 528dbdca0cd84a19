"""`poolaudit rule`."""

import click

from auditor.rule import Rule, all_rules
from auditor.selection import check_codes, matches
from auditor.settings_file import SettingsError


@click.command("rule")
@click.argument("code", required=False)
@click.option("--all", "every", is_flag=True, help="Explain every rule.")
def command(code: str | None, every: bool) -> int:
    """Explain the rule CODE: what it finds, why it matters, bad code, good code, whether it is on by default.

    A prefix such as PA1 explains every rule that it covers.
    """
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
