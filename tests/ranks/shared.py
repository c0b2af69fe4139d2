"""Data and runs that several tests share; each launch is paid for once."""

import copy
import json
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest
from ranks import REPOSITORY, deepspeed, forked, run

Cell = TypeVar("Cell")

WORKER = str(REPOSITORY / "tests" / "ranks" / "sessions_worker.py")
ALL = "zero.stage3_param_persistence_threshold=0"  # every parameter in pieces, as a real model's are
RECOMPUTE = "train.activation_checkpointing.enabled=true"
STEADY = "optim.eps=1e-6"
"""Adam divides a gradient by its own size: at 1e-8 it makes whole steps of gradients that are rounding alone, as those
of a key's bias are, and losses are 3e-5 apart after 12 steps; at 1e-6 4e-6 (a reward model, ZeRO-3).
"""
LORA = ["tuning=lora", "tuning.target_modules=[all-linear]", "optim.lr=0.01"]
WORDS = [
    "red",
    "green",
    "blue",
    "apple",
    "pear",
    "plum",
    "runs",
    "walks",
    "sleeps",
    "quickly",
    "slowly",
    "today",
    "tomorrow",
    "never",
    "always",
]


@pytest.fixture(scope="session")
def rows_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """37 short question/answer rows: no multiple of any batch size used, so every epoch has a short last step."""
    draw = random.Random(7)
    file = tmp_path_factory.mktemp("data") / "rows.jsonl"
    with file.open("w", encoding="utf-8") as handle:
        for _ in range(37):
            prompt = " ".join(draw.choices(WORDS, k=draw.randint(2, 8)))
            response = " ".join(draw.choices(WORDS, k=draw.randint(1, 12)))
            handle.write(json.dumps({"prompt": prompt, "response": response}) + "\n")
    return file


@pytest.fixture(scope="session")
def pairs_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """37 pairs: the chosen answers are of words of which the rejected have few."""
    draw = random.Random(5)
    file = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    with file.open("w", encoding="utf-8") as handle:
        for _ in range(37):
            prompt, chosen, rejected = (
                " ".join(draw.choices(words, k=draw.randint(1, 8))) for words in (WORDS, WORDS[:8], WORDS[7:])
            )
            handle.write(json.dumps({"prompt": prompt, "chosen": chosen, "rejected": rejected}) + "\n")
    return file


def tiny(rows_file: Path, folder: Path, name: str, *overrides: str) -> list[str]:
    """Return overrides of a tiny run: fp32, torch's Adam, no rehearsal, no export, each step logged, below `folder`."""
    return [
        "recipe=quickstart",
        "model=glm_tiny",
        f"data.sources=[{{path: {rows_file}}}]",
        "data.validation_fraction=0.2",
        f"prepare.dir={folder}/cache",
        f"run.dir={folder}/runs",
        f"run.name={name}",
        "batch.global_size=4",
        "batch.micro_per_gpu=1",
        "train.max_steps=6",
        "train.log_every=1",
        "checkpoint.export=false",
        "train.rehearse=false",
        "report.enabled=false",
        "optim.lr=0.003",
        "schedule=linear",
        "schedule.warmup_steps=2",
        "evaluate.prompts=[]",
        "evaluate.ngram_baselines=false",
        *overrides,
    ]


@cache
def can_do_async_io() -> bool:
    """Return whether DeepSpeed's aio op builds here (it needs libaio's headers). It tries a compiler, so ask once."""
    from deepspeed.accelerator import get_accelerator

    builder = get_accelerator().create_op_builder("AsyncIOBuilder")
    return builder is not None and bool(builder.is_compatible(verbose=False))


def runs_nightly(request: pytest.FixtureRequest) -> bool:
    """Whether the tests of the nightly tier run."""
    tiers: str = request.config.getoption("--tier")
    return tiers == "all" or "nightly" in tiers


