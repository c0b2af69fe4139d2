"""Preference pairs beside TRL's DPOTrainer: both train the same model on the same pairs, in turns, on two CPU ranks.

python -m benchmarks.pairs TRL_PYTHON WORK [rounds=2] [steps=8] > FILE    (WORK: a directory that is made)

TRL_PYTHON: the interpreter of an environment with trl, and the torch, transformers and deepspeed of this one. Both full
fine-tuning with Adam under ZeRO-2 in fp32, the reference's log-probabilities known before the first step, the same
pairs per micro-batch and step. A pair's tokens are those of both answers with their prompts, on either side.
"""

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
import atexit, importlib.util, json, os, resource, sys, time

class Finder:
    '''Notes wall clock and processor time of this rank at each call of DeepSpeed's `step`, whoever calls it.'''
    def find_spec(self, name, path, target=None):
        if name != "deepspeed.runtime.engine":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        def exec_module(module):
            load(module)
            step = module.DeepSpeedEngine.step
            def noted(self, *args, **options):
                step(self, *args, **options)
                if self.global_steps > len(times):
                    times.append([time.perf_counter(), time.process_time()])
            module.DeepSpeedEngine.step = noted
        spec.loader.exec_module = exec_module
        return spec

times = []
if os.environ.get("LOCAL_RANK"):
    sys.meta_path.insert(0, Finder())
    def tell():
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        with open(os.environ["PROBED"], "a") as file:
            file.write(json.dumps({"peak": peak, "times": times}) + "\\n")
    atexit.register(tell)
"""
TRL = """
import json, os, sys
import deepspeed
from datasets import load_dataset
from trl import DPOConfig, DPOTrainer

model, data, out, steps, micro, accumulation, ds = sys.argv[1:8]
deepspeed.init_distributed()
sizes = []

config = DPOConfig(output_dir=out, per_device_train_batch_size=int(micro), max_steps=int(steps), learning_rate=1e-5,
    gradient_accumulation_steps=int(accumulation), use_cpu=True, bf16=False, fp16=False, beta=0.1, max_length=2048,
    precompute_ref_log_probs=True, gradient_checkpointing=False, deepspeed=ds, report_to="none", save_strategy="no",
    logging_steps=1, disable_tqdm=True, seed=0, model_init_kwargs={"dtype": "float32"})
trainer = DPOTrainer(model=model, args=config, train_dataset=load_dataset("json", data_files=data, split="train"))
inner = trainer.data_collator
def collate(rows):
    batch = inner(rows)
    mask = batch["attention_mask"]
    sizes.append((mask.numel(), int(mask.sum())))
    return batch
trainer.data_collator = collate
trainer.train()
if trainer.accelerator.is_main_process:
    whole, real = (sum(column) for column in zip(*sizes))
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    found = {"padding": 1 - real / whole, "first_loss": losses[0]}
    open(os.path.join(out, "found.json"), "w").write(json.dumps(found))
