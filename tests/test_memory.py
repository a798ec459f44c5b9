"""`agentspec memory`: its plan is the engine's own, weights have the bytes that they have when loaded, and a model that
doesn't fit is answered with what is missing and what would fit."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from agentspec.commands import cli
from agentspec.config import EngineConfig
from agentspec.engine import assembly, bundled, settings
from agentspec.engine.fit import GPU, Needs, what_would_fit
from agentspec.engine.settings import Settings
from agentspec.errors import ConfigError
from agentspec.models.qwen3_5 import Qwen3_5Model
from agentspec.models.registry import resolved_config
from agentspec.models.weights import Checkpoint
from agentspec.runtime.memory_plan import MemoryPlan, concurrency, longest_sequence
from benchmarks.published import CONFIG_FILES
from tests.fakes.checkpoints import Family, write_checkpoint
from tests.fakes.four_bit import OF_FAMILY, SIZES

CPU = torch.device("cpu")
GIB = 2**30
FAMILIES: tuple[Family, ...] = ("dense", "moe", "next")


def config_only(directory: Path, name: str) -> Path:
    """A directory with nothing but the config of a published size."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG_FILES[name]))
    return directory


def needs_of(directory: Path, **fields: Any) -> Needs:
    has_weights = any(directory.glob("*.safetensors"))
    return Needs.of_checkpoint(EngineConfig(**fields), directory, has_weights=has_weights)


