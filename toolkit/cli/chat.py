"""Talk to a model in the terminal.

toolkit chat PATH [adapter=DIR] [system="…"] [max_new_tokens=512] [temperature=0] [top_p=1] [top_k=0] [seed=0]

  PATH, adapter, model.family, temperature, top_p, top_k, seed    as for `toolkit generate`
  system=TEXT           what the model is told before the first question
  max_new_tokens=512    longest answer in tokens

The answer appears as it is made; Ctrl-C stops it, and keeps what was said. Questions and answers so far are part of
each prompt; when they get longer than the model's positions, the oldest leave, and that is said. Commands:

  /reset           forget everything that was said
  /undo            forget the last question and its answer
  /system TEXT     from now on with this system message; without TEXT, with none
  /help            these commands
  /exit            the end, as Ctrl-D is

A question may not begin with `/`; put a blank before it. If stdin is no terminal, each of its lines is a question.
"""

import sys

from toolkit.arguments import named_arguments
from toolkit.cli.sampling import MODEL, SAMPLING, check_model, sampling_arguments

USAGE = "toolkit chat PATH"


def run(words: list[str]) -> int:
    """Talk."""
    given = named_arguments(words, required=(), optional=(*MODEL, "system", *SAMPLING), usage=USAGE, bare="model.path")
    check_model(given, USAGE)
    sampling = sampling_arguments(given, max_new_tokens=512)
    path, family, adapter = (given.get(name, "") for name in MODEL)
    from toolkit.evaluate.chat import ChatSession
    from toolkit.export.load import load_any

    loaded = load_any(path, adapter=adapter, family=family or "auto")
    help_text = (__doc__ or "").partition("Commands:\n\n")[2].rstrip()
    session = ChatSession(loaded.model, loaded.encoder, sampling, sys.stdin.isatty(), help_text)
    session.set_system(given.get("system", ""))
    session.talk()
    return 0
