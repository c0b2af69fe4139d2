"""What the task of a config means for its rows and for the models of a step: pairs, labels, references, teachers."""

from toolkit.config.schema import RowFormat, RunConfig, TaskKind, TuningMethod


def has_pairs(cfg: RunConfig) -> bool:
    """Whether samples come in pairs: a chosen and a rejected answer, or a query and what is to be found."""
    return cfg.preference.is_paired or cfg.task.kind in (TaskKind.reward, TaskKind.embed)


def score_labels(cfg: RunConfig) -> list[str]:
    """Return the labels of the scores of the task's head, as far as the config names them; [] for a language model."""
    if not cfg.task.has_head:
        return []
    return ["reward"] if cfg.task.kind is TaskKind.reward else cfg.classify.labels


def wanted_format(cfg: RunConfig) -> RowFormat | None:
    """Return the format of rows that the task needs; None where rows are conversations and texts."""
    if not cfg.task.is_language:
        return RowFormat(cfg.task.kind.value)
    return cfg.preference.row_format if cfg.preference.is_on else None


def data_unit(cfg: RunConfig) -> tuple[str, int]:
    """Return the unit that the data are counted in (pairs, labels, answers, samples), and its samples per unit."""
    if has_pairs(cfg):
        return "pairs", 2 + cfg.embed.negatives  # texts of a query that are not to be found; 0 for other tasks
    if cfg.task.kind is TaskKind.classify:
        return "labels", 1
    return "answers" if cfg.preference.is_on else "samples", 1


def shares_prompts(cfg: RunConfig) -> bool:
    """Whether the two answers of a pair share one copy of their prompt, where the model can be trained so."""
    return cfg.preference.is_paired and cfg.data.share_prefixes and not cfg.data.streaming


def has_reference_in_step(cfg: RunConfig) -> bool:
    """Whether each step computes the reference of its pairs: as the model without its new adapter."""
    return cfg.preference.needs_reference and _has_base_in_step(cfg)


def _has_base_in_step(cfg: RunConfig) -> bool:
    """Whether each step can also compute the outputs of the model before training: the same without its new adapter."""
    tuning = cfg.tuning
    is_adapter = tuning.method in (TuningMethod.lora, TuningMethod.qlora) and not tuning.adapter
    return is_adapter and cfg.parallel.pipeline == 1


def has_own_teacher(cfg: RunConfig) -> bool:
    """Whether the teacher is the model without its new adapter, in each step: there is no second model."""
    is_on = cfg.task.kind is TaskKind.distill and not cfg.distill.top_k
    return is_on and _has_base_in_step(cfg) and cfg.distill.teacher in ("", cfg.model.path)


def has_live_teacher(cfg: RunConfig) -> bool:
    """Whether each step runs a teacher that is another model."""
    is_on = cfg.task.kind is TaskKind.distill and not cfg.distill.top_k
    return is_on and bool(cfg.distill.teacher) and not has_own_teacher(cfg)
