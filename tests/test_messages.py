"""Every message exists in both languages, with the same placeholders, filled in at the call."""

import ast
import errno
import os
import re
import string
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from toolkit import messages
from toolkit.cli import COMMANDS, GROUPS, main
from toolkit.cli.help import help_of
from toolkit.config import rule_tables
from toolkit.config.dotted_keys import all_keys
from toolkit.messages import chinese, current_language, joined, read_table, set_language, tr

ROOT = Path(__file__).parents[1]
CHINESE = chinese()["messages"]


ERRORS = {name for name, kind in vars(messages).items() if isinstance(kind, type) and issubclass(kind, Exception)}


FILLED = {"key", "value", *all_keys()}


def is_text(line: ast.expr) -> bool:
    """Return whether a line is written out: without values it is looked up as it is."""
    return isinstance(line, ast.Constant) and bool(line.value)


def called(call: ast.Call) -> str:
    """Return the name of what is called, of a module's attribute only where that is an error; "" of other calls."""
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr if function.attr in ERRORS else ""
    return function.id if isinstance(function, ast.Name) else ""


def calls() -> Iterator[tuple[str, ast.Call]]:
    """Yield each call of tr, and of say, warn or an error with values for a template, with where it stands."""
    for path in sorted([*(ROOT / "toolkit").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py")]):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and (name := called(node))
                and (
                    name == "tr"
                    or (name in {"say", "warn", *ERRORS} and node.keywords)
                    or (name in {"say", "warn"} and is_text(node.args[0]) and path.is_relative_to(ROOT / "toolkit"))
                )
            ) or (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "omit"):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node
            elif (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in ("error", "note")
                and len(node.args) == 2
                and (node.keywords or isinstance(node.args[1], ast.Constant))
            ):  # LoadedConfig.error(KEY, template, …), which knows the values of all keys; or the import of a JSON
                names = placeholders(ast.literal_eval(node.args[1])) - {keyword.arg for keyword in node.keywords}
                known = names & FILLED if ast.unparse(node.func.value).endswith("loaded") else set()
                keywords = [*node.keywords, *(ast.keyword(arg=name) for name in known)]
                call = ast.Call(func=node.func, args=node.args[1:], keywords=keywords)
                yield f"{path.relative_to(ROOT)}:{node.lineno}", call


def texts_of(page: Path) -> list[str]:
    """Return the texts of a page's template, each of which is written out: tr("…")."""
    text = page.read_text(encoding="utf-8")
    found = re.findall(r'\btr\("([^"{}]+)"\)', text)
    assert len(found) == len(re.findall(r"\btr\(", text)), page
    return found


def placeholders(template: str) -> set[str]:
    """Return the names of a template's placeholders."""
    return {name for _, name, _, _ in string.Formatter().parse(template) if name}


def of_rules() -> Iterator[str]:
    """Yield the templates of all tables of rules."""
    tables = rule_tables
    for row in (*tables.READ_WHEN, tables.READ_BY_LANGUAGE_MODELS, tables.READ_WITH_VALIDATION):
        yield row.reason
    for name in ("RANGES", "INCOMPATIBLE", "INCOMPATIBLE_OF_MODELS", "INCOMPATIBLE_WITH_CUSTOM_MODELS"):
        for rule in getattr(tables, name):
            yield from (rule.sentence, rule.reason)
    yield from (*tables.BOUNDS.values(), *(row.sentence for row in tables.REQUIRES))


def test_each_call_has_a_literal_template_and_fills_it() -> None:
    found = 0
    for place, call in calls():
        assert len(call.args) == 1, place
        assert isinstance(call.args[0], ast.Constant), f"{place}: write the template out at the call"
        if not any(keyword.arg is None for keyword in call.keywords):  # **values cannot be seen here
            given = {keyword.arg for keyword in call.keywords}
            assert given == placeholders(str(call.args[0].value)), place
        found += 1
    assert found > 200


def test_each_finding_of_the_doctor_is_in_its_table_and_filled() -> None:
    """finding("NAME", …), whose name may have a placeholder itself: f"{key} not shared"."""
    table, used = read_table("extras/doctor/findings.yaml"), set()
    for path in (ROOT / "toolkit" / "extras" / "doctor").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "finding":
                pattern = re.sub(r"\{\w+\}", ".+", ast.literal_eval(ast.unparse(node.args[0]).removeprefix("f")))
                names = [name for name in table if re.fullmatch(pattern, name)]
                assert names, f"{path}:{node.lineno}"
                used.update(names)
                given = {keyword.arg for keyword in node.keywords} - {"level"}
                assert all(given == placeholders(table[name][2]) for name in names), f"{path}:{node.lineno}"
    assert used == set(table)


def test_the_chinese_catalogue_is_complete_and_has_nothing_else() -> None:
    templates = {str(call.args[0].value) for _, call in calls()}  # type: ignore[attr-defined]
    templates |= {
        *read_table("config/program_keys.yaml")["sentences"].values(),
        *read_table("plan/kinds.yaml").values(),
        *read_table("models/refused.yaml").values(),
    }
    templates |= {text for _, _, text in read_table("extras/doctor/findings.yaml").values()}
    templates |= {text for page in (ROOT / "toolkit").rglob("*.j2") for text in texts_of(page)}
    templates |= set(filter(None, of_rules())) | {*read_table("extras/data_report.yaml")["answers"]}
    templates |= {*read_table("extras/data_report.yaml")["scripts"]}
    templates |= {os.strerror(code) for code in (errno.ENOENT, errno.EACCES, errno.EISDIR, errno.ENOTDIR, errno.ENOSPC)}
    templates |= {str(import_module(COMMANDS[command]).__doc__).splitlines()[0] for command in COMMANDS} | set(GROUPS)
    assert templates - set(CHINESE) == set(), "without Chinese"
    assert set(CHINESE) - templates == set(), "no longer used"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_in_the_language_of_the_user_with_the_same_arguments(command: str) -> None:
    """Synopsis, arguments and commands within lines are compared; explanations and "launcher options" are Chinese."""
    pages = {}
    for language in ("en", "zh"):
        set_language(language)
        pages[language] = help_of(command).replace("启动器选项", "launcher options")
    synopsis, arguments, commands = (
        rf"^toolkit {command}(?: .*?)?(?=    |$)",
        r"^  ([^\s,]+)",
        r"`(?:toolkit|deepspeed)[^`]*`",
    )
    examples = pages["en"].rindex("\n\n")
    assert pages["zh"].endswith(pages["en"][examples:].partition(":")[2]), "other examples"
    pages = {language: text[: text.rindex("\n\n")] for language, text in pages.items()}
    for pattern in (synopsis, arguments, commands, r"(?:torchrun|deepspeed) --.*$"):
        english, other = (re.findall(pattern, text, re.MULTILINE) for text in pages.values())
        assert english == other, pattern
    bare = [line for line in pages["en"].splitlines() if line in pages["zh"].splitlines() and line.startswith("  ")]
    assert not [line for line in bare if re.search(r"\S   *\S", line)], "not translated"
    widths = [len(line) + len(re.findall("[\u3000-\u9fff\uff00-\uffef]", line)) for line in pages["zh"].splitlines()]
    assert max(widths) <= 130


@pytest.mark.parametrize("command", ["new", "chat", "generate", "export-model", "verify-serving", "report", "models"])
def test_commands_without_a_recipe_take_the_language_too(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help", "language=zh"]) == 0
    assert "  language=en|zh   输出所用的语言" in capsys.readouterr().out
    set_language("en")
    assert main([command, "--more", "language=zh"]) == 2
    assert re.search("未知(参数|选项)", capsys.readouterr().err)
    assert main([command, "language=fr"]) == 2
    assert "language = fr" in capsys.readouterr().err


def test_help_in_chinese_is_complete() -> None:
    assert set(read_table("locale/help_zh.yaml")) == set(COMMANDS)


@pytest.mark.parametrize(
    "words",
    [
        "precision=bf16",
        "optim=muon zero=stage3 train.gradient_clipping=0",
        "optim=lion zero=stage2_offload precision=fp32",
        "parallel.tensor=2 schedule=linear",
        "schedule.warmup_min_ratio=0.1",
    ],
)
def test_formulas_of_a_deepspeed_config_are_chinese(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    of_model = ["recipe=zero1", "model=glm_tiny", "world_size=8", "total_steps=1000", "--explain", "language=zh"]
    assert main(["export-config", *of_model, *words.split()]) == 0
    formulas = re.findall(r"  (= .*)", capsys.readouterr().out)
    assert len(formulas) >= 6
    bare = [one for one in formulas if not re.search("[\u4e00-\u9fff]", one)]
    assert all(one.startswith("= schedule.warmup_min_ratio 0.") for one in bare), bare


class OneLineEach(yaml.SafeDumper):
    """How zh.yaml is written: each pair on a line, in double quotes where single ones would double or break it."""

    def check_simple_key(self) -> bool:
        return True

    def choose_scalar_style(self) -> str:
        style = super().choose_scalar_style()
        return '"' if style == "'" and set("'\n") & set(self.event.value) else style


def test_the_chinese_catalogue_has_one_line_per_text_and_none_twice() -> None:
    text = (ROOT / "toolkit" / "locale" / "zh.yaml").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines(keepends=True) if not line.startswith("#")]
    written = yaml.dump(chinese(), Dumper=OneLineEach, allow_unicode=True, width=float("inf"), sort_keys=False)
    expected = written.splitlines(keepends=True)
    assert set(lines) - set(expected) == set(), f"write: {set(expected) - set(lines)}"
    assert lines == expected, "a text stands there twice"


def test_both_languages_have_the_same_placeholders() -> None:
    assert len(CHINESE) > 1000
    assert [english for english, text in CHINESE.items() if placeholders(text) != placeholders(english)] == []


def test_punctuation_after_chinese_is_full_width() -> None:
    """Apart from code: what stands in backticks, and objects in braces."""
    texts = [re.sub(r"`[^`]*`|\{\{.*\}\}", "", text) for text in CHINESE.values()]
    han = "[\u4e00-\u9fff]"
    assert [text for text in texts if re.search(rf"{han}[,;:?!]|{han} ?[,;:?!()] ?{han}", text)] == []


@pytest.mark.parametrize("word", ["language=zh", "zero.stag=3"])
def test_the_language_of_the_command_line_holds_for_errors_of_the_config(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["recipe=quickstart", word, *{"language=zh", "zero.stag=3"} - {word}]
    assert main(["check", *words]) == 2
    assert capsys.readouterr().err.startswith("ConfigError: 命令行：未知的配置项 'zero.stag'")


BROKEN = {
    "language: zh\nzero:\n  stag: 3\n": "mine.yaml:3：未知的配置项 'zero.stag'。是不是想写 'zero.stage'？",
    "defaults:\n  - base  # the language is there\n  - _self_\nzero:\n  stage: x\n": "base.yaml:2：'base'：请写",
    "defaults:\n  - none\nlanguage: 'zh'\n": "mine.yaml:2：未知的配方 'none'",
}


@pytest.mark.parametrize("content", BROKEN)
def test_the_language_of_a_recipe_holds_for_its_own_errors(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("recipes").mkdir()
    Path("recipes/base.yaml").write_text("defaults:\n  - base\nlanguage: zh\n")
    Path("recipes/mine.yaml").write_text(content)
    assert main(["check", "recipe=mine"]) == 2
    said = capsys.readouterr().err
    assert BROKEN[content] in said and re.search("[\u4e00-\u9fff]", said)
    assert main(["check", "recipe=mine", "language=en"]) == 2
    assert not re.search("[\u4e00-\u9fff]", capsys.readouterr().err)


@pytest.mark.parametrize(
    "words",
    [
        ["chek"],
        ["check", "zero=stage2"],
        ["check", "recipe=quikstart"],
        ["check", "recipe=none.yaml"],
        ["check", "recipe=quickstart", "zero.stag=3", "zero=stagee3", "optim.name=adamv"],
        ["check", "recipe=quickstart", "model=hf", "model.path=none", "zero.offload_param.device=cpu"],
        ["check", "recipe=quickstart", "batch.global_size=7", "world_size=2", "batch.world_sizes=[4]"],
    ],
    ids=lambda words: words[-1],
)
def test_no_space_follows_a_chinese_full_stop(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    set_language("zh")
    assert main([*words, "language=zh"] if len(words) > 1 else words) == 2
    said = capsys.readouterr().err
    assert "。" in said
    assert not re.search("[。？！：] ", said), said


def test_sentences_are_joined_by_a_space_where_the_language_has_one() -> None:
    assert joined("One.", "", "Two?", "Three.") == "One. Two? Three."
    assert joined("一。", "二？", "", "three.", "四。") == "一。二？three. 四。"
    assert joined("", "") == ""


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (1, "wrote a for 1 rank."),
        (2, "wrote a for 2 ranks."),
        (21, "wrote a for 21 ranks."),
        ("0.1", "wrote a for 0.1 ranks."),
        ("1,1", "wrote a for 1,1 ranks."),
    ],
)
def test_one_is_singular(count: object, said: str) -> None:
    assert tr("wrote {file} for {world_size} ranks.", file="a", world_size=count) == said
    assert tr("{count} samples", count=1) == "1 sample"
    assert tr("wrote {file} for {world_size} ranks.", file="part 1 rows", world_size=count).startswith(
        "wrote part 1 rows"
    )


def test_most_chinese_is_chinese() -> None:
    without = [text for text in CHINESE.values() if not any("\u4e00" <= letter <= "\u9fff" for letter in text)]
    assert set(without) <= {
        "{place}：",
        "{file}: {reason}",
        "{file}:{line}: {reason}",
        "{file}：{reason}。",
        "{place}：{reason}。",
        "true、false",
        "true、false、`auto`",
        "docs/config_zh.md",
        "loss",
    } | {text for text in without if "auto ->" in text}


def test_language_follows_the_locale(monkeypatch: pytest.MonkeyPatch) -> None:
    set_language("")
    for name in ("LC_ALL", "LC_MESSAGES", "LANG"):
        monkeypatch.delenv(name, raising=False)
    assert current_language() == "en"
    monkeypatch.setenv("LANG", "zh_CN.UTF-8")
    assert tr("none") == "无"
    monkeypatch.setenv("LC_ALL", "C")
    assert tr("none") == "none"


def test_a_chinese_user_reads_chinese() -> None:
    command = [sys.executable, "-m", "toolkit", "check", "recipe=quickstart", "zero.stag=3"]
    finished = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, env={"LANG": "zh_CN.UTF-8", "PYTHONUTF8": "1"}
    )
    assert finished.returncode == 2
    assert finished.stderr == "ConfigError: 命令行：未知的配置项 'zero.stag'。是不是想写 'zero.stage'？\n"


@pytest.mark.fault("S6")
def test_nothing_in_a_message_moves_the_terminal() -> None:
    hostile = "a\x1b[2J\x1b]0;title\x07b\rc\x9b31m\u202egnp.exe\u2066\x00 中文 😀\tx\ny"
    said = tr("{file} cannot be read: {reason}.", file=Path(hostile.replace("\x00", "")), reason=ValueError(hostile))
    assert not set(said) & set("\x1b\x07\r\x9b\u202e\u2066\x00")
    assert said.count("\\x1b[2J") == 2 and "中文 😀\tx\ny" in said


def test_messages_take_two_lines() -> None:
    """At most, on a terminal of 122 columns; what is longer belongs on a page of the docs."""
    too_long = [text for text in read_table("locale/zh.yaml")["messages"] if len(text) > 244]
    assert not too_long
