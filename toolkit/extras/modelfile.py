"""Ollama's Modelfile for an export: its template in Go's syntax, system message, stop tokens, context, sampling.

Ollama 0.30 and newer use the chat template in the GGUF file; older ones know Go's template syntax alone, and guess a
template that looks similar. A template that only writes texts between the messages, as most do, is written here in
Go's syntax, after it was compared with the original on conversations. For others, Ollama 0.30 is required.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from toolkit.messages import ConfigError, tr
from toolkit.sample_types import Message

CONVERTS = (
    *("LlamaForCausalLM", "MixtralForCausalLM", "GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM"),
    *("Phi3ForCausalLM", "Qwen2ForCausalLM", "Olmo3ForCausalLM", "CohereForCausalLM", "GptOssForCausalLM"),
    *("DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM", "Lfm2ForCausalLM", "Qwen3NextForCausalLM"),
)
"""Architectures of text that Ollama imports from safetensors without llama.cpp (0.33, convert/convert.go)."""
JINJA_SINCE = "0.30.0"
"""Ollama's version that first used a GGUF file's own chat template."""
_SAMPLING = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"}
_SAMPLING |= {"repetition_penalty": "repeat_penalty"}
"""Key of generation_config.json -> Ollama's."""
_QUOTES = '"""'

Render = Callable[[Sequence[Message]], str]
"""Return the prompt of a conversation as text."""


@dataclass(frozen=True, slots=True)
class Turns:
    """The texts that a template writes before and after messages."""

    start: str
    before: Mapping[str, str]
    """By role."""
    after: Mapping[str, str]
    prompt: str
    """What asks for an answer."""
    system: str
    """The system message of a conversation that has none; "" if the template adds none."""

    def text(self, messages: Sequence[Message]) -> str:
        """Return the prompt of a conversation."""
        if self.system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system}, *messages]
        turns = (self.before[m["role"]] + m["content"] + self.after[m["role"]] for m in messages)
        return self.start + "".join(turns) + self.prompt

    def go_template(self, bos: str) -> str:
        """Return the template in Go's syntax, for Ollama. `bos`: a text at its start that the server adds itself.

        It is a loop over the messages: {{ range .Messages }}{{ if eq .Role "system" }}before{{ .Content }}after
        {{ else if eq .Role "user" }}...{{ end }}{{ end }}.
        """
        parts = []
        for number, role in enumerate(self.before):
            keyword = "else if" if number else "if"
            condition = "{{ " + f'{keyword} eq .Role "{role}"' + " }}"
            parts.append(condition + self.before[role] + "{{ .Content }}" + self.after[role])
        turns = "{{ range .Messages }}" + "".join(parts) + "{{ end }}{{ end }}"
        return self.start.removeprefix(bos) + turns + self.prompt


def find_turns(render: Render, bos: str) -> Turns | None:
    """Return the texts between messages, None if the template does more than to write such texts. `bos`: the text of
    the token that begins a prompt, "" if there is none.

    They are read from two rendered conversations; each way to share them out among the messages is tried, and the first
    that gives the prompts of all conversations is right.
    """
    conversations = list(_conversations())
    try:
        with_system, without = render(conversations[0]), render(conversations[1])
        expected = [render(messages) for messages in conversations[2:]]
    except Exception:  # a template rejects what it has no place for, such as a system message
        return None
    system = _pieces(with_system, conversations[0])
    plain = _pieces(without, conversations[1])
    if system is None or plain is None:
        return None
    # The token is put back below: it stands at the start, whether a prompt has a system message or not.
    if system[0].startswith(bos) and plain[0].startswith(bos):
        system[0], plain[0] = system[0].removeprefix(bos), plain[0].removeprefix(bos)
    else:
        bos = ""
    for candidate in _candidates(system, plain):
        turns = replace(candidate, start=bos + candidate.start)
        texts = [turns.text(messages) for messages in conversations]
        is_right = texts == [with_system, without, *expected]
        if is_right and not any("{{" in text for text in _texts(turns)):  # {{ would begin Go's syntax
            return turns
    return None


def _conversations() -> Iterator[list[Message]]:
    """Yield six conversations: a template's texts are looked for in the first two, with and without a system message,
    and checked on all. Blank lines and Chinese must come out as they are.
    """
    first: list[Message] = [{"role": "user", "content": "Why 1?"}, {"role": "assistant", "content": "So 1."}]
    second: list[Message] = [
        {"role": "user", "content": "Why 2?\n\n为什么？"},
        {"role": "assistant", "content": "So 2."},
    ]
    third: list[Message] = [{"role": "user", "content": "Why 3?"}]
    system: list[Message] = [{"role": "system", "content": "Be brief. 简短。"}]
    yield [*system, *first, *third]
    yield [*first, *third]
    yield third
    yield [*system, *third]
    yield [*first, *second, *third]
    yield [*system, *first, *second, *third]


