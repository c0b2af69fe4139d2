"""What transformers alone does with a model directory: a program that imports nothing of this package.

python -I plain_transformers.py REQUEST.json ANSWER.json

REQUEST: `folder`; `prompts`: [{messages, tools, modes}]; `answers`: [{prompt, ids, tools}]; `rows`: {name: ids [R, L]}.
ANSWER: `prompts`: ids by mode, or what failed; `parsed`: messages by the parser of transformers' own server, null where
it has none; `ends`, `config`, `architecture`, `loading`; next to it logits.safetensors, [R, V] of each of `rows`.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from safetensors.torch import save_file


def prompt_ids(tokenizer: Any, asked: dict[str, Any]) -> list[Any]:
    """Return a conversation's prompt ids for each mode (options of the template), or a text that says what failed."""
    prompts: list[Any] = []
    for mode in asked["modes"]:
        try:
            options = {"tools": asked["tools"], "add_generation_prompt": True, "return_dict": False, **mode}
            prompts.append([int(token) for token in tokenizer.apply_chat_template(asked["messages"], **options)])
        except Exception as error:  # a template is a program
            prompts.append(f"{type(error).__name__}: {error}"[:500])
    return prompts


def parse(tokenizer: Any, config: Any, answers: list[dict[str, Any]]) -> list[Any] | None:
    """Return trained answers as the response parser of transformers' server reads them; None if there is no parser."""
    from transformers.cli.serving.utils import get_response_template

    template = get_response_template(tokenizer, SimpleNamespace(config=config))  # of a model it reads only the config
    if template is None:
        return None
    parsed: list[Any] = []
    for answer in answers:
        try:
            prefix = tokenizer.decode(answer["prompt"])
            parsed.append(tokenizer.parse_response(answer["ids"], template, prefix=prefix, tools=answer["tools"]))
        except Exception as error:
            parsed.append(f"{type(error).__name__}: {error}"[:500])
    return parsed


def main() -> None:
    """Answer the request file: tokenize prompts, parse answers, load the model, compute logits; write the answer."""
    request_file, answer_file = map(Path, sys.argv[1:])
    request = json.loads(request_file.read_text(encoding="utf-8"))
    folder = request["folder"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    # `generate` takes the tokens that end an answer from generation_config.json, without that file from config.json.
    ends = config
    if Path(folder, "generation_config.json").is_file():
        ends = transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)
    answer: dict[str, Any] = {
        "version": transformers.__version__,
        "prompts": [prompt_ids(tokenizer, asked) for asked in request["prompts"]],
        "parsed": parse(tokenizer, config, request["answers"]),
        "ends": ends.eos_token_id,
        "tokens": len(tokenizer),
        "config": config.get_text_config().to_dict(),
    }
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", local_files_only=True, output_loading_info=True
    )
    answer["architecture"] = type(model).__name__
    answer["dtype"] = str(model.dtype).removeprefix("torch.")
    kinds = ("missing_keys", "unexpected_keys", "mismatched_keys")
    answer["loading"] = {kind: sorted(map(str, report[kind])) for kind in kinds}
    logits = {}
    with torch.no_grad():
        for name, rows in request["rows"].items():
            last_logits = model.eval()(input_ids=torch.tensor(rows), use_cache=False).logits[:, -1]  # [R, V]
            logits[name] = last_logits.float().contiguous()
    save_file(logits, answer_file.with_name("logits.safetensors"))
    answer_file.write_text(json.dumps(answer, default=str), encoding="utf-8")  # as text what JSON has no form for


if __name__ == "__main__":
    main()
