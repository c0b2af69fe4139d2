"""Module names and regular expressions in an untrusted adapter_config.json: matched within a time limit."""

import json
import re
import subprocess
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from peft import LoraConfig
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from toolkit import children
from toolkit.messages import ModelError, tr
from toolkit.plan.tuning_targets import ALL_LINEAR

_MATCHING_S = 20.0
"""For all modules of a model; hundredths of a second are usual."""
_LONGEST = 20_000
"""Characters of an expression."""
_EXPRESSIONS = ("target_modules", "exclude_modules")
"""Settings in which a string is a regular expression; a list holds names, or ends of names."""
_NAMES = ("modules_to_save", "layers_pattern", "rank_pattern", "alpha_pattern")
"""Settings that peft inserts into regular expressions."""
_PLAIN = re.compile(r"(?:[\w.^$-]|\\[.d-]\+?)*")
r"""A name, or an expression that is matched at once: `q_proj`, `^layers\.\d+\.mlp$`; not `(q|k)_proj` or `.+`."""
_MOST_WILDCARDS = 2
"""Time of matching grows with that power of a name's length; peft writes one, as in `.*\\.gate_up_proj`."""
_MATCH = """
import json, re, sys
pattern, names = json.load(sys.stdin)
try:
    json.dump([name for name in names if re.fullmatch(pattern, name)], sys.stdout)
except (re.error, RecursionError, OverflowError) as error:
    sys.exit(str(error))
"""


def check_names(settings: dict[str, Any], file: Path) -> None:
    """Raise ModelError if `settings`, from an adapter_config.json, hold more of a regular expression than two wildcards
    `.*` where names of modules belong. `file`: that adapter_config.json, for the message.
    """
    for key in _NAMES:
        for name in _names_in(settings.get(key)):
            if not isinstance(name, str) or not _PLAIN.fullmatch(name.replace(".*", "", _MOST_WILDCARDS)):
                raise ModelError(
                    "{file}: {key} holds {value}, which is no name of a module. Write names, or ends of names, "
                    "with two wildcards .* at most.",
                    file=file,
                    key=key,
                    value=repr(name)[:200],
                )


def _names_in(value: Any) -> list[Any]:
    """Return the names in a setting: a single one, those of a list, or the keys of a mapping."""
    if isinstance(value, (list, dict)):
        return [*value]
    return [value] if isinstance(value, str) else []


def misplaced_by_peft(model: PreTrainedModel, names: Collection[str]) -> set[str]:
    """Return those of the linear layers `names` whose LoRA peft (0.21) loads into other layers, or into none.

    It takes names such as shared_experts.down_proj for those of single experts before transformers 5
    (utils/transformers_weight_conversion.py), and puts the LoRA there. It also renames an adapter's tensors by
    transformers' table for published files, whose patterns may match what has its new name already (5.24: Inkling 2).
    """
    misplaced = set()
    renamings = [entry for entry in get_model_conversion_mapping(model) if isinstance(entry, WeightRenaming)]
    for name in names:
        config, stored = LoraConfig(target_modules=[name]), f"{name}.lora_A.weight"
        read_as, _ = rename_source_key(stored, renamings, [])
        if not stored.endswith(read_as):  # a prefix that is only left out is put back by peft
            misplaced.add(name)
        try:
            convert_peft_config_for_transformers(config, model, None)  # changes `target_modules` to where it loads
            if name not in (config.target_modules or ()):
                misplaced.add(name)
        except ValueError:  # one of two matrices that transformers 5 joins
            misplaced.add(name)
    return misplaced


def with_matched_modules(settings: dict[str, Any], modules: Iterable[str]) -> dict[str, Any]:
    """Return an adapter's settings in which the regular expressions of `_EXPRESSIONS` are replaced by the names of the
    `modules` that they match. ModelError if one cannot be matched, or if that of `target_modules` matches nothing.
    """
    names = [name for name in modules if name]  # the model itself has the name ""
    for key in _EXPRESSIONS:
        expression = settings.get(key)
        if not isinstance(expression, str) or expression == ALL_LINEAR:  # not set, a list, or peft's own word
            continue
        matched = _match_in_child(key, expression, names)
        if not matched and key == "target_modules":
            raise _unusable(key, expression, tr("it matches no module of the model"))
        settings = settings | {key: matched}
    return settings


def _unusable(key: str, expression: str, reason: str) -> ModelError:
    """Return the error for a setting that is an expression which cannot be used."""
    return ModelError(
        "adapter_config.json: the expression {key} = {value} cannot be used: {reason}. Write a list of module "
        "names, or of ends of names, such as {example}.",
        key=key,
        value=repr(expression)[:200],
        reason=reason,
        example='["q_proj", "v_proj"]',
    )


def _match_in_child(key: str, expression: str, names: list[str]) -> list[str]:
    """Return those of `names` that a regular expression, the setting `key`, matches, in a subprocess with a time limit.
    ModelError if it is too long, invalid or too slow.
    """
    if len(expression) > _LONGEST:
        raise _unusable(key, expression, tr("it has more than {count} characters", count=f"{_LONGEST:,}"))
    try:
        completed = children.run(
            [sys.executable, "-I", "-S", "-c", _MATCH],
            input=json.dumps([expression, names]),
            capture_output=True,
            text=True,
            timeout=_MATCHING_S,
        )
    except subprocess.TimeoutExpired:
        reason = tr("matching it takes more than {seconds} s", seconds=f"{_MATCHING_S:g}")
        raise _unusable(key, expression, reason) from None
    if completed.returncode:
        reason = completed.stderr.strip() or tr("it matches no module of the model")
        raise _unusable(key, expression, reason)
    matched: list[str] = json.loads(completed.stdout)
    return matched