def _pieces(text: str, messages: Sequence[Message]) -> list[str] | None:
    """Return the texts around a conversation's messages, one more than messages: before the first, between two, after
    the last. None if a message is not in its place.
    """
    pieces = []
    for message in messages:
        before, found, text = text.partition(message["content"])
        if not found:
            return None
        pieces.append(before)
    return [*pieces, text]


def _candidates(system: Sequence[str], plain: Sequence[str]) -> Iterator[Turns]:
    """Yield the ways to share out the texts that fit, the likeliest first. `system`, `plain`: the pieces, as `_pieces`
    returns them, of a prompt of system message, question, answer and question, and of one without system message.

    A piece between two messages ends the one and begins the other; where, only a comparison tells. Of ChatML plain[0]
    is <|im_start|>user, and system[1] is <|im_end|><|im_start|>user: what both end with begins a question, the rest of
    system[1] ends the system message.
    """
    for length in range(len(plain[0]) + 1):  # of the text at the prompt's start; what follows it begins a question
        start, user = plain[0][:length], plain[0][length:]
        if system[0].startswith(start) and system[1].endswith(user) and plain[2].endswith(user):
            yield _turns(start, system, plain, user, "")
    # Or the template writes a system message of its own where there is none: plain[0] is then what is written before a
    # system message, that one, and what is written behind it.
    before_system, behind_system, behind_answer = system[0], system[1], plain[2]
    if plain[0].startswith(before_system) and plain[0].endswith(behind_system):
        default_system = plain[0][len(before_system) : len(plain[0]) - len(behind_system)]
        # The beginning that both have in common ends a message, the rest begins a question.
        for length in range(min(len(behind_system), len(behind_answer)), -1, -1):
            if behind_system[:length] == behind_answer[:length]:
                yield _turns("", system, plain, behind_system[length:], default_system)


def _turns(start: str, system: Sequence[str], plain: Sequence[str], user: str, default_system: str) -> Turns:
    """Return the texts when `start` is written first, `user` before a question, `default_system` as system message."""
    before = {"system": system[0].removeprefix(start), "user": user, "assistant": plain[1]}
    after = {"system": system[1].removesuffix(user), "user": "", "assistant": plain[2].removesuffix(user)}
    return Turns(start, before, after, plain[3], default_system)


def _texts(turns: Turns) -> list[str]:
    return [turns.start, turns.prompt, turns.system, *turns.before.values(), *turns.after.values()]


def modelfile(
    source: str,
    turns: Turns | None,
    *,
    bos: str,
    system: str,
    context: int,
    stops: Sequence[str],
    sampling: Mapping[str, Any],
) -> str:
    """Return a Modelfile.

    Args:
        source: the GGUF file or model directory, as Ollama finds it from the Modelfile.
        turns: those of the chat template; None leaves it to the one in the GGUF file.
        bos: the text of the token that the server puts in front of a prompt by itself; "" none.
        system: the system message of conversations that bring none; "" the template's.
        context: the context window in tokens.
        stops: tokens that end an answer.
        sampling: generation_config.json.
    """
    own_system = system or (turns.system if turns else "")
    if _QUOTES in own_system or own_system.endswith('"'):
        raise ConfigError(tr('the system message holds """ or ends with ", which a Modelfile cannot hold.'))
    lines = [f"FROM {source}"]
    if turns and not any(_QUOTES in text for text in _texts(turns)):
        lines.append(f"TEMPLATE {_QUOTES}{turns.go_template(bos)}{_QUOTES}")
    else:
        lines.append(f"REQUIRES {JINJA_SINCE}")
    lines += [f"SYSTEM {_QUOTES}{own_system}{_QUOTES}"] if own_system else []
    lines.append(f"PARAMETER num_ctx {context}")
    lines += [f'PARAMETER stop "{stop}"' for stop in stops if stop and '"' not in stop]  # a text cannot hold quotes
    if sampling.get("do_sample"):
        values = ((name, sampling.get(key)) for key, name in _SAMPLING.items())
        lines += [f"PARAMETER {name} {value}" for name, value in values if isinstance(value, (int, float))]
    return "\n".join(lines) + "\n"
