"""More than a thousand hostile inputs, of every kind that comes from outside: each ends soon, in one message or well.

Nothing of an input runs, none takes the memory or the day, none ends in a traceback. An input is repeated by the test
of its surface: its name seeds every draw, and a failure prints its bytes.
"""

import csv
import io
import json
import random
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, cast

import pyarrow
import pyarrow.parquet
import pytest
import yaml
from shared import LORA, tiny
from starlette.testclient import TestClient

from tests.config.test_import_config import DS_AUTO, FACTORY_YAML, FULL, PTUNING
from tests.config.test_import_others import AXOLOTL, SWIFT
from tests.ranks.test_task_layouts import row
from tests.system.hostile import MARKUP, VALUES, Case, Special, as_json, spoiled, trees, try_all
from tests.unit.fake_runs import fake_run
from tests.unit.speaker import write_random
from toolkit.cli import COMMANDS, _dispatch, main
from toolkit.config.dotted_keys import leaves
from toolkit.config.load import load, to_dict, to_yaml
from toolkit.extras import board
from toolkit.launch import environment, hostfile, variables

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(2400)]
EXAMPLES = Path(__file__).parents[2] / "examples"
PAIRS, LABELS, TEXTS = ["data=examples_pairs"], ["data=examples_labels"], ["data=examples_texts"]
QUICK = ["recipe=quickstart", "evaluate.prompts=[]"]
TASKS: dict[str, list[str]] = {
    "language": [],
    "text": ["data=examples_text"],
    "dpo": ["preference=dpo", *PAIRS],
    "simpo": ["preference=simpo", *PAIRS],
    "reward": ["task=reward", *PAIRS],
    "classify": ["task=classify", *LABELS],
    "embed": ["task=embed", *TEXTS],
    "distill": ["task=distill", "distill.teacher=teacher", "model.tokenizer=teacher"],
    "custom": [f"recipe={EXAMPLES}/encoder.yaml"],
}
LAYOUTS: dict[str, list[str]] = {
    **{f"stage{stage}": [f"zero=stage{stage}"] for stage in range(4)},
    "offload": ["zero=stage3_offload"],
    "tensor": ["parallel.tensor=2", "zero=stage1"],
    "sequence": ["parallel.sequence=2", "zero=stage2"],
    "pipeline": ["parallel.pipeline=2", "zero=stage0"],
    "expert": ["parallel.expert=2", "zero=stage1"],
}
ROWS: dict[str, dict[str, Any]] = {
    "prompt_response": {"prompt": "a", "response": "b", "history": [["c", "d"]], "system": "s"},
    "instruction": {"instruction": "a", "input": "b", "output": "c"},
    "query_response": {"query": "a", "response": "b"},
    "sharegpt": {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "s"},
    "conversation": {"conversation": [{"human": "a", "assistant": "b"}]},
    "messages": {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "loss": True}],
        "tools": [{"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "string"}}}}],
    },
    "text": {"text": "a b c"},
    "preference": {"prompt": "a", "chosen": "b", "rejected": "c"},
    "reward": {"prompt": "a", "chosen": [{"role": "assistant", "content": "b"}], "rejected": "c", "margin": 0.5},
    "labeled": {"prompt": "a", "completion": "b", "label": True},
    "classify": {"text": "a", "label": "good"},
    "embed": {"query": "a", "positive": "b", "negatives": ["c"]},
}
TASK_OF = {
    "preference": ["preference=dpo"],
    "reward": ["task=reward"],
    "labeled": ["preference=kto"],
    "classify": ["task=classify"],
    "embed": ["task=embed"],
    "text": [],
}


