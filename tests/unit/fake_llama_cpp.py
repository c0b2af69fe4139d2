"""Stand-ins for llama.cpp's programs: a converter that writes a GGUF file's header, and a server that answers by
transformers.
"""

import json
import os
import shutil
import struct
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any


def write_gguf(file: Path, values: dict[str, str | int | list[str]]) -> None:
    """Write a GGUF file without tensors."""
    content = b"GGUF" + struct.pack("<IQQ", 3, 0, len(values))
    for name, value in values.items():
        content += _text(name)
        if isinstance(value, str):
            content += struct.pack("<I", 8) + _text(value)
        elif isinstance(value, int):
            content += struct.pack("<II", 4, value)
        else:
            content += struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))
    file.write_bytes(content)


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def install(folder: Path, model: Path, **settings: str) -> Path:
    """Write the stand-ins to a directory, as a checkout of llama.cpp has them, and return it. `model`: what the server
    answers by; `settings`: variables that plant faults.
    """
    programs = folder / "build" / "bin"
    programs.mkdir(parents=True)
    head = f"#!{sys.executable}\nimport os\nos.environ.update({ {'MODEL': str(model), **settings}!r})\n"
    names = {"convert_hf_to_gguf.py": folder, "llama-quantize": programs, "llama-server": programs}
    for name, place in names.items():
        function = name.partition("_hf")[0].removeprefix("llama-")
        (place / name).write_text(f"{head}from tests.unit import fake_llama_cpp\nfake_llama_cpp.{function}()\n")
        (place / name).chmod(0o755)
    return folder


def convert() -> None:
    """Write the header of the model directory in the first argument."""
    folder, words = Path(sys.argv[1]), sys.argv
    kind = words[words.index("--outtype") + 1]
    file = Path(words[words.index("--outfile") + 1].replace("{ftype}", "f16" if kind == "auto" else kind))
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] == os.environ.get("UNKNOWN"):
        sys.exit("Model is not supported")
    values = {
        "general.architecture": "any",
        "any.context_length": config["max_position_embeddings"],
        "tokenizer.ggml.tokens": ["a", "b"],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
        "tokenizer.chat_template": (folder / "chat_template.jinja").read_text() + os.environ.get("TEMPLATE", ""),
    }
    write_gguf(file, values)


def quantize() -> None:
    """Copy a file."""
    shutil.copy(sys.argv[1], sys.argv[2])


def server() -> None:
    """Answer as llama-server does, greedily by transformers; ANSWER: tokens in place of those."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(os.environ["MODEL"])
    model = AutoModelForCausalLM.from_pretrained(os.environ["MODEL"])

    class Handler(BaseHTTPRequestHandler):
        def answer(self, value: Any) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(value).encode())

        def do_GET(self) -> None:
            self.answer({})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/tokenize":
                return self.answer({"tokens": tokenizer(body["content"], add_special_tokens=False)["input_ids"]})
            if self.path == "/completion":
                ids = torch.tensor([body["prompt"]])
                made = model.generate(ids, max_new_tokens=body["n_predict"], do_sample=False)[
                    0, ids.shape[1] :
                ].tolist()
                made = made[:-1] if made[-1] == tokenizer.eos_token_id else made
                return self.answer({"tokens": json.loads(os.environ.get("ANSWER", "null")) or made})
            for message in body["messages"]:
                for call in message.get("tool_calls") or []:
                    call["function"]["arguments"] = json.loads(call["function"]["arguments"])
            options = dict(
                tools=body.get("tools"), add_generation_prompt=True, **body.get("chat_template_kwargs") or {}
            )
            return self.answer({"prompt": tokenizer.apply_chat_template(body["messages"], tokenize=False, **options)})

        def log_message(self, *_: Any) -> None:
            pass

    HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
