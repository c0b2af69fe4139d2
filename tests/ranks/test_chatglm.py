"""The family on real ranks: partitioned loading, and training that follows a plain PyTorch loop."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from official import write
from ranks import REPOSITORY, forked, run
from shared import by_tier, eval_losses, losses, of_tier, plain_loop, tiny

from toolkit.models import load_chat_encoder, load_model, load_tokenizer
from toolkit.models.weights import WeightFiles

STEPS = 6
# fp32: what is left is the order of additions. Measured: about 1e-6.
TOLERANCE = 5e-6
STAGES = {"stage0": "zero=stage0", "stage2": "zero=stage2", "stage3": "zero=stage3"}
LATE = ("v1-stage0", "v1-stage2", "v3-stage0", "v3-stage3", "glm4packed")
"""Cells of the nightly tier: a family that is read, cut up, recomputed and packed is met in another one."""
NEWER = {
    "glm4": transformers.Glm4Config,
    "glm4_moe": transformers.Glm4MoeConfig,
}


def newer(folder: Path, kind: str) -> Path:
    """Write a tiny GLM-4-0414 or GLM-4.5 in transformers' layout, with a tokenizer."""
    sizes = {
        "vocab_size": 1024,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "eos_token_id": 956,
        "pad_token_id": 956,
        "bos_token_id": None,
    }
    if kind == "glm4_moe":
        sizes |= {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1}
        sizes |= {"topk_group": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0}
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(NEWER[kind](**sizes))
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer += torch.linspace(0.1, 0.4, 4)  # stored, not trained, and easily forgotten
    model.save_pretrained(folder)
    vocabulary = write(folder.with_name(f"{kind}-vocabulary"), "glm4", tokenizer=True)
    load_tokenizer(vocabulary).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny models of every kind; weights small enough to learn from."""
    top = tmp_path_factory.mktemp("models")
    made = {
        "v1": write(top / "v1", "v1", pickled=True, tokenizer=True),
        "v3": write(top / "v3", "v3", tokenizer=True),
        "v2-interleaved": write(top / "v2", "v2", shards=1, tokenizer=True, multi_query_attention=False),
    }
    return made | {kind: newer(top / kind, kind) for kind in NEWER}


def test_partitioned_loading(folders: dict[str, Path], tmp_path: Path) -> None:
    worker = str(REPOSITORY / "tests" / "ranks" / "chatglm_worker.py")
    finished = run(forked(2, worker, *map(str, folders.values())), cwd=tmp_path)
    assert finished.code == 0, finished.output[-5000:]
    assert finished.output.count("ALL CHECKED") == 2
    for name in ("v1", "v3", "v2-interleaved"):
        folder = folders[name]
        before, after = WeightFiles(folder), WeightFiles(folder.with_name(f"{folder.name}-back"))
        assert set(before) == set(after)
        for key, info in before.items():
            assert (after[key].file.name, after[key].dtype) == (info.file.name, info.dtype)
            with before.open(key) as left, after.open(key) as right:
                rounded = left if key.endswith("inv_freq") else left.bfloat16().to(left.dtype)
                assert torch.equal(rounded, right), key


@pytest.fixture(scope="module")
def cells(request: pytest.FixtureRequest, folders: dict[str, Path]) -> dict[str, list[str]]:
    """Name of each run of the tier and its overrides."""
    made = {
        f"{name}-{stage}": ["model=hf", f"model.path={folders[name]}", override]
        for name in ("v1", "v3")
        for stage, override in STAGES.items()
    }
    made["v1-recompute"] = ["model=hf", f"model.path={folders['v1']}", "train.activation_checkpointing.enabled=true"]
    made |= {kind: ["model=hf", f"model.path={folders[kind]}", "zero=stage3"] for kind in NEWER}
    packing = {
        "v3packed": [*made["v3-stage2"], "data.packing=packed"],
        "glm4packed": [*made["glm4"], "data.packing=packed"],
        "glm4_moepacked": [*made["glm4_moe"], "data.packing=packed"],
        "v1packed": [*made["v1-stage2"], "data.packing=packed"],  # cannot: rows of like length instead
    }
    common = [f"train.max_steps={STEPS}", "checkpoint.export=true"]
    return {name: [*words, *common] for name, words in of_tier(request, made | packing, late=LATE).items()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, rows_file: Path, cells: dict[str, list[str]]) -> Path:
    """Train all cells in one launch."""
    folder = tmp_path_factory.mktemp("chatglm")
    cases = [{"overrides": tiny(rows_file, folder, name, *words)} for name, words in cells.items()]
    (folder / "cases.json").write_text(json.dumps(cases))
    worker = str(REPOSITORY / "tests" / "ranks" / "sessions_worker.py")
    finished = run(forked(2, worker, str(folder / "cases.json")), cwd=folder, timeout_s=500)
    assert finished.code == 0, finished.output[-6000:]
    return folder / "runs"


@pytest.mark.parametrize(
    "model", by_tier(["v1", "v3", *NEWER, "v3packed", "glm4packed", "glm4_moepacked", "v1packed"], late=LATE)
)
def test_training_follows_the_plain_loop(
    model: str, runs: Path, rows_file: Path, cells: dict[str, list[str]], tmp_path: Path
) -> None:
    mine = [name for name in cells if name.split("-")[0] == model]
    assert mine
    training, validation = plain_loop(tiny(rows_file, tmp_path, "reference", *cells[mine[0]]), STEPS)
    assert training[0] - training[-1] > 0.1, "the reference itself must learn, or the comparison says little"
    for name in mine:
        pairs = zip([*losses(runs / name), *eval_losses(runs / name)], [*training, *validation], strict=True)
        assert max(abs(left - right) for left, right in pairs) < TOLERANCE, name


@pytest.mark.parametrize("name", ["v1-stage3", "v3-stage2", *NEWER])
def test_what_is_exported_answers_and_is_what_was_trained(name: str, runs: Path) -> None:
    """Loaded again, by plain transformers where it knows the model, the validation loss is the one that was logged."""
    from toolkit.data.loader import collate
    from toolkit.data.store import TokenizedCache

    export = runs / name / "export"
    encoder = load_chat_encoder(export)
    models = [load_model(export, dtype=torch.float32)]
    if not name.startswith("v1"):
        plain, report = transformers.AutoModelForCausalLM.from_pretrained(export, output_loading_info=True)
        assert not any(report.values()), report
        models.append(plain)
    config = json.loads((export / "generation_config.json").read_text())
    assert set(encoder.stop_ids) <= {*torch.tensor(config["eos_token_id"]).flatten().tolist()}
    stores = [
        TokenizedCache(file.parent, "validation") for file in (runs.parent / "cache" / "stores").glob("*/manifest.json")
    ]
    found = []
    for store in stores:
        batch = collate([[store[i]] for i in range(len(store))], 3 if name.startswith("v1") else 0)
        for model in models:
            if name.startswith("v1") and not (batch["input_ids"] == 704).any(dim=1).all():
                continue  # another tokenizer's store
            with torch.no_grad():
                logits = model(input_ids=batch["input_ids"], attention_mask=(batch["segment_ids"] > 0).long()).logits
            targets = batch["labels"][:, 1:].flatten()
            found.append(float(torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets)))
    wanted = eval_losses(runs / name)[-1]
    assert sum(abs(loss - wanted) < 1e-5 for loss in found) == len(models), (found, wanted)


@pytest.mark.parametrize("name", ["v1-stage3", "v3-stage2"])
def test_an_export_goes_back_to_the_official_layout(
    name: str, runs: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    from toolkit.cli import main

    export, folder = runs / name / "export", folders[name.split("-")[0]]
    assert main(["export-model", f"model.path={export}", "format=official", f"output={tmp_path}/back"]) == 0
    before, after = WeightFiles(folder), WeightFiles(tmp_path / "back")
    assert {key: (info.file.name, info.dtype, info.shape) for key, info in before.items()} == {
        key: (info.file.name, info.dtype, info.shape) for key, info in after.items()
    }
    trained = load_model(export, dtype=torch.float32).state_dict()
    again = load_model(tmp_path / "back", dtype=torch.float32).state_dict()
    assert all(torch.allclose(trained[key], again[key], atol=1e-3) for key in trained)
    start = load_model(folder, dtype=torch.float32).state_dict()
    assert sum(not torch.equal(start[key], again[key]) for key in start) > len(start) / 2
