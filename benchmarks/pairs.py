"""Preference pairs beside TRL's DPOTrainer and LLaMA-Factory: one model, the same pairs, in turns, on two CPU ranks.

python -m benchmarks.pairs TRL_PYTHON FACTORY_PYTHON WORK [rounds=2] [steps=8] > FILE    (WORK: a directory to make)

TRL_PYTHON: the interpreter of an environment with trl, and the torch, transformers and deepspeed of this one;
FACTORY_PYTHON: that of one with llamafactory, versions that it accepts, and the torch and deepspeed of this one. All do
full fine-tuning with Adam under ZeRO-2 in fp32, with the same pairs per micro-batch and step. A pair's tokens are those
of both answers with their prompts, on any side. Here and with TRL the reference's log-probabilities are known before
the first step; LLaMA-Factory computes them in each. Their time is noted apart, so that two things can be compared:
steps alone, and steps with the reference's forward pass, as in a run of one epoch.
"""

import ast
import json
import os
import random
import statistics
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from toolkit import children
from toolkit.launch.environment import free_port

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DATA = {"long prompts": (1000, 1000, 60, 60), "ordinary": (20, 250, 20, 250)}
"""Least and most characters (a token each) of prompts and of answers."""
MICRO, GLOBAL, WARM = 4, 8, 1
"""Pairs of a micro-batch and of a step; steps that are not counted."""
PROBE = """
import atexit, importlib.machinery, json, os, resource, sys, time

# Module -> class ("": none) and function: the engine's step, whoever calls it, and the reference's forward passes.
WATCHED = {
    "deepspeed.runtime.engine": ("DeepSpeedEngine", "step"),
    "toolkit.tasks.preference": ("", "answer_log_probabilities"),
    "trl.trainer.dpo_trainer": ("DPOTrainer", "compute_ref_log_probs"),
    "llamafactory.train.dpo.trainer": ("CustomDPOTrainer", "compute_reference_log_probs"),
}
steps, reference = [], []

def now():
    return [time.perf_counter(), time.process_time()]

class Finder:
    # Notes wall clock and processor time of this rank at the end of each step, and those that the reference takes.
    def find_spec(self, name, path, target=None):
        if name not in WATCHED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module
        def exec_module(module):
            load(module)
            owner, function = WATCHED[name]
            place = getattr(module, owner) if owner else module
            inner = getattr(place, function)
            def noted(*given, **options):
                begin, learns = now(), sys.modules["torch"].is_grad_enabled()
                result = inner(*given, **options)
                if function == "step":
                    if given[0].global_steps > len(steps):
                        steps.append(now())
                elif owner or not learns:  # without a class it is the function of the trained model, too
                    reference.append([end - start for start, end in zip(begin, now())])
                return result
            setattr(place, function, noted)
        spec.loader.exec_module = exec_module
        return spec

if os.environ.get("LOCAL_RANK"):
    sys.meta_path.insert(0, Finder())
    def tell():
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        with open(os.environ["PROBED"], "a") as file:
            file.write(json.dumps({"peak": peak, "steps": steps, "reference": reference}) + "\\n")
    atexit.register(tell)
"""
COUNTED = """
sizes = []

def counted(batch, pairs):
    mask = batch["attention_mask"]
    sizes.append((mask.numel(), int(mask.sum()), pairs))
    return batch

def tell():
    with open(sys.argv[1] + os.environ["RANK"], "w") as file:
        file.write(json.dumps(sizes))
"""
"""What the scripts of both others share: places, tokens and pairs of each batch of a rank."""
TRL = """
import json, os, sys
import deepspeed
from datasets import load_dataset
from trl import DPOConfig, DPOTrainer

settings = json.load(open(sys.argv[2]))
deepspeed.init_distributed()
data = load_dataset("json", data_files=settings.pop("data"), split="train")
trainer = DPOTrainer(model=settings.pop("model"), args=DPOConfig(**settings), train_dataset=data)
inner = trainer.data_collator
trainer.data_collator = lambda rows: counted(inner(rows), len(rows))
trainer.train()
trainer.save_state()
tell()
"""
FACTORY = """
import json, os, sys
import deepspeed
from llamafactory.data import PairwiseDataCollatorWithPadding as Collator
from llamafactory.train.tuner import run_exp

settings = json.load(open(sys.argv[2]))
deepspeed.init_distributed()
inner = Collator.__call__
Collator.__call__ = lambda self, rows: counted(inner(self, rows), len(rows))
run_exp(settings)
tell()
"""
SHARED = {
    "learning_rate": 1e-5,
    "gradient_accumulation_steps": GLOBAL // MICRO // 2,
    "per_device_train_batch_size": MICRO,
    "use_cpu": True,
    "bf16": False,
    "fp16": False,
    "report_to": "none",
    "save_strategy": "no",
    "logging_steps": 1,
    "disable_tqdm": True,
    "seed": 0,
}
"""Of the Trainer, for both others."""
DS = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 2},
    "zero_force_ds_cpu_optimizer": False,
}
PACKAGES = ("torch", "transformers", "deepspeed", "accelerate", "datasets", "trl", "llamafactory")
ASK = f"import importlib.metadata as m; print({{d.name: d.version for d in m.distributions() if d.name in {PACKAGES}}})"