class Made:
    """What good inputs there are to spoil."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = write_random(folder / "model")
        draw = random.Random(5)
        for kind in ("rows", "pairs"):
            lines = [json.dumps(row(kind, number, draw)) + "\n" for number in range(9)]
            (folder / f"{kind}.jsonl").write_text("".join(lines))
        how = ["model=hf", f"model.path={self.model}", "checkpoint.export=true", "checkpoint.every=2"]
        how += ["train.max_steps=4", "report.enabled=true"]
        runs = {"full": how, "adapter": [*how, *LORA]}
        made = [
            Case(name, ["train", *tiny(folder / "rows.jsonl", folder, name, *words)]) for name, words in runs.items()
        ]
        for outcome in try_all(iter(made), folder / "making"):
            assert not outcome.wrong and not outcome.code, outcome.said
        self.run, self.adapter = folder / "runs" / "full", folder / "runs" / "adapter"
        self.checkpoint = self.run / "checkpoints" / "step-4"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Import what the commands import, so that each input is tried in a fork that has it; make good inputs."""
    import toolkit.export.convert
    import toolkit.extras.board
    import toolkit.extras.cli.data_report
    import toolkit.extras.data_report
    import toolkit.jobs.check
    import toolkit.report.page
    import toolkit.tasks.language
    import toolkit.train.trainer  # noqa: F401

    return Made(tmp_path_factory.mktemp("hostile"))


def recipes(made: Made) -> Iterator[Case]:
    """Recipes of every task in every layout, with a value of a key spoiled, or the whole file."""
    for task, own in TASKS.items():
        for layout, how in LAYOUTS.items():
            words = [*([] if task == "custom" else QUICK), *own, *how]
            tree = yaml.safe_load(to_yaml(load(words).cfg))
            for label, key, content in trees(f"recipe-{task}-{layout}", tree, 3):
                yield Case(
                    label, ["check", "recipe=r.yaml", "world_size=4"], {"r.yaml": content}, None, ("r.yaml", key)
                )
    for label, spoilt in spoiled("recipe", to_yaml(load(["recipe=quickstart"]).cfg).encode(), 60):
        yield Case(label, ["check", "recipe=r.yaml"], {"r.yaml": spoilt}, None, ("r.yaml", "model.path is empty"))


def words(made: Made) -> Iterator[Case]:
    """Words of the command line: keys of recipes, and arguments of each command."""
    keys = [key for key, _ in leaves(to_dict(load(["recipe=quickstart"]).cfg))]
    texts = {name: value for name, value in VALUES.items() if isinstance(value, str) and "\0" not in value}
    texts |= {
        "quotes": "'\"",
        "brackets": "[" * 3000,
        "braces": "{a: " * 300,
        "raw": "\udcff\udcfe",
        "digits": "9" * 5000,
    }
    texts |= {
        "bytes": "\udced\udca0",
        "list": "[1,[2,{a: b}]]",
        "object": "{_target_: os.system}",
        "equals": "=a==b",
        "nan": "nan",
    }
    texts = {name: value if len(value) < 100_001 else value[:100_000] for name, value in texts.items()}
    texts = {
        name: value.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")
        if "\ud83d" not in value
        else "\udced\udca0"
        for name, value in texts.items()
    }
    for number in range(150):
        draw = random.Random(f"word-{number}")
        key, kind, task = draw.choice(keys), draw.choice(list(texts)), draw.choice(list(TASKS))
        given = ["check", *([] if task == "custom" else QUICK), *TASKS[task], f"{key}={texts[kind]}"]
        yield Case(f"word-{number} {key} {kind}", given)
    for command in COMMANDS:
        if command in ("bench", "doctor", "prove", "launch", "sweep", "rounds", "board"):
            continue  # they start processes of their own
        for number in range(4):
            draw = random.Random(f"argument-{command}-{number}")
            kind = draw.choice(list(texts))
            before = draw.choice(["", "output=", "recipe=", "path=", "model.path=", "--", "port=", "world_size="])
            if f"{before}{texts[kind]}":
                yield Case(f"argument-{command}-{number} {before} {kind}", [command, f"{before}{texts[kind]}"])


def tables(row_: dict[str, Any]) -> dict[str, bytes]:
    """Return rows as each kind of file that tables are read of."""
    flat = {key: value if isinstance(value, str) else json.dumps(value) for key, value in row_.items()}
    text = io.StringIO()
    writer = csv.DictWriter(text, list(flat))
    writer.writeheader()
    writer.writerows([flat] * 5)
    sink = pyarrow.BufferOutputStream()
    table = pyarrow.Table.from_pylist([row_] * 5)
    pyarrow.parquet.write_table(table, sink)
    stream = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(stream, table.schema) as out:
        out.write_table(table)
    return {
        "d.csv": text.getvalue().encode(),
        "d.tsv": text.getvalue().replace(",", "\t").encode(),
        "d.parquet": sink.getvalue().to_pybytes(),
        "d.arrow": stream.getvalue().to_pybytes(),
        "d.json": json.dumps([row_] * 5).encode(),
    }


