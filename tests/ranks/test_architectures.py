"""Any causal language model of transformers: loaded in pieces, trained under ZeRO-3, gone on with, exported, loaded."""

import json
from pathlib import Path

import official
import pytest
import torch
from peft import PeftModel
from ranks import forked, run
from shared import WORKER, by_tier, losses, of_tier, rows_of, tiny

from tests.architectures import WRAPPERS, auto_class, stored_tensors, write, write_predicting
from tests.probes import compare
from toolkit.export.convert import export_verified
from toolkit.export.write import ExportOptions
from toolkit.models import load_model, load_tokenizer, probe, weights

COMMON = [
    "model=hf",
    "zero=stage3",
    "zero.stage3_param_persistence_threshold=0",  # every parameter in pieces, as a real model's are
    "data.validation_fraction=0",
    "train.max_steps=4",
    "checkpoint.every=2",
    "schedule=constant",
    "schedule.warmup_steps=0",
]
PACKED, RECOMPUTE = {"data.packing": "packed"}, {"train.activation_checkpointing.enabled": True}
BF16 = {"precision.dtype": "bf16"}
NAMES: dict[str, dict[str, object]] = {
    "llama": {},
    "qwen2": RECOMPUTE,
    "qwen3": {**PACKED, **RECOMPUTE},
    "mistral": {},
    "gemma2": {**PACKED, "data.max_length": 64},  # the window of its layers
    "gemma3": BF16,
    "glm4": PACKED,
    "phi3": {**BF16, **RECOMPUTE},
    "smollm3": PACKED,
    "seed_oss": {},
    "olmo3": {**PACKED, "data.max_length": 64},
    "gpt_oss": {},
    "olmo2": {},
    "mixtral": {},
    "deepseek_v3": {**PACKED, **RECOMPUTE},
    "deepseek_v32": {},
    "glm_moe_dsa": RECOMPUTE,
    "gpt_neox": PACKED,
    "falcon": {},
    "gemma3_images": {**PACKED, "data.max_length": 64, "optim.weight_decay": 0.1},
    "gemma4_images": {},
    "qwen2_5_vl": RECOMPUTE,
    "qwen3_vl": PACKED,
    "qwen3_5": RECOMPUTE,
    "qwen3_5_moe": {},
    "qwen3_vl_moe": {},
    "ernie4_5_vl_moe": {"optim.weight_decay": 0.1},
    "llava": {},
    "mistral3": BF16,
    "ministral3": {},
    "llama4": {},
    "glm4v": PACKED,
    "internvl": {},
}
LATE = (
    *("llama", "qwen2", "mistral", "gemma2", "glm4", "phi3", "smollm3", "seed_oss", "olmo3", "olmo2", "falcon"),
    *("deepseek_v32", "glm_moe_dsa"),
    *(
        "gemma4_images",
        "qwen2_5_vl",
        "qwen3_vl",
        "qwen3_5_moe",
        "qwen3_vl_moe",
        "ernie4_5_vl_moe",
        "llava",
        "mistral3",
        "ministral3",
        "llama4",
        "glm4v",
        "internvl",
    ),
)
"""Those of the nightly tier: built as others here, or older."""


PREDICTING = "deepseek_v3"
"""It has a layer for multi-token prediction in its files."""


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, rows_file: Path) -> Path:
    """Each architecture once through, and once more from its checkpoint at step 2, in one launch on two ranks."""
    folder = tmp_path_factory.mktemp("architectures")
    tokenizer = load_tokenizer(official.write(folder / "vocabulary", "glm4", tokenizer=True))
    common = tiny(rows_file, folder, "any", *COMMON, f"model.path={folder / 'qwen3'}")
    cases: list[dict] = []
    for name, more in of_tier(request, NAMES, late=LATE).items():
        (write_predicting if name == PREDICTING else write)(folder / name, name)
        tokenizer.save_pretrained(folder / name)
        values = {"model.path": str(folder / name), **more}
        died = {"of": f"{folder}/runs/{name}", "step": 2, "as": f"{folder}/runs/{name}-again"}
        cases.append({"overrides": common, "values": {**values, "run.name": name, "checkpoint.export": True}})
        cases.append({"overrides": common, "values": {**values, "run.name": f"{name}-again"}, "died": died})
        if name == PREDICTING:
            lora = {"tuning.method": "lora", "checkpoint.export": True, "run.name": f"{name}-lora"}
            cases.append({"overrides": common, "values": {**values, **lora}})
        if name in WRAPPERS:
            (folder / name / "processor_config.json").write_text('{"processor_class": "X"}')
            lora = {"tuning.method": "lora", "optim.lr": 0.1, "checkpoint.export": True, "run.name": f"{name}-lora"}
            cases.append({"overrides": common, "values": {**values, **lora}})
    (folder / "cases.json").write_text(json.dumps(cases))
    finished = run([*forked(2, WORKER), str(folder / "cases.json")], cwd=folder, timeout_s=580)
    assert finished.code == 0, finished.output[-6000:]
    (folder / "output.txt").write_text(finished.output)
    return folder


