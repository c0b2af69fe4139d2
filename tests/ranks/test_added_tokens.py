"""Tokens that a base lacks: added, trained under ZeRO 0, 2 and 3, resumed bit by bit, exported, loaded by others."""

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from ranks import forked, run, run_unlike
from safetensors.torch import load_file
from shared import ALL, WORKER, by_tier, eval_losses, losses, of_tier, tiny

from tests.unit.test_added_tokens import ADDED, TEXTS, base_model
from toolkit.cli import main
from toolkit.export.load import load_any
from toolkit.models.adapters import WEIGHTS

LORA = ["tuning=lora", "tuning.rank=4"]
CELLS: dict[str, tuple[str, bool, int, list[str]]] = {
    "full-zero0": ("llama", False, 0, ["zero=stage0"]),
    "full-zero2": ("qwen2", True, 0, ["zero=stage2"]),
    "full-zero3": ("qwen2", False, 16, ["zero=stage3", ALL]),
    "lora-zero0": ("llama", True, 0, [*LORA, "zero=stage0"]),
    "lora-zero2": ("qwen2", False, 0, [*LORA, "zero=stage2"]),
    "lora-zero3": ("llama", False, 0, [*LORA, "zero=stage3", ALL]),
    "lora-tied-zero3": ("qwen2", True, 0, [*LORA, "zero=stage3", ALL]),
}
"""Name -> type, whether its head is its embedding, spare rows of its checkpoint, overrides."""
LATE = ("full-zero2", "lora-zero0", "lora-zero3")


def words(folder: Path, name: str, as_name: str, *more: str) -> list[str]:
    kind, is_tied, spare, own = CELLS[name]
    model = folder / f"{kind}-{is_tied}-{spare}"
    if not model.exists():
        base_model(model, kind, is_tied, spare)
    shared = ["model=hf", f"model.path={model}", f"model.add_tokens={json.dumps(ADDED)}", "model.chat_template=chatml"]
    steps = ["train.max_steps=6", "checkpoint.every=3", "checkpoint.export=true", "schedule=constant"]
    return tiny(folder / "rows.jsonl", folder, as_name, *shared, *steps, "schedule.warmup_steps=0", *own, *more)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each cell once through, and once more from its checkpoint at step 3, in one launch on two ranks."""
    folder = tmp_path_factory.mktemp("tokens")
    rows = [{"prompt": asked, "response": answer} for asked, answer in TEXTS]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    cells = of_tier(request, CELLS, late=LATE)
    cases: list[dict[str, Any]] = [{"overrides": words(folder, name, name)} for name in cells]
    for name in cells:
        died = {"of": f"{folder}/runs/{name}", "step": 3, "as": f"{folder}/runs/{name}-again"}
        cases.append({"overrides": words(folder, name, f"{name}-again"), "died": died})
    (folder / "cases.json").write_text(json.dumps(cases))
    finished = run_unlike(folder, WORKER, str(folder / "cases.json"), timeout_s=580)
    assert finished.code == 0, finished.output[-6000:]
    return folder / "runs"


def plain_tokenizer(runs: Path, name: str) -> Any:
    """Return the base's tokenizer with the tokens, as transformers' own function adds them."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(runs.parent / "{}-{}-{}".format(*CELLS[name]))
    tokenizer.add_tokens(ADDED, special_tokens=True)
    return tokenizer


def plain_model(runs: Path, name: str) -> Any:
    """Return the base with the tokens, as transformers' own functions add them."""
    folder, tokenizer = runs.parent / "{}-{}-{}".format(*CELLS[name]), plain_tokenizer(runs, name)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if len(tokenizer) > model.config.vocab_size:
        model.resize_token_embeddings(len(tokenizer))
    return model.eval()


