"""`python -m auditor.cli`."""

from auditor.cli import main

main()
