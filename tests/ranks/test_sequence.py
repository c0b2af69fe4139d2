"""Rows divided over ranks (`parallel.sequence`): the losses are those of a plain PyTorch loop over whole rows."""

import json
from pathlib import Path

import pytest
from official import write
from ranks import forked, run
from safetensors.torch import load_file
from shared import (
    ALL,
    RECOMPUTE,
    SHORT_FIRST,
    STEADY,
    WORKER,
    by_tier,
    check_short_first,
    eval_losses,
    losses,
    of_tier,
    plain_loop,
    rows_of,
    tiny,
)
from test_trajectory import TOLERANCE, furthest

from tests import architectures
from toolkit.config.load import load
from toolkit.config.rules import check_rules
from toolkit.messages import ConfigError

STEPS = 6
# name -> overrides
TWO_RANKS = {
    "stage0": ["zero=stage0", "train.rehearse=true"],
    "stage2-micro2": ["zero=stage2", "batch.micro_per_gpu=2", "kernels.mlp_pieces=3"],
    "stage3-recompute": ["zero=stage3", ALL, RECOMPUTE, "kernels.loss=full", "kernels.mlp_pieces=3"],
    "packed-stage1": ["zero=stage1", "data.packing=packed"],
    "packed-stage3": [
        *("zero=stage3", ALL, "data.packing=packed", "batch.micro_per_gpu=2", RECOMPUTE),
        *("kernels.loss=full", "kernels.mlp_pieces=3"),
    ],
    "bf16-stage1": ["zero=stage1", "precision=bf16", "kernels.mlp_pieces=2"],
    "compiled-stage2": ["zero=stage2", "compile.enabled=true", "compile.backend=eager", "model.shape.num_layers=1"],
    "tiled-stage3": ["parallel=data", "zero=stage3", ALL, "kernels.mlp_pieces=3", "batch.micro_per_gpu=2"],
}
FOUR_RANKS = {
    "dp2-stage1": [
        "zero=stage1",
        "evaluate.metrics=[exact_match]",
        "evaluate.max_new_tokens=4",
        "checkpoint.export=true",
    ],
    "dp2-packed-stage3": ["zero=stage3", ALL, "data.packing=packed", "batch.micro_per_gpu=2", RECOMPUTE],
    "sp4-stage2": ["zero=stage2", "parallel.sequence=4", "checkpoint.every=4"],
}
# name -> other overrides; they go on from a checkpoint of sp4-stage2
RESUMED = {"resumed": [], "resumed-dp2": ["parallel.sequence=2"]}
# name -> overrides; ChatGLM-6B, which finds positions and mask in whole rows; packed it gets rows of like length
CHATGLM = {
    "chatglm-stage2": ["zero=stage2", "batch.micro_per_gpu=2"],
    "chatglm-stage3": ["zero=stage3", ALL, RECOMPUTE, "data.packing=packed"],
}
PREFIX = ["tuning=ptuning_v2", "tuning.num_tokens=4", "tuning.dropout=0", "optim.lr=0.1", "precision=fp32"]
PROMPT = ["tuning=prompt", "tuning.num_tokens=16", "optim.lr=0.3", STEADY, "precision=fp32", "checkpoint.export=true"]
# name -> overrides; on four ranks, with the Llama
PROMPTED = {
    "prompt-sp4": [*PROMPT, "zero=stage2", "parallel.sequence=4", RECOMPUTE],
    "prompt-dp2": [*PROMPT, "zero=stage1", "batch.micro_per_gpu=2", "compile.enabled=true", "compile.backend=eager"],
}
# name -> a model's directory and overrides; trained with whole rows, too, as NAME-whole
PAIRS = {
    "llama": (
        "llama",
        ["tuning=lora", "tuning.target_modules=[all-linear]", "precision=fp32", "kernels.mlp_pieces=2", *SHORT_FIRST],
    ),
    "prefix": ("llama", [*PREFIX, "zero=stage3", ALL, RECOMPUTE]),
    "prefix-chatglm": ("chatglm", [*PREFIX, "batch.micro_per_gpu=2"]),
    "prompt": ("llama", [*PROMPT, "zero=stage3", ALL, RECOMPUTE]),
    "experts": ("mixtral", ["model.router_loss=0.5", "data.packing=packed", "zero=stage3", ALL, RECOMPUTE]),
}
LATE = (
    *("prefix", *PROMPTED, "chatglm-stage2", "resumed"),
    *("stage3-recompute", "tiled-stage3", "packed-stage1", "dp2-packed-stage3", "compiled-stage2"),
)
"""Those of the nightly tier: prefixes are met with a ChatGLM, prompts on two ranks, ZeRO-3 with packed rows. To compile
takes longer than all the rest, and test_lean.py does.
"""


