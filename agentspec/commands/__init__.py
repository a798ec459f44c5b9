"""The command line: one module for each command of `agentspec`. Dependencies of a command are imported when it runs, so
that `--help` starts fast."""
