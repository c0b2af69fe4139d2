"""Model directories from strangers: every damage is one message that names the file, and nothing runs for long."""

import json
import math
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from toolkit.config.load import load
from toolkit.engine.ds_config import build_ds_config
from toolkit.engine.memory import PeakMemory
from toolkit.messages import BaseMissing, ConfigError, ModelError, RowError, reading
from toolkit.models import adapter_settings, adapters, lora
from toolkit.models.base_model import BaseModel
from toolkit.models.chat import fit_tokenizer
from toolkit.models.chat_template import TemplateChatEncoder
from toolkit.models.directory import read_config
from toolkit.models.sandbox import TooSlow, bound_templates, time_limit
from toolkit.models.tokenizer_files import load_tokenizer
from toolkit.models.weights import WeightFiles, read_tensors

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 300,
}
ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
BODY = bytes(8)
MESSAGES = [{"role": "user", "content": "aaaa bbbb"}, {"role": "assistant", "content": "cccc"}]


def safetensors(header: object, body: bytes = BODY) -> bytes:
    """Return a file with a header that need not be right."""
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(content)) + content + body


FILES = {
    "two bytes": b"\x01\x02",
    "endless header": struct.pack("<Q", 1 << 62) + b"{}",
    "list": safetensors([1]),
    "null": safetensors(None),
    "no entry": safetensors({"a": 1}),
    "no offsets": safetensors({"a": {"dtype": "F32", "shape": [2]}}),
    "one offset": safetensors({"a": {**ENTRY, "data_offsets": [0]}}),
    "offsets as text": safetensors({"a": {**ENTRY, "data_offsets": ["0", "8"]}}),
    "offsets turned round": safetensors({"a": {**ENTRY, "data_offsets": [8, 0]}}),
    "overlapping": safetensors({"a": ENTRY, "b": {**ENTRY, "data_offsets": [4, 12]}}, bytes(12)),
    "unknown type": safetensors({"a": {**ENTRY, "dtype": "F33"}}),
    "shape as text": safetensors({"a": {**ENTRY, "shape": "x"}}),
    "negative shape": safetensors({"a": {**ENTRY, "shape": [-2]}}),
    "no shape": safetensors({"a": {"dtype": "F32", "data_offsets": [0, 8]}}),
    "other size": safetensors({"a": {**ENTRY, "shape": [3]}}),
    "not UTF-8": safetensors(json.dumps({"a": ENTRY}).encode().replace(b'"a"', b'"\xff"')),
    "deep": safetensors(b"[" * 100_000 + b"]" * 100_000),
    "5,000 digits": safetensors(json.dumps({"a": ENTRY}).encode().replace(b"[2]", b"[" + b"9" * 5000 + b"]")),
    "metadata": safetensors({"__metadata__": [1], "a": ENTRY}),
}


def folder_of(tmp_path: Path, config: object, weights: bytes = safetensors({"a": ENTRY})) -> Path:
    """Write a model directory."""
    text = config if isinstance(config, str) else json.dumps(config)
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    (tmp_path / "model.safetensors").write_bytes(weights)
    return tmp_path


@pytest.mark.parametrize("name", FILES)
def test_damaged_safetensors(name: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, CONFIG, FILES[name])
    for read in (lambda: read_config(str(folder)), lambda: WeightFiles(folder)):
        with pytest.raises(ModelError) as error:
            read()
        assert f"{folder}/model.safetensors" in str(error.value)
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        read_tensors(folder / "model.safetensors")


def test_types_that_cannot_be_trained(tmp_path: Path) -> None:
    entry = {"dtype": "F8_E4M3", "shape": [8], "data_offsets": [0, 8]}
    folder = folder_of(tmp_path, CONFIG, safetensors({"a": entry}))
    with pytest.raises(ModelError, match=r"model\.safetensors: 'a' is of type F8_E4M3"):
        WeightFiles(folder)


