"""What is hidden, and what is not."""

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from toolkit.config.load import load
from toolkit.export.merge import TunedPart
from toolkit.jobs import launch
from toolkit.messages import ConfigError, tr
from toolkit.models.base_model import base_of
from toolkit.secrets import HidingFilter, are_same, hide, hide_all, hide_word, learn
from toolkit.train.changes import check_changes, differences

PASSWORD = "pa\"ss\\wörd'1"


@pytest.fixture(autouse=True)
def secrets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SOME_API_KEY", "abc-12345")
    monkeypatch.setenv("db_password", PASSWORD)
    monkeypatch.setenv("MY_TOKEN", "abc-12345-and-more")
    monkeypatch.setenv("SHORT_KEY", "short")
    monkeypatch.setenv("COMMON_SECRET", "disabled")
    monkeypatch.setenv("KEY_FILE", str(tmp_path))
    monkeypatch.setenv("HARMLESS", "not-a-secret-at-all")


TEXTS = {
    "nothing here": "nothing here",
    "x=abc-12345!": "x=***!",
    "abc-12345-and-more": "***",
    f"it is {PASSWORD}": "it is ***",
    "a short one, disabled, not-a-secret-at-all": "a short one, disabled, not-a-secret-at-all",
    "https://me:pass@word@host/x and ssh://git@host": "https://***@host/x and ssh://git@host",
    "ftp://:only@h": "ftp://***@h",
    "https://access-token@host/x ssh://git@host": "https://***@host/x ssh://git@host",
    "none at /a/https:/me:pass@host/x, https:/token@host": "none at /a/https:/***@host/x, https:/***@host",
    "https://h/a@b?to=me@host http://h?mail=me@host": "https://h/a@b?to=me@host http://h?mail=me@host",
    "s3://b/f.jsonl?a=1&access_token=t1&b=2": "s3://b/f.jsonl?a=1&access_token=***&b=2",
    "'s3://f?X-Amz-Credential=c%2Fd&X-Amz-Signature=e' g": "'s3://f?X-Amz-Credential=***&X-Amz-Signature=***' g",
    "https://h/f?sv=1&sig=e%3D#part API_KEY=x": "https://h/f?sv=1&sig=***#part API_KEY=x",
    "https://h/f?max_tokens=9&design=new&keywords=a": "https://h/f?max_tokens=9&design=new&keywords=a",
    "http://host:80/a@b 12:30 me@host": "http://host:80/a@b 12:30 me@host",
    "hf_abcdefghijklmnopqrst, sk-abcdefghijklmnop1234": "***, ***",
    "AKIAIOSFODNN7EXAMPLE ghp_abcdefghijklmnopqrstuvwx": "*** ***",
    "task-with-a-very-long-name hf_home AKIA": "task-with-a-very-long-name hf_home AKIA",
}


@pytest.mark.parametrize("text", TEXTS)
def test_texts(text: str) -> None:
    assert hide(text) == TEXTS[text]


def test_what_is_written_with_escapes_is_found_too() -> None:
    import json

    assert hide(json.dumps({"a": PASSWORD})) == '{"a": "***"}'
    assert "ss" not in hide(repr([PASSWORD]))


def test_paths_stay(tmp_path: Path) -> None:
    assert hide(f"{tmp_path}/x") == f"{tmp_path}/x"


def test_the_path_of_a_model_with_a_token_is_written_nowhere(tmp_path: Path) -> None:
    """Of what an adapter, a checkpoint and an export say of their base."""
    folder = Path("https://me:token-in-a-path@host/hf_abcdefghijklmnopqrst/model")
    known = base_of(torch.nn.Linear(2, 2), folder)  # type: ignore[arg-type]
    part = TunedPart(tmp_path, {"peft_type": "LORA"}, known, folder, {})
    written = known.write() + b"".join(part.describe().values())
    assert b"token-in-a-path" not in written
    assert b"hf_abc" not in written
    assert known.path.endswith("https:/***@host/***/model")


def test_messages_hide_what_they_are_given() -> None:
    assert tr("{file} cannot be read: {reason}.", file="abc-12345", reason="x") == "*** cannot be read: x."