def reading(made: Made, kind: str, name: str, draw: random.Random) -> list[str]:
    """Return a command that reads a data file."""
    task = [*TASK_OF.get(kind, []), "evaluate.prompts=[]", "data.validation_fraction=0"]
    recipe = [
        "recipe=quickstart",
        "model=hf",
        f"model.path={made.model}",
        f"data.path={name}",
        *task,
        "prepare.dir=cache",
    ]
    skip = ["data.on_bad_row=skip"] if draw.random() < 0.5 else []
    return draw.choice(
        [
            ["check", *recipe, *skip],
            ["prepare", *recipe, *skip, "prepare.num_workers=1"],
            ["data-report", name, *report_format(kind), "workers=1"],
        ]
    )


def report_format(kind: str) -> list[str]:
    """Return what `data-report` has to be told of rows that only a task reads."""
    return [f"format={kind}"] if TASK_OF.get(kind) else []


def data(made: Made) -> Iterator[Case]:
    """Data of every format and kind of file."""
    for kind, good in ROWS.items():
        for label, _, content in trees(f"row-{kind}", good, 14):
            draw = random.Random(label)
            lines = [json.dumps(good).encode()] * 2
            lines.insert(draw.randrange(3), content)
            yield Case(
                label, reading(made, kind, "d.jsonl", draw), {"d.jsonl": b"\n".join(lines)}, None, ("d.jsonl", "rows")
            )
        for name, whole in tables(good).items():
            number = random.Random(f"{kind}-{name}").randrange(100)
            for label, spoilt in list(spoiled(f"file-{kind}-{name}", whole, 45))[28 + number % 12 :][:4]:
                draw = random.Random(label)
                yield Case(label, reading(made, kind, name, draw), {name: spoilt}, None, ("d.", "data"))
    whole_file = (json.dumps(ROWS["messages"]) + "\n").encode() * 5
    for name in ("d.jsonl", "d.json", "d.csv", "d.tsv", "d.parquet", "d.arrow", "d.jsonl.gz", "d.jsonl.zst", "d.txt"):
        for label, spoilt in list(spoiled(f"file-{name}", whole_file, 28)):
            draw = random.Random(label)
            yield Case(label, reading(made, "messages", name, draw), {name: spoilt}, None, ("d.", "data"))


TEMPLATES = [
    "{{ 'x' * 10**9 }}",
    "{% for i in range(10**9) %}x{% endfor %}",
    "{% for i in range(10**4) %}{% for j in range(10**4) %}{% endfor %}{% endfor %}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('touch CANARY') }}",
    "{{ lipsum.__globals__['os'].system('touch CANARY') }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.system('touch CANARY') }}",
    "{% extends '../../etc/passwd' %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ messages }}" * 2000,
    "{{ messages[0]['content'] }}" + "{% if true %}" * 300 + "{% endif %}" * 300,
    "{{ raise_exception('\x1b[31m' ~ '\u202e' ~ 'x' * 100000) }}",
    "{{ raise_exception('') }}",
    "{{ messages[99].content }}",
    "{{ (1).__class__.__base__ }}",
    "{{ 'a'|attr('__class__') }}",
    "{% set x = [1] %}{% for i in range(40) %}{% set x = x + x %}{% endfor %}",
    "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{{ '%s' % ('x' * 9999999) }}",
    "{{ ('(' * 5000) }}{{ " + "(" * 5000 + ")" * 5000 + " }}",
    "{{ 9 ** 9 ** 9 }}",
    "{{ strftime_now('%' ~ 'Y' * 100000) }}",
    "{{ messages.append({'role': 'user', 'content': 'x'}) }}",
    "{{ messages|map(attribute='__class__')|list }}",
    "{{ range.__self__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ messages|tojson }}\0\ud83d",
    "{%- for m in messages -%}{{ m.role }}{{ m.content }}{%- endfor -%}",
]


