"""What is wrong with a model, its tokenizer or first rows: every command that could know says it, in the same words."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.unit.speaker import write_random
from toolkit.cli import main
from toolkit.config.load import LoadedConfig, load
from toolkit.distributed import process_group, signals
from toolkit.tasks.language_check import check_model

PLAIN = [{"role": "user", "content": "he said"}, {"role": "assistant", "content": "and so on"}]
THOUGHT = [PLAIN[0], PLAIN[1] | {"reasoning_content": "said and"}]
RECIPE = ["recipe=zero1", "precision=fp32", "batch.global_size=2", "batch.micro_per_gpu=1", "train.max_steps=2"]
SAMPLES = ["data.max_length=64", "data.validation_fraction=0"]


@dataclass(frozen=True)
class Fact:
    """Something that keeps a recipe from being trained."""

    said: str
    """What is said of it, as a pattern."""
    spoil: Callable[[Path], object] = lambda model: None
    """Changes a model's directory so."""
    words: tuple[str, ...] = ()
    """Overrides that bring it about; `new` takes none."""
    is_for_new: bool = True
    """`new` reads config.json, and what else there is; it chooses `data.max_length`."""
    in_config: bool = False
    """Whether config.json and the recipe alone show it: `plan` reads nothing else."""
    rows: tuple[dict[str, str], ...] = tuple(PLAIN)


def config(**changes: object) -> Callable[[Path], object]:
    """Return what changes config.json."""

    def spoil(model: Path) -> None:
        file = model / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return spoil


def without(*names: str) -> Callable[[Path], object]:
    """Return what deletes files."""
    return lambda model: [(model / name).unlink() for name in names]


def half_a_file(model: Path) -> None:
    """End a download early."""
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def fewer_tokens(model: Path) -> None:
    """Take the last tokens from the model, as where the tokenizer is of another one."""
    tensors = load_file(model / "model.safetensors")
    cut = {name: value[:264].clone() if len(value) == 275 else value for name, value in tensors.items()}
    save_file(cut, model / "model.safetensors", metadata={"format": "pt"})
    config(vocab_size=264)(model)


