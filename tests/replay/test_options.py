"""Flags become options, or errors that name flag and value."""

from __future__ import annotations

import argparse

import pytest

from agentspec.errors import ConfigError
from agentspec.replay.options import ReplayOptions, add_arguments
from agentspec.replay.slo import Slo


def parse(*flags: str) -> ReplayOptions:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return ReplayOptions.from_args(parser.parse_args(["file.jsonl", *flags]), seed=3)


def test_default_options() -> None:
    options = parse()
    assert options == ReplayOptions(seed=3)
    assert options.lanes == 4
    assert parse("--warmup", "10") == ReplayOptions(warmup=10, seed=3)


def test_every_flag_sets_its_option() -> None:
    options = parse(
        *(
            "--concurrency",
            "7",
            "--arrival",
            "poisson:2.5",
            "--speed",
            "3",
            "--tool-delay",
            "scale:0.5",
            "--history",
            "live",
            "--output",
            "length",
        ),
        *(
            "--sessions",
            "8",
            "--max-turns",
            "9",
            "--timeout",
            "10",
            "--token-ids",
            "5:99",
            "--base-url",
            "http://h",
            "--api-key",
            "k",
        ),
        *("--served-model", "m", "--json", "a.json", "--html", "a.html", "--quiet", "--max-idle", "300"),
        *("--slo", "turn=10,ttft=150ms", "--slo", "gap=1", "--gpus", "2"),
    )
    assert options == ReplayOptions(
        concurrency=7,
        arrival="poisson",
        arrival_rate=2.5,
        speed=3.0,
        delay_scale=0.5,
        max_idle=300.0,
        history="live",
        output="length",
        sessions=8,
        max_turns=9,
        timeout=10.0,
        token_ids=(5, 99),
        seed=3,
        base_url="http://h",
        api_key="k",
        served_model="m",
        slo=Slo({"turn": 10.0, "ttft": 0.15, "gap": 1.0}),
        gpus=2,
        json_path="a.json",
        html_path="a.html",
        quiet=True,
    )


def test_open_loop_has_no_concurrency_limit() -> None:
    assert parse("--arrival", "trace").lanes is None
    assert parse("--arrival", "trace", "--concurrency", "2").lanes == 2


@pytest.mark.parametrize(
    ("flags", "field", "value"),
    [
        (("--concurrency", "0"), "concurrency", 0),
        (("--sessions", "-1"), "sessions", -1),
        (("--max-turns", "0"), "max_turns", 0),
        (("--arrival", "sometimes"), "arrival", "sometimes"),
        (("--arrival", "poisson"), "arrival", "poisson"),
        (("--arrival", "poisson:x"), "arrival", "poisson:x"),
        (("--arrival", "poisson:0"), "arrival", "poisson:0"),
        (("--arrival", "poisson:nan"), "arrival", "poisson:nan"),
        (("--arrival", "trace", "--speed", "0"), "speed", 0.0),
        (("--speed", "2"), "speed", 2.0),
        (("--tool-delay", "fast"), "tool_delay", "fast"),
        (("--tool-delay", "scale:-1"), "tool_delay", "scale:-1"),
        (("--max-idle", "-1"), "max_idle", -1.0),
        (("--warmup", "-1"), "warmup", -1),
        (("--warmup", "3", "--arrival", "trace"), "warmup", 3),
        (("--history", "none"), "history", "none"),
        (("--output", "spoken"), "output", "spoken"),
        (("--output", "forced", "--history", "live"), "history", "live"),
        (("--template", "chatml"), "template", "chatml"),
        (("--timeout", "0"), "timeout", 0.0),
        (("--slo", "turn=10,first=1"), "slo", "first=1"),
        (("--slo", "turn=10", "--slo", "turn=9"), "slo", "turn=9"),
        (("--gpus", "0"), "gpus", 0),
        (("--token-ids", "9"), "token_ids", "9"),
        (("--token-ids", "9:9"), "token_ids", (9, 9)),
        (("--base-url", "host:80"), "base_url", "host:80"),
        (("--served-model", "m"), "served_model", "m"),
        (("--api-key", "secret"), "api_key", "(hidden)"),
    ],
)
def test_invalid_flag_error_names_flag_and_value(flags: tuple[str, ...], field: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(*flags)
    assert (caught.value.field, caught.value.value) == (field, value)


def test_settings_exclude_the_api_key() -> None:
    assert "secret" not in str(parse("--base-url", "http://h", "--api-key", "secret").settings())