def test_what_a_caller_raises_is_not_the_file(tmp_path: Path) -> None:
    files = WeightFiles(folder_of(tmp_path, CONFIG))
    with pytest.raises(KeyError, match="mine"), files.open("a"):
        raise KeyError("mine")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 10**9),
        ("num_hidden_layers", True),
        ("hidden_size", 10**15),
        ("hidden_size", -4),
        ("hidden_size", None),
        ("hidden_size", "big"),
        ("hidden_size", {"a": 1}),
        ("hidden_size", 1.5),
        ("num_attention_heads", 0),
        ("vocab_size", 10**12),
        ("num_local_experts", 10**7),
        ("intermediate_size", [32, 10**9]),
    ],
)
def test_absurd_sizes(key: str, value: object, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, {**CONFIG, key: value})
    with pytest.raises(ModelError, match=rf"{folder}/config\.json: {key} = .* is not a whole number from"):
        read_config(str(folder))
    with pytest.raises(ModelError, match="is not a whole number"):
        read_config(str(folder_of(tmp_path, {**CONFIG, "text_config": {key: value}})))


@pytest.mark.parametrize("key", ["rms_norm_eps", "layernorm_epsilon", "rope_theta"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 1e300, "small", True])
def test_numbers_that_make_every_output_nan(key: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"config\.json( is not JSON: NaN|: {key} = .*) is (no|not a) number"):
        read_config(str(folder_of(tmp_path, {**CONFIG, key: value})))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "[" * 100_000,
        '{"a":' * 50_000 + "1" + "}" * 50_000,
        '{"x": ' + "9" * 5000 + "}",
        '{"model_type": [1]}',
    ],
    ids=["empty", "list", "deep list", "deep object", "5,000 digits", "type"],
)
def test_damaged_configs(text: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        read_config(str(folder_of(tmp_path, text)))


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a good tokenizer."""
    folder = tmp_path_factory.mktemp("tokenizer")
    fit_tokenizer(lambda: ["aaaa bbbb cccc"], 300, folder).save_pretrained(folder)
    return folder


def changed(source: Path, target: Path, **parts: object) -> Path:
    """Write the tokenizer with other parts."""
    for file in source.glob("*.json"):
        (target / file.name).write_bytes(file.read_bytes())
    for file in source.glob("*.jinja"):
        (target / file.name).write_bytes(file.read_bytes())
    whole = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    (target / "tokenizer.json").write_text(json.dumps(whole | parts), encoding="utf-8")
    return target


def test_tokenizers_that_explode(tokenizer_folder: Path, tmp_path: Path) -> None:
    tenfold = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
    folder = changed(tokenizer_folder, tmp_path, normalizer={"type": "Sequence", "normalizers": [tenfold] * 10})
    with pytest.raises(ModelError, match=r"tokenizer\.json: its normalizer can make a text more than 100 times"):
        load_tokenizer(folder)
    changed(tokenizer_folder, tmp_path, normalizer={"type": "Sequence", "normalizers": [tenfold]})
    assert len(load_tokenizer(folder)("aaaa")["input_ids"]) > 4


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("model", None),
        ("model", {"type": "BPE", "vocab": {"a": -1}, "merges": []}),
        ("normalizer", [1]),
        ("decoder", 3),
    ],
)
def test_damaged_tokenizers(part: str, value: object, tokenizer_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"Cannot read '{tmp_path}'"):
        load_tokenizer(changed(tokenizer_folder, tmp_path, **{part: value}))


def test_panics_of_a_library_are_messages(tmp_path: Path) -> None:
    class PanicException(BaseException):
        """As pyo3 raises."""

    with pytest.raises(ModelError, match=f"Cannot read '{tmp_path}': boom"), reading(tmp_path, ModelError):
        raise PanicException("boom\nthread panicked")
    with pytest.raises(KeyboardInterrupt), reading(tmp_path, ModelError):
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1/0 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for",
        "{{ range(10**9)|list }}",
        "{{ a.b.c }}",
    ],
    ids=["division", "recursion", "syntax", "range", "undefined"],
)
def test_templates_that_fail(template: str, tokenizer_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(template, encoding="utf-8")
    with pytest.raises(RowError, match="the chat template rejects the conversation: "):
        TemplateChatEncoder(load_tokenizer(tokenizer_folder, chat_template=str(tmp_path / "t.jinja"))).encode(MESSAGES)


GROWING = {
    "repetition": "{{ 'x' * 10**9 }}",
    "of a list": "{{ ([0] * 10**8)|length }}",
    "twice": "{% set x = 'x' * 10**6 %}{{ (x ~ '') * 10**3 }}",
    "doubling": "{% set n = namespace(x='xx') %}{% for i in range(29) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "adding": "{% set n = namespace(x=[1]) %}{% for i in range(29) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "output": "{% set x = 'x' * 10**7 %}{% for i in range(99) %}{{ x }}{% endfor %}",
    "macro": "{% set x = 'x' * 10**7 %}"
    "{% macro f() %}{% for i in range(99) %}{{ x }}{% endfor %}{% endmacro %}{{ f() }}",
    "method": "{{ 'x'.ljust(10**9) }}",
    "filter": "{{ 'x'|center(10**9) }}",
    "indent": "{{ ('\n' * 10**4)|indent(10**5) }}",
    "replace": "{{ ('x' * 10**4).replace('x', 'y' * 10**5) }}",
    "join": "{{ ('x' * 10**4).join(['a', 'b'] * 49999) }}",
    "format": "{{ '%999999999d' % 1 }}",
    "filtered format": "{{ '%*d'|format(10**9, 1) }}",
    "method format": "{{ '{:999999999}'.format(1) }}",
    # Not written out, as what is written is counted too, once it is there.
    "method format unwritten": "{{ '{:>99999999}'.format('a')|length }}",
    "method format by argument": "{{ '{:>{}}'.format('a', 99999999)|length }}",
    "method format, its precision": "{{ '{:.99999999f}'.format(1.0)|length }}",
    "method format_map": "{{ '{a:>99999999}'.format_map({'a': 'b'})|length }}",
    "method format, kept": "{% set f = '{:>99999999}'.format %}{{ f('a')|length }}",
    "method format, by filter": "{{ ('{:>99999999}'|attr('format'))('a')|length }}",
    "method format, safe": "{{ ('{:>99999999}'|safe).format('a')|length }}",
    "json": "{{ messages|tojson(indent=10**8) }}",
    "power": "{{ 10 ** (10 ** 6) }}",
    "bytes": "{{ (1).to_bytes(10**9, 'big') }}",
}


@pytest.mark.parametrize("name", GROWING)
def test_templates_that_fill_the_memory(name: str, tokenizer_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(GROWING[name], encoding="utf-8")
    with PeakMemory(torch.device("cpu"), only_new=True) as memory:
        with pytest.raises(
            RowError, match=r"the chat template rejects the conversation: it makes a text.* are the most"
        ):
            TemplateChatEncoder(load_tokenizer(tokenizer_folder, chat_template=str(tmp_path / "t.jinja"))).encode(
                MESSAGES
            )
        assert memory.highest() < 512 << 20


def test_templates_within_the_bounds_are_rendered_as_before() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    bound_templates()
    template = (
        "{{ '-' * 3 }}{{ [1] + [2] }}{{ 2 ** 5 }}{{ 7 % 4 }}{{ '%s|%d' % ('a', 3) }}{{ '{:>3}'.format(1) }}"
        "{{ 'a' ~ 1 ~ none }}{{ messages|tojson(indent=1) }}{{ ['a', 'b']|join(',') }}{{ 'a\nb'|indent(2) }}"
        "{{ 'ab'.replace('a', 'c') }}{{ messages|map(attribute='role')|join('+') }}{{ 'x'|upper|center(3) }}"
        "{{ '%s!'|format('a') }}{{ ''.join(['a', 'b']) }}{{ [[1], [2]]|sum(start=[]) }}"
    )
    texts, _ = render_jinja_template([[{"role": "user", "content": "你好"}]], chat_template=template)
    assert texts == [
        '---[1, 2]323a|3  1a1None[\n {\n  "role": "user",\n  "content": "你好"\n }\n]a,ba\n  bcbuser X a!ab[1, 2]'
    ]


def test_templates_that_never_end(tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.models.answer_spans.RENDERING_S", 0.5)
    loop = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
    (tmp_path / "t.jinja").write_text(loop, encoding="utf-8")
    started = time.monotonic()
    with pytest.raises(ModelError, match="The chat template takes more than"):
        TemplateChatEncoder(load_tokenizer(tokenizer_folder, chat_template=str(tmp_path / "t.jinja")))
    assert time.monotonic() - started < 30


def test_a_time_limit_leaves_no_alarm() -> None:
    with time_limit(0.05):
        pass
    time.sleep(0.1)
    with pytest.raises(TooSlow), time_limit(0.05):
        time.sleep(30)


def test_thousands_of_unknown_deepspeed_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cfg = load(["recipe=quickstart"]).cfg
    cfg.ds_extra = {f"key_{number}": 1 for number in range(60_000)}
    started = time.monotonic()
    with pytest.raises(ConfigError) as error:
        build_ds_config(cfg, 2, 100)
    assert time.monotonic() - started < 20
    assert str(error.value).count("\n") < 30
    assert str(error.value).endswith("… and 59,980 more.")


def adapter_of(tmp_path: Path, **settings: object) -> Path:
    """Write an adapter's settings."""
    whole = {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"], **settings}
    (tmp_path / "adapter_config.json").write_text(json.dumps(whole), encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("base", ["https://host/model", "owner/name", "/etc", "../..", ["a"], 5, None])
def test_bases_of_adapters_are_directories_of_models_or_nothing(base: object, tmp_path: Path) -> None:
    with pytest.raises(BaseMissing, match=r"the base model of .* was not found"):
        adapters.base_of_adapter(adapter_of(tmp_path, base_model_name_or_path=base))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"r": 10**9}, "r = 1000000000 is not a whole number from 1 to 65,536"),
        ({"r": "x"}, "r = 'x' is not a whole number"),
        ({"peft_type": ["LORA"]}, "is of the kind"),
        ({"peft_type": None}, "is of the kind"),
        ({"modules_to_save": ["(a+)+b"]}, "modules_to_save holds '(a+)+b', which is no name of a module"),
        ({"rank_pattern": {"(.*)*q": 4}}, "rank_pattern holds '(.*)*q'"),
        ({"rank_pattern": {".*.*.*q": 4}}, "rank_pattern holds '.*.*.*q'"),
        ({"layers_pattern": "(h+)*"}, "layers_pattern holds '(h+)*'"),
    ],
)
def test_damaged_settings_of_adapters(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"adapter_config\.json") as error:
        adapters.read_settings(adapter_of(tmp_path, **settings))
    assert said in str(error.value)


