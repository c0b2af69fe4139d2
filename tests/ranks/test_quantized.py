"""Quantized checkpoints, trained on two ranks as they are: exactly as their copies in 16 bits."""

import json
from pathlib import Path

import official
import pytest
import torch
from ranks import forked, run
from shared import WORKER, losses, tiny

from tests.architectures import stored_tensors
from tests.quantizers import write_fp8, write_integers
from toolkit.export.convert import export_verified
from toolkit.export.write import ExportOptions
from toolkit.models import load_tokenizer

METHODS: dict[str, dict[str, object]] = {
    "lora": {"tuning.method": "lora", "zero.stage": 2},
    "full": {"zero.stage": 3, "zero.stage3_param_persistence_threshold": 0},
}
PAIRS = [("gptq 4 bits", "lora"), ("fp8", "full")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, rows_file: Path) -> Path:
    """Each directory and its copy by a method, in one launch."""
    folder = tmp_path_factory.mktemp("quantized")
    tokenizer = load_tokenizer(official.write(folder / "vocabulary", "glm4", tokenizer=True))
    common = tiny(rows_file, folder, "any", "model=hf", "data.validation_fraction=0", "train.max_steps=3")
    cases = []
    for kind, method in PAIRS:
        if kind == "fp8":
            write_fp8(folder / kind, vocab_size=len(tokenizer))
        else:
            write_integers(folder / kind, kind)
        tokenizer.save_pretrained(folder / kind)
        export_verified(folder / kind, folder / f"{kind} copy", ExportOptions(dtype="bfloat16"))
        for name in (kind, f"{kind} copy"):
            more = {"model.path": str(folder / name), "run.name": name, "precision.dtype": "bf16"}
            cases.append({"overrides": common, "values": {**METHODS[method], **more, "checkpoint.export": True}})
    (folder / "cases.json").write_text(json.dumps(cases))
    finished = run([*forked(2, WORKER), str(folder / "cases.json")], cwd=folder, timeout_s=400)
    assert finished.code == 0, finished.output[-6000:]
    assert "Quantized weights (fp8) are read in bf16." in finished.output
    return folder


@pytest.mark.parametrize(("kind", "method"), PAIRS)
def test_it_trains_and_exports_as_its_copy(kind: str, method: str, folder: Path) -> None:
    runs = [folder / "runs" / name for name in (kind, f"{kind} copy")]
    values, expected = map(losses, runs)
    assert values == expected and len(set(values)) == 3
    exports = [each / "export" for each in runs]
    if method == "lora":
        assert json.loads((exports[0] / "adapter_config.json").read_text())["base_model_name_or_path"] == str(
            folder / kind
        )
        for each in runs:
            said = export_verified(each, each / "merged", ExportOptions(merge=True))
            assert "the logits are those of the save" in said
        exports = [each / "merged" for each in runs]
    tensors, others = map(stored_tensors, exports)
    for name, value in others.items():
        # Merging adds to values that are not rounded before, so that the last bit may differ.
        close = dict(rtol=0.01, atol=1e-3) if method == "lora" else dict(rtol=0, atol=0)
        torch.testing.assert_close(tensors[name], value, **close)
    assert "quant" not in (exports[0] / "config.json").read_text()
