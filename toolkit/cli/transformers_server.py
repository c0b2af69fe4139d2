"""transformers' server with one model under a short name; `toolkit serve` becomes this.

python -m toolkit.cli.transformers_server NAME serve FOLDER [--option-of-the-server …]

transformers 5.23 takes the path of a local model for its name, and its GET /v1/models lists the Hugging Face cache
(an error where there is none), not the model that is served.
"""

import sys
import time
from typing import Any


def main(words: list[str]) -> None:
    """Serve.

    Args:
        words: the name, and the arguments of transformers' command line.
    """
    from transformers.cli.serving.model_manager import ModelManager
    from transformers.cli.serving.utils import BaseHandler
    from transformers.cli.transformers import app

    from toolkit.cli import server_bounds
    from toolkit.models import template_bounds

    server_bounds.install()
    template_bounds.install()
    keep_text()
    name, folder = words[0], words[2]
    listed = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "toolkit"}
    by_path = BaseHandler._resolve_model

    def models(cache_dir: str | None = None) -> list[dict[str, Any]]:
        return [listed]

    def by_name(self: BaseHandler, body: dict[str, Any]) -> Any:
        if body.get("model") == name:
            body["model"] = folder
        return by_path(self, body)

    ModelManager.get_gen_models = staticmethod(models)
    BaseHandler._resolve_model = by_name
    app(words[1:])


def keep_text() -> None:
    """Let control strings in messages stay text in this process, as in training (`toolkit.models.shield`).

    transformers (5.23) can keep them so if it is asked to; without the names of the control tokens it would also take
    `<think>` and `<tool_call>` in an earlier answer for text, as they stand in the template.
    """
    from transformers import PreTrainedTokenizerBase

    from toolkit.models.chat_template import turn_marks_of

    apply = PreTrainedTokenizerBase.apply_chat_template

    def with_text(self: Any, conversation: Any, **options: Any) -> Any:
        if options.get("tokenize", True) and not options.get("return_assistant_tokens_mask"):
            if self.chat_control_tokens is None:
                self.chat_control_tokens = turn_marks_of(self)
            options["sanitize_control_tokens"] = True
        return apply(self, conversation, **options)

    PreTrainedTokenizerBase.apply_chat_template = with_text


if __name__ == "__main__":
    main(sys.argv[1:])
