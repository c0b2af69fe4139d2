"""Every key of the schema has an effect, or says that it has none: runs of each kind, and what they read of a config.

A key counts as having an effect where code reads it that does something with it (reads_worker.BESIDE does not). For
each other one there must be an error or a notice as soon as it is changed.
"""

import dataclasses
import json
import random
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from ranks import REPOSITORY, forked, run
from reads_worker import CUSTOM
from shared import LORA, WORDS, by_tier, of_tier

from toolkit.config import dotted_keys, schema
from toolkit.config.load import LoadedConfig, load, replace, to_plain
from toolkit.config.rules import check_rules
from toolkit.config.validate import field_type
from toolkit.messages import ConfigError, Problems

WORKER = str(REPOSITORY / "tests" / "ranks" / "reads_worker.py")
SOURCE = "data.sources[0]"
LEAVES = [key for key in dotted_keys.all_keys() if not dataclasses.is_dataclass(field_type(key))]
OF_SOURCES = [f"{SOURCE}.{name}" for name in dotted_keys.types_of(schema.SourceConfig)]
NOT_IN_A_RUN = {
    "model.hub_id": "the base model in an export's card, which is made from the config as it was written",
    "model.modelscope_id": "a way to get the weights, told where they cannot be had",
    "batch.world_sizes": "a rule alone",
    "train.on_bad_step": "a step whose numbers go wrong",
    "checkpoint.allow_changes": "a resume",
}
"""Key that no run here reads -> what reads it."""
AS_IT_IS = {"evaluate.at_start"}
"""Keys whose other value asks for what is so where nothing reads them: no evaluation before the first step."""

MODELS = {
    "random": ["model=glm_tiny"],
    "official": ["model=hf", "model.path=official", "model.family=chatglm3"],
    "transformers": ["model=hf", "model.path=transformers"],
}
TASKS = {
    "language": ["data.sources=[{path: rows.jsonl}]"],
    "dpo": ["preference=dpo", "data.sources=[{path: pairs.jsonl}]"],
    "kto": ["preference=kto", "data.sources=[{path: judged.jsonl}]"],
    "reward": ["task=reward", "data.sources=[{path: pairs.jsonl}]"],
    "classify": ["task=classify", "data.sources=[{path: labels.jsonl}]"],
    "embed": ["task=embed", "data.sources=[{path: texts.jsonl}]"],
    "distill": ["task=distill", "data.sources=[{path: rows.jsonl}, {path: more.jsonl, general: true}]"],
}
METHODS = {
    "full": [],
    "lora": LORA[:2],
    "freeze": ["tuning=freeze", "tuning.last_layers=1"],
    "ptuning_v2": ["tuning=ptuning_v2", "tuning.num_tokens=4"],
    "prompt": ["tuning=prompt", "tuning.num_tokens=4"],
}
SIZES = ["run.dir=runs", "batch.global_size=4", "train.max_steps=3", "report.enabled=false"]


def words(model: str, task: str, method: str, *more: str) -> list[str]:
    """Return the words of a run."""
    stored = ["distill.top_k=4"] if task == "distill" and method == "full" else []
    common = ["recipe=base.yaml", "prepare.dir=cache", "data.validation_fraction=0.2", *SIZES]
    return [*common, *MODELS[model], *TASKS[task], *METHODS[method], *stored, *more]


CASES = {
    f"{model}-{task}-{method}": words(model, task, method)
    for model in MODELS
    for task in TASKS
    for method in METHODS
    if task == "language" or method in ("full", "lora")
}
CASES["random-answers"] = words("random", "language", "full", "evaluate.metrics=[bleu]", "evaluate.prompts=[Hello]")
CASES["random-no-validation"] = words("random", "language", "full", "data.validation_fraction=0")
CASES["random-no-export"] = words("random", "language", "full", "checkpoint.export=false")
CASES["random-packed"] = words("random", "language", "full", "data.packing=packed", "data.max_length=64")
CASES["random-stage0"] = words("random", "language", "full", "zero=stage0", "optim=sgd", "schedule=constant")
CASES["random-stage3"] = words(
    "random", "language", "full", "zero=stage3", "optim=lion", "schedule=wsd", "precision=bf16"
)
CASES[CUSTOM] = [CUSTOM, *SIZES]
SHORT = {
    *("random-language-full", "official-language-full", "transformers-language-full", "random-no-validation", CUSTOM),
    *("random-dpo-lora", "random-kto-full", "random-reward-full", "random-classify-lora", "random-embed-full"),
    *("random-distill-lora", "random-language-freeze", "random-language-ptuning_v2", "random-language-prompt"),
}
"""One of each kind of model, task and method; the nightly tier has all of them with each other."""


