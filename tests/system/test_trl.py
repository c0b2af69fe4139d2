"""Each loss of pairs, answers and scores beside TRL's trainers on the same batches: values and gradient norms.

TRL is installed without its dependencies into a directory of its own: what it needs is here, in the same versions.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.unit.tiny_model import SIZES
from toolkit.config.program_keys import keys_of
from toolkit.config.schema import PreferenceConfig, PreferenceLoss
from toolkit.data.loader import collate
from toolkit.models import classifier
from toolkit.models.loss import LossHead
from toolkit.models.per_sample import answer_log_probabilities
from toolkit.models.record import record_of
from toolkit.tasks import preference, reward

TRL = "1.16.0"
PAIRS = 4
# name -> TRL's trainer, its settings, ours where they are called otherwise, and how many pairs are in the batch.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], int]] = {
    "sigmoid": ("DPO", {"loss_type": ["sigmoid"], "beta": 0.3}, {}, PAIRS),
    "hinge": ("DPO", {"loss_type": ["hinge"], "beta": 0.05}, {}, PAIRS),
    "ipo": ("DPO", {"loss_type": ["ipo"], "beta": 0.2}, {}, PAIRS),
    "robust": ("DPO", {"loss_type": ["robust"], "beta": 0.3, "label_smoothing": 0.2}, {}, PAIRS),
    "kto": ("KTO", {"beta": 0.4, "desirable_weight": 1.3, "undesirable_weight": 0.7}, {}, PAIRS),
    "cpo": ("CPO", {"beta": 0.1, "cpo_alpha": 0.0, "label_smoothing": 0.1}, {}, PAIRS),
    # The cross entropy is a mean over the batch's tokens there, and over each answer's here: the same of one pair.
    "cpo-one": ("CPO", {"beta": 0.1, "cpo_alpha": 0.6}, {"loss": "cpo", "sft_weight": 0.6}, 1),
    "simpo": (
        "CPO",
        {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.4, "cpo_alpha": 0.0},
        {"beta": 2.0, "gamma": 1.4},
        PAIRS,
    ),
    "orpo": ("ORPO", {"beta": 0.25}, {}, PAIRS),
    "reward": ("Reward", {"center_rewards_coefficient": 0.05}, {}, PAIRS),
    # What TRL 1.16 does not read: the pages and `toolkit import-config` say so.
    "smoothed": ("DPO", {"loss_type": ["sigmoid"], "beta": 0.3, "label_smoothing": 0.2}, {"loss": "sigmoid"}, PAIRS),
}


@pytest.fixture(scope="session")
def trl_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with TRL; skipped where it cannot be installed."""
    folder = tmp_path_factory.mktemp("trl")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), f"trl=={TRL}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip(f"trl {TRL} cannot be installed here: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    return folder


def saved_models(folder: Path) -> dict[str, str]:
    """Save a reference, the same with other weights, and a classifier, with a tokenizer; return their directories."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**{**SIZES, "pad_token_id": 0}, max_position_embeddings=128)
    model: Any = transformers.Qwen3ForCausalLM(config)
    letters = {letter: place for place, letter in enumerate("_ abcdef")}
    backend = Tokenizer(models.WordLevel(letters, unk_token="_"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="_", eos_token=" ", bos_token=" "
    )
    for name in ("model", "reference"):  # in this order K is above 0
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        with torch.no_grad():
            for one in model.parameters():
                one.add_(torch.randn_like(one), alpha=0.03)
    config.num_labels = 1
    transformers.Qwen3ForSequenceClassification(config).save_pretrained(folder / "scorer")
    return {name: str(folder / name) for name in ("reference", "model", "scorer")}


def some_pairs() -> list[dict[str, Any]]:
    """Return pairs of token ids of several lengths, with margins."""
    draw = torch.Generator().manual_seed(3)

    def some(count: int) -> list[int]:
        return torch.randint(8, 128, (count,), generator=draw).tolist()

    return [
        {"prompt_ids": some(prompt), "chosen_ids": some(chosen), "rejected_ids": some(rejected), "margin": margin}
        for prompt, chosen, rejected, margin in ((5, 4, 7, 0.0), (3, 9, 2, 0.5), (8, 1, 3, 1.0), (2, 6, 6, 0.0))
    ]


def some_answers(pairs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return good and bad answers in turns, each with the one before as another's answer."""
    own = [pair["rejected_ids" if place % 2 else "chosen_ids"] for place, pair in enumerate(pairs)]
    return [
        {
            "prompt_ids": pair["prompt_ids"],
            "completion_ids": own[n],
            "KL_completion_ids": own[n - 1],
            "label": n % 2 == 0,
        }
        for n, pair in enumerate(pairs)
    ]


