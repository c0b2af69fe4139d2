"""The site is built without a warning in both languages, its links lead to pages, and its search finds them first."""

import functools
import http.server
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import unquote

import pytest
import yaml
from browser import PROGRAM, Browser
from pages import DOCS, ROOT

SEARCHES = {
    "en": {
        "optimizers": ["learning rate", "warmup"],
        "using": ["vLLM", "OpenAI API"],
        "tracking": ["wandb", "TensorBoard"],
        "families": ["Qwen3"],
        "recipes": ["epochs", "continued pretraining"],
        "planning": ["batch size"],
        "data": ["max length", "validation set", "custom dataset", "chat template", "packing", "tool calls"],
        "first_run": ["multi-GPU"],
        "tuning": ["single GPU", "LoRA", "QLoRA", "merge LoRA"],
        "multinode": ["multi-node", "Slurm"],
        "reliability": ["early stopping", "resume"],
        "preference": ["RLHF", "DPO"],
        "installation": ["offline"],
        "environments": ["Windows", "Docker", "ROCm"],
        "debugging": ["out of memory", "loss is NaN", "loss does not decrease", "NCCL timeout"],
        "deepspeed": ["gradient checkpointing", "ZeRO-3"],
        "models": ["mixture of experts"],
        "chatglm": ["ChatGLM3"],
        "tasks": ["reward model", "embedding", "classification"],
        "distillation": ["distillation"],
        "coming_from": ["LLaMA-Factory"],
        "compare": ["multimodal"],
        "concepts": ["glossary"],
    },
    "zh": {
        "optimizers": ["学习率", "优化器"],
        "using": ["vLLM", "部署", "推理"],
        "tracking": ["训练曲线"],
        "families": ["Qwen3"],
        "planning": ["批大小", "训练时间"],
        "data": ["最大长度", "数据格式", "自定义数据集", "多轮对话", "工具调用", "验证集", "思考模型"],
        "evaluation": ["评估指标"],
        "reliability": ["早停", "断点续训"],
        "tuning": ["全参数微调", "单卡", "量化", "合并 LoRA"],
        "multinode": ["多机多卡"],
        "debugging": ["显存不足", "爆显存", "中文乱码", "loss 不下降", "损失不下降", "卡住"],
        "deepspeed": ["梯度检查点"],
        "speed": ["梯度累积"],
        "models": ["混合专家"],
        "parallelism": ["张量并行"],
        "installation": ["离线安装", "国内镜像", "魔搭"],
        "tasks": ["奖励模型", "分类"],
        "distillation": ["蒸馏"],
        "preference": ["偏好对齐"],
        "recipes": ["继续预训练"],
        "coming_from": ["LLaMA-Factory"],
        "environments": ["昇腾"],
        "concepts": ["术语"],
    },
}
"""What newcomers type into the search field, by the page that must come first."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    for name in ("sphinx", "myst_parser", "furo", "sphinx_copybutton"):
        pytest.importorskip(name, reason=f"{name} is not installed (the extra docs; needs Python 3.11)")
    folder = tmp_path_factory.mktemp("site")
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    command = [str(ROOT / "scripts" / "build_docs"), str(folder)]
    built = subprocess.run(command, env=env, cwd="/", capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_every_page_is_there_and_leads_to_the_other_language(site: Path) -> None:
    for page in DOCS:
        english, chinese = site / f"en/docs/{page.stem}.html", site / f"zh/docs/{page.stem}_zh.html"
        for one, other in ((english, chinese), (chinese, english)):
            (switch,) = re.findall(r'class="language" href="([^"]+)"', one.read_text(encoding="utf-8"))
            assert (one.parent / switch).resolve() == other.resolve()


def test_no_link_is_broken_and_nothing_comes_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r'(?:href|src)="([^"#]+)[^"]*"', text):
            if not target.startswith(("http", "data:")):
                assert (page.parent / unquote(target.partition("?")[0])).exists(), f"{page.relative_to(site)}: {target}"
        assert not re.findall(r'<(?:script|img|iframe)[^>]+src="(?:https?:)?//', text)
        assert not re.findall(r'<link[^>]+rel="(?:stylesheet|preload)"[^>]+href="(?:https?:)?//', text)


def test_the_sidebar_has_every_page(site: Path) -> None:
    for language, tail in (("en", ""), ("zh", "_zh")):
        text = (site / language / "docs" / f"index{tail}.html").read_text(encoding="utf-8")
        sidebar = text[text.index("sidebar-tree") :]
        missing = [page.stem for page in DOCS if page.stem != "index" and f'"{page.stem}{tail}.html"' not in sidebar]
        assert missing == []


def test_both_languages_can_be_searched(site: Path) -> None:
    """Sphinx 9.0.4 names a stemmer for Chinese that its script does not hold, and needs jieba for Chinese words."""
    for language, word in (("en", "offload"), ("zh", "卸载")):
        script = (site / language / "_static" / "language_data.js").read_text(encoding="utf-8")
        (stemmer,) = re.findall(r"window\.Stemmer = (\w+);", script)
        assert f"{stemmer}=function" in script
        assert json.dumps(word) in (site / language / "searchindex.js").read_text(encoding="utf-8")


def search(browser: Browser, query: str) -> str:
    """Return the address of the first result: words are typed and Enter is pressed, as Sphinx searches by a script."""
    browser.run("document.querySelector('.sidebar-search').select()")
    browser.call("Input.insertText", text=query)
    browser.call("Input.dispatchKeyEvent", type="char", text="\r")
    browser.wait(f"new URLSearchParams(location.search).get('q') == {json.dumps(query)}")
    browser.wait("document.querySelector('#search-results li a, #search-results .search-summary:not(:empty)')")
    return str(browser.run("document.querySelector('#search-results li a')?.pathname"))


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves the site without a line per request."""

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.skipif(PROGRAM is None, reason="chromium is not installed (Debian: apt-get install chromium)")
@pytest.mark.parametrize(("language", "index"), [("en", "index.html"), ("zh", "index_zh.html")])
def test_what_newcomers_search_for_is_found_first(site: Path, tmp_path: Path, language: str, index: str) -> None:
    expected = {query: page for page, queries in SEARCHES[language].items() for query in queries}
    with (
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site))) as server,
        Browser(tmp_path / "profile") as browser,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser.open(f"http://127.0.0.1:{server.server_port}/{language}/docs/{index}")
        found = {query: Path(search(browser, query)).stem.removesuffix("_zh") for query in expected}
        server.shutdown()
    wrong = {query: f"{page}, not {expected[query]}" for query, page in found.items() if page != expected[query]}
    assert wrong == {}, "see docs/search_words.yaml"


def test_the_search_words_are_of_pages_and_unique() -> None:
    words = yaml.safe_load((ROOT / "docs" / "search_words.yaml").read_text(encoding="utf-8"))
    assert set(words) <= {page.stem for page in DOCS}
    for language in ("en", "zh"):
        listed = [word.lower() for page in words.values() for word in page[language]]
        assert [word for word in set(listed) if listed.count(word) > 1] == []
