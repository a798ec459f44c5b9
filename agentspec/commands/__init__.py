"""The command line: one module for each command of `agentspec`. Loads late what a command needs, so that `--help` loads
nothing."""