@pytest.mark.parametrize("name", by_tier(NAMES, late=LATE))
def test_it_learns_and_goes_on_bit_by_bit(name: str, folder: Path) -> None:
    found, again = (losses(folder / "runs" / run) for run in (name, f"{name}-again"))
    assert len(found) == 4
    assert found[3] < found[0]
    assert again == found
    counted = [row["router_loss"] for row in rows_of(folder / "runs" / name) if "router_loss" in row]
    assert len(counted) == (4 if name in ("mixtral", "gpt_oss", "qwen3_5_moe", "qwen3_vl_moe") else 0)
    assert all(1.9 < value < 4 for value in counted)  # of the 4 experts each token goes to 2: 2 if balanced


@pytest.mark.parametrize("name", by_tier(WRAPPERS, late=LATE))
def test_what_takes_images_comes_out_as_it_was(name: str, folder: Path) -> None:
    """Every tensor that came in, in its shape, those beside the text model bit for bit, though weights decay; and the
    processor.
    """
    export, merged = folder / "runs" / name / "export", folder / f"{name}-merged"
    before, after = (weights.read_tensors(place / "model.safetensors") for place in (folder / name, export))
    shapes = {key: value.shape for key, value in before.items()}
    assert {key: value.shape for key, value in after.items()} == shapes
    export_verified(folder / "runs" / f"{name}-lora", merged, ExportOptions(merge=True))
    assert {key: value.shape for key, value in stored_tensors(merged).items()} == shapes
    beside = [key for key in before if "vis" in key or "projector" in key or "resampler" in key]
    assert beside and all(torch.equal(before[key].to(after[key]), after[key]) for key in beside)
    text = [key for key in before if key not in beside]
    assert sum(not torch.equal(before[key].to(after[key]), after[key]) for key in text) > len(text) / 2
    assert (export / "processor_config.json").read_text() == '{"processor_class": "X"}'


def test_layers_that_transformers_skips_come_out_as_they_were(folder: Path) -> None:
    """From the last step, from a checkpoint, and from an adapter that is merged; from the adapter alone none."""
    source, runs = folder / PREDICTING, folder / "runs"
    before = stored_tensors(source)
    exports = [runs / PREDICTING / "export"]
    for name, run_name, merge in (("checkpoint", PREDICTING, False), ("merged", f"{PREDICTING}-lora", True)):
        exports.append(folder / name)
        export_verified(runs / run_name, folder / name, ExportOptions(merge=merge))
    for export in exports:
        after = stored_tensors(export)
        assert after.keys() == before.keys()
        extra = [key for key in before if ".layers.2." in key]
        assert len(extra) > 20 and all(torch.equal(before[key], after[key]) for key in extra)
        assert json.loads((export / "config.json").read_text())["num_nextn_predict_layers"] == 1
    adapter = runs / f"{PREDICTING}-lora" / "export"
    assert not (adapter / "extra_tensors.json").exists()
    assert f"tensors in {source} are not part of the model" in (folder / "output.txt").read_text()


@pytest.mark.parametrize("name", by_tier(WRAPPERS, late=LATE))
def test_its_adapter_acts_on_the_whole_model(name: str, folder: Path) -> None:
    """In peft, on the model with its towers; of whose layers it adds to none."""
    export = folder / "runs" / f"{name}-lora" / "export"
    saved = probe.read(export)
    assert saved is not None
    base = auto_class(name).from_pretrained(folder / name, dtype=getattr(torch, saved.dtype)).eval()
    tolerance = probe.TOLERANCES[saved.dtype] / 5
    assert compare(base, saved)[0] > 5 * tolerance
    assert compare(PeftModel.from_pretrained(base, export).eval().base_model.model, saved)[0] < tolerance
    added = weights.read_tensors(export / "adapter_model.safetensors")
    assert added and not any("vis" in key for key in added)


@pytest.mark.parametrize("name", by_tier(NAMES, late=LATE))
def test_its_export_is_what_was_trained(name: str, folder: Path) -> None:
    """The engine's last logits, from our loading and from transformers' own alike, and no longer the first ones."""
    export = folder / "runs" / name / "export"
    saved = probe.read(export)
    assert saved is not None
    tolerance = probe.TOLERANCES[saved.dtype] / 5
    theirs, report = auto_class(name).from_pretrained(export, output_loading_info=True)
    assert not report["missing_keys"] and not report["mismatched_keys"]
    # Of layers for multi-token prediction transformers (5.23) expects published sizes' numbers.
    assert all(name == PREDICTING and ".layers.2." in key for key in report["unexpected_keys"])
    assert compare(theirs.eval(), saved)[0] < tolerance
    assert compare(load_model(export), saved)[0] < tolerance
    assert compare(load_model(folder / name), saved)[0] > 5 * tolerance
    kinds = [json.loads((place / "config.json").read_text())["model_type"] for place in (export, folder / name)]
    assert kinds[0] == kinds[1]
