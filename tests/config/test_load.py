"""Composition: who beats whom, where each value stands, and what every mistake is answered with, to the letter."""

import math
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from toolkit.arguments import parse_checked
from toolkit.config import suggest
from toolkit.config.dotted_keys import all_keys
from toolkit.config.files import Loader, _fast_loader
from toolkit.config.load import TYPED, load, replace, to_yaml
from toolkit.config.rules import check_rules
from toolkit.config.schema import LEARNING_RATES, Dtype, TrainConfig, TuningMethod
from toolkit.engine import ds_config
from toolkit.engine.ds_config import build_ds_config
from toolkit.messages import ConfigError, read_table

KNOWN = (
    "Known: quickstart, chatglm, chatglm2_6b, chatglm3_dpo_lora, chatglm3_lora, chatglm3_qlora, chatglm_6b, "
    "chatglm_full_adgen and 31 more: toolkit recipes."
)
"""Many recipes, of which a message has some."""
ZERO = (
    "Did you mean 'stage3'? Known: stage3, stage2, stage1, stage0, stage3_hpz, stage3_nvme, stage3_zeropp, "
    "stage3_offload and 3 more: conf/zero/."
)
GROUPS = "Known: compile, data, kernels, model, optim, parallel, precision, preference and 5 more: conf/."

IN_64_BITS = "a number from -9223372036854775807 to 9223372036854775807"
# Words on the command line (after recipe=quickstart) -> the whole message.
COMMAND_LINE = {
    "zero.stag=3": "command line: unknown key 'zero.stag'. Did you mean 'zero.stage'?",
    "+zero.stag=3": "command line: unknown key 'zero.stag'. Did you mean 'zero.stage'?",
    "++zero.stag=3": "command line: unknown key 'zero.stag'. Did you mean 'zero.stage'?",
    "zero.offload_param.devise=cpu": (
        "command line: unknown key 'zero.offload_param.devise'. Did you mean 'zero.offload_param.device'?"
    ),
    "checkpoint.memory_every=5": "command line: unknown key 'checkpoint.memory_every'. It has been removed; instead, "
    "see 'checkpoint.asynchronous' / 'checkpoint.every'.",
    "train.random_ltd.first_layers=2": "command line: unknown key 'train.random_ltd.first_layers'. It has been "
    "removed; instead, see 'data.curriculum' / 'data.packing'.",
    "gradient_clipping=1": "command line: unknown key 'gradient_clipping'. Did you mean 'train.gradient_clipping'?",
    "learning_rate=1": "command line: unknown key 'learning_rate'. Did you mean 'optim.lr'?",
    "cutoff_len=1": "command line: unknown key 'cutoff_len'. Did you mean 'data.max_length'?",
    "per_device_train_batch_size=1": "command line: unknown key 'per_device_train_batch_size'. Did you mean "
    "'batch.micro_per_gpu' / 'batch.global_size'?",
    "gradient_accumulation_steps=1": (
        "command line: unknown key 'gradient_accumulation_steps'. Did you mean 'batch.global_size'?"
    ),
    "train.num_train_epochs=1": "command line: unknown key 'train.num_train_epochs'. Did you mean 'train.epochs'?",
    "train_micro_batch_size_per_gpu=1": (
        "command line: unknown key 'train_micro_batch_size_per_gpu'. Did you mean 'batch.micro_per_gpu'?"
    ),
    "zero_optimization.stage=3": "command line: unknown key 'zero_optimization.stage'. Did you mean 'zero.stage'?",
    "data.sources=[{pth: x}]": "command line: unknown key 'data.sources[0].pth'. Did you mean 'data.sources[0].path'?",
    "data.sources=[{path: a},{path: b, fromat: auto}]": (
        "command line: unknown key 'data.sources[1].fromat'. Did you mean 'data.sources[1].format'?"
    ),
    "data.sources=3": "command line: 'data.sources' = 3 must be a list, for example [a, b].",
    "data.sources=[3]": "command line: 'data.sources[0]' = 3 must be a section of keys.",
    "train.max_steps=many": "command line: 'train.max_steps' = many must be a whole number.",
    "batch.micro_per_gpu=atuo": "command line: 'batch.micro_per_gpu' = atuo must be a whole number or auto.",
    "batch.micro_per_gpu=1.5": "command line: 'batch.micro_per_gpu' = 1.5 must be a whole number or auto.",
    "train.max_steps=1.5": "command line: 'train.max_steps' = 1.5 must be a whole number.",
    f"batch.global_size={2**63}": f"command line: 'batch.global_size' = {2**63} must be {IN_64_BITS}.",
    f"batch.world_sizes=[1,{2**63}]": f"command line: 'batch.world_sizes[1]' = {2**63} must be {IN_64_BITS}.",
    f"batch.micro_per_gpu={'9' * 4000}": f"command line: 'batch.micro_per_gpu' = {'9' * 40}… must be {IN_64_BITS}.",
    "data.sources=[{path: a, weight: 1e300}]": f"command line: 'data.sources[0].weight' = 1e+300 must be {IN_64_BITS}.",
    "optim.lr=-1e300": f"command line: 'optim.lr' = -1e+300 must be {IN_64_BITS}.",
    "zero.reduce_bucket_size=5e8": (
        "command line: 'zero.reduce_bucket_size' = 500000000.0 must be a whole number (write 500000000)."
    ),
    "optim.lr=fast": "command line: 'optim.lr' = fast must be a number.",
    "optim.betas=[0.9,x]": "command line: 'optim.betas[1]' = x must be a number.",
    "zero.overlap_comm=maybe": "command line: 'zero.overlap_comm' = maybe must be true or false.",
    "run.name=null": "command line: 'run.name' = null must be a text.",
    "optim.beta=[0.9,0.99]": "command line: unknown key 'optim.beta'. Did you mean 'optim.betas'?",
    "run.name=[a]": "command line: 'run.name' = ['a'] must be a text.",
    "zero=[3]": "command line: 'zero' = [3] must be a section of keys.",
    "evaluate.metrics=[rouge_L]": "command line: 'evaluate.metrics[0]' = rouge_L must be one of: bleu, chrf, rouge_1, "
    "rouge_2, rouge_l, exact_match, distinct_1, distinct_2 and 5 more: docs/config.md. Did you mean 'rouge_l'?",
    "precision.dtype=bf61": "command line: 'precision.dtype' = bf61 must be one of: fp32, bf16, fp16. Did you "
    "mean 'bf16'?",
    "zero=stage9": f"command line: unknown choice 'zero=stage9'. {ZERO}",
    "task=preference": (
        "command line: unknown choice 'task=preference'. Preferences are a group of their own: preference=dpo. Known: "
        "classify, distill, embed, language, reward."
    ),
    "recipe=chatgml": "command line: unknown recipe 'chatgml'. Did you mean 'chatglm'? Known: "
    "chatglm, chatglm_6b, chatglm2_6b, chatglm3_lora, chatglm3_qlora, chatglm3_dpo_lora, quickstart, "
    "chatglm_full_adgen and 31 more: toolkit recipes.",
    "recipe=nosuch.yaml": f"command line: there is no recipe file nosuch.yaml. {KNOWN}",
    "~zero.stage": "command line: '~zero.stage': keys cannot be removed; set a value instead.",
    "optim.lr=1e-4,2e-4": "command line: 'optim.lr=1e-4,2e-4' names several values; one run takes one. A "
    "list is 'optim.lr=[1e-4,2e-4]'.",
    "zero": "command line: cannot read 'zero': write key=value (quote spaces and brackets for the shell).",
    "hydra.run.dir=/x": "command line: 'hydra.run.dir=/x': Hydra's own settings cannot be changed here.",
}