def launcher(request: pytest.FixtureRequest) -> Callable[..., list[str]]:
    """Return what starts ranks that may be forks; in the nightly tier DeepSpeed's launcher, whose ranks have sets of
    strings each in an order of its own.
    """
    return deepspeed if runs_nightly(request) else forked


def of_tier(
    request: pytest.FixtureRequest, cells: dict[str, Cell], short: Collection[str] = (), late: Collection[str] = ()
) -> dict[str, Cell]:
    """Return the cells that a launch runs: those of the tests of the tiers that run; see `by_tier`."""
    is_short, is_late = request.config.getoption("--tier") == "default", runs_nightly(request)
    return {
        name: cell for name, cell in cells.items() if (not is_short or name in short) and (is_late or name not in late)
    }


def by_tier(names: Collection[str], short: Collection[str] = (), late: Collection[str] = ()) -> list[Any]:
    """Return the parameters of a test, those in `short` marked as of the default tier, in `late` of the nightly one."""
    tier = dict.fromkeys(short, pytest.mark.default) | dict.fromkeys(late, pytest.mark.nightly)
    return [pytest.param(name, marks=tier[name]) if name in tier else name for name in names]


def train_cells(
    folder: Path,
    cells: tuple[dict[str, list[str]], dict[str, list[str]]],
    words: Callable[[str, list[str]], list[str]],
    resumed: Mapping[str, int],
    room_mib: Mapping[str, list[float]] | None = None,
) -> Path:
    """Train cells, then resume some from the middle, as `NAME-resumed`; return the directory of their runs.

    Args:
        cells: overrides by name, of runs on two ranks and of runs on one.
        words: takes name and overrides; returns all overrides of a run below `folder`.
        resumed: the step from which a cell is resumed.
        room_mib: of a cell: the memory that each rank is said to have.
    """
    for all_cells, command in zip(cells, (forked(2, WORKER), forked(0, WORKER)), strict=True):
        cases: list[dict[str, Any]] = []
        for name, given in all_cells.items():
            case: dict[str, Any] = {"overrides": words(name, given)}
            if name in (room_mib or {}):
                case["room_mib"] = room_mib[name]
            cases.append(case)
            # At once: ZeRO-3 exchanges torch's `linear` for the rest of a process, which rounds otherwise (0.19.8,
            # partition_parameters.py).
            if name in resumed:
                checkpoint = folder / "runs" / name / "checkpoints" / f"step-{resumed[name]}"
                cases.append({"overrides": words(f"{name}-resumed", [*given, f"resume={checkpoint}"])})
        if cases:
            listing = folder / f"cases-{len(all_cells)}.json"
            listing.write_text(json.dumps(cases))
            finished = run([*command, str(listing)], cwd=folder, timeout_s=400)
            assert finished.code == 0, finished.output[-6000:]
    return folder / "runs"


def runs_fixture(
    task: str,
    words: Callable[..., list[str]],
    data: str,
    cells: tuple[dict[str, list[str]], dict[str, list[str]]],
    resumed: Mapping[str, int],
    late: tuple[Collection[str], Collection[str]] = ((), ()),
    room_mib: Mapping[str, list[float]] | None = None,
) -> Any:
    """Return a fixture that trains cells, resumes some, and returns the directory of their runs; see `train_cells`.

    Args:
        task: names the directory.
        words: takes the value of the fixture `data`, a directory, name and overrides of a run; returns all overrides.
        data: name of that fixture.
        cells: overrides by name, of runs on two ranks and of runs on one.
        resumed: the step from which a cell is resumed.
        late: cells, and resumed ones, of the nightly tier alone.
        room_mib: as of `train_cells`.
    """

    @pytest.fixture(scope="session")
    def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder = tmp_path_factory.mktemp(task)
        of_tiers = of_tier(request, cells[0], late=late[0]), of_tier(request, cells[1], late=late[0])
        words_of = partial(words, request.getfixturevalue(data), folder)
        return train_cells(folder, of_tiers, words_of, of_tier(request, dict(resumed), late=late[1]), room_mib)

    return runs


