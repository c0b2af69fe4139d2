"""Compares a recipe's exact settings, on its ranks, with a plain PyTorch loop; finds the setting that deviates."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from toolkit import children, terminal
from toolkit.arguments import check_parsed, parse
from toolkit.command_line import check_output, positive_int, write_output
from toolkit.config import files, load, mesh, schema
from toolkit.disk import json_lines
from toolkit.extras import sweep as sweeping
from toolkit.extras.sweep import DONE, SweepDir, SweepJob, SweepPlan
from toolkit.launch import deepspeed, processes
from toolkit.messages import ConfigError, LaunchError, Problems, listed, say, tr
from toolkit.tables import text_table

_PROVE_ARGUMENTS = ("steps", "sweep", "output", "max_length")
STEPS = 8
MAX_LENGTH = 256
_LIMIT_S = 3600.0
FACTOR = 8.0
"""A run may deviate by this times the plain loop's own deviation in the run's precision."""
FLOOR = {"losses": 2e-6, "norms": 2e-5, "logits": 2e-5}
"""Relative deviation that is always allowed, for sums in another order. Measured on CPU ranks in fp32: losses 6e-7,
norms 3e-6 (docs)."""
_PLAIN_OPTIMIZERS = ("adamw", "adam", "sgd", "adagrad")
_SUPPORTED_METHODS = (schema.TuningMethod.full, schema.TuningMethod.freeze, schema.TuningMethod.lora)
_BRIEF = (
    *sweeping.BRIEF,
    "optim.lr=1e-3",
    "checkpoint.keep=0",
    "checkpoint.export=true",
    "data.validation=[]",
    "data.validation_fraction=0",
)

Applies = Callable[[schema.RunConfig], bool]
_SIMPLIFICATIONS: tuple[tuple[Applies, str], ...] = (
    (lambda cfg: cfg.compile.enabled, "compile=none"),
    (lambda cfg: cfg.precision.fp8 is not schema.Fp8.none, "precision=bf16"),
    (lambda cfg: cfg.train.activation_checkpointing.enabled, "train.activation_checkpointing.enabled=false"),
    (lambda cfg: cfg.data.packing is not schema.Packing.none, "data.packing=none"),
    (lambda cfg: cfg.model.attention is not schema.Attention.eager, "model.attention=eager"),
    (lambda cfg: True, "kernels=torch"),
    (lambda cfg: cfg.kernels.mlp_pieces > 1, "kernels.mlp_pieces=1"),
    (lambda cfg: mesh.model_ranks(cfg) > 1, "parallel=data"),
    (lambda cfg: cfg.zero.overlap_comm is not False and cfg.zero.stage > 0, "zero.overlap_comm=false"),
    (lambda cfg: cfg.optim.torch is not True, "optim.torch=true"),
    (lambda cfg: cfg.tuning.method is not schema.TuningMethod.full, "tuning=full"),
    (lambda cfg: cfg.zero.stage > 1, "zero=stage1"),
    (lambda cfg: cfg.zero.stage > 0, "zero=stage0"),
    (lambda cfg: cfg.precision.dtype is not schema.Dtype.fp32, "precision=fp32"),
)
"""(whether a config uses a feature that may deviate, the override that does without it), tried one at a time."""


@dataclass(kw_only=True, slots=True)
class Finding:
    """How far one figure of a run (losses, norms or logits) is from the exact plain loop's."""

    name: str
    """losses, norms or logits."""
    found: float
    """The run's largest deviation from the plain loop in float64, relative to the largest value."""
    rounding: float
    """The same of the plain loop in the run's precision: what rounding alone does."""

    @property
    def limit(self) -> float:
        """The largest deviation that rounding and another order of additions explain."""
        return FACTOR * self.rounding + FLOOR[self.name]

    @property
    def is_right(self) -> bool:
        """Whether the run's deviation is within the limit; a NaN is not."""
        return self.found <= self.limit


