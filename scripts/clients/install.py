"""Installs the agents at their tested versions into .clients, each in a directory of its own: `python -m
scripts.clients.install`.

Never fails: where npm or a package can't be had, it says so, and the tests of that agent are skipped by its name.
"""

from __future__ import annotations

import shutil
import subprocess
import sys

from scripts.clients.agents import AGENTS, Agent


def install(agent: Agent) -> None:
    if agent.mark.exists():
        return
    directory = agent.mark.parent
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    (directory / "package.json").write_text('{"private": true}\n')
    # The packages' own scripts run: claude-code's and opencode-ai's put the program in its place.
    options = ("--no-audit", "--no-fund", "--no-update-notifier", "--loglevel=error", "--fetch-retries=1")
    try:
        done = subprocess.run(
            ["npm", "install", *options, f"{agent.package}@{agent.version}"], cwd=directory, timeout=600
        )
        failed = done.returncode != 0
    except (OSError, subprocess.TimeoutExpired):
        failed = True
    if failed:
        shutil.rmtree(directory, ignore_errors=True)
        print(
            f"{agent.package} {agent.version} could not be installed: the tests of {agent.name} are skipped",
            file=sys.stderr,
        )
    else:
        agent.mark.touch()


def main() -> None:
    for agent in AGENTS:
        install(agent)


if __name__ == "__main__":
    main()
