"""The questions of those who fine-tune ChatGLM: each leads to a section with its answer, in both languages."""

import re

import pytest
from pages import ROOT, chinese

PAGE = ROOT / "docs" / "debugging.md"
ANSWERS = {
    "LoRA on one GPU of 24 GB": ("tuning.md#on-a-single-gpu", ["recipe=chatglm3_lora"]),
    "Only 8 to 16 GB": ("recipes.md#what-a-recipe-needs", ["chatglm3_qlora"]),
    "Full fine-tuning on 8 A100": ("recipes.md#what-a-recipe-needs", ["`chatglm`", "`8xA100-80GB`"]),
    "Which ZeRO stage": ("planning.md#the-command", ["toolkit plan"]),
    "Which method": ("tuning.md", ["`ptuning_v2`", "`qlora`", "`freeze`"]),
    "Several nodes": ("multinode.md", ["slots=", "--include"]),
    "No GPU at all": ("first_run.md#on-any-machine", ["scripts/quickstart"]),
    "Ascend": ("environments.md#amd-gpus-and-ascend-npus", ["ROCm", "torch-npu"]),
    "Which ChatGLM directories": ("chatglm.md#supported-directories", ["chatglm3-6b", "codegeex2-6b", "glm-4-9b"]),
    "ModelScope": ("installation.md#mirrors-in-mainland-china", ["modelscope download", "HF_ENDPOINT"]),
    "without a network": ("installation.md#installing-offline", ["--no-index", "HF_HUB_OFFLINE=1"]),
    "Qwen or Llama": ("models.md", ["Qwen", "Llama"]),
    "Mixtures of experts": ("models.md#mixture-of-experts-moe", ["model.router_loss"]),
    "LLaMA-Factory": ("coming_from.md", ["data.max_length", "toolkit show"]),
    "My own dataset": ("data.md#samples-to-copy", ['"messages"', '"conversations"']),
    "Other field names": ("data.md#sources", ["columns"]),
    "Multi-turn": ("data.md#loss-mask-which-tokens-are-trained", ["data.train_on"]),
    "Tool calls": ("data.md#tool-calls", ["tool_calls", '"tools"']),
    "longer than `data.max_length`": ("data.md#long-conversations", ["data.too_long"]),
    "Many short conversations": ("data.md#packing", ["`packed`"]),
    "Continued pretraining": ("recipes.md#which-one", ["pretrain_continue"]),
    "Preference data": ("preference.md#data", ['"chosen"', '"rejected"']),
    "Resume": ("reliability.md#resume-a-run", ["run.name", "checkpoint."]),
    "merge a LoRA adapter": ("tuning.md#checkpoints-export-and-merging-lora", ["merge=true"]),
    "Deploy": ("using.md#deploying-a-model", ["/v1/chat/completions", "vLLM", "convert_hf_to_gguf.py"]),
}
"""Part of a question -> the page or section that it leads to, and what is there in both languages."""


def linked() -> list[tuple[str, str, str]]:
    """Return each question with its link in English and in Chinese."""
    pairs = []
    for page, heading in ((PAGE, "## Questions\n"), (chinese(PAGE), "## 常见问题\n")):
        questions = page.read_text(encoding="utf-8").partition(heading)[2]
        pairs.append(re.findall(r"^- \*\*(.*?)\*\*.*\]\(([^)]+)\)$", questions, re.MULTILINE))
    return [(question, link, other) for (question, link), (_, other) in zip(*pairs, strict=True)]


def section(link: str) -> str:
    """Return a section with those below it; without an anchor, all of the page."""
    name, _, anchor = link.partition("#")
    text = (PAGE.parent / name).read_text(encoding="utf-8")
    if not anchor:
        return text
    bare = re.sub(r"^```.*?^```$", lambda block: " " * len(block[0]), text, flags=re.MULTILINE | re.DOTALL)
    headings = list(re.finditer(r"^(#+) (.*)$", bare, re.MULTILINE))
    slugs = [re.sub(r"[^\w\- ]", "", heading[2].lower()).replace(" ", "-") for heading in headings]
    first = slugs.index(anchor)
    later = (one.start() for one in headings[first + 1 :] if len(one[1]) <= len(headings[first][1]))
    return text[headings[first].start() : next(later, len(text))]


def test_the_list_is_that_of_the_page() -> None:
    questions = linked()
    assert len(questions) == len(ANSWERS)
    for (part, (link, _)), (question, shown, _) in zip(ANSWERS.items(), questions, strict=True):
        assert part in question and link == shown


@pytest.mark.parametrize("place", range(len(ANSWERS)), ids=list(ANSWERS))
def test_the_answer_is_there(place: int) -> None:
    _, needed = list(ANSWERS.values())[place]
    for link in linked()[place][1:]:
        assert [text for text in needed if text not in section(link)] == [], link