# Content of a recipe -> the message after "recipe.yaml"
IN_A_FILE = {
    "zero:\n  stag: 3\n": ":2: unknown key 'zero.stag'. Did you mean 'zero.stage'?",
    "optim:\n  lr: 1\n\nzerro:\n  stage: 3\n": ":4: unknown key 'zerro'. Did you mean 'zero'?",
    "data:\n  sources:\n    - path: a\n    - pth: b\n": (
        ":4: unknown key 'data.sources[1].pth'. Did you mean 'data.sources[1].path'?"
    ),
    "train:\n  activation_checkpointing:\n    enable: true\n": (
        ":3: unknown key 'train.activation_checkpointing.enable'. "
        "Did you mean 'train.activation_checkpointing.enabled'?"
    ),
    "defaults: [_self_, quickstart]\noptim:\n  lr: 1e-4\n": (
        ":1: 'quickstart' follows _self_, so that its keys would replace those of this file. Put _self_ behind it."
    ),
    "train:\n  steps: 5\n": ":2: unknown key 'train.steps'. Did you mean 'train.max_steps'?",
    "train:\n  max_steps: 1:30\n": ":2: 'train.max_steps' = 1:30 must be a whole number.",
    "zero:\n  stage: three\n": ":2: 'zero.stage' = three must be a whole number.",
    "zero:\n  reduce_bucket_size: 2.0e8\n": ":2: 'zero.reduce_bucket_size' = 200000000.0 must be a whole "
    "number (write 200000000).",
    "zero: [3]\n": ":1: 'zero' = [3] must be a section of keys.",
    "optim:\n  lr:\n": ":2: 'optim.lr' = null must be a number.",
    "precision:\n  dtype: int8\n": ":2: 'precision.dtype' = int8 must be one of: fp32, bf16, fp16.",
    "defaults:\n  - override /zero: stage5\n": f":2: unknown choice 'zero=stage5'. {ZERO}",
    "defaults:\n  - override /zeroo: stage3\n": f":2: unknown group 'zeroo'. Did you mean 'zero'? {GROUPS}",
    "defaults:\n  - chatgml\n": ":2: unknown recipe 'chatgml'. Did you mean 'chatglm'?",
    "defaults:\n  - chatglm\n  - override /zero@model: stage3\n": (
        f":3: unknown group 'zero@model'. Did you mean 'model'? {GROUPS}"
    ),
    "defaults:\n  - zero: stage3\n": (
        ":2: '{'zero': 'stage3'}': write `- override /GROUP: CHOICE`, or the name of another recipe."
    ),
    "zero:\n  stage: 3\nzero:\n  stage: 2\n": ":3: found duplicate key zero",
    "zero:\n\tstage: 3\n": ":2: Indent with spaces: YAML takes no tabs.",
    "optim:\n lr: 1\n  eps: 1\n": ":3: Check the indentation: keys of a section begin in one column.",
    "defaults: quickstart\n": ":1: 'defaults' must be a list, such as [quickstart, _self_].",
    "optim：{lr: 1e-4}\n": (
        ":1: unknown key 'optim：{lr'. '：' is full-width or a typographic quote. Write = : , { } [ ] \" ' as in code. "
        "Did you mean 'optim.lr'?"
    ),
    "optim:\n  lr：1e-4\n": (
        ":1: 'optim' = lr：1e-4 must be a section of keys. '：' is full-width or a typographic quote. "
        "Write = : , { } [ ] \" ' as in code."
    ),
    "zero: {stage: 3\n": ":2: A quote or a bracket above is not closed.",
    "- a\n- b\n": " must hold `key: value` lines, not a list or a single value.",
}


