"""The file of token counts: one run reads the counts that the last one saved; any other file is refused."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from agentspec.errors import ConfigError
from agentspec.mtp.token_counts import TokenCounts

NUM_TOKENS = 100


def write(path: Path, **fields: Any) -> Path:
    path.write_text(json.dumps({"version": 1, "num_tokens": NUM_TOKENS, "counts": {"7": 2}} | fields))
    return path


def counts(path: Path, num_tokens: int = NUM_TOKENS) -> TokenCounts:
    return TokenCounts(str(path), num_tokens=num_tokens)


def test_saved_counts_are_read_by_next_run(tmp_path: Path) -> None:
    path = tmp_path / "counts.json"
    first = counts(path)
    assert first.known == {}
    first.add_tokens([5, 5, 99])
    first.add_tokens([0, 5])
    first.save()
    second = counts(path)
    assert second.known == {0: 1, 5: 3, 99: 1}
    second.add_tokens([0, 1])
    second.save()
    assert json.loads(path.read_text()) == {
        "version": 1,
        "num_tokens": NUM_TOKENS,
        "counts": {"0": 2, "1": 1, "5": 3, "99": 1},
    }
    assert os.listdir(tmp_path) == ["counts.json"]


def test_save_without_tokens_writes_nothing(tmp_path: Path) -> None:
    counts(tmp_path / "counts.json").save()
    assert os.listdir(tmp_path) == []


def test_saving_twice_counts_tokens_once(tmp_path: Path) -> None:
    path = tmp_path / "counts.json"
    served = counts(path)
    served.add_tokens([3])
    served.save()
    served.save()
    assert counts(path).known == {3: 1}
    served.add_tokens([3])
    served.save()
    assert counts(path).known == {3: 2}


def test_two_engines_can_share_a_counts_file(tmp_path: Path) -> None:
    path = write(tmp_path / "counts.json")
    first, second = counts(path), counts(path)
    first.add_tokens([7, 8])
    second.add_tokens([7, 9])
    first.save()
    second.save()
    assert counts(path).known == {7: 4, 8: 1, 9: 1}


def test_path_is_resolved_at_start_and_link_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kept").mkdir()
    file = write(tmp_path / "kept" / "counts.json")
    (tmp_path / "link.json").symlink_to(file)
    monkeypatch.chdir(tmp_path)
    served = TokenCounts("link.json", num_tokens=NUM_TOKENS)
    monkeypatch.chdir(tmp_path / "kept")
    served.add_tokens([7])
    served.save()
    assert counts(file).known == {7: 3}
    assert (tmp_path / "link.json").is_symlink()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"version": 2}, "version"),
        ({"num_tokens": 101}, "counts a vocabulary of 101 tokens; the model's has 100"),
        ({"counts": {"100": 1}}, "counts token 100"),
        ({"counts": {"-1": 1}}, "counts token -1"),
        ({"counts": {"7": -1}}, "counts"),
        ({"counts": {"7": 1.5}}, "counts"),
        ({"counts": {"seven": 1}}, "counts"),
        ({"counts": [1, 2]}, "counts"),
        ({"tokens": {}}, "unknown field `tokens`"),
    ],
    ids=str,
)
def test_invalid_counts_file_is_refused(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    path = write(tmp_path / "counts.json", **fields)
    with pytest.raises(ConfigError, match=words) as refused:
        counts(path)
    assert (refused.value.field, refused.value.value) == ("token_counts", str(path))


@pytest.mark.parametrize(
    "content",
    [b"", b"counts", b'{"version":1}', b"\xff\xfe", b'{"version":1,"num_tokens":100,"counts":{"\xff":1}}', b"[]"],
)
def test_unparsable_counts_file_is_refused_and_kept(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "counts.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="is not a file of token counts"):
        counts(path)
    assert path.read_bytes() == content


def test_unwritable_path_is_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="its directory does not exist"):
        counts(tmp_path / "no" / "counts.json")
    with pytest.raises(ConfigError, match="can't be read"):
        counts(tmp_path)


def test_save_refuses_file_damaged_in_the_meantime(tmp_path: Path) -> None:
    path = write(tmp_path / "counts.json")
    served = counts(path)
    served.add_tokens([1])
    path.write_text("broken")
    with pytest.raises(ConfigError, match="is not a file of token counts"):
        served.save()
    assert path.read_text() == "broken"
    assert os.listdir(tmp_path) == ["counts.json"]


def test_failed_write_keeps_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "counts.json")
    served = counts(path)
    served.add_tokens([1])

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(ConfigError, match="can't be written: No space left on device"):
        served.save()
    assert counts(path).known == {7: 2}
    assert os.listdir(tmp_path) == ["counts.json"]
    monkeypatch.undo()
    served.save()
    assert counts(path).known == {1: 1, 7: 2}
    assert stat.S_ISREG(path.stat().st_mode)