def check_resumed(runs: Path, name: str, step: int, last_step: int) -> None:
    """See that a cell's run that was resumed after a step did the same in all later ones, bit by bit."""
    whole, resumed = ([row for row in trained(runs / run) if row["step"] > step] for run in (name, f"{name}-resumed"))
    assert len(whole) >= last_step - step
    assert whole == resumed


def conversations(folder: Path) -> list[str]:
    """Write ten conversations with reasoning and a tokenizer for them; return overrides of a tiny run on them."""
    from tests.unit.test_templates import OURS, tokenizer_of

    draw = random.Random(4)

    def said(most: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(1, most)))

    with (folder / "rows.jsonl").open("w", encoding="utf-8") as file:
        for turns in (3, 4, 2, 1, 3, 2, 4, 3, 1, 2):
            messages = [{"role": "system", "content": said(5)}]
            for _ in range(turns):
                messages += [
                    {"role": "user", "content": said(4)},
                    {"role": "assistant", "reasoning_content": said(3), "content": said(4)},
                ]
            file.write(json.dumps({"messages": messages}) + "\n")
    tokenizer_of(OURS["qwen"]).save_pretrained(folder / "tokenizer")
    own = [f"model.tokenizer={folder}/tokenizer", "data.packing=packed", "data.max_length=512"]
    return [*tiny(folder / "rows.jsonl", folder, "NAME", *own), "batch.global_size=8"]


SHORT_FIRST = ["data.curriculum.steps=4", "data.curriculum.start_length=12", "data.max_length=64"]
"""Overrides: the shortest samples first, for as many steps."""


def experts(folder: Path) -> Path:
    """Write a tiny GLM-4.5 whose head is its embedding: experts in one tensor, a stored buffer, tied weights."""
    import torch
    import transformers
    from official import write

    from toolkit.models import load_tokenizer

    config = transformers.Glm4MoeConfig(
        vocab_size=1024,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        first_k_dense_replace=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        num_nextn_predict_layers=0,
        tie_word_embeddings=True,
        eos_token_id=956,
        pad_token_id=956,
        bos_token_id=None,
    )
    torch.manual_seed(3)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    load_tokenizer(write(folder.with_name("vocabulary"), "glm4", tokenizer=True)).save_pretrained(folder)
    return folder


def check_short_first(
    mine: Path, theirs: Path, names: Sequence[str] = ("loss", "grad_norm", "eval_loss"), **near: float
) -> None:
    """Compare two `SHORT_FIRST` runs: the same samples in each step, and figures as near as `pytest.approx` is told."""
    rows, others = rows_of(mine), rows_of(theirs)
    for one, other in zip(rows, others, strict=True):
        for name in ("step", "curriculum_length", "trained_tokens", "total_tokens"):
            assert one.get(name) == other.get(name), name
        for name in names:
            assert one.get(name, 0.0) == pytest.approx(other.get(name, 0.0), **near), (name, one)
    assert len({row["curriculum_length"] for row in rows if "loss" in row}) > 2


TIMED = {
    *("tokens_per_s", "trained_tokens_per_s", "rank_tokens_per_s", "eval_tokens_per_s"),
    *("samples_per_s", "rank_samples_per_s"),
    *("step_s", "step_median_s", "step_p95_s"),
    *("data_wait_s", "data_wait_fraction", "data_wait_rank", "slowest_rank", "slowest_rank_s", "median_rank_s"),
    *("fastest_rank_s", "time"),
    *("model_flops_per_s", "hardware_flops_per_s", "mfu_matmul", "hfu_matmul"),
    *("host_memory_peak_bytes", "planned_memory_bytes"),
}
"""What rows of metrics.jsonl say of the machine, and not of the training."""


