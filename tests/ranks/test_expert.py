"""Experts divided over ranks (`parallel.expert`): losses are those of a plain loop with all experts in one place."""

import copy
import json
from importlib.util import find_spec
from pathlib import Path

import official
import peft
import pytest
import torch
import transformers
from ranks import forked, run
from safetensors.torch import load_file
from shared import ALL, RECOMPUTE, STEADY, WORKER, by_tier, eval_losses, losses, of_tier, plain_loop, rows_of, tiny
from test_trajectory import TOLERANCE, furthest

from tests.architectures import write
from toolkit.checkpoint.fragment_reader import Fragments
from toolkit.cli import main
from toolkit.models import load_tokenizer

STEPS, SAVED = 6, 3
LORA = ["tuning=lora", "tuning.target_modules=[q_proj,v_proj]", "optim.lr=0.01"]
EXPERTS = ["tuning=lora", "tuning.target_modules=[q_proj,*.experts.*]", "optim.lr=0.01", "model.router_loss=0"]
# name -> (architecture, ranks, overrides beside parallel.expert=2)
CELLS: dict[str, tuple[str, int, list[str]]] = {
    "glm": ("glm4_moe", 2, ["zero=stage1"]),
    "glm-saved": ("glm4_moe", 2, ["zero=stage2", f"checkpoint.every={SAVED}", "checkpoint.keep=0"]),
    "glm-recomputed": ("glm4_moe", 2, ["zero=stage2", RECOMPUTE, "batch.micro_per_gpu=2"]),
    "one-sided": ("one-sided", 2, ["zero=stage2"]),
    "deepseek": ("deepseek_v3", 2, ["zero=stage1", RECOMPUTE]),
    "flash": ("glm4_moe_lite", 2, ["zero=stage2"]),
    "gpt-oss": (
        "gpt_oss",
        2,
        ["zero=stage2_offload", "evaluate.metrics=[exact_match]", "evaluate.max_new_tokens=4", "model.router_loss=0"],
    ),
    "mixtral": ("mixtral", 4, ["zero=stage1", "parallel.expert=4", "model.router_loss=0"]),
    "lora": ("glm4_moe", 2, ["zero=stage2", *LORA]),
    "lora-experts": ("qwen3_moe", 2, ["zero=stage2", *EXPERTS, f"checkpoint.every={SAVED}", "checkpoint.keep=0"]),
    "lora-router": (
        "glm4_moe",
        2,
        ["zero=stage2", *LORA, "tuning.save_modules=[mlp.gate]", f"checkpoint.every={SAVED}", "checkpoint.keep=0"],
    ),
    "lora-router-experts": ("qwen3_moe", 2, ["zero=stage1", *EXPERTS, "tuning.save_modules=[mlp.gate]"]),
    "lora-zero3": ("qwen3_moe", 2, ["parallel.expert=1", "zero=stage3", ALL, RECOMPUTE, *EXPERTS]),
    "frozen": ("glm4_moe", 2, ["zero=stage1", "tuning=freeze", "tuning.last_layers=1", f"checkpoint.every={SAVED}"]),
}
# The same, compared with a run in which every rank has all experts.
PAIRS: dict[str, tuple[str, int, list[str]]] = {
    "groups": (
        "qwen3_moe",
        2,
        ["zero=stage2", "optim.layer_lr_decay=0.9", "optim.decay=matrices", "optim.weight_decay=0.1"],
    ),
    "bf16-stage1": ("glm4_moe", 2, ["zero=stage1", "precision=bf16"]),
    "bf16-stage2": ("glm4_moe", 2, ["zero=stage2", "precision=bf16"]),
    "packed": ("glm4_moe", 4, ["zero=stage2", "data.packing=packed", RECOMPUTE]),
    "routers": ("mixtral", 4, ["zero=stage1", "parallel.sequence=2", "model.router_loss=0.5"]),
    "routers-lora": ("qwen3_moe", 2, ["zero=stage2", *LORA, "tuning.save_modules=[mlp.gate]", "model.router_loss=0.5"]),
}
for kind, given in {
    "dpo": ["data=examples_pairs", "preference=dpo", "zero=stage1"],
    "dpo-lora": ["data=examples_pairs", "preference=dpo", "zero=stage2", *EXPERTS],
    "reward": ["data=examples_pairs", "task=reward", "zero=stage2"],
    "classify": ["data=examples_labels", "task=classify", "zero=stage2", RECOMPUTE],
    "embed": ["data=examples_texts", "task=embed", "zero=stage1"],
    "distill": ["task=distill", "distill.teacher=FOLDER/qwen3_moe", "zero=stage2"],
}.items():
    PAIRS[kind] = ("qwen3_moe", 2, [*given, "model.router_loss=0"])
