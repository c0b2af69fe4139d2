"""Ask an exported model a question (greedy).

toolkit generate model.path=DIR prompt="…" [max_new_tokens=64]

  model.path=DIR        a folder with a model in transformers' layout, such as runs/NAME/export
  prompt=TEXT           the question
  max_new_tokens=64     longest answer in tokens
"""

from toolkit.cli.compose import positive_int
from toolkit.errors import ConfigError
from toolkit.messages import tr

ARGUMENTS = ("model.path", "prompt", "max_new_tokens")


def run(words: list[str]) -> int:
    """Answer."""
    given = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name not in ARGUMENTS:
            raise ConfigError(
                tr(
                    "unknown argument '{word}'. Known: {known}.",
                    word=word,
                    known=", ".join(ARGUMENTS),
                )
            )
        given[name] = value
    for name in ("model.path", "prompt"):
        if not given.get(name):
            raise ConfigError(
                tr(
                    '{name} is missing: toolkit generate model.path=DIR prompt="…"',
                    name=name,
                )
            )
    max_new_tokens = positive_int(given, "max_new_tokens") or 64
    from toolkit.models.folder import read_config

    read_config(given["model.path"])
    print(_answer(given["model.path"], given["prompt"], max_new_tokens))
    return 0


def _answer(path: str, prompt: str, max_new_tokens: int) -> str:
    import torch
    import transformers

    from toolkit.config.schema import Dtype, ModelConfig
    from toolkit.evaluate.generate import answer
    from toolkit.models.build import build_model
    from toolkit.models.tokenizer import load_tokenizer

    transformers.utils.logging.disable_progress_bar()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = load_tokenizer(path)
    dtype = Dtype.bf16 if device.type == "cuda" else Dtype.fp32
    model = build_model(ModelConfig(path=path), dtype, tokenizer, seed=0).to(device)
    return answer(model, tokenizer, prompt, max_new_tokens, device)