def write_files(folder: Path) -> None:
    """Write models, rows, and a recipe that says next to nothing."""
    import torch
    import transformers
    from official import write

    from tests.architectures import HEADS
    from tests.unit.test_templates import OURS, tokenizer_of

    write(folder / "official", "v3", tokenizer=True)
    tokenizer, draw = tokenizer_of(OURS["qwen"]), random.Random(4)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.eos_token_id}
    torch.manual_seed(3)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{**HEADS, **ids}))
    model.save_pretrained(folder / "transformers")
    tokenizer.save_pretrained(folder / "transformers")

    def said() -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(1, 8)))

    rows: dict[str, Any] = {
        "rows": lambda number: {"prompt": said(), "response": said()},
        "more": lambda number: {"prompt": said(), "response": said()},
        "pairs": lambda number: {"prompt": said(), "chosen": said(), "rejected": said()},
        "judged": lambda number: {"prompt": said(), "completion": said(), "label": number % 2 == 0},
        "labels": lambda number: {"text": said(), "label": "ab"[number % 2]},
        "texts": lambda number: {"query": said(), "positive": said()},
    }
    for name, row in rows.items():
        lines = [json.dumps(row(number)) + "\n" for number in range(24)]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    (folder / "base.yaml").write_text("defaults:\n  - override /precision: fp32\n  - _self_\n", encoding="utf-8")


@pytest.fixture(scope="session")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train the cases of the tiers that run; return where NAME.json says what each has read."""
    folder = tmp_path_factory.mktemp("reads")
    write_files(folder)
    (folder / "cases.json").write_text(json.dumps(of_tier(request, CASES, late=CASES.keys() - SHORT)))
    finished = run(forked(0, WORKER, str(folder / "cases.json")), cwd=folder, timeout_s=600)
    assert finished.code == 0, finished.output[-4000:]
    return folder


def other_value(key: str, cfg: schema.RunConfig) -> Any:
    """Return a value of a key that is neither its default nor the config's."""
    known = [dotted_keys.get_value(one, key) for one in (schema.RunConfig(), cfg)]
    value = known[0]
    chosen: dict[str, list[Any]] = {
        "batch.micro_per_gpu": [2],
        "batch.world_sizes": [[1, 2]],
        "optim.torch": [True, False],
        "optim.betas": [[0.8, 0.9]],
        "run.deadline": ["2h"],
        "prepare.shard": ["1/2"],
        "schedule.warmup_min_ratio": [0.1],
        "data.sources": [[{"path": "rows.jsonl"}]],
        "data.validation": [[{"path": "rows.jsonl"}]],
        "evaluate.metrics": [["bleu"]],
    }
    options: Any = chosen.get(key)
    if options is None and isinstance(value, bool):
        options = [False, True]
    elif options is None and isinstance(value, Enum):
        options = [*type(value)]
    elif options is None and isinstance(value, float):
        options = [0.25, 0.3, 0.35]
    elif options is None and isinstance(value, int):
        options = [value + 1, value + 2] if key != "zero.stage" else [0, 1, 2]
    elif options is None:
        options = [["x"], ["y"]] if isinstance(value, list) else [{"a": "b"}] if isinstance(value, dict) else ["x", "y"]
    return next(one for one in options if one not in known)


def told(loaded: LoadedConfig, key: str, custom: bool) -> bool:
    """Whether something is said about a key when it is changed."""
    place, problems = "command line", Problems()
    is_of_source, name = key.startswith(SOURCE), key.rpartition(".")[2]
    sources = to_plain(loaded.cfg.data.sources)
    value = (
        [{**sources[0], name: name == "general" or "x"}, *sources[1:]] if is_of_source else other_value(key, loaded.cfg)
    )
    changed = replace(loaded, {"data.sources" if is_of_source else key: (value, place)})
    changed.explicit.add(key)
    try:  # of a source's file alone is said whether it is there
        check_rules(changed, 1, files=is_of_source, custom=custom, problems=problems)
    except ConfigError as error:
        problems.add(error)
    said = [*map(str, problems.errors), *changed.notices[len(loaded.notices) :]]
    return any(f": {key} " in sentence or f": {key}." in sentence or f" {key} = " in sentence for sentence in said)


@pytest.mark.parametrize("name", by_tier([*CASES], late=CASES.keys() - SHORT))
def test_each_key_is_read_or_something_is_said(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    report, custom = json.loads((folder / f"{name}.json").read_text()), CASES[name][0] == CUSTOM
    assert not report["error"]
    given = [f"recipe={REPOSITORY}/toolkit/custom.yaml", *CASES[name][1:]] if custom else CASES[name]
    loaded, keys = load(given), LEAVES if custom else LEAVES + OF_SOURCES
    unread = [key for key in keys if key not in report["read"]]
    assert {key for key in unread if not told(loaded, key, custom)} - NOT_IN_A_RUN.keys() - AS_IT_IS == set()


def test_what_no_run_reads_is_no_more_than_that(folder: Path) -> None:
    """A key that a run reads after all has no place in the list."""
    files = [file for name in CASES if (file := folder / f"{name}.json").exists()]
    read = {key for file in files for key in json.loads(file.read_text())["read"]}
    assert not NOT_IN_A_RUN.keys() & read