def without_a_norm(model: Path) -> None:
    """Leave out a tensor."""
    tensors = load_file(model / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


FACTS = {
    "no causal model": Fact("holds a t5, which is no causal language model", config(model_type="t5"), in_config=True),
    "positions": Fact(
        r"data\.max_length = 64: more than the 32 positions",
        config(max_position_embeddings=32),
        is_for_new=False,
        in_config=True,
    ),
    "tokenizer": Fact(r"the tokenizer has 275 tokens, the model only 264: they do not match", fewer_tokens),
    "other layers": Fact("the weights in model are not those of GlmForCausalLM: missing", config(num_hidden_layers=3)),
    "other shape": Fact("are not those of GlmForCausalLM: .* of another shape", config(intermediate_size=24)),
    "a tensor": Fact(r"GlmForCausalLM: missing \[model\.norm\.weight\]", without_a_norm),
    "half a download": Fact("bytes where its header says .*: download it again", half_a_file),
    "no weights": Fact("model holds no weights", without("model.safetensors"), is_for_new=False),
    "template": Fact("The tokenizer 'model' has no chat template", without("chat_template.jinja")),
    "reasoning": Fact(r"rows\.jsonl:1: message 2: the chat template has no place for .*reasoning", rows=(*THOUGHT,)),
    "target_modules": Fact(
        r"tuning\.target_modules: nothing in this model is called 'nosuch'\. Known: .*, lm_head",
        words=("tuning=lora", "tuning.target_modules=[nosuch]"),
        in_config=True,
    ),
    "save_modules": Fact(
        r"tuning\.save_modules: nothing in this model is called 'nosuch'\. Known: .*, lm_head",
        words=("tuning=lora", "tuning.save_modules=[nosuch]"),
        in_config=True,
    ),
    "last_layers": Fact(
        r"tuning\.last_layers = 3, but the model has 2 layers", words=("tuning=freeze", "tuning.last_layers=3")
    ),
    "adapter": Fact("model holds no adapter", words=("tuning=lora", "tuning.adapter=model")),
    "experts": Fact(
        r"model\.expert_capacity = 1\.5, but GlmForCausalLM has no routed experts", words=("model.expert_capacity=1.5",)
    ),
    "liger": Fact(r"kernels\.liger = always: there is no GPU", words=("kernels.liger=always",)),
}
ONLY_NEW_WARNS = ("template", "reasoning")
"""Keys of the recipe mend these, so `new` writes it."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that can be trained."""
    return write_random(tmp_path_factory.mktemp("whole") / "model", positions=256)


def run(capsys: pytest.CaptureFixture[str], command: str, *words: str) -> tuple[int, str]:
    """Return exit code and everything said."""
    code = main([command, *words])
    said = capsys.readouterr()
    return code, said.out + said.err


@pytest.mark.parametrize("name", FACTS)
def test_every_command_says_it(
    name: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fact = FACTS[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signals, "install_signals", lambda: None)
    monkeypatch.setattr(process_group, "start", lambda config: pytest.fail("told before ranks meet"))
    shutil.copytree(whole, "model")
    fact.spoil(Path("model"))
    Path("rows.jsonl").write_text((json.dumps({"messages": fact.rows}) + "\n") * 4)
    recipe = [*RECIPE, *SAMPLES, "model=hf", "model.path=model", "data=rows.jsonl", *fact.words]
    sentences = set()
    for command, words in {
        "check": recipe,
        "plan": [*recipe, "gpus=1x24GB"] if fact.in_config else [],
        "new": []
        if fact.words or not fact.is_for_new
        else ["model=model", "data=rows.jsonl", "gpus=1x24GB", "max_length=64"],
        "prepare": recipe,
        "train": recipe,
    }.items():
        if not words:
            continue
        code, said = run(capsys, command, *words)
        is_warning = command == "new" and name in ONLY_NEW_WARNS
        assert code == (0 if is_warning else 2), f"{command}: {said}"
        found = re.search(rf"^\w+: .*{fact.said}.*?(?=\. |$)", said, re.MULTILINE)
        assert found, f"{command}: {said}"
        sentences.add(re.sub(r"^\w+: (command line: )?|\./|/\S+/(?=model)", "", found[0]).rstrip("."))
    assert len(sentences) == 1, sentences


def test_a_whole_model_is_trained(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """So that no fact of FACTS holds of the model itself."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(whole, "model")
    Path("rows.jsonl").write_text((json.dumps({"messages": PLAIN}) + "\n") * 4)
    code, said = run(capsys, "check", *RECIPE, *SAMPLES, "model=hf", "model.path=model", "data=rows.jsonl")
    assert code == 0, said


def test_config_json_alone_is_enough(whole: Path, tmp_path: Path) -> None:
    """Of a model on Hugging Face `check` downloads no weights."""
    shutil.copytree(whole, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    words = ["model=hf", f"model.path={tmp_path / 'model'}", "parallel.sequence=2", "data.packing=packed"]
    check_model(load([*RECIPE, *SAMPLES, *words]).cfg, None)


def test_no_weights_are_downloaded_for_the_question_whether_an_adapter_merges(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text((json.dumps({"messages": PLAIN}) + "\n") * 4)
    asked: list[bool] = []

    def resolve(loaded: LoadedConfig, *, config_only: bool = False) -> LoadedConfig:
        asked.append(config_only)
        return loaded

    monkeypatch.setattr("toolkit.config.hub.resolve_model_path", resolve)
    words = ["model=hf", f"model.path={whole}", "data=rows.jsonl", "tuning=lora", "tuning.save_modules=[lm_head]"]
    code, said = run(capsys, "check", *RECIPE, *SAMPLES, *words)
    assert code == 0, said
    assert len(asked) == 3 and all(asked)
