"""`toolkit models DIR`: what it prints of a directory is what `toolkit check` says, as training does."""

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.architectures import CONFIGS, WRAPPERS
from toolkit.cli import main
from toolkit.config.schema import TuningMethod
from toolkit.extras.model_facts import facts_of, model_folders
from toolkit.messages import ConfigError
from toolkit.models.chat import fit_tokenizer

SIZES = {"vocab_size": 1024, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
MLX = {"bits": 4, "group_size": 64}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
CODE = {"AutoModelForCausalLM": "mine.Mine"}
# Case: config, more keys of config.json, why it cannot be trained, why it is not packed.
CASES: dict[str, tuple[Any, dict[str, Any], str, str]] = {
    "qwen3": (CONFIGS["qwen3"], {}, "", ""),
    "gemma3 of images": (WRAPPERS["gemma3_images"], {}, "", "reaches back 64 tokens only"),
    "hybrid": (WRAPPERS["qwen3_5"], {}, "", "mix a whole row: linear_attention"),
    "no decoder": (
        lambda: transformers.BertConfig(**SIZES, num_attention_heads=2),
        {},
        'is_decoder = false: .* Set "is_decoder": true there',
        "",
    ),
    "refused type": (
        lambda: transformers.XLNetConfig(vocab_size=1024, d_model=32, n_layer=1, n_head=2),
        {},
        "model_type = xlnet, which cannot be trained",
        "",
    ),
    "gptq": (CONFIGS["qwen3"], {"quantization_config": GPTQ}, "", ""),
    "fp8": (CONFIGS["qwen3"], {"quantization_config": FP8}, "", ""),
    "mlx": (CONFIGS["qwen3"], {"quantization_config": MLX}, r"quantized weights \(mlx .*quantized-checkpoints", ""),
    "code": (CONFIGS["qwen3"], {"auto_map": CODE}, r"names Python code .*\['mine.py'\]", ""),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a tokenizer with a chat template."""
    return fit_tokenizer(lambda: ["and so on"], 270, tmp_path_factory.mktemp("fit"))


def written(folder: Path, config: Any, tokenizer: Any, **keys: Any) -> Path:
    """Write a model directory with random weights, and more keys of config.json."""
    auto = transformers.AutoModelForCausalLM
    if type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        auto = transformers.AutoModelForImageTextToText
    auto.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "mine.py").write_text("raise SystemExit\n")
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))
    return folder


def checked(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Return the exit code of `toolkit check`, and what it said of packed samples."""
    Path("chat.jsonl").write_text('{"prompt": "a", "response": "b"}\n' * 4)
    capsys.readouterr()
    of_run = ["recipe=zero1", "model=hf", "data=chat.jsonl", "precision=fp32", "data.packing=packed"]
    code = main(["check", *of_run, f"model.path={folder}", *words])
    output = capsys.readouterr()
    return code, output.out + output.err


@pytest.mark.parametrize("case", CASES)
def test_check_says_the_same(
    case: str, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    config, keys, refused, grouped = CASES[case]
    folder = written(tmp_path / "model", config(), tokenizer, **keys)
    facts = facts_of(folder, 512)
    assert bool(facts.refused) == bool(refused) and re.search(refused, facts.refused), facts.refused
    assert bool(facts.grouped) == bool(grouped) and grouped in facts.grouped, facts.grouped
    code, printed = checked(folder, capsys, "data.max_length=512")
    assert code == (2 if refused else 0) and facts.refused in printed, printed
    assert (f"packed rows: {facts.grouped}. Samples of like length" in printed) == bool(grouped)
    assert facts.kernels in printed
    assert ("Not trained, as" in printed) == bool(facts.frozen) and all(name in printed for name in facts.frozen)
    assert set(facts.methods) == (set() if refused else {method.value for method in TuningMethod})
    for method, answer in facts.methods.items():
        code, printed = checked(folder, capsys, f"tuning={method}", "data.packing=grouped")
        assert code == (2 if answer.refused else 0) and answer.refused in printed, printed
        if case == "qwen3" and not answer.refused:  # whose numbers a formula knows
            assert f"{answer.trained:,} of" in printed, printed


def test_what_is_printed(tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("qwen3", "glm4_moe"):
        keys = {"num_nextn_predict_layers": 1} if name == "glm4_moe" else {}
        folder = written(tmp_path / name, CONFIGS[name](), tokenizer, **keys)
        for file in folder.glob("*.safetensors"):
            file.write_bytes(b"")  # weights are not looked at
    assert main(["models", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    for line in (
        r"tuning=lora +trains 2,560 parameters: k_proj, q_proj, v_proj",
        r"packing +packed",
        r"parallel.tensor=2 +no: parallel.tensor = 2 does not divide the model's 1 heads of keys and values",
        r"parallel.expert=2 +yes",
        r"multi-token prediction +num_nextn_predict_layers = 1: skipped, not trained",
        r"chat template +yes",
    ):
        assert re.search(f"(?m)^  {line}", text), text
    assert re.search(r"(?m)^  glm4_moe +glm4_moe +84,256 .* packed +sequence expert +yes$", text), text
    assert main(["models", str(tmp_path / "qwen3"), "max_length=64", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [asdict(facts_of(tmp_path / "qwen3", 64))]
    assert main(["models"]) == 0 and "Qwen/Qwen3-8B" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "holds no config.json: it is not a model directory"),
        ("{", "config.json is not JSON"),
        ("[]", "config.json is not a JSON object"),
        ("{}", "has no model_type"),
        ('{"model_type": "qwen3", "num_hidden_layers": 100000000}', "is not a whole number from 1 to 4,096"),
        ('{"model_type": "nothing"}', "cannot load the model"),
        ('{"model_type": "t5"}', "which is no causal language model"),
        ('{"model_type": "pix2struct"}', "which is no causal language model"),
    ],
)
def test_mistakes(content: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert main(["models", str(tmp_path)]) == 2
    output = capsys.readouterr()
    assert message in output.out and "Traceback" not in output.out + output.err


def test_no_such_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "Qwen3").mkdir()
    with pytest.raises(ConfigError, match=r"there is no directory .*Did you mean '.*/Qwen3'"):
        model_folders(tmp_path / "Qwen")
    assert main(["models", str(tmp_path / "Qwen")]) == 2
    with (tmp_path / "Qwen3" / "config.json").open("wb") as file:
        file.truncate((256 << 20) + 1)
    assert main(["models", str(tmp_path)]) == 2
    assert "it has more than 268,435,456 bytes" in capsys.readouterr().out
