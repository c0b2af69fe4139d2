"""`toolkit verify-serving`: exports are served as they were trained, and each planted defect is named."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.architectures import CONFIGS
from tests.unit.data_tools import write_rows
from tests.unit.test_templates import KNOWN, tokenizer_of
from toolkit.cli import main
from toolkit.config.schema import TrainOn
from toolkit.data.formats import Conversation
from toolkit.export.write import write_folder
from toolkit.extras import serving
from toolkit.extras.serving import FAILED, PASSED, SKIPPED, require_serving, verify_serving
from toolkit.messages import CheckpointError
from toolkit.models import probe
from toolkit.models.chat_template import TemplateChatEncoder
from toolkit.models.save import non_weight_files

FAMILIES = {"qwen": "qwen3", "glm-4.5": "glm4_moe", "glm-4.7": "glm4_moe", "glm-4": "glm4", "plain": "llama"}
"""Template -> architecture, in test_templates and architectures; ChatGLM3 and GLM-4-9B are in tests/parity."""


def write(folder: Path, template: str) -> TemplateChatEncoder:
    """Write an export as a run does, of a tiny model of a family."""
    tokenizer = tokenizer_of(KNOWN[template])
    config = CONFIGS[FAMILIES[template]]()
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, None
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    encoder = TemplateChatEncoder(tokenizer)
    write_folder(
        model, non_weight_files(model, encoder), folder, "hf", probe.capture(model, probe.spread_ids(model.config))
    )
    return encoder


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TemplateChatEncoder]:
    """A Qwen3, as a run exports it."""
    folder = tmp_path_factory.mktemp("serving") / "export"
    return folder, write(folder, "qwen")


@pytest.mark.parametrize(
    "template", ["glm-4.7", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("glm-4.5", "glm-4", "plain"))]
)
def test_families_are_served_as_they_were_trained(template: str, tmp_path: Path) -> None:
    encoder = write(tmp_path / "export", template)
    findings = verify_serving(tmp_path / "export", encoder, [])
    states = {one.check: one.state for one in findings}
    assert FAILED not in states.values(), serving.lines_of(findings)
    assert states.pop("calls and reasoning are parsed") == SKIPPED  # transformers' server has no parser for them
    assert set(states.values()) == {PASSED}
    [prompts] = [one for one in findings if one.check.startswith("prompts")]
    assert "48 of 48" in prompts.text or "not tried" in prompts.text


def change(folder: Path, name: str, **values: Any) -> None:
    """Change fields of a JSON file."""
    file = folder / name
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def change_template(folder: Path) -> None:
    """A blank more after the role."""
    file = folder / "chat_template.jinja"
    file.write_text(file.read_text().replace("<|im_start|>assistant\n{%", "<|im_start|>assistant \n{%"))


def change_weights(folder: Path) -> None:
    """One matrix is another one's."""
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"].mul_(2)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_planted_defects_are_named(exported: tuple[Path, TemplateChatEncoder], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(exported[0], tmp_path / "export"))
    change_template(folder)
    change_weights(folder)
    change(folder, "generation_config.json", eos_token_id=[3])
    change(folder, "config.json", num_nextn_predict_layers=1, dtype="bfloat16")
    findings = {one.check: one for one in verify_serving(folder, exported[1], [])}
    expected = {
        "files as they were written": "generation_config.json",
        "prompts by transformers 5": "0 of 48 equal",
        "stop tokens of generation_config.json": "<|im_end|> (",
        "config.json describes the weights": "num_nextn_predict_layers = 1, but there are no such layers",
        "logits that training saved": "other weights than were saved",
    }
    for check, says in expected.items():
        [found] = [one for name, one in findings.items() if name.startswith(check)]
        assert found.state == FAILED and says in " ".join([found.text, *found.details])
    assert "dtype = bfloat16, but the weights are float32" in findings["config.json describes the weights"].details
    assert findings["calls and reasoning are parsed"].state == PASSED


def test_weights_that_the_config_does_not_know(exported: tuple[Path, TemplateChatEncoder], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(exported[0], tmp_path / "export"))
    change(folder, "config.json", num_hidden_layers=1, layer_types=["full_attention"])
    findings = {one.check: one for one in verify_serving(folder, exported[1], [])}
    assert findings["config.json describes the weights"].details[0].startswith("unexpected_keys: model.layers.1.")
    assert findings["logits that training saved"].state == FAILED


def test_a_call_that_a_server_would_not_parse(exported: tuple[Path, TemplateChatEncoder]) -> None:
    folder, encoder = exported
    odd = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "Look:\n<tool_call>{}</tool_call>", "reasoning_content": "So."},
    ]
    findings = {one.check: one for one in verify_serving(folder, encoder, [("rows.jsonl:7", Conversation(odd))])}
    found = findings["calls and reasoning are parsed"]
    assert found.state == FAILED and found.details[0].startswith("rows.jsonl:7: trained")