@dataclass(kw_only=True, slots=True)
class Proof:
    """One proof of a recipe: its runs, and results of the plain PyTorch loop that they are compared with."""

    plan: SweepPlan
    sweep: SweepDir
    cfg: schema.RunConfig
    """The recipe's config, as it is run: short and with a small model."""
    world_size: int
    device: str
    requests: processes.SignalRequests = field(default_factory=processes.SignalRequests)
    plain_results: dict[tuple[Any, ...], dict[str, Any]] = field(default_factory=dict)
    """Results of the plain loop, by the settings that they depend on."""

    def train(self, words: Sequence[str], cfg: schema.RunConfig, name: str = "") -> SweepJob:
        """Train the recipe with further overrides `words` (`cfg`: composed of both), unless that is done already;
        return its job in the sweep.
        """
        job = sweeping.new_job(words, cfg)
        job = self.sweep.add(replace(job, name=name or job.name))
        if job.state != DONE:
            log = self.sweep.folder / f"{job.name}.log"
            text = tr("Training with {words}", words=" ".join(words) or tr("the recipe's settings"))
            with terminal.phase(text), log.open("a", encoding="utf-8") as lines:
                sweeping.launch(self.plan, self.sweep, job, words, self.requests, lines)
            sweeping.check_stopped(self.sweep, self.requests)
        return job

    def plain(self, words: Sequence[str], cfg: schema.RunConfig, dtype: str) -> dict[str, Any]:
        """Return losses, gradient norms and last logits of the plain loop in `dtype`: float64 or the run's. Cached by
        the settings that the loop follows: runs that differ in others, such as zero.stage, have the same results.
        """
        key = (dtype, cfg.data.packing, repr(cfg.precision), cfg.tuning.method, mesh.model_ranks(cfg))
        if key not in self.plain_results:
            device = "cpu" if dtype == "float64" else self.device
            spec = {"dtype": dtype, "device": device, "world_size": self.world_size}
            self.plain_results[key] = run_reference(self.sweep.folder, [*self.plan.fixed, *words], spec)
        return self.plain_results[key]

    def findings(self, job: SweepJob, words: Sequence[str], cfg: schema.RunConfig) -> list[Finding]:
        """Compare a finished run's losses, norms and export with the plain loop; `words`: its further overrides. Both
        loops' figures are series of floats by the names of FLOOR: a loss and a norm per step, and flattened logits.
        """
        exact, rounded = self.plain(words, cfg, "float64"), self.plain(words, cfg, cfg.precision.dtype.value)
        rows = [row for row in json_lines(self.sweep.run_dir(job) / "metrics.jsonl") if row and "loss" in row]
        run = {"losses": [float(row["loss"]) for row in rows], "norms": [float(row["grad_norm"]) for row in rows]}
        spec = {"export": str(self.sweep.run_dir(job)), "world_size": self.world_size}
        run["logits"] = run_reference(self.sweep.folder, [*self.plan.fixed, *words], spec)["logits"]
        return [
            Finding(name=name, found=deviation(run[name], exact[name]), rounding=deviation(rounded[name], exact[name]))
            for name in FLOOR
        ]


def deviation(values: Sequence[float], exact: Sequence[float]) -> float:
    """Return the largest difference of two series, relative to the largest exact value; NaN if their lengths differ or
    a value is NaN.
    """
    if len(values) != len(exact) or any(value != value for value in values):  # a NaN is not equal to itself
        return float("nan")
    return max(abs(value - other) for value, other in zip(values, exact, strict=True)) / max(map(abs, exact))


def run_reference(folder: Path, words: Sequence[str], spec: dict[str, Any]) -> dict[str, Any]:
    """Run toolkit.extras.reference in a child process, with files in `folder`; return its answer, or raise LaunchError.
    `words`: recipe and overrides; `spec`: what else its `main` takes, whose docstring names the keys.
    """
    request, answer = folder / "reference.json", folder / "reference-answer.json"
    request.write_text(json.dumps({**spec, "words": list(words), "output": str(answer)}), encoding="utf-8")
    command = [sys.executable, "-m", "toolkit.extras.reference", str(request)]
    ran = children.run(command, capture_output=True, text=True, timeout=_LIMIT_S)
    if ran.returncode:
        raise LaunchError(
            "the plain loop failed: {reason}", reason="\n".join(ran.stderr.strip().splitlines()[-8:]) or ran.returncode
        )
    result: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    return result


