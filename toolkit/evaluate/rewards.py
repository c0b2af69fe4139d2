"""Rewards of generated answers, by a rule, a reward model or a function; and preference pairs of the answers."""

import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from statistics import fmean
from typing import Any

from toolkit.disk import write_atomically
from toolkit.distributed.exits import run_guarded
from toolkit.messages import ConfigError, DataError, reading, tr

RULES = ("exact_match", "json", "regex", "length")
Row = dict[str, Any]
"""A line of `toolkit generate`."""
Score = Callable[[Sequence[Row]], list[float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reward:
    """How rewards of answers are computed."""

    kind: str
    """A rule, the directory of a reward model, or module:function."""
    pattern: str = ""
    """regex: the reward is 1 if it matches in the answer, else 0."""
    least: int = 0
    """length: smallest number of characters with a reward of 0; each character less subtracts 1."""
    most: int = 0
    """length: largest number of characters with a reward of 0; 0: no limit."""
    allow_code: bool = False
    """Whether a function may be imported."""

    @property
    def is_function(self) -> bool:
        """Whether the kind is module:function; a directory's name may hold a colon too."""
        return ":" in self.kind and not Path(self.kind).exists()

    def check(self) -> None:
        """Raise ConfigError if this reward cannot be computed."""
        if self.is_function and not self.allow_code:
            raise ConfigError(
                "reward = {kind} runs code of this machine. If you trust it, add allow_code=true.", kind=self.kind
            )
        if not self.is_function and self.kind not in RULES and not (Path(self.kind) / "config.json").is_file():
            raise ConfigError(
                "reward = {kind} is neither {known}, nor the directory of a reward model, nor module:function.",
                kind=self.kind,
                known=", ".join(RULES),
            )
        for name, rule in (("pattern", "regex"), ("least", "length"), ("most", "length")):
            if getattr(self, name) and self.kind != rule:
                raise ConfigError("{name} has an effect with reward={rule} only. Remove it.", name=name, rule=rule)
        if self.kind == "regex":
            try:
                re.compile(self.pattern or "(")  # an empty pattern, which matches everything, is an error as "(" is
            except re.error as error:
                reason = error if self.pattern else tr("it is empty")
                raise ConfigError(
                    "pattern = {pattern} is no regular expression: {reason}.", pattern=self.pattern, reason=reason
                ) from None
        if (self.kind == "length" and not (self.least or self.most)) or 0 < self.most < self.least:
            raise ConfigError(tr("reward=length needs least=N or most=N, and least no larger than most."))

    def score(self) -> Score:
        """Return a function that computes the rewards of rows with answers; ConfigError if it cannot be imported."""
        if self.kind in RULES:
            return lambda rows: [self._rule_reward(row) for row in rows]
        if self.is_function:
            module, _, name = self.kind.partition(":")
            try:
                function = getattr(import_module(module), name)
            except (ImportError, AttributeError) as error:
                raise ConfigError("reward = {kind} cannot be used: {reason}.", kind=self.kind, reason=error) from error
            return lambda rows: [float(function(row)) for row in rows]
        return _reward_model(Path(self.kind))

    def _rule_reward(self, row: Row) -> float:
        """Return an answer's reward by a rule: minus the characters beyond the limits, or 1 for a match, else 0."""
        answer = str(row["answer"])
        if self.kind == "length":
            longer = len(answer) - self.most if self.most else 0
            return -float(max(self.least - len(answer), longer, 0))
        if self.kind == "regex":
            return float(re.search(self.pattern, answer) is not None)
        if self.kind == "json":
            try:
                json.loads(answer)
            except ValueError:
                return 0.0
            return 1.0
        if row.get("reference") is None:
            raise DataError(
                "{where}: reward=exact_match needs the right answer in each row of the prompts (reference). Add it.",
                where=row["where"],
            )
        return float(answer.strip() == str(row["reference"]).strip())


def _reward_model(folder: Path) -> Score:
    """Return the function that scores rows by a reward model."""
    import torch
    from transformers import AutoModelForSequenceClassification

    from toolkit.distributed import accelerator
    from toolkit.models import chat, tokenizer_files

    encoder = chat.chat_encoder(tokenizer_files.load_tokenizer(str(folder)))
    device = accelerator.device_alone()
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1).to(device).eval()

    @torch.no_grad()
    def score(rows: Sequence[Row]) -> list[float]:
        scores = []
        for row in rows:  # one by one, as models treat padding in different ways
            conversation = [*row["messages"], {"role": "assistant", "content": row["answer"]}]
            ids, _ = encoder.encode(conversation, row.get("tools"))
            scores.append(float(model(input_ids=torch.tensor([ids], device=device)).logits[0, 0]))
        return scores

    return score


def with_rewards(rows: Iterable[Row], reward: Reward) -> list[Row]:
    """Return the rows that have an answer, each with the key `reward` added."""
    answered = [row for row in rows if "error" not in row]
    rewards = reward.score()(answered)
    if wrong := [row["where"] for row, value in zip(answered, rewards, strict=True) if math.isnan(value)]:
        raise DataError("{where}: the reward is no number (NaN).", where=wrong[0])
    return [{**row, "reward": value} for row, value in zip(answered, rewards, strict=True)]


def best_and_worst_pairs(rows: Sequence[Row]) -> tuple[list[Row], dict[str, Any]]:
    """Return a preference pair of each prompt's best and worst answer, unless their rewards are equal, and figures of
    all rows. `rows`: of `with_rewards`. Empty answers, from which nothing can be learned, are skipped.
    """
    prompts, pairs = _by_prompt(rows), []
    for samples in prompts.values():
        usable = [row for row in samples if row["answer"]]
        best = max(usable, key=lambda row: row["reward"], default=None)
        worst = min(usable, key=lambda row: row["reward"], default=None)
        if best is None or worst is None or best["reward"] == worst["reward"]:
            continue
        pair = {"messages": best["messages"], **({"tools": best["tools"]} if best.get("tools") else {})}
        for name, row in (("chosen", best), ("rejected", worst)):
            pair[name] = {"role": "assistant", "content": row["answer"]}
            pair[f"{name}_reward"] = row["reward"]
        pairs.append(pair)
    return pairs, _figures(prompts, len(pairs))


def best_answers(rows: Sequence[Row], least: float) -> tuple[list[Row], dict[str, Any]]:
    """Return each prompt's conversation with its best answer, if its reward is `least` or more; and figures."""
    prompts, conversations = _by_prompt(rows), []
    for samples in prompts.values():
        best = max((row for row in samples if row["answer"]), key=lambda row: row["reward"], default=None)
        if best is not None and best["reward"] >= least:
            messages = [*best["messages"], {"role": "assistant", "content": best["answer"]}]
            conversations.append({"messages": messages, **({"tools": best["tools"]} if best.get("tools") else {})})
    return conversations, _figures(prompts, len(conversations))


def _by_prompt(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows of each prompt, by file:line of the prompt."""
    prompts: dict[str, list[Row]] = {}
    for row in rows:
        prompts.setdefault(row["where"], []).append(row)
    return prompts


def _figures(prompts: Mapping[str, list[Row]], learned: int) -> dict[str, Any]:
    """Return figures of all answers; of `learned` prompts a pair or an answer was taken, and the others are ties."""
    rewards = [[row["reward"] for row in samples] for samples in prompts.values()]
    return {
        "prompts": len(prompts),
        "samples": sum(map(len, rewards)),
        "mean_reward": fmean(value for values in rewards for value in values) if rewards else None,
        "best_reward": fmean(map(max, rewards)) if rewards else None,
        "pairs": learned,
        "ties": len(prompts) - learned,
    }


def read_lines(file: Path) -> list[Row]:
    """Return the rows (one dict per line) of a JSONL file."""
    with reading(file, DataError), file.open(encoding="utf-8") as lines:  # str.splitlines would cut texts at U+2028
        return [json.loads(line) for line in lines]


def write_lines(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows to a JSONL file, atomically."""
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_atomically(file, lines.encode("utf-8", "backslashreplace"))


def scoring_command(reward: Reward, samples: Path, output: Path) -> list[str]:
    """Return the command that scores a file in a separate process, which frees the GPU, and isolates imported code."""
    spec = {"reward": asdict(reward), "samples": str(samples), "output": str(output)}
    return [sys.executable, "-m", "toolkit.evaluate.rewards", json.dumps(spec)]


def _main(spec: Mapping[str, Any]) -> int:
    """Score a file as `scoring_command` describes it."""
    write_lines(Path(spec["output"]), with_rewards(read_lines(Path(spec["samples"])), Reward(**spec["reward"])))
    return 0


if __name__ == "__main__":
    sys.path.insert(0, "")
    sys.exit(run_guarded(lambda: _main(json.loads(sys.argv[1]))))