def batch_of(rows: list[tuple[list[int], list[int]]]) -> dict[str, torch.Tensor]:
    """Return a micro-batch of prompts and answers."""
    import numpy as np

    samples = [
        (np.array([*prompt, *answer]), np.array([False] * len(prompt) + [True] * len(answer)))
        for prompt, answer in rows
    ]
    return collate([[sample] for sample in samples], 0)


def of_answers(folders: dict[str, str], rows: list[tuple[list[int], list[int]]]) -> tuple[Any, preference.Answers]:
    """Return the model, and its log-probabilities of answers with the reference's."""
    found: list[Any] = []
    for name in ("reference", "model"):
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(folders[name], dtype=torch.float32)
        record_of(model).loss_head = LossHead()
        with torch.set_grad_enabled(name == "model"):
            found.append((model, *answer_log_probabilities(model, batch_of(rows))))
    (_, reference, _), (model, values, tokens) = found
    return model, preference.Answers(values, tokens, reference)


def ours(name: str, folders: dict[str, str], pairs: list[dict[str, Any]]) -> dict[str, float]:
    """Return our loss of a case, its gradient norm, and K."""
    kind, settings, own, most = CASES[name]
    pairs, more = pairs[:most], {}
    sides = [[(pair["prompt_ids"], pair[f"{side}_ids"]) for pair in pairs] for side in ("chosen", "rejected")]
    read = {"beta", "label_smoothing", "desirable_weight", "undesirable_weight"}
    same = {key: value for key, value in settings.items() if key in read}
    if kind != "Reward":
        same["loss"] = PreferenceLoss[own.get("loss", name)]
    config = PreferenceConfig(**{**own, **same})
    if kind == "Reward":
        model: Any = transformers.AutoModelForSequenceClassification.from_pretrained(folders["scorer"])
        chosen, rejected = (classifier.scores(model, batch_of(rows))[:, 0] for rows in sides)
        margins = torch.tensor([pair["margin"] for pair in pairs])
        losses = reward.reward_losses(chosen, rejected, margins, settings["center_rewards_coefficient"])
    elif kind == "KTO":
        answers = some_answers(pairs)
        _, others = of_answers(folders, [(one["prompt_ids"], one["KL_completion_ids"]) for one in answers])
        divergence = (others.log_probabilities - others.reference).mean().clamp(min=0).detach()
        more["kl"] = float(divergence)
        model, found = of_answers(folders, [(one["prompt_ids"], one["completion_ids"]) for one in answers])
        is_good = torch.tensor([one["label"] for one in answers])
        losses = preference.answer_losses(config, found.log_probabilities - found.reference, is_good, divergence)
    else:
        model, found = of_answers(folders, [*sides[0], *sides[1]])
        halves = [preference.Answers(*(one[part] for one in found)) for part in (slice(most), slice(most, None))]
        losses = preference.pair_losses(config, *halves).losses
    losses.mean().backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
    return {"loss": float(losses.mean().detach()), "norm": float(norm), **more}


def test_losses_and_gradients_are_those_of_trl(trl_path: Path, tmp_path: Path) -> None:
    pairs = some_pairs()
    spec = {
        **saved_models(tmp_path),
        "cases": {name: (kind, settings, most) for name, (kind, settings, _, most) in CASES.items()},
        "pairs": pairs,
        "answers": some_answers(pairs),
        "output": str(tmp_path / "found.json"),
    }
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    command = [sys.executable, str(Path(__file__).with_name("trl_worker.py")), str(tmp_path / "spec.json")]
    environ = {**os.environ, "PYTHONPATH": str(trl_path), "TRL_EXPERIMENTAL_SILENCE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=300)
    assert done.returncode == 0, done.stderr[-6000:]
    theirs = json.loads((tmp_path / "found.json").read_text())
    versions = theirs.pop("versions")
    assert versions["trl"] == TRL
    known, arguments = keys_of("hf"), theirs.pop("arguments")
    assert "center_rewards_coefficient" in arguments and arguments.keys() <= known.keys()
    defaults = {name: known[name].default for name in arguments if name != "max_length"}  # given by RewardConfig itself
    assert defaults == {name: value for name, value in arguments.items() if name != "max_length"}
    folders = {name: spec[name] for name in ("reference", "model", "scorer")}
    differences = {}
    for name in CASES:
        found = ours(name, folders, pairs)
        assert found.keys() == theirs[name].keys()
        differences[name] = max(abs(found[key] - theirs[name][key]) / abs(theirs[name][key]) for key in found)
    print(json.dumps({"versions": versions, "differences": differences}))
    assert theirs["kto"]["kl"] > 0.1, "what is at least 0 must not be 0 to be compared"
    assert theirs["smoothed"] == theirs["sigmoid"], "TRL reads label_smoothing with its sigmoid loss now"
    assert differences.pop("smoothed") > 0.01
    assert max(differences.values()) < 1e-5, differences
