"""Runs on one GPU against the same runs on the CPU and a plain loop in float64, each in a process of its own.

A test trains what it needs, and a process that dies, as by an error after which its GPU's context is of no use, takes
no other with it. Several run side by side, for most of their time goes into imports. A run on a GPU may be as far from
float64 as the run on the CPU is, some times over: what rounds there is the control. Without a GPU both are the CPU's,
so that what is compared, and how, is known to work.
"""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from device import CPU_LIMIT_S, DEVICE, cells_of, lacks, needs, train
from ranks import Finished, forked
from shared import ALL, LORA, RECOMPUTE, conversations, experts, losses, plain_loop, rows_of, tiny

from toolkit.checkpoint.fragment_reader import iter_weights

pytestmark = pytest.mark.timeout(2 * CPU_LIMIT_S)
STEPS = 10
SAVED = ["checkpoint.every=5"]
DEEPSPEED_ADAM = "optim.torch=false"
BACKEND = "inductor" if DEVICE == "cuda" else "aot_eager"  # Inductor's C++ takes minutes
LORA_EXPERTS = "tuning.target_modules=[q_proj,experts.gate_up_proj,experts.down_proj]"
OFFLOADED = "train.activation_checkpointing.cpu_checkpointing=true"
HALF = ["precision=fp16", "precision.initial_scale_power=8"]