def message(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(list(words))
    return str(caught.value)


@pytest.mark.parametrize("word", COMMAND_LINE)
def test_mistakes_on_the_command_line(word: str) -> None:
    found = message(*([] if word.startswith("recipe=") else ["recipe=quickstart"]), word)
    expected = COMMAND_LINE[word]
    assert found.startswith(expected) if expected.endswith(": ") else found == expected


@pytest.mark.parametrize("content", IN_A_FILE)
def test_mistakes_in_a_recipe(content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(content)
    assert message("recipe=recipe.yaml") == f"recipe.yaml{IN_A_FILE[content]}"


def test_two_recipes() -> None:
    assert (
        message("recipe=zero1", "recipe=zero1", "recipe=lora")
        == "command line: several recipes, zero1, lora: give one. "
        "A value with spaces needs quotes: data='my chat.jsonl'."
    )
    assert load(["recipe=zero1", "recipe=zero1"]).cfg.zero.stage == 1


def test_no_recipe() -> None:
    how = "no recipe is chosen: add recipe=NAME or PATH.yaml. recipe=lora trains any model; `toolkit new` writes one."
    assert message() == f"{how} {KNOWN}"


def test_not_utf8(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_bytes("run:\n  name: 你好\n".encode("gbk"))
    assert message(f"recipe={file}").startswith(f"{file}: not UTF-8, but probably GBK (GB18030). Convert it: `iconv -f")


def write(folder: Path, name: str, content: str) -> str:
    (folder / f"{name}.yaml").write_text(content)
    return f"recipe={folder}/{name}.yaml"


def test_command_line_beats_recipe_beats_group_beats_default(tmp_path: Path) -> None:
    recipe = write(tmp_path, "mine", "defaults:\n  - override /zero: stage3\n  - _self_\nzero:\n  overlap_comm: true\n")
    cfg = load([recipe, "model=glm_tiny"]).cfg
    assert (cfg.zero.stage, cfg.zero.overlap_comm, cfg.recipe) == (3, True, "mine")
    assert cfg.model.name == "glm-tiny"
    cfg = load([recipe, "zero=stage1", "zero.overlap_comm=false"]).cfg
    assert (cfg.zero.stage, cfg.zero.overlap_comm) == (1, False)
    # conf/config.yaml takes bf16; the recipe's own value beats it.
    assert load([write(tmp_path, "other", "precision:\n  dtype: fp32\n")]).cfg.precision.dtype is Dtype.fp32


def test_a_typed_group_beats_the_recipes_keys_and_typed_keys_beat_the_group(tmp_path: Path) -> None:
    recipe = write(tmp_path, "mine", "defaults:\n  - override /zero: stage1\n  - _self_\nzero:\n  stage: 3\n")
    assert load([recipe]).cfg.zero.stage == 3, "the recipe's own group loses to its keys"
    loaded = load(["zero=stage2", recipe])
    assert (loaded.cfg.zero.stage, loaded.where["zero.stage"]) == (2, "conf/zero/stage2.yaml:2")
    assert loaded.layers["zero.stage"] == TYPED and "zero.stage" in loaded.explicit
    assert load(["zero.stage=0", recipe, "zero=stage2"]).cfg.zero.stage == 0
    resolved = write(tmp_path, "resolved", to_yaml(load([recipe]).cfg))
    cfg = load([resolved, "zero=stage2", "precision=fp32", "track=csv"]).cfg
    assert (cfg.zero.stage, cfg.precision.dtype, cfg.track.csv.enabled) == (2, Dtype.fp32, True)


def test_a_recipe_can_build_on_another(tmp_path: Path) -> None:
    loaded = load([write(tmp_path, "mine", "defaults:\n  - chatglm\n  - _self_\noptim:\n  lr: 1e-6\n")])
    assert loaded.cfg.zero.stage == 3
    assert loaded.cfg.optim.lr == 1e-6
    assert loaded.where["checkpoint.every"].startswith("recipes/chatglm.yaml:")


def test_a_recipe_may_have_the_name_of_the_one_it_builds_on(tmp_path: Path) -> None:
    loaded = load([write(tmp_path, "chatglm", "defaults:\n  - chatglm\n  - _self_\noptim:\n  lr: 1e-6\n")])
    assert (loaded.cfg.recipe, loaded.cfg.zero.stage, loaded.cfg.optim.lr) == ("chatglm", 3, 1e-6)


@pytest.mark.parametrize("second", ["first", "second"])
def test_recipes_in_a_circle(second: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("recipes").mkdir()
    Path("recipes/first.yaml").write_text(f"defaults:\n  - {second}\n")
    Path("recipes/second.yaml").write_text("# this one\ndefaults:\n  - first\n")
    place = "recipes/first.yaml:2" if second == "first" else "recipes/second.yaml:3"
    expected = f"{place}: 'first': write `- override /GROUP: CHOICE`, or the name of another recipe."
    assert message("recipe=first") == expected


def test_texts_that_are_not_ascii_need_no_quotes(tmp_path: Path) -> None:
    recipe = write(tmp_path, "我的 配方,1", "zero:\n  stage: 1\n")
    words = [
        "run.name=测试",
        "data.sources=[{path: 数据 1/对话.jsonl}, {path: b.jsonl}]",
        "evaluate.prompts=['你好,吗']",
    ]
    cfg = load([recipe.replace("recipe=", "recipe='") + "'", *words]).cfg
    assert (cfg.recipe, cfg.run.name, cfg.evaluate.prompts) == ("我的 配方,1", "测试", ["你好,吗"])
    assert [source.path for source in cfg.data.sources] == ["数据 1/对话.jsonl", "b.jsonl"]


def test_where_each_value_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("# comment\noptim:\n  lr: 1e-6\ndata:\n  sources:\n    - path: x\n")
    loaded = load(["recipe=mine.yaml", "zero=stage1", "train.max_steps=3"])
    assert loaded.where["optim.lr"] == "mine.yaml:3"
    assert loaded.where["data.sources"] == "mine.yaml:5"
    assert loaded.where["zero.stage"] == "conf/zero/stage1.yaml:2"
    assert loaded.where["train.max_steps"] == "command line"
    assert "optim.eps" not in loaded.where
    assert {"optim.lr", "zero.stage", "train.max_steps"} <= loaded.explicit
    assert "precision.dtype" not in loaded.explicit, "conf/config.yaml chose it, nobody else"


def test_plus_on_a_known_key_is_taken_and_ds_extra_is_free() -> None:
    words = ["+train.max_steps=7", "+ds_extra.a.b=1", "ds_extra.c=2", "ds_extra={d: 3}", "+zero=stage3"]
    cfg = load(["recipe=quickstart", *words]).cfg
    assert (cfg.train.max_steps, cfg.zero.stage) == (7, 3)
    assert cfg.ds_extra == {"a": {"b": 1}, "c": 2, "d": 3}


def test_interpolation_of_another_key(tmp_path: Path) -> None:
    cfg = load([write(tmp_path, "mine", "evaluate:\n  every: ${checkpoint.every}\ncheckpoint:\n  every: 9\n")]).cfg
    assert cfg.evaluate.every == 9


REFERENCES = {
    "evaluate:\n  every: ${run.dir}\n": "recipe.yaml:2: 'evaluate.every' = runs must be a whole number.",
    "batch:\n  micro_per_gpu: ${run.dir}\n": (
        "recipe.yaml:2: 'batch.micro_per_gpu' = runs must be a whole number or auto."
    ),
    "precision:\n  dtype: ${run.dir}\n": "recipe.yaml:2: 'precision.dtype' = runs must be one of: fp32, bf16, fp16.",
    "zero: ${run.dir}\n": "recipe.yaml:1: 'zero' = runs must be a section of keys.",
    "zero: ${plan}\n": (
        "2 errors:\n1. recipe.yaml:1: unknown key 'zero.auto'. Did you mean 'plan.auto'?\n"
        "2. recipe.yaml:1: unknown key 'zero.max_gpu_gib'. Did you mean 'plan.max_gpu_gib'?"
    ),
    "optim:\n  betas: ${run.dir}\n": "recipe.yaml:2: 'optim.betas' = runs must be a list, for example [a, b].",
    "ds_extra: ${run.dir}\n": "recipe.yaml:1: 'ds_extra' = runs must be a section of keys.",
}


@pytest.mark.parametrize("content", REFERENCES)
def test_a_reference_to_a_key_of_another_type(content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(content)
    assert message("recipe=recipe.yaml") == REFERENCES[content]


SOURCES = {
    "data=chat.jsonl": ["chat.jsonl"],
    "data=[a.jsonl,b.jsonl]": ["a.jsonl", "b.jsonl"],
    "data.sources=x.jsonl": ["x.jsonl"],
    "data.sources=[x.jsonl,{path: y.jsonl, weight: 2}]": ["x.jsonl", "y.jsonl"],
    "data=对话/聊天.jsonl": ["对话/聊天.jsonl"],
    "data=chats/*.jsonl": ["chats/*.jsonl"],
    'data="it\'s.jsonl"': ["it's.jsonl"],
}


@pytest.mark.parametrize("word", SOURCES)
def test_a_file_alone_is_a_source(word: str) -> None:
    loaded = load(["recipe=zero1", word])
    assert [source.path for source in loaded.cfg.data.sources] == SOURCES[word]
    assert loaded.where["data.sources"] == "command line"


ONLY = {
    "data=x.jsonl columns={prompt:q,response:a}": ("x.jsonl", {"prompt": "q", "response": "a"}),
    "data=x.jsonl data.columns={prompt:q}": ("x.jsonl", {"prompt": "q"}),
    "data.path=x.jsonl columns.prompt=q columns.response=a": ("x.jsonl", {"prompt": "q", "response": "a"}),
    "data.path=1e3": ("1e3", {}),
    "data={path:x.jsonl,columns:{prompt:q}}": ("x.jsonl", {"prompt": "q"}),
    "data=adgen data.columns={prompt:q}": ("data/AdvertiseGen/train.json", {"prompt": "q"}),
}


@pytest.mark.parametrize("words", ONLY)
def test_keys_of_the_only_source(words: str) -> None:
    loaded = load(["recipe=zero1", *words.split()])
    [source] = loaded.cfg.data.sources
    assert (source.path, source.columns) == ONLY[words]
    assert loaded.where["data.sources"] == "command line" and "data.sources" in loaded.explicit


def test_keys_of_the_only_source_in_a_recipe(tmp_path: Path) -> None:
    recipe = write(tmp_path, "only", "data:\n  columns: {prompt: q}\n  path: x.jsonl\n  max_length: 99\n")
    loaded = load([recipe])
    assert (loaded.cfg.data.sources[0].path, loaded.cfg.data.sources[0].columns) == ("x.jsonl", {"prompt": "q"})
    assert (loaded.cfg.data.max_length, loaded.where["data.sources"][-2:]) == (99, ":3")
    assert load([recipe, "columns={text:t}"]).cfg.data.sources[0].columns == {"text": "t"}
    assert load([recipe, "data.path=y.jsonl"]).cfg.data.sources[0].columns == {}


def test_keys_of_one_source_of_several() -> None:
    assert message("recipe=quickstart", "data=examples", "columns={prompt:q}") == (
        "command line: data.columns is for a single source, but data.sources has 2. Add data.path=FILE, or write it "
        "into each: data.sources=[{path: FILE, columns: …}, …]"
    )
    assert message("recipe=quickstart", "data=x.jsonl", "data.hub=me/data") == (
        "command line: data.hub and data.sources both name data. Keep one of them."
    )
    for words in (["data.path=a.jsonl", "data.sources=[b.jsonl]"], ["data.sources=[b.jsonl]", "data.path=a.jsonl"]):
        assert message("recipe=quickstart", *words) == (
            "command line: data.path and data.sources both name data. Keep one of them."
        )
    for words in (["data.path=a.jsonl", "data=b.jsonl"], ["data={path: a.jsonl, sources: [b.jsonl]}"]):
        assert "data.path and data.sources both name data" in message("recipe=quickstart", *words)
    assert message("recipe=quickstart", "data.path=x", "data.columns=3") == (
        "command line: 'data.columns' = 3 must be a section of keys."
    )


def test_a_text_is_a_list_of_one(tmp_path: Path) -> None:
    assert load(["recipe=zero1", "tuning=lora", "tuning.target_modules=all-linear"]).cfg.tuning.target_modules == [
        "all-linear"
    ]
    recipe = write(tmp_path, "lora", "tuning:\n  method: lora\n  target_modules: all-linear\n")
    assert load([recipe]).cfg.tuning.target_modules == ["all-linear"]


def test_short_forms_in_a_recipe(tmp_path: Path) -> None:
    content = "defaults:\n  - override /zero: 1\n  - _self_\ndata:\n  sources: a.jsonl\n  validation: [b.jsonl]\n"
    cfg = load([write(tmp_path, "short", content)]).cfg
    assert (cfg.zero.stage, cfg.data.sources[0].path, cfg.data.validation[0].path) == (1, "a.jsonl", "b.jsonl")
    cfg = load([write(tmp_path, "shorter", "zero: 3\ndata: a.jsonl\n")]).cfg
    assert (cfg.zero.stage, cfg.data.sources[0].path) == (3, "a.jsonl")


@pytest.mark.parametrize(
    ("typed", "rows", "fraction"),
    [("500", 500, 0.05), ("0.1", 0, 0.1), ("5%", 0, 0.05), ("12.5%", 0, 0.125), ("0", 0, 0.0), ("'7'", 7, 0.05)],
)
def test_a_number_as_validation_is_split_off(tmp_path: Path, typed: str, rows: int, fraction: float) -> None:
    recipe = write(tmp_path, "split", f"data:\n  sources: a.jsonl\n  validation: {typed}\n")
    from_recipe, from_words = load([recipe]), load(["recipe=quickstart", f"data.validation={typed}"])
    for loaded in (
        from_recipe,
        from_words,
        load(["recipe=quickstart", f"data={{path: a.jsonl, validation: {typed}}}"]),
    ):
        data = loaded.cfg.data
        assert (data.validation, data.validation_rows, data.validation_fraction) == ([], rows, fraction)
    assert from_recipe.where["data.validation_rows"].endswith("split.yaml:3")
    assert from_words.where["data.validation_rows"] == "command line"


def test_the_highest_layer_decides_what_validation_is(tmp_path: Path) -> None:
    """Whatever of files, rows and fraction a recipe says, one argument replaces it, and nothing else is left of it."""
    for written in ("[v.jsonl]", "500", "0.2", "{path: v.jsonl, max_samples: 3}"):
        recipe = write(tmp_path, "split", f"data:\n  sources: a.jsonl\n  validation: {written}\n")
        for typed, paths, rows, fraction in (
            ("w.jsonl", ["w.jsonl"], None, None),
            ("30", [], 30, 0.05),
            ("0.1", [], 0, 0.1),
        ):
            loaded = load([recipe, f"data.validation={typed}"])
            check_rules(loaded, files=False)
            data = loaded.cfg.data
            assert [source.path for source in data.validation] == paths
            assert paths or (data.validation_rows, data.validation_fraction) == (rows, fraction)


def test_validation_is_rows_a_fraction_or_files() -> None:
    for typed, shown in (("1.5", "1.5"), ("-3", "-3"), ("100%", "100%"), ("2.0", "2.0")):
        assert message("recipe=quickstart", f"data.validation={typed}") == (
            f"command line: 'data.validation' = {shown} must be a number of rows (500), a fraction below 1 (0.05 or "
            "5%), or files."
        )
    assert "must be a list" in message("recipe=quickstart", "data.validation=true")


def test_a_name_on_the_hub_is_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chats").mkdir()
    words = ["recipe=quickstart", "data=[openai/gsm8k:main,me/data,me/data.json,chats/none,./me/data]"]
    words += ["data.validation=me/held:zh"]
    data = load(words).cfg.data
    assert [(source.hub, source.subset, source.path) for source in (*data.sources, *data.validation)] == [
        ("openai/gsm8k", "main", ""),
        ("me/data", "", ""),
        ("", "", "me/data.json"),
        ("", "", "chats/none"),
        ("", "", "./me/data"),
        ("me/held", "zh", ""),
    ]
    recipe = write(tmp_path, "hub", "data: openai/gsm8k:main\n")
    loaded = load([recipe, "columns={prompt: question, response: answer}", "data.split=test"])
    [source] = loaded.cfg.data.sources
    assert (source.hub, source.subset, source.split, source.columns["prompt"]) == (
        *("openai/gsm8k", "main", "test"),
        "question",
    )
    Path("openai/gsm8k:main").mkdir(parents=True)
    assert load([recipe]).cfg.data.sources[0].path == "openai/gsm8k:main"


def test_epochs_may_be_a_fraction() -> None:
    for typed, value in (("2.5", 2.5), ("3", 3), ("3.0", 3), ("1e1", 10)):
        epochs = load(["recipe=quickstart", f"train.epochs={typed}"]).cfg.train.epochs
        assert epochs == value and isinstance(epochs, type(value))
    assert "'train.epochs' = two must be a number." in message("recipe=quickstart", "train.epochs=two")
    steps = [TrainConfig(epochs=epochs).over_epochs(10) for epochs in (1.1, 0.01, 2.5, 3, 0.1, 0.30000000000000004)]
    assert steps == [11, 1, 25, 30, 1, 4]


def test_a_number_is_a_zero_stage() -> None:
    assert load(["recipe=zero1", "zero=3"]).cfg.zero.stage == 3
    assert load(["recipe=zero1", "zero=0"]).cfg.zero.stage == 0


FOREIGN = "model_name_or_path: m\nstage: sft\nfinetuning_type: lora\ndataset: d\ncutoff_len: 512\noutput_dir: o\n"


def test_another_programs_config_is_no_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sft.yaml").write_text(FOREIGN)
    assert message("recipe=sft.yaml") == (
        "sft.yaml is no recipe but another program's config (model_name_or_path, stage, finetuning_type, …). Make a "
        "recipe of it:  toolkit import-config sft.yaml output=NAME.yaml"
    )
    Path("ds.json").write_text("{}")
    assert "recipe=NAME deepspeed_json=ds.json" in message("recipe=ds.json")
    assert "import-config ds.json" in message("recipe=ds.json")


def test_what_a_file_in_the_place_of_a_recipe_is(tmp_path: Path) -> None:
    """By what is in it, in any directory."""
    deepspeed = '{"train_batch_size": 8, "zero_optimization": {"stage": 2}}'
    for name in ("ds.json", "ds.yaml"):
        (tmp_path / name).write_text(deepspeed)
        assert message(f"recipe={tmp_path / name}") == (
            f"{tmp_path / name} is no recipe but a DeepSpeed config (train_batch_size, zero_optimization, …). It goes "
            f"with a recipe:  recipe=NAME deepspeed_json={tmp_path / name}"
        )
    meant = {
        '{"learning_rate": 1e-4, "lora_rank": 8}': "import-config PATH",
        "[{}]": "data=PATH",
        "[" + " " * 1_000_000 + "{}]": "data=PATH",
        '"text"': "data=PATH",
        "{": "deepspeed_json=PATH",
    }
    for text, words in meant.items():
        (tmp_path / "file.json").write_text(text)
        assert words.replace("PATH", str(tmp_path / "file.json")) in message(f"recipe={tmp_path / 'file.json'}")
    (tmp_path / "train.sh").write_text("python train.py --lr 1")
    assert f"import-config {tmp_path / 'train.sh'}" in message(f"recipe={tmp_path / 'train.sh'}")


def test_every_error_is_reported_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text("defaults:\n  - override /zero: stage9\nzero:\n  stag: 3\noptim:\n  lr: fast\n")
    found = message("recipe=r.yaml", "train.max_step=5", "learning_rate=1", "optim.betas=[0.9,x]").splitlines()
    assert found[0] == "6 errors:"
    assert [line.split(":")[0] for line in found[1:]] == [
        *("1. command line", "2. command line", "3. command line", "4. r.yaml", "5. r.yaml", "6. r.yaml")
    ]


def test_a_models_directory_is_no_group() -> None:
    assert "A directory or a name on Hugging Face is model.path=/my/dir." in message(
        "recipe=quickstart", "model=/my/dir"
    )
    assert "model.path" not in message("recipe=quickstart", "model=chatglm5")


def test_names_of_deepspeed_are_those_of_its_table() -> None:
    for name, ours in read_table("config/other_names.yaml").items():
        assert ds_config.OWNED.get(name, ours) == ours
    for keys in suggest.foreign_names().values():
        assert all(key in set(all_keys()) | {"ds_extra"} for key in keys)


def test_own_groups(tmp_path: Path) -> None:
    (tmp_path / "optim").mkdir()
    (tmp_path / "optim" / "mine.yaml").write_text("name: adam\nlr: 0.25\n")
    loaded = load(["recipe=quickstart", "optim=mine", "optim.torch=true"], config_dir=str(tmp_path))
    assert loaded.where["optim.name"].endswith("optim/mine.yaml:1")
    assert message_with_dir(str(tmp_path / "nosuch")) == f"--config-dir {tmp_path}/nosuch is not a directory."


def test_texts_are_as_they_were_typed(tmp_path: Path) -> None:
    words = ["run.name=1.10", "model.revision=2026_11_26", "track.wandb.project=True", "run.deadline='22:00'"]
    cfg = load(["recipe=quickstart", *words, "optim.lr=1e-3"]).cfg
    assert (cfg.run.name, cfg.model.revision, cfg.track.wandb.project) == ("1.10", "2026_11_26", "True")
    assert (cfg.run.deadline, cfg.optim.lr) == ("22:00", 1e-3)
    words = ["classify.labels=[true,no, 1.10]", "launch.env={B: 1.10,C: a,D: true}", "evaluate.prompts=[true,'a, b']"]
    cfg = load(["recipe=quickstart", *words]).cfg
    assert (cfg.classify.labels, cfg.evaluate.prompts) == (["true", "no", "1.10"], ["true", "a, b"])
    assert cfg.launch.env == {"B": "1.10", "C": "a", "D": "true"}
    words = ["run={name: 1.10,seed: 1_0}", "track.wandb={group:1e3, tags: [1.0,'2.0',x:y]}", "optim={lr: 1e-3}"]
    words += ["data.sources=[{path: 1.10, columns:{prompt: 007}}]", "model={path:'1.0', revision: 1_0}"]
    words += ["evaluate.prompts=['it\\'s', 1.10]", "launch={env: {A: 1.10, B:off}}"]
    cfg = load(["recipe=quickstart", *words]).cfg
    assert (cfg.run.name, cfg.run.seed, cfg.optim.lr, cfg.model.revision) == ("1.10", 10, 1e-3, "1_0")
    assert (cfg.track.wandb.group, cfg.track.wandb.tags) == ("1e3", ["1.0", "2.0", "x:y"])
    assert (cfg.data.sources[0].path, cfg.data.sources[0].columns) == ("1.10", {"prompt": "007"})
    assert cfg.launch.env == {"A": "1.10", "B": "off"} and cfg.evaluate.prompts == ["it's", "1.10"]
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("path: 007\nrevision: 1e3\n")
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        "defaults: [quickstart, override /model: mine, _self_]\nrun: {name: 2026_11_26, deadline: 22:00}\n"
        "classify: {labels: [yes, 1.10, 'no']}\noptim: {lr: 1e-3}\n"
        "data: {sources: [{path: 1.10, columns: {prompt: on, response: 0x1F}}]}\n"
        "track:\n  wandb:\n    group: ${run.name}\n"
    )
    cfg = load([f"recipe={recipe}"], config_dir=str(tmp_path)).cfg
    assert (cfg.run.name, cfg.run.deadline, cfg.track.wandb.group) == ("2026_11_26", "22:00", "2026_11_26")
    assert (cfg.model.path, cfg.model.revision, cfg.optim.lr) == ("007", "1e3", 1e-3)
    assert cfg.classify.labels == ["yes", "1.10", "no"]
    assert (cfg.data.sources[0].path, cfg.data.sources[0].columns) == ("1.10", {"prompt": "on", "response": "0x1F"})
    recipe.write_text(to_yaml(cfg))
    assert load([f"recipe={recipe}"]).cfg == cfg
    recipe.write_text("run: {name: }\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml:1: 'run\.name' = null must be a text"):
        load([f"recipe={recipe}"])


def test_own_groups_of_any_name_in_any_folder(tmp_path: Path) -> None:
    folder = tmp_path / "my own, 配置's"
    (folder / "habit").mkdir(parents=True)
    (folder / "habit" / "often.yaml").write_text("# @package _global_\ncheckpoint:\n  every: 3\n")
    (folder / "habit" / "lost.yaml").write_text("every: 3\n")
    for word in ("habit=often", "+habit=often"):
        loaded = load(["recipe=chatglm", word], config_dir=str(folder))
        assert loaded.cfg.checkpoint.every == 3, "the recipe says 500; the command line beats it"
        assert loaded.where["checkpoint.every"].endswith("habit/often.yaml:3")
    with pytest.raises(ConfigError, match=r"habit/lost\.yaml: unknown key 'habit'"):
        load(["recipe=chatglm", "habit=lost"], config_dir=str(folder))


def message_with_dir(folder: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(["recipe=quickstart"], config_dir=folder)
    return str(caught.value)


def test_replace_is_typed() -> None:
    loaded = load(["recipe=quickstart"])
    changed = replace(loaded, {"zero.stage": (3, "ds.json:4"), "precision.dtype": (Dtype.fp16, "ds.json:9")})
    assert (changed.cfg.zero.stage, changed.cfg.precision.dtype) == (3, Dtype.fp16)
    assert changed.where["zero.stage"] == "ds.json:4"
    assert loaded.cfg.zero.stage == 2, "the original stays"
    with pytest.raises(ConfigError, match=r"ds\.json:1: 'zero\.stage' = x must be a whole number"):
        replace(loaded, {"zero.stage": ("x", "ds.json:1")})


@pytest.mark.parametrize("recipe", ["quickstart", "chatglm", "zero3_nvme"])
def test_a_resolved_config_is_a_recipe_again(recipe: str, tmp_path: Path) -> None:
    cfg = load([f"recipe={recipe}", "ds_extra.prescale_gradients=true"]).cfg
    again = load([write(tmp_path, "config", to_yaml(cfg))]).cfg
    assert again == cfg


def test_no_torch_and_quick() -> None:
    code = (
        "import sys; from toolkit.config.load import load; load(['recipe=chatglm']);"
        "sys.exit(bool({'torch', 'deepspeed', 'transformers'} & set(sys.modules)))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], timeout=60, check=False, cwd=Path(__file__).parents[2]).returncode
        == 0
    )


@pytest.mark.parametrize("method", TuningMethod)
def test_the_learning_rate_follows_the_method(method: TuningMethod, tmp_path: Path) -> None:
    """However the method is chosen; it is seen in --cfg job and in DeepSpeed's JSON, and a named value wins."""
    for words in ([f"tuning={method.value}"], [f"tuning.method={method.value}"]):
        loaded = load(["recipe=zero1", *words])
        assert loaded.cfg.optim.lr == LEARNING_RATES[method]
        if method not in (TuningMethod.full, TuningMethod.freeze):
            assert loaded.where["optim.lr"] == f"default of tuning.method = {method.value}"
            assert f"lr: {LEARNING_RATES[method]}" in to_yaml(loaded.cfg)
        values = build_ds_config(loaded.cfg, 2, 100).values
        assert values["optimizer"]["params"]["lr"] == LEARNING_RATES[method]
    assert load(["recipe=zero1", *words, "optim.lr=2e-5"]).cfg.optim.lr == 2e-5
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("defaults: [zero1]\noptim: {lr: 2e-5}\n")
    assert load([f"recipe={recipe}", *words]).cfg.optim.lr == 2e-5


SCALARS = {"2e-5": 2e-5, "1E5": 1e5, "1.5e3": 1500.0, "1_0e1": 100.0, "1.5": 1.5, "-.inf": -math.inf, "1e": "1e"}
SCALARS |= {"2026-01-01": "2026-01-01", "2026-01-01 10:00:00": "2026-01-01 10:00:00", "off": False}
# Numbers to YAML 1.1 alone, which nobody means: 90, 10, 5430.5.
SCALARS |= {
    "1:30": "1:30",
    "012": "012",
    "1:30:30.5": "1:30:30.5",
    "0": 0,
    "-7": -7,
    "0x1F": 31,
    "0.5": 0.5,
    "00": "00",
}
SCALARS["0x" + "f" * 5000] = "0x" + "f" * 5000


def test_scalars_are_those_of_omegaconf() -> None:
    """Numbers that PyYAML takes for texts, no dates, times and octal numbers; also where libyaml reads them."""
    for loader in (Loader, _fast_loader()):
        assert {text: yaml.load(f"a: {text}", loader)["a"] for text in SCALARS} == SCALARS


@pytest.mark.parametrize(
    ("words", "is_told"),
    [
        ("preference=dpo", True),
        ("preference.loss=simpo", True),
        ("", False),
        ("preference=dpo optim.lr=1e-3", False),
        ("preference=dpo optim.lr=1e-6", False),
        ("recipe=qwen3_dpo", False),
        ("recipe=lora preference=dpo", True),
    ],
)
def test_a_rate_for_another_task_is_told(words: str, is_told: bool) -> None:
    typed = words.split() if "recipe=" in words else ["recipe=smollm2_135m", *words.split()]
    told = [notice for notice in load(typed).notices if "optim.lr" in notice]
    expected = r"recipes/\w+\.yaml:\d+: optim\.lr = 0\.\d+ is the recipe's, .* 5e-06 is usual"
    assert len(told) == is_told and all(re.match(expected, notice) for notice in told)


def test_a_resolved_config_keeps_its_learning_rate(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(load(["recipe=zero1", "tuning=lora"]).cfg))
    assert load([f"recipe={file}", "tuning.method=full"]).cfg.optim.lr == LEARNING_RATES[TuningMethod.lora]


def test_a_resolved_config_of_earlier_versions_names_keys_that_are_gone(tmp_path: Path) -> None:
    """All keys, as ever: those that were off nobody has to take out."""
    file, cfg = tmp_path / "config.yaml", load(["recipe=zero1"]).cfg
    file.write_text(to_yaml(cfg).replace("\ncheckpoint:\n", "\ncheckpoint:\n  memory_every: 0\n"))
    assert load([f"recipe={file}"]).cfg == cfg
    file.write_text(file.read_text().replace("memory_every: 0", "memory_every: 5"))
    with pytest.raises(ConfigError, match=r"unknown key 'checkpoint.memory_every'. It has been removed"):
        load([f"recipe={file}"])


@pytest.mark.parametrize("section", ["", "data:", "model:\n  shape:"])
def test_thousands_of_unknown_keys_are_a_short_answer(section: str, tmp_path: Path) -> None:
    """Timed by the processor: 2 s of an idle one; every key with a suggestion of its own took ten minutes."""
    indent = "    " if section else ""
    keys = "".join(f"{indent}key_{number}: 1\n" for number in range(50_000))
    path = tmp_path / "many.yaml"
    path.write_text(f"# @package _global_\ndefaults:\n  - quickstart\n  - _self_\n{section}\n{keys}", encoding="utf-8")
    started = time.process_time()
    with pytest.raises(ConfigError) as caught:
        load([f"recipe={path}"])
    assert time.process_time() - started < 20
    said = str(caught.value)
    assert said.startswith("50000 errors:\n1. ")
    assert said.endswith("\n… and 49,950 more.")
    assert said.count("\n") == 51


def test_a_misspelt_key_does_not_hide_the_errors_of_the_section_it_resembles() -> None:
    with pytest.raises(ConfigError) as told:
        parse_checked(["recipe=quickstart", "ranks=1", "train.epochs=-1"])
    assert "unknown key 'ranks'" in str(told.value) and "train.epochs" in str(told.value)


@pytest.mark.parametrize(
    ("in_recipe", "typed", "expected"),
    [
        ("schedule: {warmup_ratio: 0.1}", "schedule.warmup_steps=5", {"schedule.warmup_steps": 5}),
        ("schedule: {warmup_ratio: 0.1}", "schedule.warmup_steps=0", {}),
        ("schedule: {warmup_steps: 5}", "schedule.warmup_ratio=0.1", {"schedule.warmup_ratio": 0.1}),
        ("schedule: {warmup_steps: 5}", "optim.lr=1e-5", {"schedule.warmup_steps": 5}),
        ("train: {max_steps: 9}", "train.epochs=2", {"train.epochs": 2}),
        ("train: {epochs: 2}", "train.max_steps=9", {"train.epochs": 2, "train.max_steps": 9}),
    ],
)
def test_of_two_units_the_later_one_counts(in_recipe: str, typed: str, expected: dict, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"defaults: [quickstart]\n{in_recipe}\n")
    config = load([f"recipe={recipe}", typed]).cfg
    section = "train" if typed.startswith("train") else "schedule"
    names = {"train": ("epochs", "max_steps"), "schedule": ("warmup_steps", "warmup_ratio")}[section]
    values = {f"{section}.{name}": getattr(getattr(config, section), name) for name in names}
    assert {key: value for key, value in values.items() if value} == expected


def test_the_later_one_counts_over_a_run_s_config_too(tmp_path: Path) -> None:
    """It names every key, as the defaults do."""
    resolved = tmp_path / "config.yaml"
    resolved.write_text(to_yaml(load(["recipe=quickstart", "train.max_steps=9", "schedule.warmup_steps=3"]).cfg))
    config = load([f"recipe={resolved}", "train.epochs=2", "schedule.warmup_ratio=0.1"]).cfg
    assert (config.train.max_steps, config.train.epochs) == (0, 2)
    assert (config.schedule.warmup_steps, config.schedule.warmup_ratio) == (0, 0.1)
