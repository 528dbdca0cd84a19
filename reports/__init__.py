"""One output format a file: a pure function of a finished run.

A format is a module of this folder with `render(run, *, color, width) -> str`; being here is all it takes to
be offered. A leading underscore marks what the formats share.
"""
