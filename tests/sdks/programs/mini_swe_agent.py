"""mini-swe-agent: its own loop, prompts, bash tool and shell, as `mini` runs it. The variant is the class of its
model."""

from __future__ import annotations

from pathlib import Path

import minisweagent
import task
import yaml
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models import get_model

(kind,) = task.WAY
file = "mini_textbased.yaml" if kind == "litellm_textbased" else "mini.yaml"
config = yaml.safe_load((Path(minisweagent.__file__).parent / "config" / file).read_text())
config["model"] |= {"model_class": kind, "model_name": f"openai/{task.MODEL}", "cost_tracking": "ignore_errors"}
config["model"]["model_kwargs"] |= {"api_base": f"{task.URL}/v1", "api_key": "none"}
config["agent"].pop("mode")
agent = DefaultAgent(
    get_model(config=config["model"]),
    LocalEnvironment(**config["environment"]),
    **config["agent"],
)
result = agent.run("Say what notes.txt holds.")
task.calls += [
    ("bash", {"command": action["command"]})
    for message in agent.messages
    for action in message.get("extra", {}).get("actions", [])
]
task.report([result["submission"]])