# name -> what it needs, overrides; against the plain loop in float64
CELLS: dict[str, tuple[str, list[str]]] = {
    "fp32-stage0": ("", ["zero=stage0"]),
    "fp32-stage1": ("", ["zero=stage1", *SAVED]),
    "fp32-stage2-recompute": ("", ["zero=stage2", RECOMPUTE]),
    "fp32-stage3": ("", ["zero=stage3", ALL, "batch.micro_per_gpu=4"]),
    "fp32-deepspeed-adam": ("nvcc", ["zero=stage2", DEEPSPEED_ADAM]),
    "fp32-offload": ("nvcc", ["zero=stage2_offload", DEEPSPEED_ADAM]),
    "fp32-offload3": ("nvcc", ["zero=stage3_offload", DEEPSPEED_ADAM, ALL]),
    "fp32-asynchronous": ("", ["zero=stage1", "checkpoint.asynchronous=true", *SAVED]),
    "fp32-compiled": ("", ["zero=stage2", "compile=inductor", f"compile.backend={BACKEND}"]),
    "fp32-nvme": ("libaio", ["zero=stage3_nvme", DEEPSPEED_ADAM, ALL, "zero.offload_optimizer.nvme_path=NVME"]),
    "tf32-stage1": ("cuda", ["zero=stage1", "precision.tf32=true"]),
    "bf16-stage0": ("", ["zero=stage0", "precision=bf16"]),
    "bf16-stage1": ("", ["zero=stage1", "precision=bf16"]),
    "bf16-stage2": ("", ["zero=stage2", "precision=bf16"]),
    "bf16-stage3": ("", ["zero=stage3", ALL, "precision=bf16"]),
    "bf16-offload": ("nvcc", ["zero=stage2_offload", DEEPSPEED_ADAM, "precision=bf16"]),
    "fp8-stage1": ("fp8", ["zero=stage1", "precision=fp8"]),
    "fp8-stage3": ("fp8", ["zero=stage3", ALL, "precision=fp8"]),
    "fp8-compiled": (
        "fp8",
        ["zero=stage2", "precision=fp8", RECOMPUTE, "compile=inductor", f"compile.backend={BACKEND}"],
    ),
    "fp16-stage2": ("", ["zero=stage2", *HALF]),
    "fp16-stage3": ("", ["zero=stage3", ALL, *HALF]),
}
PACKED: dict[str, tuple[str, list[str]]] = {
    "packed-fp32-auto": ("", ["zero=stage1", "data.packing=packed"]),
    "packed-fp32-eager": ("", ["zero=stage1", "data.packing=packed", "model.attention=eager"]),
    "packed-bf16-auto": ("", ["zero=stage1", "data.packing=packed", "precision=bf16"]),
    "packed-bf16-sdpa": ("", ["zero=stage1", "data.packing=packed", "precision=bf16", "model.attention=sdpa"]),
    "packed-fp16-auto": ("", ["zero=stage2", "data.packing=packed", *HALF]),
}
ROUGH = {"fp32": 5e-6, "tf32": 0.005, "bf16": 0.01, "fp16": 0.003, "fp8": 0.03}
"""How far from float64 the CPU may be itself; TF32 rounds as bf16 does, at twice the bits."""
# Against the same run on the CPU; the control has another micro-batch there, so another order of additions.
ALIKE: dict[str, tuple[str, list[str]]] = {
    "lora": ("", ["zero=stage1", *LORA]),
    "ptuning": ("", ["zero=stage1", "tuning=ptuning_v2", "tuning.num_tokens=4", "tuning.dropout=0"]),
    "freeze": ("", ["zero=stage2", "tuning=freeze", "tuning.last_layers=1"]),
    "experts": ("", ["zero=stage1", "model=hf", "model.path=EXPERTS", "optim.lr=0.001"]),
    "experts-lora": ("", ["zero=stage1", "model=hf", "model.path=EXPERTS", *LORA[:1], LORA_EXPERTS, "optim.lr=0.01"]),
    "dpo": ("", ["zero=stage1", "preference=dpo", *LORA]),
    "trees": ("", ["zero=stage1", "batch.global_size=4", *LORA]),
}
# Only on the device: bit by bit from a checkpoint, and what the CPU has no counterpart of.
RESUMED: dict[str, tuple[str, list[str]]] = {
    "lora-dropout": ("", ["zero=stage1", *LORA, "tuning.dropout=0.2", *SAVED]),
    "bf16-dropout-recompute": ("", ["zero=stage2", "precision=bf16", *LORA, "tuning.dropout=0.2", RECOMPUTE, *SAVED]),
}
OTHERS: dict[str, tuple[str, list[str]]] = {
    "overflow": ("", ["zero=stage2", "precision=fp16", "precision.initial_scale_power=32", "train.max_steps=30"]),
    "auto": ("", ["zero=stage1", "batch.global_size=16", "batch.micro_per_gpu=auto", "plan.max_gpu_gib=1"]),
    "offloaded-freeze": ("cuda", ["zero=stage2", "tuning=freeze", "tuning.last_layers=1", RECOMPUTE, OFFLOADED]),
    "qlora": ("bitsandbytes", ["zero=stage1", "tuning=qlora", "precision=bf16", "optim.lr=0.01"]),
    "liger": ("liger_kernel", ["zero=stage1", "model=hf", "model.path=LLAMA", "kernels=liger", "precision=bf16"]),
    "no-liger": ("liger_kernel", ["zero=stage1", "model=hf", "model.path=LLAMA", "kernels=torch", "precision=bf16"]),
    "liger-glm": ("liger_kernel", ["zero=stage1", "kernels=liger", "precision=bf16"]),
    "no-liger-glm": ("liger_kernel", ["zero=stage1", "kernels=torch", "precision=bf16"]),
}
RAW = ["checkpoint.export=false", "evaluate.at_start=false"]


def llama(folder: Path) -> Path:
    """Write a tiny Llama with the vocabulary of glm-4's tests."""
    import transformers
    from official import write

    from tests.unit.tiny_model import SIZES
    from toolkit.models import load_tokenizer

    tokenizer = load_tokenizer(write(folder.with_name("llama-vocabulary"), "glm4", tokenizer=True))
    config = transformers.LlamaConfig(**SIZES | {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id})
    torch.manual_seed(3)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


