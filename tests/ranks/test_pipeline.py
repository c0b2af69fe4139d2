"""Layers divided over ranks: the losses of a plain loop, whole checkpoints and exports, right clipping."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from official import write
from ranks import run
from safetensors.torch import load_file
from shared import (
    LORA,
    RECOMPUTE,
    SHORT_FIRST,
    WORKER,
    check_short_first,
    eval_losses,
    launcher,
    losses,
    plain_loop,
    tiny,
    trained,
)

from toolkit.checkpoint import fragment_reader, fragments
from toolkit.checkpoint.fragment_reader import iter_weights
from toolkit.cli import main
from toolkit.models.adapters import WEIGHTS
from toolkit.models.directory import BASE_FILE

PIPELINE = "parallel=pipeline"
BF16 = ["model=glm_tiny", "precision=bf16", "zero=stage1", "data.packing=packed", "batch.global_size=2"]
EXPORT = "checkpoint.export=true"
SAVES = ["checkpoint.every=3", "train.rehearse=true", RECOMPUTE, EXPORT]
STEPS = 6


def tiny_model(folder: Path, kind: str, is_tied: bool) -> Path:
    """Write a model of four layers, of a type of transformers, whose head may be its embedding."""
    from toolkit.models.tokenizer_files import load_tokenizer

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 2}
    config = transformers.AutoConfig.for_model(
        kind,
        vocab_size=1024,
        **sizes,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=is_tied,
        eos_token_id=956,
        pad_token_id=956,
        bos_token_id=None,
    )
    torch.manual_seed(3)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    load_tokenizer(write(folder.with_name("vocabulary"), "glm4", tokenizer=True)).save_pretrained(folder)
    return folder


FROZEN = ["tuning=freeze", "optim.lr=0.01", "tuning.last_layers=0", "tuning.patterns=[*.mlp.*]"]
# Model and what is trained of it -> its type, whether its head is its embedding, overrides.
TUNED: dict[str, tuple[str, bool, list[str]]] = {
    "glm": ("glm", False, [*LORA, "zero=stage0", *SHORT_FIRST]),
    "llama": ("llama", False, [*LORA, "zero=stage1", RECOMPUTE, "tuning.dora=true", "tuning.rslora=true"]),
    "qwen": ("qwen2", True, [*LORA, "zero=stage1", "tuning.save_modules=[lm_head]"]),
    "freeze": (
        "qwen2",
        True,
        [*FROZEN, "zero=stage1", RECOMPUTE],
    ),
}
OF_FOUR = "qwen-stages"
"""The run on four ranks; all others of what is tuned are on two."""


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, rows_file: Path) -> Path:
    """Two stages on two ranks, and on four with two data-parallel pipelines; each of `TUNED` whole and in stages, one
    of them with dropout, and once more from its checkpoint.
    """
    folder = tmp_path_factory.mktemp("pipeline")
    tied = ["model=hf", f"model.path={tiny_model(folder / 'tied', 'glm', True)}", "zero=stage1", PIPELINE, *SAVES]
    v1 = ["model=hf", f"model.path={write(folder / 'v1', 'v1', tokenizer=True)}", "zero=stage0", PIPELINE]
    v1 += ["checkpoint.asynchronous=true", "checkpoint.every=3", EXPORT]
    tuned: dict[str, list[str]] = {}
    for name, (kind, is_tied, words) in TUNED.items():
        path = tiny_model(folder / name, kind, is_tied)
        tuned[name] = ["model=hf", f"model.path={path}", "checkpoint.every=2", "train.max_steps=4", EXPORT, *words]
    staged = {f"{name}-stages": [*words, PIPELINE] for name, words in tuned.items()}
    dropout = [*staged["llama-stages"], "tuning.dropout=0.2"]
    cases = {
        2: {
            # First: an engine without stages cannot follow one with stages in the same process.
            "bf16-data": BF16,
            **tuned,
            "v1-2": v1,
            "bf16-2": [*BF16, PIPELINE, EXPORT],
            **{name: words for name, words in staged.items() if name != OF_FOUR},
            "dropout": dropout,
            "dropout-again": [*dropout, f"resume={folder}/runs/dropout/checkpoints/step-2"],
            "refused": [*tuned["glm"][:2], PIPELINE, "zero=stage1", "tuning=freeze", "tuning.last_layers=1"],
        },
        4: {
            "tied-4": tied,
            "resumed-4": [*tied, f"resume={folder}/runs/tied-4/checkpoints/step-3"],
            OF_FOUR: staged[OF_FOUR],
        },
    }
    for ranks, named in cases.items():
        lines = [
            {"overrides": tiny(rows_file, folder, name, f"train.max_steps={STEPS}", *words)}
            | ({"refused": f"{folder}/refused.txt"} if name == "refused" else {})
            for name, words in named.items()
        ]
        (folder / "cases.json").write_text(json.dumps(lines))
        finished = run([*launcher(request)(ranks, WORKER), str(folder / "cases.json")], cwd=folder, timeout_s=400)
        assert finished.code == 0, finished.output[-6000:]
    return folder / "runs"


@pytest.mark.parametrize(("name", "model"), [("tied-4", "tied"), ("v1-2", "v1")])
def test_losses_are_those_of_a_plain_loop(name: str, model: str, runs: Path, rows_file: Path) -> None:
    """In fp32 but for rounding; every norm is above the bound, so clipping that misses a stage would show at once."""
    words = ["model=hf", f"model.path={runs.parent / model}", f"train.max_steps={STEPS}"]
    expected, validation = plain_loop(tiny(rows_file, runs.parent, "", *words), STEPS)
    assert losses(runs / name) == pytest.approx(expected, rel=2e-5)
    found = eval_losses(runs / name)
    assert [found[0], found[-1]] == pytest.approx(validation, rel=2e-5)
    assert validation[1] < validation[0] - 0.1
    assert all(row["grad_norm"] > 1 for row in trained(runs / name) if "grad_norm" in row)


def test_packed_rows_in_bf16(runs: Path) -> None:
    """Differences are those of bf16: each stage hands its hidden states on rounded, as the undivided model has them."""
    mine, theirs = trained(runs / "bf16-2"), trained(runs / "bf16-data")
    for one, other in zip(mine, theirs, strict=True):
        for key in {"loss", "grad_norm", "eval_loss"} & set(one):
            assert one[key] == pytest.approx(other[key], rel=5e-3), (key, one)


def test_the_same_samples_first_as_without_stages(runs: Path) -> None:
    check_short_first(runs / "glm-stages", runs / "glm", rel=2e-5)


def test_going_on_is_bit_equal(runs: Path) -> None:
    straight = [row for row in trained(runs / "tied-4") if row["step"] > 3]
    assert len(straight) == 4
    assert trained(runs / "resumed-4") == straight
    mine, theirs = (load_file(runs / name / "export" / "model.safetensors") for name in ("resumed-4", "tied-4"))
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(("name", "exported"), [("tied-4", "tied"), ("v1-2", "v1"), ("bf16-2", "")])
def test_exports_are_whole(name: str, exported: str, runs: Path, tmp_path: Path) -> None:
    """The run compared the export's logits with its own; the checkpoint, without ranks, gives the same weights."""
    assert main(["verify", str(runs / name / "export")]) == 0
    assert main(["verify", str(runs / name / "checkpoints" / f"step-{STEPS}")]) == 0
    held = load_file(runs / name / "export" / "model.safetensors")
    found = dict(iter_weights(runs / name / "checkpoints" / f"step-{STEPS}"))
    assert set(found) == set(held)
    assert all(torch.equal(found[one], held[one]) for one in held)
    assert main(["export-model", f"model.path={runs / name}/checkpoints/step-{STEPS}", f"output={tmp_path}/out"]) == 0
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (
        runs / name / "export" / "model.safetensors"
    ).read_bytes()
    if exported:
        original = dict(transformers_names(runs.parent / exported))
        assert {key: value.shape for key, value in held.items()} == original