PAIRS["kto"] = (
    "qwen3_moe",
    2,
    ["preference=kto", "data.sources=[{path: FOLDER/labeled.jsonl}]", "zero=stage2", "model.router_loss=0"],
)
CAPACITY = ["batch.micro_per_gpu=2", "model.expert_capacity=0.75"]
PAIRS["dropped"] = ("qwen3_moe", 2, ["zero=stage2", RECOMPUTE, "model.router_loss=0.5", *CAPACITY])
PAIRS["dropped-lora"] = ("glm4_moe", 2, ["zero=stage1", *EXPERTS, "data.packing=packed", *CAPACITY])
if find_spec("bitsandbytes") is not None:
    PAIRS["qlora"] = ("qwen3_moe", 2, ["zero=stage2", *EXPERTS, "tuning=qlora"])
# name -> (ranks, run and step whose checkpoint it goes on from, overrides)
RESUMED: dict[str, tuple[int, str, list[str]]] = {
    "same": (2, "glm-saved/checkpoints/step-3", ["parallel=expert", "zero=stage2"]),
    "whole": (2, "glm-saved/checkpoints/step-3", ["zero=stage3", ALL, "checkpoint.every=4"]),
    "four": (4, "glm-saved/checkpoints/step-3", ["zero=stage1", "parallel.expert=4"]),
    "from-whole": (4, "whole/checkpoints/step-4", ["zero=stage2", "parallel.expert=2"]),
    "lora-whole": (2, "lora-experts/checkpoints/step-3", ["zero=stage3", ALL, *EXPERTS]),
    "lora-four": (4, "lora-experts/checkpoints/step-3", ["zero=stage1", "parallel.expert=4", *EXPERTS]),
}
LATE = (
    *("glm", "glm-recomputed", "flash", "mixtral", "lora", "lora-router-experts", "lora-zero3"),
    *("bf16-stage2", "routers-lora", "dpo", "reward", "classify", "kto", "dropped-lora", "four", "lora-whole"),
)
"""Cells of the nightly tier: each way to divide, to tune and to count tokens is met in another one."""
EXPORTED = (
    *("glm", "flash", "deepseek", "gpt-oss", "mixtral", "frozen", "one-sided", "lora-router", "lora-experts"),
    *("packed", "packed-whole"),
)


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, rows_file: Path) -> Path:
    """Train all cells, in one launch for each number of ranks; then those that go on. Two ranks that have all experts
    are enough to compare with.
    """
    folder = tmp_path_factory.mktemp("expert")
    tokenizer = load_tokenizer(official.write(folder / "vocabulary", "glm4", tokenizer=True))
    for name in {model for model, *_ in (*CELLS.values(), *PAIRS.values())} - {"one-sided"}:
        tokenizer.save_pretrained(write(folder / name, name))
    rows = [{"prompt": f"{n} + 1", "completion": str(n + n % 2), "label": n % 2 == 1} for n in range(48)]
    (folder / "labeled.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    biased = transformers.AutoModelForCausalLM.from_pretrained(folder / "glm4_moe")
    biased.model.layers[1].mlp.gate.e_score_correction_bias[:2] += 10  # no token goes to the other rank's experts
    biased.save_pretrained(folder / "one-sided")
    tokenizer.save_pretrained(folder / "one-sided")
    cases: dict[tuple[bool, int], list[dict[str, object]]] = {}
    for name, (model, ranks, overrides) in of_tier(request, CELLS | PAIRS, late=LATE).items():
        for whole in (False, True)[: 1 + (name in PAIRS)]:
            layout = [] if whole else ["parallel.expert=2"]
            own = words(rows_file, folder, f"{name}-whole" if whole else name, model, *layout, *overrides)
            cases.setdefault((False, 2 if whole else ranks), []).append({"overrides": own})
    alone = ["parallel=expert", "zero=stage1", "precision=bf16", *EXPERTS, "tuning.target_modules=[*.experts.*]"]
    refused = words(rows_file, folder, "refused", "qwen3_moe", *alone)
    cases[False, 2].append({"overrides": refused, "refused": str(folder / "refused")})
    for name, (ranks, source, overrides) in of_tier(request, RESUMED, late=LATE).items():
        more = ["checkpoint.keep=0", f"resume={folder}/runs/{source}", *overrides]
        model = "qwen3_moe" if "lora" in name else "glm4_moe"
        cases.setdefault((True, ranks), []).append({"overrides": words(rows_file, folder, name, model, *more)})
    for (_, ranks), some in sorted(cases.items(), key=lambda one: one[0]):
        (folder / "cases.json").write_text(json.dumps(some))
        finished = run([*forked(ranks, WORKER), str(folder / "cases.json")], cwd=folder, timeout_s=500)
        assert finished.code == 0, finished.output[-6000:]
    return folder


def words(rows_file: Path, folder: Path, name: str, model: str, *overrides: str) -> list[str]:
    common = ["model=hf", f"model.path={folder / model}", f"train.max_steps={STEPS}", STEADY]
    common += [f"checkpoint.export={name in EXPORTED}"]
    given = tiny(rows_file, folder, name, *common, *(word.replace("FOLDER", str(folder)) for word in overrides))
    if any(word.startswith("data=") for word in overrides):
        given = [word for word in given if not word.startswith("data.")]
    return given


@pytest.mark.parametrize("name", by_tier(CELLS, late=LATE))
def test_losses_are_those_of_a_plain_loop(name: str, folder: Path, rows_file: Path) -> None:
    model, _, overrides = CELLS[name]
    method = [word for word in overrides if word.startswith(("tuning", "optim"))]
    training, validation = plain_loop(words(rows_file, folder, "plain", model, *method), STEPS)
    assert furthest(losses(folder / "runs" / name), training) < TOLERANCE
    assert furthest(eval_losses(folder / "runs" / name), validation) < TOLERANCE


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["glm", "flash", "deepseek", "gpt-oss", "mixtral"])
def test_servers_are_fed_what_was_trained(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """transformers, which imports nothing of ours: prompts, logits, tokens that end answers, config."""
    assert main(["verify-serving", str(folder / "runs" / name), "programs=none"]) == 0
    assert "logits" in capsys.readouterr().out


@pytest.mark.parametrize("name", by_tier(PAIRS, late=LATE))
def test_losses_are_those_of_whole_layers(name: str, folder: Path) -> None:
    mine, theirs = (rows_of(folder / "runs" / run) for run in (name, f"{name}-whole"))
    # Scales of 4-bit blocks are rounded together for all that a rank has.
    near = {"bf16-stage1": 2e-3, "bf16-stage2": 2e-3, "qlora": 5e-3}.get(name, TOLERANCE)
    for one, other in zip(mine, theirs, strict=True):
        for key in ("loss", "grad_norm", "eval_loss", "router_loss", "expert_dropped"):
            assert one.get(key, 0.0) == pytest.approx(other.get(key, 0.0), rel=near), (key, one)
    assert not name.startswith("routers") or mine[-2]["router_loss"] > 1
    assert not name.startswith("dropped") or mine[-2]["expert_dropped"] > 0


@pytest.mark.parametrize("name", by_tier(RESUMED, late=LATE))
def test_it_goes_on_in_any_layout(name: str, folder: Path) -> None:
    """Bit for bit in the same one; also from and into ranks that have all experts, or parts of each under ZeRO-3."""
    run = "lora-experts" if "lora" in name else "glm-saved"
    straight, again = (losses(folder / "runs" / one) for one in (run, name))
    again = again[-(STEPS - SAVED) :]
    assert again[-1] == pytest.approx(straight[-1], rel=0 if name == "same" else TOLERANCE)
    assert furthest(again, straight[-len(again) :]) < (1e-12 if name == "same" else TOLERANCE)


@pytest.mark.parametrize("name", ["glm-saved", "frozen"])
def test_checkpoints_hold_each_expert_once(name: str, folder: Path) -> None:
    found = Fragments(folder / "runs" / name / "checkpoints" / f"step-{SAVED}")
    own = transformers.AutoModelForCausalLM.from_pretrained(folder / "glm4_moe").state_dict()
    for expert in (one for one in found.names if ".experts." in one):
        assert found.facts[expert]["parts"] == 2
        assert found.whole(expert).shape == own[expert].shape
        begin, part = own[expert].numel() // 2, found.read(expert, "weight", 0, 8, (1, 2))
        assert part.equal(found.whole(expert).flatten()[begin : begin + 8])
        assert found.read(expert, "weight", 5, 300, (1, 4)).equal(found.whole(expert).flatten()[begin // 2 :][5:305])


@pytest.mark.parametrize("name", by_tier(["glm", "flash", "gpt-oss", "packed", "frozen"], late=LATE))
def test_exports_are_whole(name: str, folder: Path) -> None:
    """Loaded by transformers alone, every weight there; those of `packed` are what ranks with all experts learn."""
    export = folder / "runs" / name / "export"
    model, report = transformers.AutoModelForCausalLM.from_pretrained(export, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    if name == "packed":
        other = transformers.AutoModelForCausalLM.from_pretrained(folder / "runs" / "packed-whole" / "export")
        for key, value in other.state_dict().items():
            assert torch.allclose(model.state_dict()[key], value, atol=2e-6), key


def test_the_other_rank_had_no_token(folder: Path) -> None:
    """Or the test of a rank without work would not be one: its experts' weights have only decayed."""
    before, after = (
        transformers.AutoModelForCausalLM.from_pretrained(path).state_dict()["model.layers.1.mlp.experts.down_proj"]
        for path in (folder / "one-sided", folder / "runs" / "one-sided" / "export")
    )
    assert not torch.allclose(before[:2], after[:2], atol=1e-4)
    assert torch.allclose(before[2:], after[2:], atol=1e-4)


def test_an_adapter_with_routers_is_pefts(folder: Path, tmp_path: Path) -> None:
    """peft loads the trained router, with the bias that chooses experts; from a checkpoint, too, and merged."""
    run = folder / "runs" / "lora-router"
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "glm4_moe")
    before = base.model.layers[1].mlp.gate
    theirs = peft.PeftModel.from_pretrained(base, run / "export").eval()
    after = theirs.base_model.model.model.layers[1].mlp.gate.modules_to_save["default"]
    assert not torch.allclose(after.weight, before.weight, atol=1e-4)
    assert after.e_score_correction_bias.equal(before.e_score_correction_bias)
    assert main(["export-model", str(run / "export"), "merge=true", f"output={tmp_path}/merged", "dtype=fp32"]) == 0
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.model.layers[1].mlp.gate.weight.equal(after.weight)
    ids = torch.randint(0, 900, (1, 30), generator=torch.Generator().manual_seed(1))
    assert torch.allclose(merged(ids).logits, theirs(ids).logits, atol=1e-5)
    checkpoint = run / "checkpoints" / f"step-{STEPS}"
    assert main(["export-model", str(checkpoint), f"output={tmp_path}/adapter"]) == 0
    one, other = (load_file(path / "adapter_model.safetensors") for path in (run / "export", tmp_path / "adapter"))
    assert one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


def test_an_adapter_of_experts_is_pefts(folder: Path, tmp_path: Path) -> None:
    """peft loads it, merged it is a plain model, and both compute what was trained; from a checkpoint, too."""
    run = folder / "runs" / "lora-experts"
    ids = torch.randint(0, 900, (1, 30), generator=torch.Generator().manual_seed(1))
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "qwen3_moe")
    before = base(ids).logits
    plain, config = copy.deepcopy(base), json.loads((run / "export" / "adapter_config.json").read_text())
    theirs = peft.PeftModel.from_pretrained(base, run / "export").eval()
    expected = theirs(ids).logits
    assert not torch.allclose(before, expected, atol=1e-3)
    assert main(["export-model", str(run / "export"), "merge=true", f"output={tmp_path}/merged", "dtype=fp32"]) == 0
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.allclose(merged(ids).logits, expected, atol=1e-5)
    checkpoint = run / "checkpoints" / f"step-{STEPS}"
    assert main(["export-model", str(checkpoint), f"output={tmp_path}/adapter"]) == 0
    names = [path / "adapter_model.safetensors" for path in (run / "export", tmp_path / "adapter")]
    one, other = map(load_file, names)
    assert one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)
    assert {value.dim() for value in one.values()} == {2}
    # As vLLM reads it (lora/model_manager.py, _convert_3d_to_2d_moe_lora): gate and up in what is inside.
    before, after = (dict(model.named_parameters()) for model in (plain, merged))
    for name, key in (("gate_up_proj", "experts.base_layer"), ("down_proj", "experts")):
        for layer in range(2):
            first, second = (one[f"base_model.model.model.layers.{layer}.mlp.{key}.lora_{x}.weight"] for x in "AB")
            whole = f"model.layers.{layer}.mlp.experts.{name}"
            first = first.reshape(len(before[whole]), -1, first.size(-1))
            second = second.reshape(len(second), -1, len(first)).permute(2, 0, 1)
            scale = config["lora_alpha"] / config["r"]
            torch.testing.assert_close(before[whole] + second @ first * scale, after[whole], rtol=1e-5, atol=1e-6)


def test_experts_alone_are_refused_where_deepspeed_fails(folder: Path) -> None:
    assert "nothing but divided experts is trained" in (folder / "refused").read_text()
