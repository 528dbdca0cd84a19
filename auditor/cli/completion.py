"""What a shell may offer for an option's value; click's own completion asks."""

import click
from click.shell_completion import CompletionItem


def rule_codes(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Codes that go on from what was typed, after the last comma too: `PA101,PA1`."""
    from auditor.rule import all_rules  # only when a shell asks

    before, comma, begun = incomplete.rpartition(",")
    return [
        CompletionItem(before + comma + rule.meta.code, help=rule.meta.name)
        for rule in all_rules()
        if rule.meta.code.startswith(begun.upper())
    ]
