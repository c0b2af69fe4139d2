#!/usr/bin/env python3
"""Time our encoding of conversations against the bare library's, and append to benchmarks/DATE-encode.json.

scripts/bench_encode.py recipe=chatglm model.tokenizer=DIR [model.family=chatglm3] 'data.sources=[{path: chat.jsonl}]'
Words of its own: repeats=20 rows=10000 output=FILE; everything else is as for `toolkit prepare`. Short files are
repeated until there are enough rows.
"""

import json
import sys
import time
from itertools import cycle, islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import results
from toolkit.arguments import parse, positive_int


def main() -> None:
    """Measure and write."""
    arguments = parse(sys.argv[1:], world_size=1, names=("repeats", "rows", "output"))
    cfg, given = arguments.loaded.cfg, arguments.values
    from benchmarks.encode import compare
    from toolkit.data.sources import read_conversations
    from toolkit.models.chat import load_chat_encoder
    from toolkit.models.chatglm.formats import FamilyChatEncoder

    output = given.get("output") or f"benchmarks/{time.strftime('%Y-%m-%d')}-encode.json"
    before = results.earlier(output)
    encoder = load_chat_encoder(cfg.model.tokenizer or cfg.model.path, family=cfg.model.family)
    if not isinstance(encoder, FamilyChatEncoder):
        sys.exit("only official ChatGLM tokenizers have a bare library to compare with")
    rows = [
        [dict(message) for message in found.messages] for found in read_conversations(cfg.data, Path(cfg.prepare.dir))
    ]
    conversations = list(islice(cycle(rows), positive_int(given, "rows") or 10000))
    result = compare(encoder, conversations, positive_int(given, "repeats") or 20)
    command = ["scripts/bench_encode.py", *sys.argv[1:]]
    print(json.dumps(results.append_result(output, before, command, result, 1), indent=2))


if __name__ == "__main__":
    main()