def templates(made: Made) -> Iterator[Case]:
    """Chat templates, which are programs."""
    good = (made.model / "chat_template.jinja").read_bytes()
    start = ["recipe=quickstart", "model=hf", f"model.path={made.model}", f"data.path={made.folder}/rows.jsonl"]
    start += ["prepare.dir=cache", "model.chat_template=t.jinja"]
    whole = [("written", text.encode("utf-8", "surrogatepass")) for text in TEMPLATES]
    for number, (kind, spoilt) in enumerate([*whole, *spoiled("template", good, 60)]):
        command = ["check", "prepare", "show"][number % 3]
        yield Case(f"template-{number} {kind}", [command, *start], {"t.jinja": spoilt}, None, ("jinja", "template"))


def using(made: Made, number: int) -> tuple[list[str], tuple[str, ...]]:
    """Return a command that reads a model directory `m`."""
    start = [
        "recipe=quickstart",
        "model=hf",
        "model.path=m",
        f"data.path={made.folder}/rows.jsonl",
        "prepare.dir=cache",
    ]
    how = [
        ["check", *start],
        ["plan", *start, "gpus=8xA100-80GB"],
        ["prepare", *start],
        ["generate", "model.path=m", "prompts=[a]"],
        ["export-model", "model.path=m", "output=out", "format=hf"],
        ["verify", "m"],
        ["show", *start],
    ]
    return how[number % len(how)], ("m", "model")


def models(made: Made) -> Iterator[Case]:
    """Model directories: config, tokenizer, weights and their index."""
    counts = {"config.json": 70, "tokenizer.json": 50, "tokenizer_config.json": 35, "generation_config.json": 20}
    number = 0
    for name, count in counts.items():
        tree = json.loads((made.model / name).read_text())
        if name == "tokenizer.json":
            tree["model"]["vocab"] = dict(list(tree["model"]["vocab"].items()))
        some = dict(tree)
        for label, _, content in trees(f"model-{name}", some, count):
            number += 1
            command, told = using(made, number)
            yield Case(label, command, {f"m/{name}": content}, made.model, told)
        for label, spoilt in spoiled(f"model-{name}", (made.model / name).read_bytes(), 36):
            number += 1
            command, told = using(made, number)
            yield Case(label, command, {f"m/{name}": spoilt}, made.model, told)
    weights = (made.model / "model.safetensors").read_bytes()
    size = int.from_bytes(weights[:8], "little")
    header, body = json.loads(weights[8 : 8 + size]), weights[8 + size :]
    for label, _, content in trees("header", header, 60):
        number += 1
        command, told = using(made, number)
        whole = len(content).to_bytes(8, "little") + content + body
        yield Case(label, command, {"m/model.safetensors": whole}, made.model, told)
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(header, "model.safetensors")}
    for label, _, content in trees("index", index, 30):
        number += 1
        command, told = using(made, number)
        yield Case(label, command, {"m/model.safetensors.index.json": content}, made.model, told)
    for label, spoilt in spoiled("weights", weights, 50):
        number += 1
        command, told = using(made, number)
        yield Case(label, command, {"m/model.safetensors": spoilt}, made.model, told)


def adapters(made: Made) -> Iterator[Case]:
    """Adapters: settings and weights."""
    base = made.adapter / "export"
    settings = json.loads((base / "adapter_config.json").read_text())
    how = [
        ["generate", "model.path=m", "prompts=[a]"],
        ["export-model", "model.path=m", "output=out", "merge=true", "format=hf"],
        ["verify", "m"],
    ]
    for number, (label, _, content) in enumerate(trees("adapter", settings, 70)):
        yield Case(label, how[number % 3], {"m/adapter_config.json": content}, base, ("m", "adapter"))
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        for number, (label, spoilt) in enumerate(spoiled(f"adapter-{name}", (base / name).read_bytes(), 36)):
            yield Case(label, how[number % 3], {f"m/{name}": spoilt}, base, ("m", "adapter"))


