"""A chat over a pipe: `toolkit board` starts it to load a model, whose memory is free again at its end.

python -m toolkit.jobs.chat PATH LANGUAGE

Each line of stdin is a question or a command of `toolkit chat`, as JSON. Each line of stdout is an object: `text` of an
answer as it comes, `note`, and `end`, after the model has been loaded and after each answer. SIGINT stops an answer.
"""

import io
import json
import os
import signal
import sys
from contextlib import redirect_stderr, redirect_stdout, suppress
from typing import TextIO

from toolkit.messages import ToolkitError, set_language


class Lines(io.TextIOBase):
    """Writes what is printed as objects, a line each."""

    def __init__(self, file: TextIO, name: str) -> None:
        self.file, self.name = file, name

    def write(self, text: str) -> int:
        """Write a text."""
        print(json.dumps({self.name: text}), file=self.file, flush=True)
        return len(text)


def main(path: str) -> None:
    """Load a model and answer the lines of stdin until it ends, as the module's docstring describes. The objects go to
    a copy of stdout; stdout itself becomes stderr, as libraries print there.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # except during an answer
    pipe = os.fdopen(os.dup(1), "w", encoding="utf-8")  # the board's end of stdout
    os.dup2(2, 1)  # what libraries print is no answer
    ends, notes = Lines(pipe, "end"), Lines(pipe, "note")  # objects of these names
    try:
        from toolkit.evaluate.chat_session import COMMANDS, ChatSession
        from toolkit.evaluate.generate import Sampling
        from toolkit.export.load import load_any

        loaded = load_any(path)
    except ToolkitError as error:
        notes.write(str(error))
        return
    session = ChatSession(loaded.model, loaded.encoder, Sampling(max_new_tokens=512), True, " ".join(COMMANDS))
    ends.write("")
    with redirect_stdout(Lines(pipe, "text")), redirect_stderr(notes):
        while line := sys.stdin.readline():
            with suppress(KeyboardInterrupt):  # of an answer that had just ended
                signal.signal(signal.SIGINT, signal.default_int_handler)
                if not session.handle(json.loads(line)):
                    return
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            ends.write("")


if __name__ == "__main__":
    set_language(sys.argv[2])
    main(sys.argv[1])
