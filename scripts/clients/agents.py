"""The agents: which version, how it is told where the server is, and the calls that make it work through a small task.

Knows nothing of servers. An agent has a scratch directory of its own, with `home` and `workspace` in it; whatever it
would ask of the network beside the server is switched off, and where that can't be done, the way is blocked.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
INSTALLED = ROOT / ".clients"
"""Where scripts/clients/install.py puts them, each in a directory by its name."""

MODEL = "scripted"
"""The name that the agents ask for."""

TASK = "List the files here, read notes.txt, and say in one sentence what it holds."
NOTES = "Milk, bread, and a dozen eggs.\n"
ANSWER = "notes.txt is a shopping list: milk, bread and a dozen eggs."
"""What the agent hears at the end, and prints."""

Calls = tuple[tuple[str, dict[str, Any]], ...]
"""Tools of the agent by name, with arguments. WORKSPACE stands for its directory."""
WORKSPACE = "WORKSPACE"

_FAILING = "cat other.txt"
"""There is no such file."""

_BLOCKED = "http://127.0.0.1:9"
"""Nothing is there: whoever goes elsewhere fails at once."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one run of an agent happens."""

    scratch: Path
    url: str
    """The server's root, without a slash at the end."""

    @property
    def home(self) -> Path:
        return self.scratch / "home"

    @property
    def workspace(self) -> Path:
        return self.scratch / "workspace"


@dataclass(frozen=True, kw_only=True)
class Agent:
    name: str
    package: str
    version: str
    program: str
    """Below node_modules/.bin."""
    arguments: tuple[str, ...]
    """Before the task."""
    calls: Calls
    environment: Callable[[Place], Mapping[str, str]] = lambda place: {}
    files: Callable[[Place], Mapping[str, str]] = lambda place: {}
    """Below home, by their paths there."""

    @property
    def binary(self) -> Path:
        return INSTALLED / self.name / "node_modules" / ".bin" / self.program

    @property
    def mark(self) -> Path:
        """Is there once this version is installed as a whole."""
        return INSTALLED / self.name / f".installed-{self.version}"

    def why_not(self) -> str | None:
        """Why it can't be run here; None: it can."""
        if shutil.which("node") is None:
            return f"{self.name} needs node"
        if not self.mark.exists():
            return f"{self.package} {self.version} is not there: `make test-clients` installs it"
        return None

    def run(self, place: Place, *, timeout_seconds: float = 600) -> subprocess.CompletedProcess[str]:
        """Let it work at the task, from an empty home on."""
        place.workspace.mkdir(parents=True)
        place.home.mkdir(parents=True)
        (place.workspace / "notes.txt").write_text(NOTES)
        for name, text in self.files(place).items():
            path = place.home / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        command = [str(self.binary), *self.arguments, TASK]
        environment = {**quiet(place), **self.environment(place)}
        return subprocess.run(
            command,
            env=environment,
            cwd=place.workspace,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
        )


def quiet(place: Place) -> dict[str, str]:
    """The whole environment of an agent: nothing of the caller's comes along but the way to programs."""
    home = place.home
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "TMPDIR": str(place.scratch),
        "XDG_CONFIG_HOME": str(home / ".config"),
        "XDG_DATA_HOME": str(home / ".local" / "share"),
        "XDG_CACHE_HOME": str(home / ".cache"),
        "XDG_STATE_HOME": str(home / ".local" / "state"),
        "USER": "user",
        "SHELL": "/bin/bash",
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "TZ": "UTC",
        "NO_COLOR": "1",
        "HTTP_PROXY": _BLOCKED,
        "HTTPS_PROXY": _BLOCKED,
        "http_proxy": _BLOCKED,
        "https_proxy": _BLOCKED,
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
        "DO_NOT_TRACK": "1",
    }


def _claude_environment(place: Place) -> dict[str, str]:
    return {
        "ANTHROPIC_BASE_URL": place.url,
        "ANTHROPIC_API_KEY": "none",
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
    }