def checkpoints(made: Made) -> Iterator[Case]:
    """Checkpoints that are verified, exported and resumed."""
    folder = made.checkpoint
    resume = tiny(made.folder / "rows.jsonl", Path("new"), "again", "model=hf", f"model.path={made.model}")
    resume += ["train.max_steps=6", "checkpoint.every=2", "resume=m", "checkpoint.verify=false"][:3]
    how = [["verify", "m"], ["export-model", "model.path=m", "output=out", "format=hf"], ["train", *resume]]
    number = 0
    for name in ("manifest.json", "state.json", "config.yaml", "latest"):
        if not (folder / name).exists():
            continue
        text = (folder / name).read_text()
        tree = yaml.safe_load(text)
        spoil = trees(f"checkpoint-{name}", tree, 30) if isinstance(tree, dict) else iter(())
        for label, _, content in spoil:
            number += 1
            yield Case(label, how[number % 3], {f"m/{name}": content}, folder, ("m",))
        for label, spoilt in spoiled(f"checkpoint-{name}", text.encode(), 32):
            number += 1
            yield Case(label, how[number % 3], {f"m/{name}": spoilt}, folder, ("m",))
    for file in sorted(folder.rglob("*")):
        if file.is_file() and file.parent == folder and file.name.startswith("fragments"):
            for label, spoilt in spoiled(f"checkpoint-{file.name}", file.read_bytes(), 40):
                number += 1
                yield Case(label, how[number % 3], {f"m/{file.name}": spoilt}, folder, ("m",))


def hostfiles(made: Made) -> Iterator[Case]:
    """Hostfiles, env files and variables of launchers, as their readers take them."""
    good = b"node1 slots=8\nnode2 slots=8\n# comment\nlocalhost slots=2\n"
    for label, spoilt in spoiled("hostfile", good, 50):
        if spoilt is not Special.pipe:  # hostfile=<(command)
            yield Case(
                label,
                calling(lambda: hostfile.select_gpus(hostfile.read_hostfile(Path("h")), {})),
                {"h": spoilt},
                None,
                ("h",),
            )
    for label, spoilt in spoiled("deepspeed-env", b"A=1\nB=two words\nC=\n", 40):
        yield Case(
            label,
            calling(lambda: variables.variables_of_files(Path())),
            {".deepspeed_env": spoilt},
            None,
            (".deepspeed_env",),
        )
    for number in range(40):
        draw = random.Random(f"variables-{number}")
        names = draw.choice(list(environment.VARIABLES.values()))
        texts = [str(value) for value in VALUES.values() if "\0" not in str(value)]
        environ = {name: draw.choice([*texts, "0", "1", "2"]) for name in names}
        yield Case(f"variables-{number}", calling(partial(environment.detect, environ)))
        nodes = "".join(draw.choice(["gpu", "[", "]", "01", "-", ",", "9" * 30, "\x1b"]) for _ in range(12))
        yield Case(f"nodes-{number} {nodes!r}", ["hostfile", "output=h", f"nodes={nodes}", "slots=8"])


def calling(function: Callable[[], object]) -> Callable[[], int]:
    """Return what calls a function and ends well."""

    def call() -> int:
        function()
        return 0

    return call


def deepspeed_jsons(made: Made) -> Iterator[Case]:
    """DeepSpeed JSONs, in a recipe."""
    folder = Path(__file__).parents[1] / "config" / "deepspeed_json"
    for file in sorted(folder.glob("*.json")):
        tree = json.loads(file.read_text())
        for label, key, content in trees(f"deepspeed-{file.stem}", tree, 10):
            given = ["check", "recipe=quickstart", "deepspeed_json=ds.json", "world_size=4", "batch.global_size=64"]
            yield Case(label, given, {"ds.json": content}, None, ("ds.json", key))
    for label, spoilt in spoiled("deepspeed", as_json(DS_AUTO), 40):
        yield Case(
            label, ["check", "recipe=quickstart", "deepspeed_json=ds.json"], {"ds.json": spoilt}, None, ("ds.json",)
        )


