"""One output format a file: a pure function of a finished run."""
