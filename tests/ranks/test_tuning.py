"""Every way of tuning through the one loop: under ZeRO 0, 2 and 3, saved, gone on with bit by bit, exported, loaded."""

import json
import shutil
import subprocess
from pathlib import Path

import peft
import pytest
import torch
import transformers
from official import write
from ranks import BIN, REPOSITORY, environment, forked, run, run_unlike
from safetensors.torch import load_file
from shared import ALL, RECOMPUTE, WORKER, by_tier, eval_losses, experts, losses, of_tier, tiny

from tests.probes import compare
from toolkit.checkpoint.fragment_reader import iter_weights
from toolkit.cli import main
from toolkit.export.load import load_any
from toolkit.models import probe
from toolkit.models.adapters import CONFIG, WEIGHTS
from toolkit.models.lora_init import BUFFERS
from toolkit.models.record import tuning_state

CELLS: dict[str, list[str]] = {
    "lora-zero0": ["tuning=lora", "zero=stage0", "tuning.save_modules=[lm_head]", "tuning.dropout=0.2"],
    "lora-zero2-bf16": ["tuning=lora", "zero=stage2", "precision=bf16", "tuning.dora=true", RECOMPUTE],
    "lora-zero3": [
        "tuning=lora",
        "zero=stage3",
        ALL,
        "tuning.target_modules=[all-linear]",
        "tuning.dropout=0.2",
        RECOMPUTE,
    ],
    "lora-v1-zero3-bf16": ["tuning=lora", "zero=stage3", ALL, "precision=bf16", "tuning.rslora=true"],
    "lora-v3-zero2": ["tuning=lora", "zero=stage2", "data.packing=packed", "checkpoint.asynchronous=true"],
    "lora-pissa-zero3": ["tuning=lora", "tuning.init=pissa", "zero=stage3", ALL, "tuning.dropout=0.2", RECOMPUTE],
    "lora-pissa-zero2-bf16": ["tuning=lora", "tuning.init=pissa", "zero=stage2", "precision=bf16"],
    "lora-pissa-zero0": ["tuning=lora", "tuning.init=pissa", "zero=stage0", "optim.lora_plus_ratio=4"],
    "freeze-zero0-bf16": ["tuning=freeze", "tuning.last_layers=1", "zero=stage0", "precision=bf16"],
    "freeze-zero2": ["tuning=freeze", "tuning.last_layers=0", "tuning.patterns=[*.mlp.*]", "zero=stage2", RECOMPUTE],
    "freeze-v3-zero3": ["tuning=freeze", "tuning.last_layers=1", "zero=stage3", ALL],
    "ptuning-v1-zero0": ["tuning=ptuning_v2", "tuning.num_tokens=4", "zero=stage0", RECOMPUTE],
    "ptuning-zero2-bf16": ["tuning=ptuning_v2", "tuning.num_tokens=4", "zero=stage2", "precision=bf16"],
    "ptuning-v3-zero3": [
        "tuning=ptuning_v2",
        "tuning.num_tokens=4",
        "tuning.projection=true",
        "tuning.dropout=0.0",
        "zero=stage3",
        ALL,
        RECOMPUTE,
    ],
    "prompt-zero0-bf16": [
        "tuning=prompt",
        "tuning.num_tokens=4",
        "tuning.init_text=red apple",
        "zero=stage0",
        "precision=bf16",
    ],
    "prompt-zero3": ["tuning=prompt", "tuning.num_tokens=4", "zero=stage3", ALL, RECOMPUTE],
}
TIED: dict[str, list[str]] = {
    "lora-tied-all": ["tuning=lora", "tuning.target_modules=[all-linear]", "zero=stage0"],
    "lora-tied-zero3": ["tuning=lora", "zero=stage3", ALL],
    "lora-tied-embedding": ["tuning=lora", "tuning.target_modules=[embed_tokens]", "zero=stage0"],
    "lora-tied-head": ["tuning=lora", "tuning.save_modules=[lm_head]", "zero=stage0"],
    "freeze-tied": ["tuning=freeze", "tuning.last_layers=0", "tuning.patterns=[embed_tokens.*]", "zero=stage0"],
}
AT_ONCE = ["checkpoint.asynchronous=false"]  # the worker wants an update after an asynchronous save
TO_ONE_RANK = [
    "lora-zero3",
    "lora-pissa-zero0",
    "lora-v3-zero2",
    "ptuning-v3-zero3",
    "freeze-zero2",
    "prompt-zero0-bf16",
]
ONE_RANK_LATE = ("lora-zero3", "freeze-zero2", "prompt-zero0-bf16")  # the tightest tolerances stay