def llama(folder: Path) -> Path:
    """Write a tiny Llama."""
    import torch
    import transformers

    from toolkit.models import load_tokenizer

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(
        **sizes, vocab_size=1024, num_key_value_heads=2, head_dim=8, eos_token_id=956, bos_token_id=None
    )
    torch.manual_seed(3)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    load_tokenizer(write(folder.with_name("vocabulary"), "glm4", tokenizer=True)).save_pretrained(folder)
    return folder


def mixtral(folder: Path) -> Path:
    """Write a tiny Mixtral, whose routers have a loss."""
    from toolkit.models import load_tokenizer

    load_tokenizer(write(folder.with_name("vocabulary"), "glm4", tokenizer=True)).save_pretrained(folder)
    return architectures.write(folder, "mixtral")


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory, rows_file: Path, request: pytest.FixtureRequest) -> Path:
    """Train all cells, in one launch for each number of ranks."""
    folder = tmp_path_factory.mktemp("sequence")

    def words(name: str, overrides: list[str]) -> list[str]:
        return tiny(rows_file, folder, name, "parallel=sequence", *overrides)

    for ranks, cells in ((2, TWO_RANKS), (4, FOUR_RANKS)):
        cells = of_tier(request, cells, late=LATE)
        cases: list[dict] = [
            {"overrides": words(name, overrides)} | ({"facts": f"{folder}/facts"} if "compiled" in name else {})
            for name, overrides in cells.items()
        ]
        if ranks == 4:
            for name, others in of_tier(request, RESUMED, late=LATE).items():
                died = {"of": str(folder / "runs" / "sp4-stage2"), "step": 4, "as": str(folder / "runs" / name)}
                cases.append({"overrides": words(name, FOUR_RANKS["sp4-stage2"] + others), "died": died})
            for name, overrides in of_tier(request, PROMPTED, late=LATE).items():
                cases.append({"overrides": words(name, ["model=hf", f"model.path={folder / 'llama'}", *overrides])})
        else:
            chatglm = write(folder / "chatglm", "v1", tokenizer=True, num_attention_heads=4)
            for name, overrides in of_tier(request, CHATGLM, late=LATE).items():
                cases.append({"overrides": words(name, ["model=hf", f"model.path={chatglm}", *overrides])})
            models = {"chatglm": chatglm, "llama": llama(folder / "llama"), "mixtral": mixtral(folder / "mixtral")}
            for name, (model, overrides) in of_tier(request, PAIRS, late=LATE).items():
                base = ["zero=stage2", "model=hf", f"model.path={models[model]}", *overrides]
                whole = [word for word in base if "mlp_pieces" not in word]
                cases.append({"overrides": words(name, base)})
                cases.append({"overrides": words(f"{name}-whole", [*whole, "parallel=data"])})
            refused = {"overrides": words("three", ["model.shape.num_heads=1", "model.shape.num_kv_heads=1"])}
            cases.append({**refused, "refused": str(folder / "refused")})
        listing = folder / f"cases-{ranks}.json"
        listing.write_text(json.dumps(cases))
        finished = run(forked(ranks, WORKER, str(listing)), cwd=folder, timeout_s=580)
        assert finished.code == 0, finished.output[-6000:]
    return folder / "runs"


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory, rows_file: Path) -> tuple[list[float], list[float]]:
    return plain_loop(tiny(rows_file, tmp_path_factory.mktemp("reference"), "reference"), STEPS)


@pytest.mark.parametrize(
    "name",
    by_tier(["stage0", "stage2-micro2", "stage3-recompute", "tiled-stage3", "dp2-stage1", "sp4-stage2"], late=LATE),
)
def test_losses_are_those_of_whole_rows(name: str, runs: Path, reference: tuple[list[float], list[float]]) -> None:
    training, validation = reference
    assert furthest(losses(runs / name), training) < TOLERANCE
    assert furthest(eval_losses(runs / name), validation) < TOLERANCE


@pytest.mark.parametrize("name", by_tier(["packed-stage1", "packed-stage3", "dp2-packed-stage3"], late=LATE))
def test_packed_rows_too(name: str, runs: Path, tmp_path: Path, rows_file: Path) -> None:
    training, validation = plain_loop(tiny(rows_file, tmp_path, "reference", "data.packing=packed"), STEPS)
    assert furthest(losses(runs / name), training) < TOLERANCE
    assert furthest(eval_losses(runs / name), validation) < TOLERANCE


@pytest.mark.nightly
def test_compiled_too(runs: Path, tmp_path: Path, rows_file: Path) -> None:
    name = "compiled-stage2"
    training, validation = plain_loop(tiny(rows_file, tmp_path, "reference", *TWO_RANKS[name]), STEPS)
    assert furthest(losses(runs / name), training) < TOLERANCE
    assert furthest(eval_losses(runs / name), validation) < TOLERANCE
    assert json.loads((runs.parent / "facts").read_text())["graphs"] > 0