"""


def main(python: str, work: Path, rounds: int, steps: int) -> dict[str, Any]:
    """Make model and pairs, run both sides in turns, and return what was measured."""
    work.mkdir(parents=True)
    model = _model(work / "model")
    (work / "site").mkdir()
    (work / "site" / "sitecustomize.py").write_text(PROBE, encoding="utf-8")
    (work / "trl_dpo.py").write_text(TRL, encoding="utf-8")
    found: dict[str, Any] = {}
    for name, lengths in DATA.items():
        data = _pairs(work / f"{name.split()[0]}.jsonl", lengths, GLOBAL * steps)
        sides: dict[str, list[dict[str, Any]]] = {"ours": [], "trl": []}
        for turn in range(rounds):
            for side in sorted(sides, reverse=bool(turn % 2)):
                folder = work / f"{name.split()[0]}-{side}-{turn}"
                folder.mkdir()
                one = _ours(model, data, folder, steps) if side == "ours" else _trl(python, model, data, folder, steps)
                sides[side].append(one)
                print(name, side, json.dumps(one), file=sys.stderr, flush=True)  # noqa: T201
        found[name] = _compared(sides, data)
    return found


def _compared(sides: dict[str, list[dict[str, Any]]], data: Path) -> dict[str, Any]:
    rows = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
    answers = [row[name][0]["content"] for row in rows for name in ("chosen", "rejected")]
    prompts = [row["prompt"][0]["content"] for row in rows]
    tokens = (2 * sum(map(len, prompts)) + sum(map(len, answers))) / len(rows)  # without the template's marks
    step, busy = (
        {side: [round(one[kind], 3) for one in runs] for side, runs in sides.items()} for kind in ("wall_s", "cpu_s")
    )
    return {
        "tokens_of_a_pair": round(tokens, 1),
        "step_s": step,
        "step_cpu_s": busy,
        "pair_tokens_per_s": {side: [round(GLOBAL * tokens / one) for one in found] for side, found in step.items()},
        "ratios": [round(trl / ours, 3) for ours, trl in zip(step["ours"], step["trl"], strict=True)],
        "cpu_ratios": [round(trl / ours, 3) for ours, trl in zip(busy["ours"], busy["trl"], strict=True)],
        "peak_mib": {side: [one["peak_mib"] for one in runs] for side, runs in sides.items()},
        "padding": {side: round(runs[0]["padding"], 4) for side, runs in sides.items()},
        "first_loss": {side: runs[0]["first_loss"] for side, runs in sides.items()},
    }


def _ours(model: Path, data: Path, folder: Path, steps: int) -> dict[str, Any]:
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
        *("checkpoint.export=false", "optim.torch=true", "optim.lr=1e-5"),
    ]
    probed = _run([sys.executable, "-m", "toolkit", "launch", "--num_gpus", "2", *words], folder)
    lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if "step_s" in row]
    padding = statistics.fmean(row["padding_fraction"] for row in rows)
    return {**probed, "padding": padding, "first_loss": rows[0]["loss"]}


def _trl(python: str, model: Path, data: Path, folder: Path, steps: int) -> dict[str, Any]:
    ds = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": 2},
        "zero_force_ds_cpu_optimizer": False,
    }
    (folder / "ds.json").write_text(json.dumps(ds), encoding="utf-8")
    script = Path(folder.parent / "trl_dpo.py")
    given = [str(model), str(data), str(folder), str(steps), str(MICRO), str(GLOBAL // MICRO // 2)]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", f"--master-port={free_port()}"]
    probed = _run([python, *launcher, str(script), *given, str(folder / "ds.json")], folder)
    return {**json.loads((folder / "found.json").read_text(encoding="utf-8")), **probed}


def _run(command: list[str], folder: Path) -> dict[str, float]:
    """Run a command; return medians over its counted steps and ranks, and the highest peak of resident memory."""
    probed = folder / "probed"
    path = os.pathsep.join([str(folder.parent / "site"), str(Path(__file__).parents[1])])
    environ = {**os.environ, "PYTHONPATH": path, "PROBED": str(probed), "TOKENIZERS_PARALLELISM": "false"}
    with open(folder / "log", "w", encoding="utf-8") as log:
        children.run(command, env=environ, stdout=log, stderr=log, check=True, timeout=1800)
    ranks = [one for one in map(json.loads, probed.read_text().splitlines()) if one["times"]]
    wall, busy = (
        [end[kind] - begin[kind] for rank in ranks for begin, end in pairwise(rank["times"][WARM - 1 :])]
        for kind in (0, 1)
    )
    return {
        "wall_s": statistics.median(wall),
        "cpu_s": statistics.median(busy),
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
    options = dict(word.split("=") for word in sys.argv[3:])
    result = main(
        sys.argv[1], Path(sys.argv[2]).absolute(), int(options.get("rounds", 2)), int(options.get("steps", 8))
    )
    print(json.dumps({"command": ["python", "-m", "benchmarks.pairs", *sys.argv[1:]], **result}, indent=1))  # noqa: T201