LATE = (
    *("lora-v1-zero3-bf16", "freeze-zero0-bf16", "freeze-zero2", "ptuning-v1-zero0", "ptuning-zero2-bf16"),
    *("prompt-zero0-bf16", "lora-tied-zero3"),
)
"""Cells of the nightly tier: each method, stage and precision is met in another one."""
REWOUND = ["ptuning-v3-zero3", "lora-v3-zero2", "freeze-zero0-bf16"]
REWOUND_LATE = REWOUND[1:]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, rows_file: Path) -> Path:
    """Each cell once through, and once more from its checkpoint at step 3, in one launch on two ranks."""
    folder = tmp_path_factory.mktemp("tuning")
    models = {
        "v1": write(folder / "v1", "v1", pickled=True, tokenizer=True),
        "v3": write(folder / "v3", "v3", tokenizer=True),
        "tied": experts(folder / "experts"),
    }

    def words(name: str, as_name: str, *more: str) -> list[str]:
        model = models.get(name.split("-")[1])
        own = ["model=hf", f"model.path={model}"] if model else []
        wanted = ["train.max_steps=6", "checkpoint.every=3", "schedule=constant", "schedule.warmup_steps=0"]
        return tiny(rows_file, folder, as_name, *wanted, *own, *(CELLS | TIED)[name], *more)

    cells = of_tier(request, CELLS, late=LATE)
    exported = "checkpoint.export=true"
    cases: list[dict] = [{"overrides": words(name, name, exported)} for name in cells]
    for name in cells:
        died = {"of": f"{folder}/runs/{name}", "step": 3, "as": f"{folder}/runs/{name}-again"}
        cases.append({"overrides": words(name, f"{name}-again"), "died": died})
    for name in of_tier(request, dict.fromkeys(REWOUND), late=REWOUND_LATE):
        spoil = {"steps": {"5": ["loss", "nan"]}, "note": f"{folder}/{name}.note"}
        rewound = words(name, f"{name}-rewound", "train.on_bad_step=rewind", *AT_ONCE)
        cases.append({"overrides": rewound, "spoil": spoil})
    (folder / "cases.json").write_text(json.dumps(cases))
    finished = run_unlike(folder, WORKER, str(folder / "cases.json"), timeout_s=580)
    assert finished.code == 0, finished.output[-6000:]
    one = [
        {"overrides": words(name, f"{name}-one", f"resume={folder}/runs/{name}/checkpoints/step-3", *AT_ONCE)}
        for name in of_tier(request, dict.fromkeys(TO_ONE_RANK), late=ONE_RANK_LATE)
    ]
    one += [{"overrides": words(name, name, exported)} for name in of_tier(request, TIED, late=LATE)]
    (folder / "one.json").write_text(json.dumps(one))
    finished = run([*forked(1, WORKER), str(folder / "one.json")], cwd=folder, timeout_s=300)
    assert finished.code == 0, finished.output[-6000:]
    return folder / "runs"


@pytest.mark.parametrize("name", by_tier(CELLS, late=LATE))
def test_it_learns_and_goes_on_bit_by_bit(name: str, runs: Path) -> None:
    found = losses(runs / name)
    assert len(found) == 6
    before, *_, after = eval_losses(runs / name)
    assert after < before
    assert losses(runs / f"{name}-again") == found
    first, again = (weights_of(runs / one / "checkpoints" / "step-6") for one in (name, f"{name}-again"))
    assert set(first) == set(again)
    assert all(torch.equal(first[key], again[key]) for key in first)


@pytest.mark.parametrize("name", by_tier(TO_ONE_RANK, late=ONE_RANK_LATE))
def test_one_rank_goes_on_where_two_stopped(name: str, runs: Path) -> None:
    """Dropout is drawn anew."""
    tolerance = 0.2 if "tuning.dropout=0.2" in CELLS[name] else 0.03 if "bf16" in name else 1e-5
    assert losses(runs / f"{name}-one") == pytest.approx(losses(runs / name)[3:], abs=tolerance)


@pytest.mark.parametrize("name", by_tier(REWOUND, late=REWOUND_LATE))
def test_a_bad_step_goes_back_to_a_checkpoint_without_the_frozen(name: str, runs: Path) -> None:
    assert (runs.parent / f"{name}.note").read_text().splitlines() == ["5 loss nan"]
    done = json.loads((runs / f"{name}-rewound" / "DONE").read_text())
    assert (done["bad_steps"], done["rewinds"], done["steps"]) == (1, 1, 6)
    assert losses(runs / f"{name}-rewound")[:3] == losses(runs / name)[:3]


