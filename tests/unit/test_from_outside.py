"""What the battery of hostile inputs found, each in its shortest form."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.unit.speaker import write_random
from toolkit import file_patterns
from toolkit.cli import main
from toolkit.config.load import load
from toolkit.data.data_paths import files_of
from toolkit.data.detection import detect_format
from toolkit.data.first_rows import check_sources
from toolkit.data.readers import blocks
from toolkit.extras.board import Board, application
from toolkit.launch.variables import variables_of_files
from toolkit.messages import ConfigError, DataError, LaunchError, ModelError, Problems, RowError, filled, printable, tr
from toolkit.models.chat_template import TemplateChatEncoder
from toolkit.models.directory import is_lfs_pointer, read_config
from toolkit.models.load import load_empty
from toolkit.models.tokenizer_files import load_chat_encoder, load_tokenizer
from toolkit.plan import lookup
from toolkit.secrets import hide

BLOCKED = "/proc/self/mem"
"""An I/O error for everybody who reads it, root too."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random(tmp_path_factory.mktemp("outside") / "model")


def spoiled(whole: Path, folder: Path, name: str, content: str | dict[str, Any]) -> Path:
    """Write a model directory with one other file, or with other keys in it."""
    for file in whole.iterdir():
        os.link(file, folder / file.name)
    text = content if isinstance(content, str) else json.dumps(json.loads((whole / name).read_text()) | content)
    (folder / name).unlink()
    (folder / name).write_text(text)
    return folder


def test_halves_of_characters_can_be_written() -> None:
    """They ended in a UnicodeEncodeError while the message was printed."""
    assert printable("a\ud83db\udcff😀").encode() == "a\\ud83db\\udcff😀".encode()
    assert str(ConfigError("{value} is wrong.", value="\ud83d")) == "\\ud83d is wrong."


def test_a_value_does_not_fill_a_message() -> None:
    message = tr("{file} is not JSON: {reason}", file="x" * 100_000, reason=["y" * 100_000])
    assert len(message) < 2100 and "is not JSON" in message
    assert len(filled("{key} is wrong.", lambda name: "9" * 5000)) < 1100
    lines = "\n".join(["x" * 900] * 5)
    assert tr("{file} is not a JSON object.", file=lines).startswith(lines)


@pytest.mark.parametrize("text", ["x" * 100_000, "a.b" * 30_000, "x-" * 50_000, "http://" + "a" * 100_000])
def test_secrets_are_looked_for_in_linear_time(text: str) -> None:
    """Each took 4 to 8 s."""
    started = time.process_time()
    assert hide(text) == text
    assert time.process_time() - started < 1


def test_users_and_passwords_of_urls_are_hidden_wherever_the_scheme_begins() -> None:
    for scheme in ("https", "git+ssh", "1http", "s3"):
        assert hide(f"x {scheme}://me:secret@host/a") == f"x {scheme}://***@host/a"
    assert hide("ssh://git@host C:/a:b@c") == "ssh://git@host C:/a:b@c"


def test_a_csv_with_lone_carriage_returns(tmp_path: Path) -> None:
    """The message was csv's own, with a traceback."""
    (tmp_path / "d.csv").write_bytes(b"prompt,response\ra,b\r")
    with pytest.raises(DataError, match=r"d\.csv:1: broken CSV: new-line character"):
        list(blocks(tmp_path / "d.csv", 1))
    with pytest.raises(RowError, match="more fields than the first line names"):
        detect_format({"c": "a", None: ["b"]}, {})  # type: ignore[dict-item]