@pytest.mark.parametrize("name", by_tier(CELLS, late=LATE))
def test_the_first_loss_is_that_of_a_plain_program(name: str, runs: Path) -> None:
    """Whose tokenizer gives the same ids; its new rows are the mean of all others, and hardly any noise."""
    from toolkit.arguments import parse
    from toolkit.config.hub import resolve_model_path
    from toolkit.tasks.language_data import load_data

    data = load_data(resolve_model_path(parse(words(runs.parent, name, name)).loaded).cfg)
    assert data.validation is not None
    model, tokenizer = plain_model(runs, name), plain_tokenizer(runs, name)
    turns = [
        f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>" for asked, answer in TEXTS
    ]
    plain_ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in turns]
    total, count = 0.0, 0
    for index in range(len(data.validation)):
        ids, trained = (list(map(int, values)) for values in data.validation[index][:2])
        assert any(ids[: len(plain)] == plain for plain in plain_ids)
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0].double()
        wanted = [at for at in range(1, len(ids)) if trained[at]]
        total -= sum(float(torch.log_softmax(logits[at - 1], 0)[ids[at]]) for at in wanted)
        count += len(wanted)
    assert eval_losses(runs / name)[0] == pytest.approx(total / count, abs=1e-4)
    assert eval_losses(runs / name)[-1] < eval_losses(runs / name)[0]


@pytest.mark.parametrize("name", by_tier(CELLS, late=LATE))
def test_it_resumes_bit_by_bit(name: str, runs: Path) -> None:
    assert len(losses(runs / name)) == 6
    assert losses(runs / f"{name}-again") == losses(runs / name)


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings")
@pytest.mark.parametrize("name", by_tier(CELLS, late=LATE))
def test_exports_load_in_other_programs_and_compute_the_same(name: str, runs: Path, tmp_path: Path) -> None:
    """On the base with rows of plain transformers too; the adapter alone, and merged."""
    export = runs / name / "export"
    tokenizer = transformers.AutoTokenizer.from_pretrained(export)
    found = [tokenizer(f"red{token}apple", add_special_tokens=False)["input_ids"] for token in ADDED]
    indices = tokenizer.convert_tokens_to_ids(ADDED)
    assert [ids.count(index) for ids, index in zip(found, indices, strict=True)] == [1] * 3
    ids = torch.tensor([tokenizer("".join(ADDED) + "red apple", add_special_tokens=False)["input_ids"]])
    assert {*indices} <= {*ids[0].tolist()}
    with torch.no_grad():
        expected = load_any(str(export)).model(ids).logits
        if "full" in name:
            plain = transformers.AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
            torch.testing.assert_close(plain(ids).logits, expected)
        else:
            values = load_file(export / WEIGHTS)
            rows = [value.shape[0] for key, value in values.items() if key.endswith("trainable_tokens_delta")]
            assert rows == [3] * (1 if CELLS[name][1] else 2)
            plain = peft.PeftModel.from_pretrained(plain_model(runs, name), export).eval()
            torch.testing.assert_close(plain(ids).logits, expected, atol=1e-5, rtol=1e-4)
            named = peft.AutoPeftModelForCausalLM.from_pretrained(export, dtype=torch.float32).eval()
            torch.testing.assert_close(named(ids).logits, expected, atol=1e-5, rtol=1e-4)
            assert main(["export-model", str(export), "merge=true", f"output={tmp_path / 'merged'}"]) == 0
            plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
            torch.testing.assert_close(plain(ids).logits, expected, atol=1e-5, rtol=1e-4)
            assert plain.config.tie_word_embeddings == CELLS[name][1]
    assert plain.config.vocab_size == max(len(tokenizer), len(tokenizer) - 3 + CELLS[name][2])


@pytest.mark.parametrize("name", by_tier(["lora-zero2"]))
def test_the_run_names_what_it_trains_and_other_tokens_are_another_run(name: str, runs: Path) -> None:
    finished = run([*forked(0, "--module", "toolkit"), "check", *words(runs.parent, name, name)], cwd=runs.parent)
    assert finished.code == 0, finished.output
    trained = json.loads((runs / name / "DONE").read_text())["trained_parameters"]
    assert f"{trained:,} of " in finished.output
    resume = f"resume={runs / name}/checkpoints/step-3"
    other = words(runs.parent, name, "other", 'model.add_tokens=["<|im_start|>","<|im_end|>"]', resume)
    finished = run([*forked(1, str(Path(__file__).parents[2] / "run.py")), *other], cwd=runs.parent)
    assert finished.code == 2
    assert "trains other parameters" in finished.output and "model.add_tokens" in finished.output
