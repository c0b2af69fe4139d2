"""The questions of those who fine-tune ChatGLM: each leads to a section with its answer, in both languages."""

import re

import pytest
from pages import ROOT, chinese

PAGE = ROOT / "docs" / "questions.md"
ANSWERS = {
    "LoRA on one GPU of 24 GB": ("tuning.md#on-a-single-gpu", ["--num_gpus 1 recipe=chatglm3_lora", "data=chat.jsonl"]),
    "Only 8 to 16 GB": ("recipes.md#which-one", ["chatglm3_qlora"]),
    "Full fine-tuning on 8 A100": ("recipes.md#what-a-recipe-needs", ["| `chatglm` | `8xA100-80GB` |"]),
    "Which ZeRO stage": ("planning.md#the-command", ["toolkit plan"]),
    "Which method": ("tuning.md#fine-tuning-methods", ["`ptuning_v2`", "`qlora`", "`freeze`"]),
    "Several nodes": ("multinode.md#the-hostfile", ["slots=", "--include"]),
    "No GPU at all": ("first_run.md#on-any-machine", ["scripts/quickstart"]),
    "Ascend": ("installation.md#requirements", ["torch_npu"]),
    "Which ChatGLM directories": ("chatglm.md#supported-directories", ["chatglm3-6b", "codegeex2-6b", "glm-4-9b"]),
    "ModelScope": ("installation.md#mirrors-in-mainland-china", ["modelscope download", "HF_ENDPOINT"]),
    "without a network": ("installation.md#installing-offline", ["--no-index", "HF_HUB_OFFLINE=1"]),
    "Qwen or Llama": ("models.md#tested-architectures", ["Qwen", "Llama"]),
    "Mixtures of experts": ("models.md#mixture-of-experts-moe", ["model.router_loss"]),
    "LLaMA-Factory": ("coming_from.md#what-to-check", ["data.max_length", "toolkit show"]),
    "My own dataset": ("data.md#samples-to-copy", ['"messages"', '"conversations"']),
    "Other field names": ("data.md#sources", ["columns"]),
    "Multi-turn": ("data.md#loss-mask-which-tokens-are-trained", ["data.train_on"]),
    "Tool calls": ("data.md#tool-calls", ["tool_calls", '"tools"']),
    "longer than `data.max_length`": ("data.md#long-conversations", ["data.too_long"]),
    "Many short conversations": ("data.md#packing", ["`packed`"]),
    "Continued pretraining": ("recipes.md#which-one", ["pretrain_continue"]),
    "Preference data": ("preference.md#data", ['"chosen"', '"rejected"']),
    "Out of memory": ("debugging.md#cuda-out-of-memory-at-step-1", ["batch.micro_per_gpu", "plan.auto=true"]),
    "loss does not fall": ("debugging.md#the-loss-does-not-decrease", ["optim.lr", "toolkit show"]),
    "loss is NaN": ("debugging.md#the-loss-is-nan", ["bad-step"]),
    "Resume": ("reliability.md#resume-a-run", ["run.name", "checkpoint."]),
    "hangs": ("debugging.md#hangs-at-step-1", ["logs/"]),
    "Merge a LoRA adapter": ("tuning.md#checkpoints-export-and-merging-lora", ["merge=true"]),
    "Deploy": ("using.md#deploying-a-model", ["/v1/chat/completions", "vLLM", "convert_hf_to_gguf.py"]),
    "Generation does not stop": ("debugging.md#generation-does-not-stop", ["toolkit show"]),
}
"""Part of a question -> the section that it leads to, and what stands in that section in both languages."""


def linked() -> list[tuple[str, str, str]]:
    """Return each question with its link in English and in Chinese."""
    pairs = []
    for page in (PAGE, chinese(PAGE)):
        pairs.append(re.findall(r"^- \*\*(.*?)\*\*.*\]\(([^)]+)\)$", page.read_text(encoding="utf-8"), re.MULTILINE))
    return [(question, link, other) for (question, link), (_, other) in zip(*pairs, strict=True)]


def section(link: str) -> str:
    """Return a section with those below it; that of a page's title is all of the page."""
    name, _, anchor = link.partition("#")
    text = (PAGE.parent / name).read_text(encoding="utf-8")
    bare = re.sub(r"^```.*?^```$", lambda block: " " * len(block[0]), text, flags=re.MULTILINE | re.DOTALL)
    headings = list(re.finditer(r"^(#+) (.*)$", bare, re.MULTILINE))
    slugs = [re.sub(r"[^\w\- ]", "", heading[2].lower()).replace(" ", "-") for heading in headings]
    first = slugs.index(anchor)
    later = (one.start() for one in headings[first + 1 :] if len(one[1]) <= len(headings[first][1]))
    return text[headings[first].start() : next(later, len(text))]


def test_the_list_is_that_of_the_page() -> None:
    found = linked()
    assert len(found) == len(ANSWERS) == 30
    for (part, (link, _)), (question, shown, _) in zip(ANSWERS.items(), found, strict=True):
        assert part in question and link == shown


@pytest.mark.parametrize("place", range(30), ids=list(ANSWERS))
def test_the_answer_is_there(place: int) -> None:
    _, needed = list(ANSWERS.values())[place]
    for link in linked()[place][1:]:
        assert [text for text in needed if text not in section(link)] == [], link
