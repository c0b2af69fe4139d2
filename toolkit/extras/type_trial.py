"""A type of models that nobody has trained here: built tiny, trained a step and packed, in a process of its own.

`python -m toolkit.extras.type_trial DIR LANGUAGE` does it and prints JSON, which is cached by type and versions.
"""

import json
import resource
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from toolkit import __version__, children
from toolkit.config import schema
from toolkit.messages import ModelError, current_language, reason_of, say, set_language, tr
from toolkit.models import directory, trainable
from toolkit.plan.lookup import cache_file, write_cache

_TRIAL_S = 120
_MOST_BYTES = 8 << 30
"""Of memory that the trial may write to."""
_MOST_PARAMETERS = 300_000_000
_CLOSE = 1e-3
"""Largest difference of losses, of their size."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What was seen of a tiny model."""

    is_built: bool = False
    trains: bool = False
    packs: bool = False
    reason: str = ""
    """Why no more of this is true."""


def tell(cfg: schema.RunConfig) -> None:
    """Say what a tiny model of the recipe's type does, if that type is untested."""
    if sentence := about(Path(cfg.model.path), cfg):
        say(sentence)


def about(folder: Path, cfg: schema.RunConfig) -> str:
    """Return what a tiny model of a directory's type does; "" if the type was tested, or is code of the directory."""
    kind = directory.read_config(str(folder), with_weights=False).get("model_type", "chatglm")
    if trainable.is_tested(kind) or directory.is_trusted(folder):
        return ""
    trial = _cached(folder, kind, cfg)
    if not trial.is_built:
        what = tr("no tiny model of it could be tried: {reason}", reason=trial.reason)
    elif not trial.trains:
        what = tr("a tiny model of it was built, but does not train: {reason}", reason=trial.reason)
    elif trial.packs:
        what = tr("a tiny model of it was built, trains, and packs")
    else:
        what = tr("a tiny model of it was built and trains; it does not pack: {reason}", reason=trial.reason)
    return tr("model_type = {kind} is untested: {what}.", kind=kind, what=what.rstrip("."))


def _cached(folder: Path, kind: str, cfg: schema.RunConfig) -> Trial:
    """Return what was seen of a tiny model of the type `kind` before, else try it and remember that."""
    cached = cache_file(cfg, "type", [kind, version("transformers"), __version__, current_language()])
    if cached.is_file():
        return Trial(**directory.read_object(cached))
    trial = _in_child(folder)
    write_cache(cached, asdict(trial))
    return trial


def _in_child(folder: Path) -> Trial:
    """Try a directory's type in a process that may hang, crash, or want more memory than there is."""
    command = [sys.executable, "-m", "toolkit.extras.type_trial", str(folder.absolute()), current_language()]
    try:
        ran = children.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TRIAL_S)
    except subprocess.TimeoutExpired:
        return Trial(reason=tr("no answer within {seconds} s", seconds=_TRIAL_S))
    if ran.returncode:
        last = (ran.stderr.strip().splitlines() or ["?"])[-1][:200]
        return Trial(reason=tr("its process ended with code {code}: {last}", code=ran.returncode, last=last))
    return Trial(**json.loads(ran.stdout.strip().splitlines()[-1]))


def try_type(folder: Path) -> Trial:
    """Build a tiny random model of a directory's type, train it a step and pack samples, in this process."""
    from toolkit.models import packable

    try:
        model = _tiny(folder)
    except Exception as error:  # whatever code that nobody here has seen raises
        return Trial(reason=_reason(error))
    try:
        _check_training(model)
    except Exception as error:
        return Trial(is_built=True, reason=_reason(error))
    try:
        source, max_length = schema.ModelConfig(path=str(folder)), schema.DataConfig().max_length
        if not (reason := packable.reason_not_to_pack(source, max_length)):
            _check_packing(model)
    except Exception as error:
        reason = _reason(error)
    return Trial(is_built=True, trains=True, packs=not reason, reason=reason)


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, ModelError) else f"{type(error).__name__}: {reason_of(error)}"


def _check_training(model: Any) -> None:
    """Raise ModelError if two rows, of which one is padded, have another loss than each alone, or have no gradient."""
    import torch

    from toolkit.models.loss import token_loss_sum

    ids = torch.stack((torch.arange(5, 25), torch.arange(8, 28)))  # [2, 20]
    labels, segments = ids.clone(), torch.ones_like(ids)
    segments[1, 12:], labels[1, 12:] = 0, -100  # of the second row, 12 tokens and padding
    expected = 0.0  # sum over the tokens of both rows
    for row in (ids[:1], ids[1:, :12]):
        logits = model(input_ids=row, use_cache=False).logits[0, :-1].detach()
        expected += float(torch.nn.functional.cross_entropy(logits, row[0, 1:], reduction="sum"))
    batch = {"input_ids": ids, "labels": labels, "segment_ids": segments, "position_ids": torch.arange(20).repeat(2, 1)}
    total = token_loss_sum(model, batch)
    loss = float(total.detach())
    if not abs(loss - expected) <= _CLOSE * expected:
        raise ModelError(
            tr(
                "padded rows have the loss {loss}, each alone {expected}",
                loss=f"{loss:.4g}",
                expected=f"{expected:.4g}",
            )
        )
    total.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    if not gradients or not all(gradient.isfinite().all() for gradient in gradients):
        raise ModelError(tr("it has no gradient, or one that is not finite"))


def _check_packing(model: Any) -> None:
    """Raise ModelError if samples in a packed row influence each other; measured as training does."""
    import torch

    from toolkit.models import attention, isolation

    attention.choose_attention(model, schema.Attention.auto, packed=True, dtype=torch.float32)
    vocab_size = model.config.get_text_config().vocab_size
    isolation.check_isolation(model, vocab_size, torch.device("cpu"), model.config.model_type)


def _tiny(folder: Path) -> Any:
    """Return a tiny random model of a directory's type, loaded as training does. Its weights are so large that a leak
    between samples shows.
    """
    import torch

    from toolkit.extras.shrink import shrunk_config
    from toolkit.models.load import load_empty, model_class, transformers_config
    from toolkit.models.load_weights import load_model

    config = shrunk_config(transformers_config(folder).to_dict())
    with TemporaryDirectory() as temporary:
        (Path(temporary) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        count = sum(parameter.numel() for parameter in load_empty(temporary).parameters())
        if count > _MOST_PARAMETERS:
            raise ModelError(tr("made small, it still has {count} parameters", count=f"{count:,}"))
        small = transformers_config(Path(temporary))
        torch.manual_seed(0)
        model = model_class(small).from_config(small, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:  # norms and biases stay
                    parameter.normal_(0, 0.1)
        model.save_pretrained(Path(temporary) / "model")
        return load_model(Path(temporary) / "model", dtype=torch.float32)


if __name__ == "__main__":
    set_language(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_DATA, (_MOST_BYTES, _MOST_BYTES))
    sys.stdout.write(json.dumps(asdict(try_type(Path(sys.argv[1])))) + "\n")