EVERYTHING = CELLS | PACKED | ALIKE | RESUMED | OTHERS
PLACES: dict[str, Callable[[Path], Path]] = {"NVME": Path, "EXPERTS": experts, "LLAMA": llama}
"""What overrides name by a word, and how it is made in a directory of that name."""
SIDE_BY_SIDE = max(1, min(4, (os.cpu_count() or 1) // 4))


def control_of(name: str) -> str:
    """Return the run on the CPU that a cell is held against: its own, if it takes nothing that is built there."""
    given = EVERYTHING[name][1]
    return f"{name.partition('-')[0]}-stage1" if "compile=inductor" in given or DEEPSPEED_ADAM in given else name


class Runs:
    """Where the runs on the device and on the CPU are; each is trained when it is first asked for."""

    def __init__(self, folder: Path, rows_file: Path, pairs_file: Path) -> None:
        self.folder, self.rows_file, self.pairs_file = folder, rows_file, pairs_file
        self.pool = ThreadPoolExecutor(SIDE_BY_SIDE)
        self.trained: dict[tuple[str, str], Future[None]] = {}
        self.places: dict[str, Path] = {}
        self.losses: dict[str, list[float]] = {}

    @cached_property
    def chats(self) -> list[str]:
        """Overrides of a run on conversations."""
        folder = self.folder / "chats"
        folder.mkdir()
        return conversations(folder)

    def words(self, device: str, name: str, given: list[str]) -> list[str]:
        """Return the overrides of a run."""
        for mark, make in PLACES.items():
            if any(mark in word for word in given):
                if mark not in self.places:
                    self.places[mark] = make(self.folder / mark.lower())
                given = [word.replace(mark, str(self.places[mark])) for word in given]
        rows = self.pairs_file if "preference=dpo" in given else self.rows_file
        base = self.chats if name.startswith("trees") else tiny(rows, self.folder, name)
        own = [f"run.dir={self.folder}/{device}", f"run.name={name}", f"train.max_steps={STEPS}"]
        return [*base, *own, *RAW, *given]

    def case(self, device: str, name: str, given: list[str], **more: Any) -> dict[str, Any]:
        """Return a case whose failure is its own."""
        place = f"{self.folder}/{device}-{name}"
        notes = {"outcome": f"{place}.txt", "facts": f"{place}.json"}
        return {"overrides": self.words(device, name, given), **notes, **more}

    def begin(self, name: str, device: str = DEVICE) -> "Future[None]":
        """Let a run be trained, unless it is or will be. `NAME-control`: with another micro-batch, so another order of
        additions; what is resumed is trained and resumed, as NAME and `NAME-again`.
        """
        cell = name.removesuffix("-control")
        if (device, name) not in self.trained:
            given = EVERYTHING[cell][1]
            cases = [self.case(device, name, given if cell == name else [*given, "batch.micro_per_gpu=4"])]
            if name in RESUMED:
                run = f"{self.folder}/{device}/{name}"
                died = {"of": run, "step": 5, "as": f"{run}-again"}
                cases.append(self.case(device, f"{name}-again", given, died=died))
            if device == "cpu":
                forked(0)  # starts what is forked, which the threads would do several times
            self.trained[device, name] = self.pool.submit(self.train, name, device, cases)
        return self.trained[device, name]

    def begin_all_of(self, name: str) -> None:
        """Let all be trained that a test of a cell compares, where it is not skipped."""
        if lacks(EVERYTHING[name][0]):
            return
        self.begin(name)
        if name in ALIKE:
            self.begin(name, "cpu")
            self.begin(f"{name}-control", "cpu")
        elif name in CELLS | PACKED and not name.startswith("tf32"):
            self.begin(control_of(name), "cpu")

    def train(self, name: str, device: str, cases: list[dict[str, Any]]) -> None:
        """Train cases in one process; where it dies without a word of its own, note what it has printed."""
        try:
            finished = train(cases, self.folder, name, device)
        except subprocess.TimeoutExpired as error:
            finished = Finished(-1, f"{error}\n{error.output}")
        outcomes = [Path(case["outcome"]) for case in cases]
        if finished.code and not any(map(Path.exists, outcomes)):
            for outcome in outcomes:
                outcome.write_text(f"exit code {finished.code}\n{finished.output}")

    def check(self, name: str, device: str = DEVICE) -> Path:
        """Return the directory of a run that went well."""
        self.begin(name.removesuffix("-again"), device).result()
        failed = self.folder / f"{device}-{name}.txt"
        assert not failed.exists(), failed.read_text()[-4000:]
        return self.folder / device / name

    def facts(self, name: str) -> dict[str, Any]:
        """Return what the engine of a run on the device was made of."""
        self.check(name)
        found: dict[str, Any] = json.loads((self.folder / f"{DEVICE}-{name}.json").read_text())
        return found

    def exact(self, kind: str) -> list[float]:
        """Return the losses of the plain loop in float64, of "single" or "packed" samples."""
        if kind not in self.losses:
            given = PACKED["packed-fp32-auto"][1] if kind == "packed" else []
            self.losses[kind], _ = plain_loop(self.words("cpu", f"plain-{kind}", given), STEPS, dtype=torch.float64)
        return self.losses[kind]


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, rows_file: Path, pairs_file: Path
) -> Iterator[Runs]:
    """Begin with what the tests that were selected compare, in their order."""
    made = Runs(tmp_path_factory.mktemp("gpu"), rows_file, pairs_file)
    for item in request.session.items:
        if item.path == request.path and hasattr(item, "callspec"):
            made.begin_all_of(item.callspec.params["name"])
    yield made
    made.pool.shutdown(cancel_futures=True)


@pytest.mark.default
def test_a_process_that_dies_takes_no_other_with_it(
    tmp_path: Path, rows_file: Path, pairs_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(words: list[str], *_: Any) -> Finished:
        return Finished(-6, "an illegal memory access was encountered") if "stage0" in words[1] else Finished(0, "")

    monkeypatch.setattr("device.launch", launch)
    monkeypatch.setitem(globals(), "forked", lambda ranks: [])
    made = Runs(tmp_path, rows_file, pairs_file)
    made.begin_all_of("fp32-stage0")
    with pytest.raises(AssertionError, match="an illegal memory access"):
        made.check("fp32-stage0")
    assert "illegal" in (tmp_path / f"{DEVICE}-fp32-stage0.txt").read_text()
    assert made.check("fp32-compiled") == tmp_path / DEVICE / "fp32-compiled"
    assert {name for _, name in made.trained} == {"fp32-stage0", "fp32-compiled"}
    made.pool.shutdown()


def furthest(left: list[float], right: list[float]) -> float:
    """Return the largest difference."""
    return max(abs(a - b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("name", cells_of(CELLS | PACKED))
def test_it_rounds_as_the_cpu_does(name: str, runs: Runs) -> None:
    wanted = runs.exact("packed" if name in PACKED else "single")
    assert wanted[0] - wanted[-1] > 0.1, "the reference itself must learn, or the comparison says little"
    bound = next(bound for kind, bound in ROUGH.items() if kind in name)
    if name.startswith("tf32"):
        assert losses(runs.check(name)) != losses(runs.check("fp32-stage1")), "nothing was rounded"
    else:
        if name.startswith("fp8"):
            assert furthest(losses(runs.check(name)), losses(runs.check("bf16-stage1"))) > 1e-3, "it is bf16"
        control = furthest(losses(runs.check(control_of(name), "cpu")), wanted)
        assert control < bound
        bound = min(bound, 4 * control + bound / 5)
    assert furthest(losses(runs.check(name)), wanted) < bound


@pytest.mark.parametrize("name", cells_of({name: CELLS[name] for name in CELLS if name.endswith("compiled")}))
def test_what_is_compiled_is_compiled(name: str, runs: Runs) -> None:
    """And no other: without graphs the losses would be the same."""
    runs.check(name)
    assert runs.facts(name)["graphs"] > 0
    assert runs.facts("fp32-stage1")["graphs"] == 0


@pytest.mark.parametrize("name", cells_of(ALIKE))
def test_methods_are_those_of_the_cpu(name: str, runs: Runs) -> None:
    there, control = (losses(runs.check(one, "cpu")) for one in (name, f"{name}-control"))
    assert furthest(there, there[:1] * STEPS) > 0.01, "losses that do not move prove nothing"
    assert 8 * furthest(there, control) + 1e-5 < 1e-3, "the control strays"
    assert furthest(losses(runs.check(name)), there) <= 8 * furthest(there, control) + 1e-5


@pytest.mark.parametrize("name", RESUMED)
def test_random_states_go_on_bit_by_bit(name: str, runs: Runs) -> None:
    """What dropout draws on the device after a checkpoint is what it would have drawn."""
    found = losses(runs.check(name))
    assert len(set(found)) == STEPS
    assert losses(runs.check(f"{name}-again")) == found
    first, again = (runs.check(one) / "checkpoints" / f"step-{STEPS}" for one in (name, f"{name}-again"))
    weights = dict(iter_weights(again))
    assert all(torch.equal(weights[key], value) for key, value in iter_weights(first))


def test_a_late_copy_is_of_the_step_that_was_saved(runs: Runs) -> None:
    """An asynchronous save whose copies wait for the next update, on a GPU on a stream of their own."""
    late, at_once = (runs.check(name) / "checkpoints" / "step-5" for name in ("fp32-asynchronous", "fp32-stage1"))
    weights = dict(iter_weights(late))
    assert weights
    assert all(torch.equal(weights[key], value) for key, value in iter_weights(at_once))
    assert losses(runs.check("fp32-asynchronous")) == losses(runs.check("fp32-stage1"))


def test_fp16_overflows_and_recovers(runs: Runs) -> None:
    rows = [row for row in rows_of(runs.check("overflow")) if "loss" in row]
    skipped = rows[-1]["skipped_steps"]
    assert 5 < skipped < 25, "2^32 is too large a scale, 2^7 is not"
    assert rows[-1]["bad_steps"] == 0, "an overflow is no bad step"
    assert rows[int(skipped)]["loss"] - rows[-1]["loss"] > 0.1


def test_the_micro_batch_is_found(runs: Runs) -> None:
    """With a GiB there is room for all rows; what a GPU has in use counts."""
    ds_config = json.loads((runs.check("auto") / "ds_config.json").read_text())
    assert ds_config["train_micro_batch_size_per_gpu"] == 16


@needs("nvcc")
def test_optimizers_are_those_that_were_asked_for(runs: Runs) -> None:
    theirs, ours = (runs.facts(name) for name in ("fp32-deepspeed-adam", "fp32-stage1"))
    assert (theirs["optimizer"], ours["optimizer"]) == ("FusedAdam", "AdamW")
    assert {theirs["device"], ours["device"], *theirs["masters_on"]} == {DEVICE}
    assert runs.facts("fp32-offload")["optimizer"] == "DeepSpeedCPUAdam"
    assert runs.facts("fp32-offload")["masters_on"] == ["cpu"]


@needs("nvcc")
@needs("cuda")
def test_offloaded_states_are_page_locked(runs: Runs) -> None:
    for name in ("fp32-offload", "fp32-offload3", "bf16-offload"):
        assert runs.facts(name)["page_locked"], name


@needs("cuda")
def test_no_input_of_a_frozen_layer_stays_in_host_memory(runs: Runs) -> None:
    assert losses(runs.check("offloaded-freeze")) == pytest.approx(losses(runs.check("freeze")), abs=1e-5)
    assert runs.facts("offloaded-freeze")["kept_on_host"] == 0


@needs("cuda")
def test_the_host_waits_at_most_five_times_per_step(runs: Runs) -> None:
    """As docs/speed.md says; CPU ranks count in tests/ranks/lean_worker.py."""
    for name in ("fp32-stage1", "bf16-stage2", "packed-bf16-auto", "lora", "dpo"):
        assert max(runs.facts(name)["waits"][2:]) <= 5, (name, runs.facts(name)["waits"])


@needs("cuda")
def test_packed_half_precision_takes_the_kernel_of_variable_lengths(runs: Runs) -> None:
    kinds = {name: runs.facts(name)["attention"] for name in PACKED}
    assert kinds["packed-bf16-auto"] == kinds["packed-fp16-auto"] == "varlen"
    assert kinds["packed-fp32-auto"] == kinds["packed-bf16-sdpa"] == "sdpa"


@needs("bitsandbytes")
def test_qlora_learns(runs: Runs) -> None:
    found = losses(runs.check("qlora"))
    assert found[0] - found[-1] > 0.05


@needs("liger_kernel")
@pytest.mark.parametrize("name", ["liger", "liger-glm"])
def test_liger_is_near_the_models_own_layers(name: str, runs: Runs) -> None:
    mine, own = (losses(runs.check(one)) for one in (name, f"no-{name}"))
    assert mine != own, "nothing was replaced"
    assert furthest(mine, own) < 0.02