def transformers_names(folder: Path) -> dict[str, torch.Size]:
    """Return names and shapes of a model folder's parameters, each once."""
    from toolkit.models.load import load_empty

    return {name: one.shape for name, one in load_empty(folder).named_parameters()}


def test_a_stage_writes_its_own_layers(runs: Path) -> None:
    """The embedding, which is the head too, once: by the first stage."""
    checkpoint = runs / "tied-4" / "checkpoints" / "step-6"
    names: list[set[str]] = [set(), set()]
    for rank in range(4):  # two of each stage; one may have numbers of the head alone, which the first stage saves
        file = checkpoint / fragments.file_name(rank)
        held = load_file(file) if file.exists() else {}
        names[rank // 2] |= {key.partition(":")[2] for key in held if ":" in key}
    assert names[0] and names[1] and not names[0] & names[1]
    assert names[0] | names[1] == set(transformers_names(runs.parent / "tied"))


@pytest.mark.parametrize("name", TUNED)
def test_what_is_tuned_is_what_is_tuned_without_stages(name: str, runs: Path) -> None:
    """Adapters begin with the same numbers on whatever stage; tied weights that are frozen are exchanged by none."""
    mine, theirs = (trained(runs / one) for one in (f"{name}-stages", name))
    for one, other in zip(mine, theirs, strict=True):
        for key in ("step", "loss", "grad_norm", "eval_loss"):
            assert one.get(key, 0.0) == pytest.approx(other.get(key, 0.0), rel=2e-5), (key, one)
    assert losses(runs / name)[-1] < losses(runs / name)[0] - 0.1
    checkpoints = [fragment_reader.Fragments(runs / one / "checkpoints" / "step-4") for one in (f"{name}-stages", name)]
    assert checkpoints[0].names == checkpoints[1].names
    described = [runs / one / "checkpoints" / "step-4" / "model" / BASE_FILE for one in (f"{name}-stages", name)]
    assert described[0].read_bytes() == described[1].read_bytes()
    file = "model.safetensors" if name == "freeze" else WEIGHTS
    held, expected = (load_file(runs / one / "export" / file) for one in (f"{name}-stages", name))
    assert set(held) == set(expected)
    for key, value in expected.items():
        assert (held[key] - value).abs().max() < 1e-4 * value.abs().max().clamp(min=1e-3), key


@pytest.mark.filterwarnings("ignore:.*keys did not match any targeted module", "ignore:.*tie_word_embeddings")
@pytest.mark.parametrize("name", TUNED)
def test_what_is_tuned_in_stages_is_exported(name: str, runs: Path, tmp_path: Path) -> None:
    """Checkpoints and export give the logits of the run; out of the checkpoint comes the same export, and a merged."""
    run_folder = runs / f"{name}-stages"
    assert main(["verify", str(run_folder)]) == 0
    assert main(["export-model", f"{run_folder}/checkpoints/step-4", f"output={tmp_path}/same"]) == 0
    file = "model.safetensors" if name == "freeze" else WEIGHTS
    assert (tmp_path / "same" / file).read_bytes() == (run_folder / "export" / file).read_bytes()
    if name in ("glm", "llama"):
        assert main(["export-model", str(run_folder), "merge=true", f"output={tmp_path}/merged"]) == 0
        assert main(["verify", str(tmp_path / "merged")]) == 0


def test_dropout_goes_on_bit_by_bit(runs: Path) -> None:
    straight = [row for row in trained(runs / "dropout") if row["step"] > 2]
    assert trained(runs / "dropout-again") == straight and len(straight) == 3
    mine, theirs = (runs / name / "export" / WEIGHTS for name in ("dropout-again", "dropout"))
    assert mine.read_bytes() == theirs.read_bytes()
    assert losses(runs / "dropout") != losses(runs / "llama-stages")


def test_a_stage_with_nothing_to_train_is_refused(runs: Path) -> None:
    assert (runs.parent / "refused.txt").read_text() == (
        "ModelError: parallel.pipeline = 2: stage 1, from model.embed_tokens to model.layers.1, would have nothing to "
        "train. Train something in each stage (tuning.last_layers, tuning.patterns, tuning.target_modules), or use "
        "parallel=data with zero=stage3."
    )