def test_patterns_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of links to the directories above the module glob makes as many paths as there are numbers."""
    for name in ("a/b/one.jsonl", "a/two.jsonl", "a/.hidden/three.jsonl", "four.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    for name, target in {"a/up": "..", "a/here": ".", "a/b/top": "../.."}.items():
        (tmp_path / name).symlink_to(target)
    found = {path.relative_to(tmp_path).as_posix() for path in file_patterns.matching(f"{tmp_path}/**/*.jsonl")}
    assert found == {"a/b/one.jsonl", "a/two.jsonl"}
    monkeypatch.chdir(tmp_path)
    assert file_patterns.matching("a/*/*.jsonl") == [Path("a/b/one.jsonl")]
    assert file_patterns.matching("fo?r.[tx]*") == [Path("four.txt")]
    assert file_patterns.matching("a/.h*/**") == [Path("a/.hidden/three.jsonl")]
    with monkeypatch.context() as gone:  # links in /proc are, while they are looked at
        gone.setattr(os.path, "realpath", lambda path: os.readlink(f"{path}/gone"))
        assert file_patterns.matching("a/*/*.jsonl") == []
    monkeypatch.setattr(file_patterns, "_MOST_ENTRIES", 5)
    data = load(["recipe=quickstart"]).cfg.data
    for pattern in ("**/*", "."):
        data.sources[0].path, data.sources[0].format = pattern, data.sources[0].format.auto
        with pytest.raises(DataError, match=r"has more than 5 files below it"):
            files_of(data.sources[0])


def test_a_path_that_is_too_long_is_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    """It was a failure of the machine, told by its 100,000 letters alone."""
    for key in ("data.path", "model.path", "model.tokenizer", "distill.teacher", "tuning.adapter"):
        assert main(["check", "recipe=quickstart", f"{key}={'x' * 5000}"]) == 2
        assert "File name too long" not in capsys.readouterr().err, key
    data = load(["recipe=quickstart"]).cfg.data
    data.sources[0].path, data.sources[0].format = "x" * 5000, data.sources[0].format.auto
    problems = Problems()
    check_sources(data, (), problems)
    assert "There is no data file" in str(problems.errors[0])


def test_variables_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / ".deepspeed_env").symlink_to(BLOCKED)
    with pytest.raises(LaunchError, match=r"Cannot read '.*\.deepspeed_env': Input/output error"):
        variables_of_files(tmp_path)


@pytest.mark.timeout(60)
def test_a_template_that_is_no_file(whole: Path, tmp_path: Path) -> None:
    """A pipe blocked, and /dev/zero took all the memory."""
    os.mkfifo(tmp_path / "pipe")
    for file in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ModelError, match=r"it is no file\. Correct model\.chat_template"):
            load_tokenizer(whole, chat_template=str(file))


def test_templates_are_tried_in_one_time(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A template that took a little less than the limit for each of the first questions took minutes."""
    tokenizer, now, limits = load_tokenizer(whole), [0.0], list[float]()

    @contextmanager
    def slowly(seconds: float) -> Iterator[None]:
        limits.append(seconds)
        yield
        now[0] += 0.9 * seconds

    for module in ("chat_template", "answer_spans"):
        monkeypatch.setattr(f"toolkit.models.{module}.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr("toolkit.models.answer_spans.time_limit", slowly)
    monkeypatch.setattr("toolkit.models.chat_template.time_limit", slowly)
    encoder = TemplateChatEncoder(tokenizer)
    assert len(limits) > 5 and limits[0] == 10 and limits[-1] == 0.5
    assert sum(limits) < 20 + 0.5 * len(limits)
    encoder.encode([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    assert limits[-1] == 10, "a row may take as long as ever"


@pytest.mark.parametrize("value", [float("-inf"), "x", 1e30, [1]])
def test_rotary_parts_that_are_none(value: object, whole: Path, tmp_path: Path) -> None:
    folder = spoiled(whole, tmp_path, "config.json", {"rope_parameters": {"partial_rotary_factor": value}})
    with pytest.raises(ModelError, match=r"config\.json: partial_rotary_factor = "):
        read_config(str(folder))


def test_what_a_constructor_cannot_take(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.models.directory.check_sizes", lambda config, file: None)
    folder = spoiled(whole, tmp_path, "config.json", {"rope_parameters": {"partial_rotary_factor": 1e400}})
    with pytest.raises(ModelError, match="cannot load the model in "):
        load_empty(folder)


@pytest.mark.parametrize("key", ["num_key_value_heads", "intermediate_size", "head_dim"])
def test_sizes_that_are_texts_are_not_multiplied(key: str, whole: Path, tmp_path: Path) -> None:
    folder = spoiled(whole, tmp_path, "config.json", {key: "x"})
    cfg = load(["recipe=quickstart", "model=hf", f"model.path={folder}"]).cfg
    with pytest.raises(ConfigError, match=r"is no model's config\.json"):
        lookup.cached_outline(cfg)


@pytest.mark.parametrize("content", ["", "[" * 100_000, '{"a": ' + "9" * 5000 + "}", "<html>"])
def test_generation_configs_that_are_none(content: str, whole: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"generation_config\.json is not JSON"):
        load_empty(spoiled(whole, tmp_path, "generation_config.json", content))


def test_tokenizers_whose_settings_show_as_they_are_used(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(ModelError, match=r"Cannot read '.*': '>' not supported"):
        load_tokenizer(spoiled(whole, tmp_path / "a", "tokenizer_config.json", {"model_max_length": "x"}))
    (tmp_path / "b").mkdir()
    nothing = {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}}
    folder = spoiled(whole, tmp_path / "b", "tokenizer.json", {"post_processor": nothing})
    load_chat_encoder(folder)  # rows say that nothing of them is trained


def test_weights_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").symlink_to(BLOCKED)
    with pytest.raises(ModelError, match=r"Cannot read '.*w\.safetensors': Input/output error"):
        is_lfs_pointer(tmp_path / "w.safetensors")


@pytest.mark.parametrize("action", ["check", "save"])
@pytest.mark.parametrize(
    "given", [{"values": []}, {"values": None}, {"groups": "x"}, {"groups": 1}, {"gpus": 8}, {"base": {}}]
)
def test_questions_of_wrong_types_are_no_failures_of_the_board(
    action: str, given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with TestClient(application(Board(tmp_path, tmp_path), "t", "c"), base_url="http://127.0.0.1:8765") as client:  # type: ignore[arg-type]
        client.cookies.set("c", "t")
        assert client.post(f"/do/{action}", json={"file": "f.yaml", **given}).status_code == 400