def trained(run_folder: Path) -> list[dict[str, float]]:
    """Return metrics.jsonl of a run without what the machine did to it."""
    return [{key: value for key, value in row.items() if key not in TIMED} for row in rows_of(run_folder)]


def rows_of(run_folder: Path) -> list[dict[str, float]]:
    """Return metrics.jsonl of a run."""
    return [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]


def losses(run_folder: Path) -> list[float]:
    """Return the training loss of each step."""
    return [row["loss"] for row in rows_of(run_folder) if "loss" in row]


def eval_losses(run_folder: Path) -> list[float]:
    """Return the validation losses in order."""
    return [row["eval_loss"] for row in rows_of(run_folder) if "eval_loss" in row]


class PlainOptimizer:
    """torch's AdamW on the parameters that are trained, with the clipping and the schedule of a `tiny` run."""

    def __init__(self, model: Any, cfg: Any, steps: int) -> None:
        import torch

        self.cfg, self.steps, self.updates = cfg, steps, 0
        self.parameters = [one for one in model.parameters() if one.requires_grad]
        self.adam = torch.optim.AdamW(
            self.parameters,
            lr=cfg.optim.lr,
            betas=tuple(cfg.optim.betas),
            eps=cfg.optim.eps,
            weight_decay=cfg.optim.weight_decay,
        )

    def step(self, loss: Any) -> float:
        """Update by a loss; return the norm of its gradients."""
        import torch

        self.adam.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.cfg.train.gradient_clipping)
        # DeepSpeed's warm-up from half the peak (1 / its steps): two steps there (before and at its iteration 0), up
        # over 2 steps, then down to 0.
        iteration = max(self.updates - 1, 0)
        factor = 0.5 + 0.5 * iteration / 2 if iteration < 2 else (self.steps - iteration) / (self.steps - 2)
        for group in self.adam.param_groups:
            group["lr"] = self.cfg.optim.lr * factor
        self.adam.step()
        self.updates += 1
        return float(norm)


def global_batches(cfg: Any, data: Any, steps: int) -> Iterator[list[Any]]:
    """Yield the rows of each step: the places of their samples in `data.train`, those of a pair in order."""
    from toolkit.config import mesh
    from toolkit.data.sampler import GlobalBatchSampler
    from toolkit.tasks.language_batches import rows_per_step

    plan, size = data.train_plan, rows_per_step(mesh.with_micro_batch(cfg), data.packing)[0]
    sampler = GlobalBatchSampler(len(plan), size, size, 0, 1, f"{cfg.run.seed} {data.train.content}")
    return ([plan[row] for row in rows] for rows in islice(sampler, steps))


class PlainRun(NamedTuple):
    """What a plain PyTorch loop trains a `tiny` run's model with."""

    cfg: Any
    data: Any
    model: Any
    """In fp32, with what `tuning` adds to it, which is ours."""
    untrained: Any
    """A copy of it from before that, in evaluation mode."""
    optimizer: PlainOptimizer

    def forward(self, model: Any, samples: Iterable[Any]) -> tuple[Any, Any]:
        """Return the logits of a model for samples, each on a padded row of its own, and the labels of their tokens."""
        from toolkit.data.loader import collate

        batch = collate([[sample] for sample in samples], self.data.pad_id)
        mask = (batch["segment_ids"] > 0).long()
        return model(input_ids=batch["input_ids"], attention_mask=mask).logits, batch["labels"]

    def line(self, sample: int) -> int:
        """Return the line, from 0, of a training sample's row in its file."""
        return int(self.data.train.where(sample).rsplit(":")[1]) - 1