def run_prove(words: list[str]) -> int:
    """Train the recipe, compare it with the plain loop, look for what deviates; return 0 if all is right, else 1."""
    launcher, options, rest = deepspeed.typed_options(words)
    problems = Problems()
    slots_by_host = problems.attempt(deepspeed.hosts_of, options) or {}
    world_size = sum(map(len, slots_by_host.values()))
    arguments = parse(rest, names=_PROVE_ARGUMENTS, problems=problems)
    cfg, settings = arguments.loaded.cfg, arguments.values
    problems.apply((_unsupported,), cfg)
    check_parsed(arguments.loaded, world_size or None, problems)
    steps = problems.attempt(positive_int, settings, "steps") or STEPS
    length = problems.attempt(positive_int, settings, "max_length") or MAX_LENGTH
    problems.attempt(check_output, settings)
    problems.raise_all()
    recipe = [word for word in rest if word.partition("=")[0] not in _PROVE_ARGUMENTS]
    # The same command finds its directory again, and does not repeat runs that are done.
    name = f"prove-{Path(cfg.recipe).stem}-{sweeping.digest(sorted([*launcher, *recipe, f'{steps} {length}']))}"
    sweep_settings = {"sweep": settings.get("sweep") or name}
    plan = SweepPlan(
        launcher=launcher, options=options, fixed=[*recipe, *_brief(cfg, steps, length)], settings=sweep_settings
    )
    with sweeping.open_sweep(sweeping.sweep_dir(plan, cfg), sweeping.typed_command(words, "prove")) as sweep:
        sweep.save()
        # Overrides of all runs, but not of the name above: where this proof keeps its data and its small model.
        plan.fixed.append(f"prepare.dir={files.quoted(sweep.folder / 'cache')}")
        if cfg.model.init is schema.Init.pretrained:
            _write_small_model(plan, sweep, cfg, recipe)
        settled = plan.compose([])  # the recipe's config with all these overrides
        from deepspeed.accelerator import get_accelerator

        proof = Proof(
            plan=plan, sweep=sweep, cfg=settled, world_size=world_size, device=get_accelerator().device_name()
        )
        result = _prove(proof, steps)
        if "output" in settings:
            write_output(settings, json.dumps(result, indent=1, ensure_ascii=False) + "\n")
        return 0 if result["is_right"] else 1


def _unsupported(cfg: schema.RunConfig) -> Iterator[ConfigError]:
    """Yield a ConfigError for each setting of a recipe that the plain loop does not support."""
    if cfg.tuning.method not in _SUPPORTED_METHODS or cfg.tuning.adapter:
        yield ConfigError(tr("prove knows tuning=full, freeze and lora, without tuning.adapter."))
    if cfg.preference.is_on:
        text = tr("prove does not support preference.loss: use preference=none, with conversations as data.")
        yield ConfigError(text)
    if cfg.task.kind is not schema.TaskKind.language:
        yield ConfigError(tr("prove does not support task={task}.", task=cfg.task.kind.value))
    if cfg.model.trust_remote_code:
        yield ConfigError(tr("prove knows architectures of transformers: set model.trust_remote_code=false."))
    if cfg.plan.auto:
        yield ConfigError(tr("plan.auto chooses the layout itself. Run `toolkit plan`, and prove what it says."))


def _brief(cfg: schema.RunConfig, steps: int, length: int) -> list[str]:
    """Return overrides that make a run short, and switch off what is random or unknown to the plain loop. It saves at
    the middle, where `_resume` begins.
    """
    words = [*_BRIEF, f"train.max_steps={steps}", f"checkpoint.every={max(1, steps // 2)}"]
    words += [f"data.max_length={min(cfg.data.max_length, length)}", "data.too_long=truncate"]
    changed = (  # (whether the recipe has the setting, the override in its place)
        (cfg.batch.micro_per_gpu == schema.AUTO, "batch.micro_per_gpu=1"),
        (cfg.optim.name.value not in _PLAIN_OPTIMIZERS, f"optim={schema.OptimizerName.adamw.value}"),
        (cfg.tuning.dropout > 0, "tuning.dropout=0"),
        (cfg.train.neftune_alpha > 0, "train.neftune_alpha=0"),
        (cfg.data.curriculum.steps > 0, "data.curriculum.steps=0"),
        # With the usual first loss scale gradients may overflow: such steps are skipped, and the plain loop skips none.
        (cfg.precision.dtype is schema.Dtype.fp16, "precision.initial_scale_power=8"),
    )
    defaults = schema.EvaluateConfig()  # without validation data nothing else has an effect
    changed_fields = [
        item.name for item in fields(defaults) if getattr(cfg.evaluate, item.name) != getattr(defaults, item.name)
    ]
    words += [f"evaluate.{name}={load.as_typed(getattr(defaults, name))}" for name in changed_fields]
    return words + [word for applies, word in changed if applies]


def _write_small_model(plan: SweepPlan, sweep: SweepDir, cfg: schema.RunConfig, recipe: Sequence[str]) -> None:
    """Write a small random model of the recipe's architecture into the sweep's directory, and let all runs train it."""
    folder = sweep.folder / "model"
    if not folder.exists():
        heads = max(4, mesh.model_ranks(cfg))  # as in `shrink`, or what tensor and sequence parallelism divide
        answer = run_reference(sweep.folder, recipe, {"folder": str(folder), "heads": heads})
        say(
            "{model}, made small: {count} random parameters in {folder}.",
            model=cfg.model.name or cfg.model.path,
            count=f"{answer['parameters']:,}",
            folder=folder,
        )
    plan.fixed += [f"model.path={files.quoted(folder)}", "model.tokenizer=''", "model.revision=''"]


