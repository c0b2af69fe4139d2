"""Answers of a model: batched, padded on the left, with a KV cache, greedy or sampled by a seed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from toolkit.config import context_length
from toolkit.messages import ConfigError, ModelError, RowError
from toolkit.models import chat, probe
from toolkit.models.record import record_of
from toolkit.sample_types import Message


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How tokens are sampled, and the longest answer."""

    max_new_tokens: int = 64
    """Longest answer in tokens, its end token included."""
    temperature: float = 0.0
    """0: greedy decoding; else logits are divided by it, and tokens are sampled."""
    top_p: float = 1.0
    """Sample from the likeliest tokens with this probability together."""
    top_k: int = 0
    """Sample from so many of the likeliest tokens; 0: from all."""
    seed: int = 0
    """The same seed and batch give the same answers."""


def generate(
    model: PreTrainedModel,
    encoder: chat.AnyChatEncoder,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    device: torch.device,
    *,
    in_step: bool = False,
    keeps_end: bool = False,
    **options: Any,
) -> list[list[int]]:
    """Return the new tokens of each prompt, up to the end token and without it; the prompts are one batch.

    Args:
        model: the model, `engine.module` included; left in its mode.
        encoder: its `stop_ids` end an answer.
        prompts: ids of `encoder.prompt`, of any lengths; too long ones are a ModelError.
        device: where the model computes; under ZeRO-3 with offload its parameters are elsewhere.
        in_step: needed for a partitioned model: a collective in which ranks continue until the last answer ends.
        keeps_end: return the end token too, where an answer has one.
        **options: for `transformers`' generate, such as `streamer`.
    """
    longest = max(map(len, prompts))
    check_length(max_context_tokens(model), longest, sampling.max_new_tokens)
    tokenizer = encoder.tokenizer
    pad = int(tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id)
    ids = torch.tensor([[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    # `generate` of transformers (5.23) counts positions from 0 also for a model that counts them from another number.
    if first := record_of(model).first_position:
        options["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0) + first
    drawn: dict[str, Any] = {}
    if sampling.temperature > 0:  # with greedy decoding transformers would warn of these
        drawn = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    original_config = model.generation_config
    # Replaced: what a passed config omits transformers would take from the model's.
    model.generation_config = GenerationConfig(
        max_new_tokens=sampling.max_new_tokens,
        do_sample=bool(drawn),
        use_cache=True,
        eos_token_id=encoder.stop_ids,
        pad_token_id=pad,
        **drawn,
    )
    try:
        without_compiling = torch.compiler.set_stance("force_eager")  # each new token would be compiled again
        with (
            probe.evaluating(model),
            without_compiling,
            torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type),
        ):
            torch.manual_seed(sampling.seed)
            output = model.generate(input_ids=ids, attention_mask=mask, synced_gpus=in_step, **options)
    finally:
        model.generation_config = original_config
    stops, num_ends = set(encoder.stop_ids), 1 if keeps_end else 0
    answers = output[:, longest:].tolist()  # behind the end token all is padding
    return [row[: len(until_stop(row, stops)) + num_ends] for row in answers]


def answer(
    model: PreTrainedModel,
    encoder: chat.AnyChatEncoder,
    question: str,
    max_new_tokens: int,
    device: torch.device,
    *,
    in_step: bool,
) -> str:
    """Return the greedy answer to a question; ranks may differ by rounding. `in_step`: see `generate`."""
    prompt = encoder.prompt([{"role": "user", "content": question}])
    [ids] = generate(model, encoder, [prompt], Sampling(max_new_tokens=max_new_tokens), device, in_step=in_step)
    return decode_answer(encoder, ids)


def decode_answer(encoder: chat.AnyChatEncoder, ids: Sequence[int]) -> str:
    """Return generated token ids as text, without special tokens and surrounding white space."""
    return str(encoder.tokenizer.decode(list(ids), skip_special_tokens=True)).strip()


def check_length(most: float, prompt_tokens: int, max_new_tokens: int) -> None:
    """Raise a ModelError if prompt and answer could be longer than `most`, the model's `max_context_tokens`."""
    if prompt_tokens + max_new_tokens > most:
        raise ModelError(
            "a prompt of {prompt} tokens and max_new_tokens = {new} are more than the {most} positions that the model "
            "has. Shorten the prompt, or set max_new_tokens to {left} at most.",
            prompt=prompt_tokens,
            new=max_new_tokens,
            most=most,
            left=max(most - prompt_tokens, 0),
        )


def max_context_tokens(model: PreTrainedModel) -> float:
    """Return how many tokens prompt and answer may have together: the model's positions, inf without a limit."""
    return context_length.position_limit(model.config.to_dict()) or math.inf


def until_stop(ids: list[int], stops: set[int]) -> list[int]:
    """Return the token ids of an answer up to its first stop token, which is left out."""
    return ids[: next((index for index, token in enumerate(ids) if token in stops), len(ids))]


def with_system(messages: Sequence[Message], system: str) -> list[Message]:
    """Return a conversation with `system` as its system message, unless that is "" or the conversation has one."""
    if not system or (messages and messages[0]["role"] == "system"):
        return list(messages)
    return [{"role": "system", "content": system}, *messages]


def has_system_role(encoder: chat.AnyChatEncoder) -> bool:
    """Whether a chat format has a system message: it changes the prompt."""
    asked = [{"role": "user", "content": "?"}]
    try:
        return encoder.prompt(with_system(asked, "!")) != encoder.prompt(asked)
    except RowError:
        return False


def check_system(encoder: chat.AnyChatEncoder, system: str) -> None:
    """Raise ConfigError for a system message that the chat format does not support."""
    if system and not has_system_role(encoder):
        family = getattr(encoder.tokenizer, "family", None)
        raise ConfigError(
            "the chat format of {name} has no system message: the model would not see it. Leave it out, or put it "
            "into the question.",
            name=family.value if family else encoder.tokenizer.name_or_path,
        )