def _codex_files(place: Place) -> dict[str, str]:
    lines = [
        f'model = "{MODEL}"',
        'model_provider = "local"',
        "check_for_update_on_startup = false",
        "[analytics]",
        "enabled = false",
        "[model_providers.local]",
        'name = "local"',
        f'base_url = "{place.url}/v1"',
        'wire_api = "responses"',
    ]
    return {".codex/config.toml": "\n".join(lines) + "\n"}


def _opencode_files(place: Place) -> dict[str, str]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "local",
        "options": {"baseURL": f"{place.url}/v1", "apiKey": "none"},
        "models": {MODEL: {"name": MODEL}},
    }
    config = {
        "$schema": "https://opencode.ai/config.json",
        "autoupdate": False,
        "share": "disabled",
        "model": f"local/{MODEL}",
        "provider": {"local": provider},
    }
    return {".config/opencode/opencode.json": json.dumps(config)}


def _qwen_environment(place: Place) -> dict[str, str]:
    return {"OPENAI_BASE_URL": f"{place.url}/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": MODEL}


def _qwen_files(place: Place) -> dict[str, str]:
    settings = {
        "general": {"enableAutoUpdate": False, "disableAutoUpdate": True},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "security": {"auth": {"selectedType": "openai"}},
    }
    return {".qwen/settings.json": json.dumps(settings)}


def _pi_files(place: Place) -> dict[str, str]:
    provider = {"baseUrl": f"{place.url}/v1", "api": "openai-completions", "apiKey": "none", "models": [{"id": MODEL}]}
    return {".pi/agent/models.json": json.dumps({"providers": {"local": provider}})}


AGENTS: tuple[Agent, ...] = (
    Agent(
        name="claude-code",
        package="@anthropic-ai/claude-code",
        version="2.1.330",
        program="claude",
        arguments=("--allowedTools=Bash,Read", "-p"),
        calls=(
            ("Bash", {"command": "ls", "description": "List the files"}),
            ("Read", {"file_path": f"{WORKSPACE}/notes.txt"}),
            ("Bash", {"command": _FAILING, "description": "Show another file"}),
            ("ToolSearch", {"query": "select:WebFetch", "max_results": 1}),
        ),
        environment=_claude_environment,
    ),
    Agent(
        name="codex",
        package="@openai/codex",
        version="0.169.0",
        program="codex",
        arguments=("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
        calls=(
            ("exec_command", {"cmd": "ls"}),
            ("exec_command", {"cmd": "cat notes.txt"}),
            ("exec_command", {"cmd": _FAILING}),
        ),
        files=_codex_files,
    ),
    Agent(
        name="opencode",
        package="opencode-ai",
        version="1.18.33",
        program="opencode",
        arguments=("run",),
        calls=(
            ("bash", {"command": "ls", "description": "List the files"}),
            ("read", {"filePath": f"{WORKSPACE}/notes.txt"}),
            ("read", {"filePath": f"{WORKSPACE}/other.txt"}),
        ),
        environment=lambda place: {
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        },
        files=_opencode_files,
    ),
    Agent(
        name="qwen-code",
        package="@qwen-code/qwen-code",
        version="0.24.4",
        program="qwen",
        arguments=("--yolo", "-p"),
        calls=(
            ("run_shell_command", {"command": "ls", "is_background": False}),
            ("read_file", {"file_path": f"{WORKSPACE}/notes.txt"}),
            ("run_shell_command", {"command": _FAILING, "is_background": False}),
        ),
        environment=_qwen_environment,
        files=_qwen_files,
    ),
    Agent(
        name="pi",
        package="@mariozechner/pi-coding-agent",
        version="0.73.1",
        program="pi",
        arguments=("--provider", "local", "--model", MODEL, "-p"),
        calls=(("bash", {"command": "ls"}), ("read", {"path": "notes.txt"}), ("bash", {"command": _FAILING})),
        environment=lambda place: {"PI_OFFLINE": "1", "PI_SKIP_VERSION_CHECK": "1", "PI_TELEMETRY": "0"},
        files=_pi_files,
    ),
)
