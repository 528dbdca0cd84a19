"""`python -m auditor.cli`."""

from auditor.cli import main

if __name__ == "__main__":  # worker processes may import this file too
    main()