def test_a_config_keeps_its_form_and_its_secrets_are_remembered() -> None:
    config = {"a": [1, None, {"comet": {"api_key": "only-in-the-config"}}], "tokenizer": "a/tokenizer"}
    assert hide_all(config) == {"a": [1, None, {"comet": {"api_key": "***"}}], "tokenizer": "a/tokenizer"}
    assert hide("and only-in-the-config later") == "and *** later"


def test_a_secret_that_changed_refuses_no_resume() -> None:
    assert are_same("https://***@h/a", "https://x:y@h/a")
    assert are_same("new-token", "***")
    assert not are_same("https://***@h/a", "https://***@h/b")
    assert not are_same("*** b", "x c")
    before, now = {"model": {"hub_id": "***", "path": "https://***@h/a"}}, {"model": {"hub_id": "t", "path": "h/b"}}
    assert [key for key, *_ in differences(before, now)] == ["model.path"]
    with pytest.raises(ConfigError, match=r"model\.path"):
        check_changes(before, now, {}, {}, [])


def test_logs_hide_arguments_and_tracebacks(caplog: pytest.LogCaptureFixture) -> None:
    caplog.handler.addFilter(HidingFilter())
    try:
        raise ValueError("abc-12345")
    except ValueError:
        logging.getLogger("x").exception("found %s", "abc-12345")
    assert "found ***" in caplog.text
    assert "ValueError: ***" in caplog.text
    assert "12345" not in caplog.text


def test_of_secrets_that_overlap_nothing_is_seen() -> None:
    learn("abcdefghij")
    learn("sk-abcdefghijklmnop1234.and+more")
    assert hide("use hf_abcdefghijklmnopqrst now") == "use *** now"
    assert hide("sk-abcdefghijklmnop1234.and+more!") == "***!"


WORDS = {
    "ds_extra.comet.api_key=shrt": "ds_extra.comet.api_key=***",
    "+ds_extra.comet.api_key='a b'": "+ds_extra.comet.api_key=***",
    "launch.env.MY_TOKEN=abc": "launch.env.MY_TOKEN=***",
    "run.name=token": "run.name=token",
    "optim.lr=1e-3": "optim.lr=1e-3",
    "recipe=chatglm": "recipe=chatglm",
}


@pytest.mark.parametrize("word", WORDS)
def test_words_of_a_command_line(word: str) -> None:
    assert hide_word(word) == WORDS[word]


def test_a_command_within_a_text() -> None:
    """However short: nothing has been learned of it, as no config was read."""
    text = "Starts: deepspeed run.py 'ds_extra.comet.api_key=sh rt' a.api_key=shrt, b.password=\"x y\" model.eos_token"
    shown = hide(text)
    assert "shrt" not in shown and "x y" not in shown and "=sh" not in shown
    assert shown.startswith("Starts: deepspeed run.py ") and shown.endswith(" model.eos_token")


def test_keys_of_a_config_hide_short_values_too() -> None:
    hidden = {"comet": {"api_key": "***", "workspace": "me", "token": "", "password": "***"}}
    assert hide_all({"comet": {"api_key": "abc", "workspace": "me", "token": "", "password": "***"}}) == hidden


def test_a_config_that_was_read_has_told_its_secrets() -> None:
    """Wherever they are typed, such as within braces."""
    load(["recipe=quickstart", "ds_extra={comet: {api_key: longenoughtohide1}}"])
    assert hide("deepspeed run.py ds_extra={comet:{api_key:longenoughtohide1}}").endswith("{api_key:***}}")


def test_the_launchers_command_is_shown_without_secrets(said: list[str]) -> None:
    cfg = load(["recipe=quickstart"]).cfg
    words = ["recipe=quickstart", "ds_extra.comet.api_key=shrt"]
    nodes = SimpleNamespace(hosts={"localhost": [0]}, options={}, cfg=cfg, typed=[], words=words)
    command, _ = launch._command(nodes)
    assert any("shrt" in word for word in command)
    assert not any("shrt" in line for line in said) and any("api_key=***" in line for line in said)
