"""Completion for fish; imported only when a shell asks for completion."""

from click.shell_completion import FishComplete, add_completion_class


class CommasInValues(FishComplete):
    """As click's, whose script cuts a value at its first comma: `--select PA101,PA1` has one."""

    source_template = FishComplete.source_template.replace('string split ","', 'string split --max 1 ","')


add_completion_class(CommasInValues)