@pytest.mark.parametrize("name", by_tier(CHATGLM, late=LATE))
def test_chatglm_6b_too(name: str, runs: Path, tmp_path: Path, rows_file: Path) -> None:
    words = ["model=hf", f"model.path={runs.parent / 'chatglm'}", *CHATGLM[name]]
    training, validation = plain_loop(tiny(rows_file, tmp_path, "reference", *words), STEPS)
    assert training[0] - training[-1] > 0.1, "the reference itself must learn, or the comparison says little"
    assert furthest(losses(runs / name), training) < TOLERANCE
    assert furthest(eval_losses(runs / name), validation) < TOLERANCE


def test_bf16_stays_near(runs: Path, reference: tuple[list[float], list[float]]) -> None:
    assert 0 < furthest(losses(runs / "bf16-stage1"), reference[0]) < 0.01


def test_tokens_are_counted_once(runs: Path) -> None:
    counts = {
        name: [(row["trained_tokens"], row["total_tokens"]) for row in rows_of(runs / name) if "loss" in row]
        for name in ("stage0", "dp2-stage1", "sp4-stage2")
    }
    assert counts["stage0"] == counts["dp2-stage1"] == counts["sp4-stage2"]
    tokens = {row["eval_tokens"] for name in counts for row in rows_of(runs / name) if "eval_tokens" in row}
    assert len(tokens) == 1
    assert next(row for row in rows_of(runs / "dp2-stage1") if "eval_answers" in row)["eval_answers"] > 1


@pytest.mark.parametrize("name", by_tier(RESUMED, late=LATE))
def test_goes_on_where_it_died(name: str, runs: Path) -> None:
    again, straight = losses(runs / name), losses(runs / "sp4-stage2")
    assert furthest(again, straight) < TOLERANCE if RESUMED[name] else again == straight


@pytest.mark.parametrize("name", by_tier(PAIRS, late=LATE))
def test_as_with_whole_rows(name: str, runs: Path) -> None:
    mine, whole = runs / name, runs / f"{name}-whole"
    of_experts = ("router_loss", "expert_load_max", "router_entropy")
    for key in ("loss", "eval_loss", "grad_norm", *of_experts):
        found, wanted = ([row[key] for row in rows_of(one) if key in row] for one in (mine, whole))
        assert len(found) == len(wanted) and (found or key in of_experts)
        assert found == pytest.approx(wanted, abs=TOLERANCE), key
    assert eval_losses(mine)[0] - eval_losses(mine)[-1] > 0.01, "it must learn, or the comparison says little"
    assert {*of_experts} & {*rows_of(mine)[-2]} == ({*of_experts} if name == "experts" else set())


@pytest.mark.parametrize("name", by_tier(["prompt", *PROMPTED], late=LATE))
def test_a_prompt_stands_once_before_a_row(name: str, runs: Path, tmp_path: Path, rows_file: Path) -> None:
    """And learns what it learns of whole rows."""
    words = ["model=hf", f"model.path={runs.parent / 'llama'}", *PROMPT]
    training, validation = plain_loop(tiny(rows_file, tmp_path, "reference", *words), STEPS)
    assert furthest(losses(runs / name), training) < TOLERANCE
    assert furthest(eval_losses(runs / name), validation) < TOLERANCE
    found, wanted = (
        [row["grad_norm"] for row in rows_of(runs / one) if "grad_norm" in row] for one in (name, "prompt-whole")
    )
    assert found == pytest.approx(wanted, rel=1e-5)
    mine, whole = (load_file(runs / one / "export" / "adapter_model.safetensors") for one in (name, "prompt-whole"))
    assert (mine["prompt_embeddings"] - whole["prompt_embeddings"]).abs().max() < 1e-5


def test_the_same_samples_first_as_with_whole_rows(runs: Path) -> None:
    check_short_first(runs / "llama", runs / "llama-whole", ["loss"], rel=0.0, abs=TOLERANCE)


def test_what_deepspeed_and_an_export_get(runs: Path) -> None:
    import transformers

    values = json.loads((runs / "dp2-stage1" / "ds_config.json").read_text())
    batch = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    assert [values[key] for key in batch] == [4, 1, 2]
    assert values["sequence_parallel_size"] == 2
    config = json.loads((runs / "dp2-stage1" / "export" / "config.json").read_text())
    assert "sequence" not in json.dumps(config)
    transformers.AutoModelForCausalLM.from_pretrained(runs / "dp2-stage1" / "export")


def test_heads_that_cannot_be_divided(runs: Path) -> None:
    said = (runs.parent / "refused").read_text()
    assert "ModelError: parallel.sequence = 2 is incompatible with GlmForCausalLM" in said
    assert "its 1 attention heads cannot be divided by 2" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model.attention=eager"], "model.attention = eager is computed on one rank. Leave it at auto"),
    ],
)
def test_refused(words: list[str], said: str) -> None:
    loaded = load(["recipe=quickstart", "parallel=sequence", *words])
    with pytest.raises(ConfigError, match=said) as refusal:
        check_rules(loaded, 2)
    assert "parallel.sequence = 2 cannot be" in str(refusal.value)