def test_patterns_that_peft_writes_are_read(tmp_path: Path) -> None:
    patterns = {r".*\.gate_up_proj": 8, r"^layers\.1\.mlp\-up": 4}
    assert adapters.read_settings(adapter_of(tmp_path, rank_pattern=patterns))["rank_pattern"] == patterns


NAMED = ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.up_proj"]


def test_expressions_of_adapters_become_names() -> None:
    found = adapter_settings.with_matched_modules(
        {"target_modules": r".*\.1\.(self_attn\.q_proj|mlp\.up_proj)", "r": 2}, ["", *NAMED]
    )
    assert found == {"target_modules": NAMED[1:], "r": 2}
    both = {"target_modules": ".*proj", "exclude_modules": "no such"}
    assert adapter_settings.with_matched_modules(both, NAMED) == {"target_modules": NAMED, "exclude_modules": []}
    for kept in ({"target_modules": "all-linear"}, {"target_modules": ["q_proj"]}, {"target_modules": None}):
        assert adapter_settings.with_matched_modules(kept, NAMED) == kept


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("(([a-z_.0-9])+)+!", "takes more than 0.5 s"),
        ("(", "missing ), unterminated subpattern"),
        ("no such", "it matches no module of the model"),
        ("a" * 30_000, "it has more than 20,000 characters"),
    ],
    ids=["endless", "damaged", "nothing", "long"],
)
def test_expressions_of_adapters_are_bounded(
    expression: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_settings, "_MATCHING_S", 0.5 if "takes" in reason else 60)
    settings = adapters.read_settings(adapter_of(tmp_path, target_modules=expression))
    with torch.device("meta"):
        model: Any = torch.nn.Sequential()
        model.add_module("model_layers_0_self_attn_q_proj_" * 2, torch.nn.Linear(2, 2))
    model.device = torch.device("meta")
    with pytest.raises(ModelError, match=r"adapter_config\.json: the expression target_modules = ") as error:
        adapters.attach_adapter(model, settings, BaseModel(path="", numbers={}))
    assert reason in str(error.value)


def test_adapters_cannot_name_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """peft imports what some settings name."""
    names = {"megatron_core": "canary", "megatron_config": {"a": 1}, "auto_mapping": {"parent_library": "canary"}}
    found: list[Any] = []
    monkeypatch.setattr(lora, "inject_lora", lambda model, config, ds_config: found.append(config))
    with torch.device("meta"):
        model: Any = torch.nn.Linear(2, 2)
    model.device = torch.device("meta")
    settings = adapters.read_settings(adapter_of(tmp_path, **names))
    adapters.attach_adapter(model, settings, BaseModel(path="", numbers={}))
    (config,) = found
    assert config.r == 2
    assert config.auto_mapping is None
    assert config.megatron_config is None
    assert config.megatron_core != "canary"