def main(pythons: dict[str, str], work: Path, rounds: int, steps: int) -> dict[str, Any]:
    """Make model and pairs, run all sides in turns, and return what was measured."""
    work.mkdir(parents=True)
    model = _model(work / "model")
    (work / "site").mkdir()
    (work / "site" / "sitecustomize.py").write_text(PROBE, encoding="utf-8")
    found: dict[str, Any] = {"versions": {side: _versions(python) for side, python in pythons.items()}}
    for name, lengths in DATA.items():
        data = _pairs(work / f"{name.split()[0]}.jsonl", lengths, GLOBAL * steps)
        sides: dict[str, list[dict[str, Any]]] = {side: [] for side in pythons}
        for turn in range(rounds):
            for side in sorted(sides, reverse=bool(turn % 2)):
                folder = work / f"{name.split()[0]}-{side}-{turn}"
                folder.mkdir()
                one = {"ours": _ours, "trl": _trl, "llamafactory": _factory}[side](
                    pythons[side], model, data, folder, steps
                )
                sides[side].append(one)
                print(name, side, json.dumps(one), file=sys.stderr, flush=True)  # noqa: T201
        found[name] = _compared(sides, data)
    return found


def _compared(sides: dict[str, list[dict[str, Any]]], data: Path) -> dict[str, Any]:
    rows = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
    answers = [row[name][0]["content"] for row in rows for name in ("chosen", "rejected")]
    prompts = [row["prompt"][0]["content"] for row in rows]
    tokens = (2 * sum(map(len, prompts)) + sum(map(len, answers))) / len(rows)  # without the template's marks
    seconds = {
        "steps alone": {side: [one["wall_s"] - one["live_s"] for one in runs] for side, runs in sides.items()},
        "with the reference": {
            side: [one["wall_s"] - one["live_s"] + one["reference_s"] for one in runs] for side, runs in sides.items()
        },
    }
    listed = {
        name: {side: [round(one[name], 3) for one in runs] for side, runs in sides.items()}
        for name in ("wall_s", "cpu_s", "reference_s", "reference_cpu_s", "peak_mib")
    }
    return {
        "tokens_of_a_pair": round(tokens, 1),
        "tokens_with_marks": {side: round(runs[0]["tokens"], 1) for side, runs in sides.items()},
        **listed,
        "pair_tokens_per_s": {
            kind: {side: [round(GLOBAL * tokens / one) for one in found] for side, found in by_side.items()}
            for kind, by_side in seconds.items()
        },
        "times_as_fast_as": {
            kind: {
                side: [round(theirs / ours, 3) for ours, theirs in zip(by_side["ours"], found, strict=True)]
                for side, found in by_side.items()
                if side != "ours"
            }
            for kind, by_side in seconds.items()
        },
        "padding": {side: round(runs[0]["padding"], 4) for side, runs in sides.items()},
        "first_loss": {side: runs[0]["first_loss"] for side, runs in sides.items()},
    }


def _versions(python: str) -> dict[str, str]:
    said = children.run([python, "-c", ASK], capture_output=True, text=True, check=True, timeout=120).stdout
    versions: dict[str, str] = ast.literal_eval(said)
    return versions


def _ours(python: str, model: Path, data: Path, folder: Path, steps: int) -> dict[str, Any]:
    words = [
        *(
            "recipe=qwen3_dpo",
            "zero=stage2",
            f"model.path={model}",
            "model.name=tiny",
            f"data={data}",
            "precision=fp32",
        ),
        *("tuning=full", "data.max_length=2048", "data.validation_fraction=0", "report.enabled=false"),
        *(f"run.dir={folder}", "run.name=run", f"prepare.dir={folder}/cache", f"train.max_steps={steps}"),
        *(f"batch.global_size={GLOBAL}", f"batch.micro_per_gpu={MICRO}", "train.log_every=1", "train.rehearse=false"),
        *("evaluate.prompts=[]", "evaluate.ngram_baselines=false", "checkpoint.every=0", "checkpoint.minutes=0"),
        *(
            "checkpoint.export=false",
            "optim.torch=true",
            "optim.lr=1e-5",
            "train.activation_checkpointing.enabled=false",
        ),
    ]
    probed = _run([python, "-m", "toolkit", "launch", "--num_gpus", "2", *words], folder)
    lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if "step_s" in row]
    padding = statistics.fmean(row["padding_fraction"] for row in rows)
    [manifest] = folder.glob("cache/stores/*/manifest.json")
    report = json.loads(manifest.read_text(encoding="utf-8"))["report"]
    tokens = report["tokens"] / (report["train_samples"] / 2)
    return {**probed, "padding": padding, "tokens": tokens, "first_loss": rows[0]["loss"]}


def _trl(python: str, model: Path, data: Path, folder: Path, steps: int) -> dict[str, Any]:
    settings = {
        "model": str(model),
        "data": str(data),
        "output_dir": str(folder / "out"),
        "max_steps": steps,
        "beta": 0.1,
        "max_length": 2048,
        "precompute_ref_log_probs": True,
        "gradient_checkpointing": False,
        "model_init_kwargs": {"dtype": "float32"},
    }
    return _other(python, TRL, settings, folder)