def shown(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert cli.main(["memory", *flags]) == 0
    return capsys.readouterr().out


def cell(table: str, name: str, column: int = 0) -> str:
    (line,) = (line for line in table.splitlines() if line.strip().startswith(name))
    return re.split(r"  +", line.strip())[1 + column]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("state_form", ["rows", "ring"])
def test_rows_pages_and_rings_are_those_that_an_engine_allocates(
    family: Family, state_form: Any, tmp_path: Path
) -> None:
    directory = write_checkpoint(tmp_path / "m", family, num_hidden_layers=4)
    fields: dict[str, Any] = {"model": str(directory), "dtype": "float32", "state_form": state_form}
    fields |= {"draft_tokens": 2, "max_running": 3, "memory_gib": 0.01}
    plan = needs_of(directory, **fields).plan(4 * GIB)
    built = assembly.assemble(EngineConfig(device="cpu", **fields))
    try:
        assert isinstance(built.model, Qwen3_5Model)
        allocated = sum(tensor.nbytes for tensor in built.model.pools.tensors())
        assert built.memory == plan.memory
        assert built.config.max_running == plan.settings.max_running
    finally:
        built.close()
    spec = built.spec
    state = plan.memory.num_rows * spec.row_bytes + plan.memory.num_pages * spec.page_bytes
    assert allocated == state + plan.rings_bytes
    assert (plan.rings_bytes > 0) == (state_form == "ring")


@pytest.mark.parametrize("free", [2 * GIB, 4 * GIB, 20 * GIB])
def test_the_plan_is_that_of_an_engine_on_a_gpu_with_as_much_free_memory(
    free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = needs_of(config_only(tmp_path / "m", "0.8B"))
    plan = needs.plan(needs.weight_bytes + needs.draft_head_bytes + free + GIB)

    asked = iter([needs.draft_head_bytes + free + GIB] * 9)
    monkeypatch.setattr(settings, "free_bytes", lambda device: next(asked))
    of_engine = Settings.resolve(needs.config, needs.spec, GPU)
    asked = iter([free + GIB])
    assert of_engine.max_running == plan.settings.max_running
    assert of_engine.plan_memory(None) == plan.memory


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_have_the_bytes_of_the_loaded_ones_and_none_is_read(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_checkpoint(tmp_path / "m", family, num_hidden_layers=4, tied=family == "dense")
    with Checkpoint(directory) as checkpoint:
        config = resolved_config(directory, random_weights=False)
        loaded = checkpoint.load(config, device=CPU, dtype=torch.bfloat16)
    monkeypatch.setattr(Checkpoint, "tensor", None)
    needs = needs_of(directory, draft_precision="checkpoint")
    assert needs.weight_bytes == sum(weight.nbytes for weight in loaded.values())


@pytest.mark.parametrize(
    ("family", "source", "tied"),
    [
        *((family, None, False) for family in FAMILIES),
        ("dense", None, True),
        ("dense", "stored", False),
        ("dense", "stored", True),
        ("moe", "stored", False),
    ],
)
def test_other_forms_have_the_bytes_of_what_quantize_writes(
    family: Family, source: Any, tied: bool, tmp_path: Path
) -> None:
    sizes = OF_FAMILY["moe" if family == "next" else family]
    directory = write_checkpoint(tmp_path / "m", family, tied=tied, **SIZES | sizes | {"fp8": source})
    forms = needs_of(directory).quantized()
    assert set(forms) == ({"fp8", "int4", "mixed4"} if source is None else {"int4", "mixed4"})
    for target, form in forms.items():
        written = tmp_path / target
        assert cli.main(["quantize", str(directory), str(written), "--to", target]) == 0
        assert form.weights == needs_of(written).weights, target
        assert needs_of(written).quantized().keys() <= {"int4", "mixed4"}


@pytest.mark.parametrize("gib", [1.5, 10, 24, 40])
def test_what_is_missing_is_the_least_that_fits(gib: float, tmp_path: Path) -> None:
    needs, free = needs_of(config_only(tmp_path / "m", "27B")), int(gib * GIB)
    missing = needs.missing_bytes(free)
    assert needs.fits(free + missing)
    assert not needs.fits(free + missing - 1)
    assert needs.missing_bytes(free + missing) == 0


def test_a_model_that_fits_shows_the_least_of_what_pages_slots_and_rows_allow(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = config_only(tmp_path / "35B", "35B-A3B-FP8")
    table = shown(capsys, str(directory), "--card-gib", "48", "--card-gib", "80", "--tokens", "100000")
    assert cell(table, "on a GPU of", 1) == "80 GiB"
    for column, (allowed, slots) in enumerate([(2, 8), (9, 32)]):
        assert cell(table, "requests of 100,000 tokens", column) == str(allowed)
        assert cell(table, "as many as pages allow", column) == str(allowed)
        assert cell(table, "as many as slots allow", column) == str(slots)
        assert int(cell(table, "as many as rows allow", column)) > slots
    assert "experts         float8_e4m3fn in blocks of 128 x 128" in table
    assert "note: there are no weights: sizes are by config.json, in bfloat16" in table
    assert cell(table, "a page") == "1.38 MiB (64 tokens of context, 22.00 KiB each)"


def test_a_column_adds_up_to_the_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = shown(capsys, str(config_only(tmp_path / "m", "27B")), "--card-gib", "80")
    of_card = table.partition("on a GPU of")[2].partition("tokens of context")[0].splitlines()[1:]
    units = {"GiB": 1.0, "MiB": 2**-10}
    sizes = [line.split()[-2:] for line in of_card if line]
    assert sum(float(number) * units[unit] for number, unit in sizes) == pytest.approx(80, abs=0.1)


def test_the_documented_output_is_what_the_command_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = config_only(tmp_path / "Qwen3.5-27B-FP8", "27B-FP8")
    page = (Path(__file__).resolve().parent.parent / "docs" / "api.md").read_text()
    marks = "<!-- the output of agentspec memory -->\n```\n", "```\n<!-- end of the output of agentspec memory -->"
    documented = page.partition(marks[0])[2].partition(marks[1])[0]
    assert documented == shown(capsys, str(directory), "--card-gib", "48", "--card-gib", "80")


def test_without_flags_the_bundled_model_on_24_gib_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    table = shown(capsys)
    assert table.startswith("tiny-agent: ")
    assert cell(table, "on a GPU of") == "24 GiB"
    assert cell(table, "requests of 16,384 tokens") == cell(table, "running requests (slots)") == "64"
    assert "note" not in table


def test_engine_flags_change_the_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    directory = str(config_only(tmp_path / "m", "4B"))
    table = shown(capsys, directory, "--max-running", "2", "--state-form", "rows", "--draft-tokens", "1")
    assert "a slot       4 state rows, beside its pages" in table
    assert cell(table, "running requests (slots)") == "2"
    assert cell(table, "rings") == "0 B"
    table = shown(capsys, directory, "--memory", "2", "--max-context", "4096", "--tokens", "4096")
    assert cell(table, "tokens of the longest sequence") == "4,096"
    file = tmp_path / "flags.toml"
    file.write_text("max-running = 3\nport = 9\ncard-gib = [32.0]\n")
    table = shown(capsys, directory, "--config", str(file))
    assert (cell(table, "running requests (slots)"), cell(table, "on a GPU of")) == ("3", "32 GiB")


@pytest.mark.parametrize(
    ("name", "gib", "words"),
    [
        (
            "27B",
            48,
            "6.60 GiB are missing; `agentspec quantize` makes what would fit: --to fp8 with 27.9 GiB of weights",
        ),
        ("27B", 32, "--to mixed4 with 19.0 GiB of weights, --to int4 with 16.9 GiB of weights\n"),
        ("27B", 21, "would fit: --to int4 with 16.9 GiB of weights\n"),
        ("27B", 8, "makes nothing that would fit: the least is --to int4 with 16.9 GiB of weights"),
        ("122B-A10B-FP8", 100, "`agentspec quantize` makes what would fit: --to mixed4 with 64.3 GiB of weights"),
    ],
)
def test_a_model_that_does_not_fit_is_answered_with_what_would(
    name: str, gib: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = shown(capsys, str(config_only(tmp_path / "m", name)), "--card-gib", str(gib))
    assert f"{gib} GiB: does not fit, " in table
    assert words in table
    assert "on a GPU of" not in table


def test_a_checkpoint_in_4_bits_has_no_smaller_form_and_says_that_gpus_refuse_its_groups(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = SIZES | OF_FAMILY["moe"] | {"moe_intermediate_size": 96}
    source, written = write_checkpoint(tmp_path / "m", "moe", **sizes), tmp_path / "int4"
    assert cli.main(["quantize", str(source), str(written), "--to", "int4"]) == 0
    capsys.readouterr()
    table = shown(capsys, str(written), "--card-gib", "1.01")
    assert (
        "in int4 in groups of 32 (model.layers.0.mlp.experts.down_proj) run on the CPU reference only so far" in table
    )
    assert what_would_fit(needs_of(written), 0) == ""


def test_the_refusal_at_start_names_the_form_that_would_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = config_only(tmp_path / "m", "27B")
    tokenizer = bundled.DIRECTORY / "tokenizer.json"
    (directory / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    monkeypatch.setattr(assembly, "device_of", lambda config, **_: GPU)
    monkeypatch.setattr(assembly, "free_bytes", lambda device: 47 * GIB)
    with pytest.raises(ConfigError) as refused:
        assembly.assemble(EngineConfig(model=str(directory), random_weights=True))
    words = str(refused.value)
    assert "its weights take 50.9 GiB and the device has 47.0 GiB free: 3.9 GiB are missing" in words
    assert "`agentspec quantize` makes what would fit: --to fp8 with 27.9 GiB of weights" in words


class NoRanks:
    """Ranks without processes."""

    def __init__(self, *_: object) -> None:
        self.is_closed = False
        made.append(self)

    def close(self) -> None:
        self.is_closed = True


made: list[NoRanks] = []


def test_the_refusal_of_ranks_at_start_gives_no_advice_for_a_single_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = config_only(tmp_path / "m", "27B")
    monkeypatch.setattr(assembly, "device_of", lambda config, **_: GPU)
    monkeypatch.setattr(assembly, "free_bytes", lambda device: 20 * GIB)
    monkeypatch.setattr(assembly, "Ranks", NoRanks)
    with pytest.raises(ConfigError) as refused:
        assembly.assemble(EngineConfig(model=str(directory), random_weights=True, tensor_parallel=2))
    assert re.search(
        r"its weights take 2[67]\.\d GiB .* are missing, before state rows and KV pages$", str(refused.value)
    )
    assert [ranks.is_closed for ranks in made] == [True]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--card-gib", "0"], "card_gib=0.0: must be above 0 and at most 65536 GiB"),
        (["--card-gib", "24", "--card-gib", "nan"], "card_gib=nan"),
        (["--card-gib", "1e300"], "card_gib=1e+300"),
        (["--tokens", "0"], "tokens=0: must be 1 to 16384, which is the context"),
        (["--tokens", "16385"], "tokens=16385"),
        (["--tokens", "65", "--max-context", "64"], "tokens=65: must be 1 to 64"),
        (["--max-context", "99999999"], "max_context=99999999: tiny-agent has a context of 16384 tokens"),
        (["--device", "cpu"], "device='cpu': the plan is one of a GPU; leave it out"),
        (["--tensor-parallel", "2"], "tensor_parallel=2: the plan is one of a single GPU"),
        (["--memory", "0.000001"], "memory='9.993e-07 GiB': 1 running requests with"),
        (["--draft-vocab", "9999"], "draft_vocab=9999"),
        (["--state-form", "rows", "--draft-tokens", "9"], "draft_tokens=9"),
        (["./nowhere"], "model='./nowhere': no such directory"),
        (["a", "--model", "b"], "model='b': and 'a' are two models"),
    ],
)
def test_invalid_settings_are_refused_by_name(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["memory", *flags]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert err.count("\n") == 1


def test_requests_of_the_longest_sequence_are_counted_as_one() -> None:
    for num_pages in (10, 65):
        for drafts in (0, 3):
            plan = MemoryPlan(num_rows=50, num_pages=num_pages, max_length=longest_sequence(num_pages, drafts, 64))
            sizes: dict[str, Any] = {"max_running": 4, "max_draft_tokens": drafts, "block_tokens": 64}
            allowed = concurrency(plan, plan.max_length, **sizes)
            assert (allowed.pages, allowed.requests) == (1, 1)
            assert concurrency(plan, plan.max_length + 1, **sizes).pages == 0
            assert concurrency(plan, 1, **sizes).requests == 4


def test_pages_in_fp8_are_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = str(config_only(tmp_path / "m", "27B"))
    plain, fp8 = (shown(capsys, directory, "--card-gib", "80", *flags) for flags in ([], ["--kv-dtype", "fp8"]))
    assert "a page       4.25 MiB (64 tokens of context, 68.00 KiB each)" in plain
    assert "a page       2.13 MiB (64 tokens of context, 34.13 KiB each)" in fp8
    found = [re.search(r"tokens of context in all pages +([\d,]+)", table) for table in (plain, fp8)]
    context = [int(match[1].replace(",", "")) for match in found if match]
    assert context[1] > 1.6 * context[0], "checkpoint rows grow with the pages"