def weights_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return what a checkpoint holds of the model."""
    return dict(iter_weights(checkpoint))


@pytest.mark.parametrize("name", by_tier(CELLS, late=LATE))
def test_only_what_is_trained_is_kept(name: str, runs: Path) -> None:
    """Nothing empty, nothing frozen, and no optimizer states for it: 12 bytes per trained parameter in float32."""
    checkpoint = runs / name / "checkpoints" / "step-6"
    held = weights_of(checkpoint)
    of_lora = {name: value.numel() for name, value in held.items() if name.endswith(BUFFERS)}
    trained = sum(value.numel() for value in held.values()) - sum(of_lora.values())
    assert bool(of_lora) == ("pissa" in name)
    total = json.loads((runs / name / "DONE").read_text())["parameters"]
    assert json.loads((runs / name / "DONE").read_text())["trained_parameters"] == trained
    assert 0 < trained < 0.65 * total
    assert all(value.numel() for value in held.values())
    files = [path.stat().st_size for path in checkpoint.glob("fragments-*")]
    per_parameter = sum(files) / trained
    assert 12 <= per_parameter < 12.5 + len(files) * 40_000 / trained, per_parameter
    assert "frozen_param_shapes" not in json.dumps(sorted(held))
    exported = runs / name / "export"
    assert (exported / CONFIG).is_file() == ("freeze" not in name)
    card = (exported / "README.md").read_text()
    library = "transformers" if "freeze" in name else "" if "ptuning" in name else "peft"  # which can load it
    assert f'library_name: "{library}"' in card or (not library and "library_name" not in card)
    assert "- peft " in card
    if "freeze" not in name:
        values = load_file(exported / WEIGHTS)
        assert sum(value.numel() for value in values.values()) == trained + sum(of_lora.values())


@pytest.mark.parametrize("name", by_tier(["lora-pissa-zero3", "lora-pissa-zero0"]))
def test_pissa_begins_as_the_base_and_ends_as_plain_lora_of_it(name: str, runs: Path) -> None:
    """peft loads the export on the base as it is on the disk."""
    assert eval_losses(runs / name)[0] == pytest.approx(eval_losses(runs / "lora-zero0")[0], abs=1e-6)
    saved = probe.read(runs / name / "export")
    assert saved is not None
    base = transformers.AutoModelForCausalLM.from_pretrained(runs / name / "base", dtype=torch.float32)
    with torch.no_grad():
        logits = peft.PeftModel.from_pretrained(base, runs / name / "export").eval()(input_ids=saved.ids).logits
    assert (logits[:, -1] - saved.logits).abs().max() <= 1e-5 * saved.logits.abs().max()


@pytest.mark.parametrize("name", by_tier(CELLS, late=LATE))
def test_everything_kept_proves_itself(
    name: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checkpoints and export, the export out of the checkpoint, and the same merged and loaded as a plain model."""
    assert main(["verify", str(runs / name)]) == 0
    assert capsys.readouterr().out.count("forward: the logits are those of the save") == 3
    copy = shutil.copytree(runs / name, tmp_path / "run", ignore=shutil.ignore_patterns("export"))
    assert main(["export-model", str(copy)]) == 0
    made = {path.name: path.read_bytes() for path in (copy / "export").iterdir() if path.is_file()}
    before = {path.name: path.read_bytes() for path in (runs / name / "export").iterdir() if path.is_file()}
    assert [file for file in before if made.get(file) != before[file]] == []
    mergeable = name.startswith("lora")
    assert main(["export-model", str(copy), "merge=true"]) == (0 if mergeable else 2)
    if mergeable:
        saved = probe.read(copy / "merged")
        assert saved is not None
        usable = load_any(str(copy / "merged"))
        difference, tolerance = compare(usable.model, saved)
        assert difference <= tolerance
        assert not list((copy / "merged").glob("adapter*"))
    elif "freeze" not in name:
        assert tuning_state(load_any(str(copy)).model).method.value == CELLS[name][0].removeprefix("tuning=")