def _prove(proof: Proof, steps: int) -> dict[str, Any]:
    """Train, compare with the plain loop, resume at the middle, look for what deviates; print and return all of it."""
    job = proof.train([], proof.cfg, "recipe")
    if job.state != DONE:
        log = proof.sweep.folder / f"{job.name}.log"
        raise LaunchError(
            "the run did not come to its end (exit code {code}). The last lines of {file}:\n{lines}",
            code=job.exit_code,
            file=log,
            lines="\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]),
        )
    findings = proof.findings(job, [], proof.cfg)
    resumed_deviation = _resume(proof, job)
    titles = {"losses": tr("losses"), "norms": tr("gradient norms"), "logits": tr("logits of the export")}
    say("")
    for line in text_table(
        (tr("of {steps} steps", steps=steps), tr("deviates by"), tr("rounding alone"), tr("allowed"), ""),
        [
            (
                titles[finding.name],
                *(f"{number:.1e}" for number in (finding.found, finding.rounding, finding.limit)),
                tr("right") if finding.is_right else tr("deviates"),
            )
            for finding in findings
        ],
    ):
        say(line)
    say(
        "Relative to a plain loop in float64 on the CPU; rounding alone: the same loop in {dtype} on the {device}.",
        dtype=proof.cfg.precision.dtype.value,
        device=proof.device,
    )
    if resumed_deviation:  # also NaN, where it could not be resumed
        shown = f"{resumed_deviation:.1e}"
        say("Resumed at the middle, the losses deviate by {found} from those of the run.", found=shown)
    else:
        say("Resumed at the middle, the losses are those of the run bit for bit.")
    is_right = all(finding.is_right for finding in findings) and resumed_deviation <= FLOOR["losses"]
    suspects = [] if is_right else _find_suspects(proof)
    return {
        "settings": proof.plan.fixed,
        "ranks": proof.world_size,
        "device": proof.device,
        "versions": {name: metadata.version(name) for name in ("torch", "deepspeed", "transformers")},
        "findings": {
            finding.name: {"found": finding.found, "rounding": finding.rounding, "limit": finding.limit}
            for finding in findings
        },
        "resumed": resumed_deviation,
        "suspects": suspects,
        "is_right": is_right,
    }


def _resume(proof: Proof, job: SweepJob) -> float:
    """Resume a copy of the run at its middle checkpoint; return by how much the losses deviate from the run's, NaN if
    that fails. The copy is made to look like a run that was killed after the middle: without its end's checkpoint,
    export and DONE.
    """
    run, resumed_run = proof.sweep.run_dir(job), proof.sweep.folder / "resumed"
    if not resumed_run.exists():
        part = resumed_run.with_suffix(".part")  # killed in here, the copy would be the whole run, and prove nothing
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(run, part)
        (part / "DONE").unlink()
        *_, last = sorted((part / "checkpoints").glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))
        shutil.rmtree(last)
        shutil.rmtree(part / "export")
        part.rename(resumed_run)
    resumed_job = proof.train([], proof.cfg, resumed_run.name)
    if resumed_job.state != DONE:
        return float("nan")
    losses = {
        folder: [row["loss"] for row in json_lines(folder / "metrics.jsonl") if row and "loss" in row]
        for folder in (resumed_run, run)
    }
    return deviation(losses[resumed_run], losses[run])


def _find_suspects(proof: Proof) -> list[str]:
    """Train the recipe with each simplification alone; print all results, return the overrides that make it right."""
    say("")
    say("Something deviates by more than rounding explains. The settings, plainer one at a time:")
    suspects = []
    for applies, word in _SIMPLIFICATIONS:
        if not applies(proof.cfg):
            continue
        try:
            cfg = proof.plan.compose([word])
        except ConfigError as error:
            say(f"  {word}  " + tr("skipped: {reason}", reason=error))
            continue
        if load.to_yaml(replace(cfg, run=proof.cfg.run)) == load.to_yaml(proof.cfg):
            continue  # the recipe has this setting already
        job = proof.train([word], cfg)
        is_right = job.state == DONE and all(finding.is_right for finding in proof.findings(job, [word], cfg))
        if is_right:
            suspects.append(word)
            result = tr("right")
        elif job.state == DONE:
            result = tr("deviates too")
        else:
            result = tr("failed")
        say(f"  {word}  {result}")
    if suspects:
        say("Right with {words}: what that changes deviates.", words=listed(*suspects))
    else:
        say("None of them alone makes it right.")
    return suspects