def imports(made: Made) -> Iterator[Case]:
    """Configs and commands of other programs."""
    trainer = {
        "per_device_train_batch_size": 2,
        "model_name_or_path": "m",
        "learning_rate": 1e-4,
        "num_train_epochs": 1,
    }
    files: dict[str, bytes] = {
        "factory.yaml": FACTORY_YAML.encode(),
        "axolotl.yaml": yaml.safe_dump(
            {**AXOLOTL, "datasets": AXOLOTL["datasets"][:2], "deepspeed": "x.json"}
        ).encode(),
        "swift.sh": SWIFT.encode(),
        "full.sh": FULL.encode(),
        "ptuning.sh": PTUNING.encode(),
        "trainer.json": json.dumps(trainer).encode(),
    }
    for name, content in files.items():
        given = ["import-config", name, "world_size=4"]
        if not name.endswith(".sh"):
            for label, key, text in trees(f"import-{name}", yaml.safe_load(content), 25):
                yield Case(label, given, {name: text}, None, (name, key, name.partition(".")[0]))
        for label, spoilt in spoiled(f"import-{name}", content, 44 if name.endswith(".sh") else 34):
            yield Case(label, given, {name: spoilt}, None, (name,))
        if name.endswith(".sh"):
            for number in range(16):
                draw = random.Random(f"import-{name}-words-{number}")
                parts = content.decode().split()
                at = draw.randrange(len(parts))
                kind = draw.choice([one for one, value in VALUES.items() if isinstance(value, str)])
                parts[at] = str(VALUES[kind])
                text = " ".join(parts).encode("utf-8", "surrogatepass")
                yield Case(f"import-{name}-words-{number} {kind}", given, {name: text}, None, (name,))