def _factory(python: str, model: Path, data: Path, folder: Path, steps: int) -> dict[str, Any]:
    rows = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
    texts = [{name: row[name][0]["content"] for name in ("prompt", "chosen", "rejected")} for row in rows]
    (folder / "texts.json").write_text(json.dumps(texts), encoding="utf-8")
    columns = {name: name for name in ("prompt", "chosen", "rejected")}
    info = {"pairs": {"file_name": "texts.json", "ranking": True, "columns": columns}}
    (folder / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")
    settings = {
        "stage": "dpo",
        "do_train": True,
        "finetuning_type": "full",
        "pref_beta": 0.1,
        "pref_loss": "sigmoid",
        "model_name_or_path": str(model),
        "dataset": "pairs",
        "dataset_dir": str(folder),
        "template": "chatml",
        "cutoff_len": 2048,
        "disable_gradient_checkpointing": True,
        "output_dir": str(folder / "out"),
        "max_steps": steps,
    }
    found = _other(python, FACTORY, settings, folder)
    return {**found, "live_s": found["reference_s"]}


def _other(python: str, script: str, settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    (folder / "train.py").write_text(script.replace("\n\n", f"\n{COUNTED}\n", 1), encoding="utf-8")
    (folder / "ds.json").write_text(json.dumps(DS), encoding="utf-8")
    settings = {**SHARED, **settings, "deepspeed": str(folder / "ds.json")}
    (folder / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", f"--master-port={free_port()}"]
    files = [str(folder / name) for name in ("train.py", "sizes", "settings.json")]
    probed = _run([python, *launcher, *files], folder)
    sizes = [size for rank in range(2) for size in json.loads((folder / f"sizes{rank}").read_text(encoding="utf-8"))]
    places, tokens, pairs = (sum(column) for column in zip(*sizes, strict=True))
    rows = json.loads((folder / "out" / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    return {**probed, "padding": 1 - tokens / places, "tokens": tokens / pairs, "first_loss": rows[0]["loss"]}


def _run(command: list[str], folder: Path) -> dict[str, float]:
    """Run a command; return medians over its counted steps and ranks, and the highest peak of resident memory."""
    probed = folder / "probed"
    path = os.pathsep.join([str(folder.parent / "site"), str(Path(__file__).parents[1])])
    environ = {**os.environ, "PYTHONPATH": path, "PROBED": str(probed), "TOKENIZERS_PARALLELISM": "false"}
    with open(folder / "log", "w", encoding="utf-8") as log:
        children.run(command, env=environ, stdout=log, stderr=log, check=True, timeout=1800)
    ranks = [one for one in map(json.loads, probed.read_text().splitlines()) if one["steps"]]
    wall, busy = (
        statistics.median(
            end[kind] - begin[kind] for rank in ranks for begin, end in pairwise(rank["steps"][WARM - 1 :])
        )
        for kind in (0, 1)
    )
    # A rank's share of a step is one micro-batch.
    reference_wall, reference_busy = (
        statistics.median(one[kind] for rank in ranks for one in rank["reference"][WARM:]) for kind in (0, 1)
    )
    return {
        "wall_s": wall,
        "cpu_s": busy,
        "reference_s": reference_wall,
        "reference_cpu_s": reference_busy,
        "live_s": 0.0,
        "peak_mib": round(max(one["peak"] for one in ranks), 1),
    }


def _model(folder: Path) -> Path:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    names = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    backend.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in names])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=names[2],
        pad_token=names[0],
        chat_template=TEMPLATE,
    )
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = Qwen3Config(
        vocab_size=1024, num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, **sizes, eos_token_id=258
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _pairs(file: Path, lengths: tuple[int, int, int, int], count: int) -> Path:
    draw, letters = random.Random(4), "abcdefghijklmnopqrstuvwxyz ,."  # noqa: S311

    def text(least: int, most: int) -> str:
        return "".join(draw.choices(letters, k=draw.randint(least, most) - 1)) + "x"

    with file.open("w", encoding="utf-8") as out:
        for _ in range(count):
            prompt, chosen, rejected = text(*lengths[:2]), text(*lengths[2:]), text(*lengths[2:])
            row = {"prompt": [{"role": "user", "content": prompt}]}
            row["chosen"] = [{"role": "assistant", "content": chosen}]
            row["rejected"] = [{"role": "assistant", "content": rejected}]
            out.write(json.dumps(row) + "\n")
    return file


if __name__ == "__main__":
    trl, factory, folder, *words = sys.argv[1:]
    options = {name: int(value) for name, value in (word.split("=") for word in words)}
    sides = {"ours": sys.executable, "trl": trl, "llamafactory": factory}
    result = main(sides, Path(folder).absolute(), options.get("rounds", 2), options.get("steps", 8))
    command = ["python", "-m", "benchmarks.pairs", "TRL_PYTHON", "FACTORY_PYTHON", "WORK", *words]
    print(json.dumps({"command": command, **result}, indent=1))  # noqa: T201