def test_the_command_in_a_run(
    exported: tuple[Path, TemplateChatEncoder], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(exported[0], run / "base")
    shutil.copytree(exported[0], run / "export")
    rows = [{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    (run / "config.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /model: hf\n"
        f"model: {{path: {run}/base}}\ndata: {{sources: [{{path: {data}}}]}}\nprepare: {{dir: {tmp_path}/cache}}\n"
    )
    assert main(["verify-serving", str(run), "programs=none"]) == 0
    said = capsys.readouterr().out
    assert "49 of 49 equal to training's, token for token" in said and "checks passed" in said
    change_template(run / "export")
    assert main(["verify-serving", str(run), "programs=none", "color=always"]) == 74
    shown = capsys.readouterr()
    assert f"{data}:1: at token" in shown.out and "\x1b[1;32m" in shown.out
    assert "FAILED: files as they were written" in shown.out and "2 of 7 checks failed" in shown.err
    assert main(["verify-serving", str(run / "base"), "programs=none"]) == 0
    assert "is in no run directory" not in capsys.readouterr().out  # its parent is one
    assert main(["verify-serving", str(run), "programs=vlm"]) == 2
    assert main(["verify-serving", str(tmp_path / "nowhere")]) == 2


def test_an_export_that_fails_is_held_back(exported: tuple[Path, TemplateChatEncoder], tmp_path: Path) -> None:
    folder, encoder = Path(shutil.copytree(exported[0], tmp_path / "export")), exported[1]
    require_serving(folder, encoder, [], TrainOn.auto)
    assert folder.is_dir()
    change(folder, "generation_config.json", eos_token_id=[3])
    with pytest.raises(CheckpointError, match=r"stop tokens of generation_config\.json"):
        require_serving(folder, encoder, [], TrainOn.auto)
    assert not folder.exists() and (tmp_path / "export.held" / "model.safetensors").is_file()
    assert "<|im_end|>" in (tmp_path / "export.held.txt").read_text()


SERVER = """#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from transformers import AutoTokenizer
folder, port = {folder!r}, int(sys.argv[sys.argv.index("--port") + 1])
tokenizer = AutoTokenizer.from_pretrained(folder)

class Handler(BaseHTTPRequestHandler):
    def answer(self, value):
        self.send_response(200); self.end_headers(); self.wfile.write(json.dumps(value).encode())
    def do_GET(self):
        self.answer({{}})
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "content" in body:
            return self.answer({{"tokens": tokenizer(body["content"], add_special_tokens=False)["input_ids"]}})
        for message in body["messages"]:
            for call in message.get("tool_calls") or []:
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        options = dict(tools=body.get("tools"), add_generation_prompt=True, **body.get("chat_template_kwargs") or {{}})
        text = tokenizer.apply_chat_template(body["messages"], tokenize=False, **options)
        ids = tokenizer(text + {more!r}, add_special_tokens=False)["input_ids"]
        self.answer({{"prompt": text, "tokens": ids, "usage": {{"prompt_tokens": len(ids)}}}})
    def log_message(self, *_):
        pass

HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def test_engines(exported: tuple[Path, TemplateChatEncoder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins that speak as vLLM and llama.cpp do; they themselves need a GPU, or a compiler."""
    folder, encoder = exported
    for name in ("vllm", "llama-server"):
        program = tmp_path / name
        program.write_text(SERVER.format(python=sys.executable, folder=str(folder), more="!"))
        program.chmod(0o755)
    (tmp_path / "convert_hf_to_gguf.py").write_text("#!/bin/sh\n")
    (tmp_path / "convert_hf_to_gguf.py").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    findings = {one.check: one for one in verify_serving(folder, encoder, [], programs=list(serving.ENGINES))}
    by_vllm, by_llama = findings["prompts by vLLM"], findings["prompts by llama.cpp"]
    assert by_vllm.state == FAILED and "0 of 48" in by_vllm.text and "{+!+}" in by_vllm.details[0]
    assert by_llama.state == PASSED and "48 of 48" in by_llama.text
    assert findings["prompts by SGLang"] == serving.Finding("prompts by SGLang", SKIPPED, "it is not installed")


def test_an_engine_that_does_not_start(
    exported: tuple[Path, TemplateChatEncoder], monkeypatch: Any, tmp_path: Path
) -> None:
    program = tmp_path / "vllm"
    program.write_text("#!/bin/sh\necho no GPU here >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(serving.NotRun, match="does not start here: no GPU here"):
        serving.ENGINES["vLLM"](exported[0], [])