def test_the_command_evaluates_an_adapter_and_says_which(runs: Path, rows_file: Path, tmp_path: Path) -> None:
    """On the base that it names, and as `tuning.adapter` of a recipe."""
    metrics = ["evaluate.metrics=[bleu]", "evaluate.max_new_tokens=2"]
    exports = {name: str(runs / name / "export") for name in ("lora-zero0", "prompt-zero3")}
    words = [
        [f"adapter={exports['lora-zero0']}", f"output={tmp_path}/0.jsonl"],
        ["tuning=prompt", f"tuning.adapter={exports['prompt-zero3']}", f"output={tmp_path}/1.jsonl"],
    ]
    for more in words:
        command = ["eval", *tiny(rows_file, runs.parent, "", *metrics, *more)]
        finished = run(forked(0, "--module", "toolkit", *command), cwd=tmp_path)
        assert finished.code == 0, finished.output[-4000:]
    for number, (name, export) in enumerate(exports.items()):
        found = json.loads((tmp_path / f"{number}.json").read_text())
        assert found["adapter"] == export
        assert found["figures"]["eval_loss"] == pytest.approx(eval_losses(runs / name)[-1], abs=1e-5)


@pytest.mark.filterwarnings("ignore:.*keys did not match any targeted module", "ignore:.*tie_word_embeddings")
@pytest.mark.parametrize("name", by_tier(TIED, late=LATE))
def test_tied_weights_buffers_and_experts(
    name: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is saved beside the trained parameters is no damage; one of two tied weights is merged alone."""
    assert main(["verify", str(runs / name)]) == 0
    assert main(["export-model", str(runs / name), f"output={tmp_path / 'same'}"]) == 0
    file = WEIGHTS if "lora" in name else "model.safetensors"
    assert (tmp_path / "same" / file).read_bytes() == (runs / name / "export" / file).read_bytes()
    capsys.readouterr()
    code = main(["export-model", str(runs / name), "merge=true", f"output={tmp_path / 'merged'}"])
    if "lora" in name:
        assert code == 0
        assert "forward: the logits are those of the save" in capsys.readouterr().out
        is_tied = json.loads((tmp_path / "merged" / "config.json").read_text())["tie_word_embeddings"]
        assert is_tied == (name in ("lora-tied-all", "lora-tied-zero3"))
    else:
        assert code == 2
        assert not (tmp_path / "merged").exists()


@pytest.mark.filterwarnings("ignore::peft.utils.warning.PeftWarning", "ignore:.*tie_word_embeddings")
def test_weights_that_an_adapter_has_once_in_two_places(rows_file: Path, tmp_path: Path) -> None:
    """They are saved as peft saves them; that the adapter cannot be merged is said before the first step."""
    base, adapter = experts(tmp_path / "experts"), tmp_path / "adapter"
    config = peft.LoraConfig(
        r=2,
        target_modules=["q_proj", "o_proj"],
        modules_to_save=["embed_tokens"],
        ensure_weight_tying=True,
        lora_bias=True,
        task_type="CAUSAL_LM",
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    peft.get_peft_model(model, config).save_pretrained(adapter)
    own = ["model=hf", f"model.path={base}", "tuning=lora", f"tuning.adapter={adapter}", "checkpoint.export=true"]
    words = tiny(rows_file, tmp_path, "run", *own, "train.max_steps=2", "schedule.warmup_steps=0")
    finished = run(forked(1, str(REPOSITORY / "run.py"), *words), cwd=tmp_path)
    assert finished.code == 0, finished.output[-4000:]
    warning = f"WARNING: {adapter} cannot be merged into its base: it trains model.layers.0.self_attn.o_proj.bias"
    assert 0 <= finished.output.find(warning) < finished.output.find("step 1/2")
    assert main(["verify", str(tmp_path / "runs" / "run")]) == 0
    before, after = (load_file(folder / WEIGHTS) for folder in (adapter, tmp_path / "runs" / "run" / "export"))
    assert before.keys() == after.keys()


@pytest.mark.parametrize(
    "place", by_tier(["", "checkpoints/step-6", "without export"], late=["", "checkpoints/step-6"])
)
def test_answers_alone_reach_stdout(place: str, runs: Path, tmp_path: Path) -> None:
    """Where DeepSpeed has to find out by itself what it runs on, it says so; of a run that was not exported, it is said
    which checkpoint is taken.
    """
    run = runs / "lora-zero0"
    if place == "without export":
        run = shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("export"))
    else:
        run /= place
    command = [str(BIN / "toolkit"), "generate", str(run), "prompt=red", "max_new_tokens=3"]
    env = {name: value for name, value in environment().items() if name != "DS_ACCELERATOR"}
    finished = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert finished.returncode == 0, finished.stderr
    assert len(finished.stdout.splitlines()) == 1, finished.stdout
    assert ("step-6." in finished.stderr) == (place == "without export")