def plain_run(overrides: list[str], steps: int) -> PlainRun:
    """Return config, data, model and optimizer of a `tiny` run of so many steps."""
    from toolkit.config.load import load
    from toolkit.config.schema import Dtype
    from toolkit.models.fine_tuning import apply_tuning
    from toolkit.models.load import create_model
    from toolkit.plan.tuning_targets import tuning_of
    from toolkit.tasks.language_data import head_of, load_data

    cfg = load(overrides).cfg
    data = load_data(cfg)
    model = create_model(cfg.model, Dtype.fp32, data.tokenizer, cfg.run.seed, head=head_of(cfg, data))
    untrained = copy.deepcopy(model).eval()
    if cfg.tuning.method.value != "full":
        apply_tuning(model, tuning_of(cfg), Path("base"), data.tokenizer, cfg.run.seed)
    return PlainRun(cfg, data, model, untrained, PlainOptimizer(model, cfg, steps))


def plain_loop(
    overrides: list[str],
    steps: int,
    data: Sequence[int] = (),
    without: Collection[int] = (),
    dtype: Any = None,
    norms: list[float] | None = None,
) -> tuple[list[float], list[float]]:
    """Train in a plain PyTorch loop without any of our training code; every sample on a padded row of its own. What
    `tuning` adds to a model is ours.

    Args:
        overrides: of a `tiny` run: fp32, global batch 4, linear schedule with two warm-up steps.
        steps: train.max_steps of the run.
        data: whose data each step takes, from 1, where that is not its own.
        without: steps, from 1, that do not update anything; the schedule does not advance either.
        dtype: of torch, to compute in instead of the config's.
        norms: receives the norm of each step's gradients, before they are clipped.

    Returns:
        The training losses; first and last validation loss.
    """
    import torch

    from toolkit.config.load import load
    from toolkit.data.loader import collate
    from toolkit.models.fine_tuning import apply_tuning
    from toolkit.models.load import create_model
    from toolkit.tasks.language_data import load_data

    cfg = load(overrides).cfg
    prepared = load_data(cfg)
    assert prepared.validation is not None
    model = create_model(cfg.model, cfg.precision.dtype, prepared.tokenizer, cfg.run.seed)
    apply_tuning(model, cfg.tuning, Path("base"), prepared.tokenizer, cfg.run.seed)
    model = model if dtype is None else model.to(dtype)

    def mean_loss(samples: list[tuple]) -> torch.Tensor:
        batch = collate([[sample] for sample in samples], prepared.pad_id)
        logits = model(input_ids=batch["input_ids"], attention_mask=(batch["segment_ids"] > 0).long()).logits
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())

    def validation_loss() -> float:
        with torch.no_grad():
            return float(mean_loss([prepared.validation[i] for i in range(len(prepared.validation))]))

    optimizer = PlainOptimizer(model, cfg, steps)
    data = data or range(1, steps + 1)
    batches = list(global_batches(cfg, prepared, max(data)))
    found, before = [], validation_loss()
    for step, rows in enumerate((batches[number - 1] for number in data), start=1):
        loss = mean_loss([prepared.train[sample] for row in rows for sample in row])
        found.append(float(loss.detach()))
        if step not in without:
            norm = optimizer.step(loss)
            if norms is not None:
                norms.append(norm)
    return found, [before, validation_loss()]


FAULTY = str(REPOSITORY / "tests" / "ranks" / "faulty_run.py")
STEPS = 8


def faulty_words(rows_file: Path, folder: Path, name: str, *overrides: str) -> list[str]:
    """Return the arguments of a run of 8 steps that saves at every second."""
    return tiny(
        rows_file,
        folder,
        name,
        f"train.max_steps={STEPS}",
        "checkpoint.every=2",
        "checkpoint.export=false",
        "zero=stage2",
        "evaluate.at_start=false",
        *overrides,
    )


@pytest.fixture(scope="session")
def straight(tmp_path_factory: pytest.TempPathFactory, rows_file: Path) -> list[float]:
    """Losses of the run that nothing happens to."""
    folder = tmp_path_factory.mktemp("straight")
    finished = run(forked(2, FAULTY, *faulty_words(rows_file, folder, "straight")), cwd=folder, FAULT="{}")
    assert finished.code == 0, finished.output[-4000:]
    return losses(folder / "runs" / "straight")
