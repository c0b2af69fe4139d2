"""Ask a model a question (greedy).

toolkit generate model.path=DIR prompt="…" [max_new_tokens=64] [model.family=chatglm2|chatglm3]

  model.path=DIR        an official ChatGLM folder or one in transformers' layout, such as runs/NAME/export
  prompt=TEXT           the question
  max_new_tokens=64     longest answer in tokens
  model.family=NAME     only where nothing in the folder tells ChatGLM2 from ChatGLM3
"""

from toolkit.cli.compose import named_arguments, positive_int
from toolkit.messages import printable


def run(words: list[str]) -> int:
    """Answer."""
    given = named_arguments(
        words,
        required=("model.path", "prompt"),
        optional=("max_new_tokens", "model.family"),
        usage='toolkit generate model.path=DIR prompt="…"',
    )
    max_new_tokens = positive_int(given, "max_new_tokens") or 64
    print(printable(_answer(given["model.path"], given.get("model.family", "auto"), given["prompt"], max_new_tokens)))
    return 0


def _answer(path: str, family: str, prompt: str, max_new_tokens: int) -> str:
    from toolkit.cli.usable import load_usable
    from toolkit.evaluate.generate import answer

    usable = load_usable(path, family=family)
    return answer(usable.model, usable.encoder, prompt, max_new_tokens, usable.model.device)
