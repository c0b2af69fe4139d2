"""A model whose folder brings its own code: refused by name, run only where it is trusted, and exported with it."""

import json
import re
import sys
from pathlib import Path

import official
import pytest
import torch
import transformers
from ranks import REPOSITORY, forked, run
from shared import losses, tiny

from tests.architectures import write
from tests.probes import compare
from toolkit.cli import main
from toolkit.models import load_tokenizer, probe

CODE = '''
import torch
from transformers import LlamaConfig, LlamaForCausalLM


class TinyConfig(LlamaConfig):
    model_type = "of_its_own"


class TinyForCausalLM(LlamaForCausalLM):
    """Llama with a factor before its head."""

    config_class = TinyConfig

    def __init__(self, config):
        super().__init__(config)
        self.factor = torch.nn.Parameter(torch.ones(config.hidden_size))
        self.model.norm.register_forward_hook(lambda _, __, states: states * self.factor)
'''
AUTO_MAP = {"AutoConfig": "own_code.TinyConfig", "AutoModelForCausalLM": "own_code.TinyForCausalLM"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from safetensors.torch import load_file, save_file

    place = tmp_path_factory.mktemp("remote")
    folder = write(place / "own", "llama")
    (folder / "own_code.py").write_text(CODE)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "of_its_own", "architectures": ["TinyForCausalLM"], "auto_map": AUTO_MAP}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors") | {"factor": torch.full((32,), 1.5)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = load_tokenizer(official.write(place / "vocabulary", "glm4", tokenizer=True))
    tokenizer.save_pretrained(folder)
    return folder


def words(rows_file: Path, folder: Path, name: str, *more: str) -> list[str]:
    return tiny(
        rows_file,
        folder.parent,
        name,
        "model=hf",
        f"model.path={folder}",
        "data.validation_fraction=0",
        "train.max_steps=3",
        "checkpoint.export=true",
        "zero=stage3",
        "zero.stage3_param_persistence_threshold=0",
        "schedule=constant",
        "schedule.warmup_steps=0",
        *more,
    )


def test_refused_with_the_files_that_would_run(
    rows_file: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["check", *words(rows_file, folder, "refused")]
    assert main(command) == 2
    found = capsys.readouterr().err
    assert "names Python code to run (auto_map), which is rejected; there are ['own_code.py']" in found
    assert "train with model.trust_remote_code=true" in found
    assert not any("own_code" in name for name in sys.modules)


def test_trained_and_exported_with_its_code(rows_file: Path, folder: Path, tmp_path: Path) -> None:
    trusted = words(rows_file, folder, "trusted", "model.trust_remote_code=true")
    modules = str(tmp_path / "modules")
    command = forked(2, str(REPOSITORY / "run.py"), *trusted)
    finished = run(command, cwd=tmp_path, HF_MODULES_CACHE=modules)
    assert finished.code == 0, finished.output[-4000:]
    assert f"model.trust_remote_code = true: the Python files of {folder} run with all your rights." in finished.output
    assert re.search(r"\x1b\[", finished.output) is None  # no terminal, no colours
    assert list(Path(modules).rglob("own_code.py")), "it was copied elsewhere"
    found = losses(folder.parent / "runs" / "trusted")
    assert found[-1] < found[0]
    export = folder.parent / "runs" / "trusted" / "export"
    assert (export / "own_code.py").read_text() == CODE
    saved = probe.read(export)
    assert saved is not None
    model = transformers.AutoModelForCausalLM.from_pretrained(export, trust_remote_code=True)
    assert type(model).__name__ == "TinyForCausalLM"
    assert compare(model.eval(), saved)[0] < 1e-4
    assert float((model.factor.detach() - 1.5).abs().max()) > 0