class Inert(HTMLParser):
    """A page in which no text of an input has become markup."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.wrong: list[str] = []
        self.scripts = 0
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.scripts += tag == "script"
        links = [str(given.get(name) or "").strip().lower() for name in ("href", "src", "action", "xlink:href")]
        is_link = any(link.startswith(("javascript:", "vbscript:", "data:text")) for link in links)
        if is_link or any(name.startswith("on") for name in given) or tag in ("iframe", "object", "embed", "base"):
            self.wrong.append(f"<{tag} {given}>")
        if tag == "img" and not links[1].startswith("data:image"):
            self.wrong.append(f"<{tag} {given}>")


MARKUPS = [
    MARKUP,
    "<img src=x onerror=alert(1)>",
    "<svg/onload=alert(1)>",
    '"><script>alert(1)</script>',
    "' onmouseover='alert(1)",
    "javascript:alert(1)",
    "[x](javascript:alert(1))",
    "</title><script>alert(1)</script>",
    "--><script>alert(1)</script><!--",
    "]]><script>alert(1)</script>",
    "</textarea></style><script>alert(1)</script>",
    "<!--<script>",
    "&lt;script&gt;alert(1)&lt;/script&gt; &#x3c;img src=x&#x3e;",
    "{{ 7 * 7 }}{% raw %}{{ ''.__class__ }}",
    "\u2028</script\u2029><iframe srcdoc='<script>alert(1)</script>'>",
]


def writing(words: list[str], page: str, scripts: int) -> Callable[[], int]:
    """Return what runs a command and looks at the page that it writes, which has so many scripts of its own."""

    def call() -> int:
        code = _dispatch(words)
        found = Inert(Path(page).read_text(encoding="utf-8"))
        assert not found.wrong and found.scripts == scripts, (found.wrong, found.scripts)
        return code

    return call


def scripts_of(words: list[str], page: Path) -> int:
    """Return how many scripts the page of a harmless input has."""
    with redirect_stdout(io.StringIO()) as said, redirect_stderr(said):
        assert main(words) == 0, said.getvalue()
    return Inert(page.read_text(encoding="utf-8")).scripts


def pages(made: Made) -> Iterator[Case]:
    """Texts that would become markup in a report of data or of a run."""
    rows, page = made.folder / "plain.jsonl", made.folder / "plain.html"
    for kind, good in ROWS.items():
        rows.write_text((json.dumps(good) + "\n") * 3)
        scripts = scripts_of(["data-report", str(rows), f"output={page}", *report_format(kind)], page)
        for number, markup in enumerate(MARKUPS):
            texts = json.dumps(good)
            for text in ('"a"', '"b"', '"c"', '"good"', '"s"', '"d"', '"a b c"'):
                texts = texts.replace(f" {text}", " " + json.dumps(markup + " <|im_end|> I'm sorry, but I cannot"))
            name = f"{markup}.jsonl".replace("/", "_") if number < 6 else "d.jsonl"
            content = (texts + "\n").encode() * 3 + json.dumps({markup: markup}).encode() + b"\n"
            shown = name if "=" not in name else f"path={name}"
            command = ["data-report", shown, "output=p.html", *report_format(kind)]
            yield Case(f"page-{kind}-{number}", writing(command, "p.html", scripts), {name: content})
    plain = fake_run(made.folder / "plain" / "run")
    scripts = scripts_of(["report", str(plain), f"output={page}"], page)
    for number, markup in enumerate(MARKUPS):
        base = fake_run(made.folder / f"run-{number}", text=markup)
        yield Case(f"page-run-{number}", writing(["report", "m", "output=p.html"], "p.html", scripts), {}, base)


def asking(path: str, body: bytes, headers: dict[str, str] | None = None) -> Callable[[], int]:
    """Return what asks the board, as a browser that has its cookie."""

    def call() -> int:
        application = board.application(board.Board(Path(), Path()), "token", "cookie")
        with TestClient(cast(Any, application), base_url="http://127.0.0.1:8765") as client:
            client.cookies.set("cookie", "token")
            if path.startswith("/do/"):
                answer = client.post(path, content=body, headers=headers)
            else:
                answer = client.get(path, headers=headers)
        assert answer.status_code < 500, answer.status_code
        if path.startswith("/report") and answer.status_code == 200:
            assert not Inert(answer.text).wrong
        return 0

    return call


def runs(made: Made) -> Iterator[Case]:
    """Directories of runs that `report`, the board and `verify` read."""
    base = fake_run(made.folder / "read" / "run")
    kinds = sorted(file.relative_to(base).as_posix() for file in base.rglob("*") if file.is_file())
    kinds = [name for name in kinds if "step-" not in name or "step-20" in name] + ["DONE", "FAILED"]
    number = 0
    for name in kinds:
        text = (base / name).read_bytes() if (base / name).exists() else b'{"steps": 40}'
        first, *rest = text.split(b"\n") if name.endswith(".jsonl") else [text]
        tree = yaml.safe_load(first)
        spoil = [(label, content) for label, _, content in trees(f"run-{name}", tree, 8)]
        spoil = [(label, b"\n".join([content, *rest])) for label, content in spoil]
        for label, content in [*spoil, *spoiled(f"run-{name}", text, 34)]:
            number += 1
            how: list[Any] = [["report", "m", "output=r.html"], asking("/do/runs", b"{}"), asking("/report?run=m", b"")]
            command = how[number % 3] if number % 10 else ["verify", "m"]
            yield Case(label, command, {f"m/{name}": content}, base, ("m",))


def requests(made: Made) -> Iterator[Case]:
    """What a browser, or what looks like one, asks the board."""
    values = {"optim.lr": "1e-3", "train.max_steps": "4"}
    given: dict[str, Any] = {
        "base": "quickstart",
        "groups": {"zero": "stage1"},
        "values": values,
        "gpus": "8xA100-80GB",
    }
    given = given | {"run": "x", "name": "n", "recipe": "none.yaml", "ranks": "2", "file": "f.yaml", "overwrite": False}
    for action, count in {"check": 60, "save": 30, "start": 30, "stop": 12, "log": 12, "runs": 6, "form": 4}.items():
        for label, _, content in trees(f"request-{action}", given, count):
            yield Case(label, asking(f"/do/{action}", content))
    for label, spoilt in spoiled("request", json.dumps(given).encode(), 40):
        if isinstance(spoilt, bytes):
            yield Case(label, asking("/do/check", spoilt))
    for path in ("/file/%2e%2e%2fboard.py", "/report?run=..", "/report?run=%00", "/report?run=" + "x" * 9000, "/%ff"):
        yield Case(f"request {path[:40]}", asking(path, b""))
    for name in ("host", "origin", "cookie", "content-length", "transfer-encoding", "content-type"):
        for value in ("", "x" * 9000, "http://127.0.0.1:8765@evil", "[::1", "-1", "null", "127.0.0.1:99999999"):
            yield Case(f"request {name} {value[:30]!r}", asking("/do/runs", b"{}", {name: value}))


def large(made: Made) -> Iterator[Case]:
    """What is large in one direction, and patterns and links that lead to the whole disk."""
    names = [f"name{number}" for number in range(5000)]
    for label, lines in {
        "the same": ["quickstart"] * 5000,
        "others": names,
        "chosen": ["override /zero: stage1"] * 5000,
        "unknown groups": [f"override /{name}: x" for name in names],
    }.items():
        content = "".join(["defaults:\n", *(f"  - {line}\n" for line in lines), "run:\n  name: x\n"]).encode()
        yield Case(f"defaults {label}", ["check", "recipe=r.yaml"], {"r.yaml": content})
    wide = json.dumps({f"column{number}": "x" for number in range(30_000)}).encode() + b"\n"
    good = json.dumps({**json.loads(wide), "prompt": "a", "response": "b"}).encode() + b"\n"
    start = ["recipe=quickstart", "model=hf", f"model.path={made.model}", "data.path=d.jsonl", "prepare.dir=cache"]
    for label, content in {"unknown columns": wide * 3, "columns": good * 3}.items():
        for command in (["check", *start], ["prepare", *start], ["data-report", "d.jsonl", "workers=1"]):
            yield Case(f"30,000 {label} {command[0]}", command, {"d.jsonl": content}, None, ("d.jsonl",))
    file = made.folder / "large.parquet"
    text = ["".join(random.Random(number).choices("abcdefgh ", k=1000)) for number in range(2000)]
    pyarrow.parquet.write_table(pyarrow.table({"text": text * 100}), file)
    yield Case("large table check", ["check", *start[:3], f"data.path={file}"], {}, None, ("large",))
    yield Case("large table report", ["data-report", str(file), "workers=1"], {}, None, ("large",), 400)
    (made.folder / "loops" / "a").mkdir(parents=True)
    for name, target in {"a/up": "..", "a/here": ".", "disk": "/"}.items():
        (made.folder / "loops" / name).symlink_to(target)
    for pattern in (
        "/**/*",
        "/",
        "/**/*.jsonl",
        "/*/*/*/*/*/*.json",
        "m",
        "m/**/*.jsonl",
        "m/*/*/*/*/*/*/*/*",
        "/proc/**",
    ):
        for command in (["check", *start[:3], f"data.path={pattern}"], ["data-report", pattern, "workers=1"]):
            yield Case(f"pattern {pattern} {command[0]}", command, {}, made.folder / "loops", (pattern, "data"))


SURFACES: dict[str, Callable[[Made], Iterator[Case]]] = {
    "recipes": recipes,
    "words": words,
    "data": data,
    "templates": templates,
    "models": models,
    "adapters": adapters,
    "checkpoints": checkpoints,
    "hostfiles": hostfiles,
    "deepspeed_json": deepspeed_jsons,
    "imports": imports,
    "pages": pages,
    "runs": runs,
    "requests": requests,
    "large": large,
}


@pytest.mark.fault("S7")
@pytest.mark.parametrize("surface", SURFACES)
def test_hostile_inputs(
    surface: str,
    made: Made,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("toolkit.report.page.png", lambda drawing: b"a picture")  # seconds each
    found = try_all(SURFACES[surface](made), tmp_path)
    wrong = [one for one in found if one.wrong]
    record_property("inputs", len(found))
    record_property("refused", sum(one.code != 0 for one in found))
    record_property("slowest_s", round(max(one.seconds for one in found), 1))
    record_property("most_memory_mib", max(one.memory_bytes for one in found) >> 20)
    assert not wrong, f"{len(wrong)} of {len(found)}\n" + "\n\n".join(one.wrong for one in wrong[:60])
