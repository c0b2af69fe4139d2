"""`data.max_length` against the positions of the model, from config.json alone."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from toolkit.cli import main
from toolkit.config.context_length import check_positions, position_limit
from toolkit.config.load import load
from toolkit.messages import ConfigError

ROOT = Path(__file__).parents[2]
LLAMA: dict[str, Any] = {"model_type": "llama", "max_position_embeddings": 2048, "rope_theta": 10000.0}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
OFFICIAL = {"model_type": "chatglm", "padded_vocab_size": 65024, "seq_length": 8192, "rope_ratio": 50}


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        (LLAMA, 2048),
        ({"model_type": "gpt2", "n_positions": 1024}, 1024),
        ({"model_type": "mpt", "max_seq_len": 2048}, 2048),
        # One row of the table is that of padding, and nothing has the positions before it.
        ({"model_type": "roberta", "max_position_embeddings": 514, "pad_token_id": 1}, 512),
        ({"model_type": "xmod", "max_position_embeddings": 514, "pad_token_id": 0}, 513),
        (OFFICIAL, 8192),
        ({"position_encoding_2d": True, "max_sequence_length": 2048}, 2048),
        # No limit: ALiBi, state spaces, nothing said.
        ({"model_type": "bloom", "seq_length": 2048}, None),
        ({"model_type": "falcon", "max_position_embeddings": 2048, "alibi": True}, None),
        ({"model_type": "mamba"}, None),
        ({**LLAMA, "max_position_embeddings": None}, None),
        # Scaling that multiplies what is said beside it.
        ({**LLAMA, "rope_scaling": {"type": "linear", "factor": 4.0}}, 8192),
        ({**LLAMA, "rope_scaling": {"rope_type": "dynamic", "factor": 2}}, 4096),
        ({**LLAMA, "max_position_embeddings": 32768, "rope_scaling": YARN}, 131072),
        ({**LLAMA, "max_position_embeddings": 131072, "rope_scaling": YARN}, 131072),
        ({**LLAMA, "max_position_embeddings": 40960, "rope_parameters": {"rope_theta": 1e6, **YARN}}, 131072),
        ({**LLAMA, "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}}}, 16384),
        # Scaling that is counted in.
        ({**LLAMA, "max_position_embeddings": 131072, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 131072),
        (
            {
                "model_type": "gemma3_text",
                **{k: LLAMA[k] for k in ("max_position_embeddings",)},
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
            2048,
        ),
        (
            {
                "model_type": "glm",
                "max_position_embeddings": 32768,
                "rope_parameters": {"rope_type": "linear", "factor": 4.0},
            },
            32768,
        ),
        ({**LLAMA, "rope_scaling": None}, 2048),
        ({**LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": "x"}}, 2048),
        ({**LLAMA, "max_position_embeddings": 10**400, "rope_scaling": YARN}, None),
        ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "max_position_embeddings": 9}}, 9),
    ],
)
def test_the_limit_of_a_config(config: dict[str, Any], limit: int | None) -> None:
    assert position_limit(config) == limit


def check(folder: Path, config: dict[str, Any], *words: str) -> None:
    """Check a recipe with a model of which there is a config.json alone."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    check_positions(load(["recipe=zero1", "model=hf", f"model.path={folder}", *words]))


@pytest.mark.parametrize(
    ("config", "words", "message"),
    [
        (
            LLAMA,
            ["data.max_length=12000"],
            "data.max_length = 12000: more than the 2048 positions that the model has. Set data.max_length=2048 "
            "(longer samples: data.too_long), train the variant of the model for long texts, or extend its positions "
            'by rope_scaling in its config.json: "rope_scaling": {"rope_type": "yarn", "factor": 6.0, '
            '"original_max_position_embeddings": 2048}.',
        ),
        (OFFICIAL, ["data.max_length=8193"], "such as chatglm3-6b-32k"),
        ({"model_type": "gpt2", "n_positions": 512}, [], "data.max_length = 1024: more than the 512 positions"),
        ({"model_type": "gpt2", "n_positions": 512}, [], "this one has learned an embedding for each"),
        (
            LLAMA,
            ["data.max_length=2000", "tuning=prompt", "tuning.num_tokens=50"],
            "data.max_length + tuning.num_tokens = 2000 + 50: more than the 2048 positions that the model has. Set "
            "data.max_length=1998",
        ),
    ],
)
def test_longer_samples_than_positions(config: dict[str, Any], words: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        check(tmp_path / "m", config, *words)
    assert message in str(caught.value)


def test_what_fits(tmp_path: Path) -> None:
    check(tmp_path / "m", LLAMA, "data.max_length=2048")
    check(tmp_path / "m", LLAMA, "data.max_length=2048", "tuning=ptuning_v2")  # a prefix takes no positions
    check(tmp_path / "m", {**LLAMA, "rope_scaling": YARN}, "data.max_length=100000")
    check(tmp_path / "m", {"model_type": "mamba"}, "data.max_length=100000")
    check_positions(load(["recipe=quickstart", "data.max_length=2048"]))
    with pytest.raises(ConfigError, match=r"more than the 2048 positions.*or raise model\.shape\.max_positions"):
        check_positions(load(["recipe=quickstart", "data.max_length=2049"]))


@pytest.mark.parametrize("command", ["check", "prepare", "train"])
def test_every_command_says_so_at_once(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("defaults: [quickstart]\ndata:\n  max_length: 9000\n")
    words = [f"recipe={recipe}", f"run.dir={tmp_path}/runs"]
    if command == "check":
        assert main([command, *words]) == 2
        assert f"{recipe}:3: data.max_length = 9000: more than the 2048" in capsys.readouterr().err
        return
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "toolkit", command, *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2, done.stderr[-2000:]
    assert "data.max_length = 9000: more than the 2048" in done.stderr
    assert "| torch\n" not in done.stderr, "before torch is imported"
