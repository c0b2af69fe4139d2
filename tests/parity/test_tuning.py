"""LoRA, prompt tuning and freezing: what is trained, peft's own numbers and files, and merging without a difference."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import transformers
from golden import GOLDEN, SETS, inputs, load
from safetensors.torch import load_file, save_file

from tests.architectures import write
from tests.unit.test_templates import KNOWN, tokenizer_of
from tests.unit.tiny_model import SIZES
from toolkit.cli import main
from toolkit.config.schema import LoraInit, TuningConfig, TuningMethod
from toolkit.engine.parameters import count_parameters
from toolkit.export import adapter as export_adapter
from toolkit.export.adapter import write_adapter
from toolkit.export.load import load_any
from toolkit.messages import BaseMissing, CheckpointError, ConfigError, ModelError
from toolkit.models import load as load_module, load_tokenizer, load_weights, probe
from toolkit.models.adapters import base_of_adapter, load_adapter, stored_names
from toolkit.models.base_model import base_of
from toolkit.models.fine_tuning import apply_tuning
from toolkit.models.lora_init import BUFFERS, as_plain_state
from toolkit.models.record import record_of, tuning_state
from toolkit.models.structure import trained_names
from toolkit.plan.model_config import shapes_of_config
from toolkit.plan.outline import with_tuning as plan

LORA = TuningMethod.lora


def tuned(name: str, **settings):
    """Return a golden model with what a method adds to it, as if it had been trained: all that is new is drawn."""
    model = load(name)
    config = TuningConfig(**{"method": LORA, **settings})
    apply_tuning(model, config, GOLDEN / name, tokenizer=range(50), seed=1)
    torch.manual_seed(5)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn_like(parameter)
    return model.eval()


def logits(model, name: str) -> torch.Tensor:
    """Return the logits of the plain case."""
    given = inputs(name, "plain")
    with torch.no_grad():
        return model(input_ids=given["input_ids"], use_cache=False).logits


def put(name: str, adapter: Path):
    """Return a golden model with an adapter in it."""
    model = load(name)
    load_adapter(model, adapter, base_of(model, GOLDEN / name))
    return model.eval()


def written(model, folder: Path) -> Path:
    """Write an adapter's folder as a run does."""
    state = {stored: model.get_parameter_or_buffer(name).detach() for name, stored in stored_names(model).items()}
    ids = probe.spread_ids(model.config)
    write_adapter(as_plain_state(state), tuning_state(model).exported.describe(), folder, probe.capture(model, ids))
    return folder


VARIANTS = {
    "plain": {},
    "rslora": {"rslora": True, "rank": 4, "alpha": 3.5},
    "dora": {"dora": True, "target_modules": ["all-linear"]},
    "saved": {"save_modules": ["lm_head"], "dropout": 0.5},
    "pissa": {"init": LoraInit.pissa, "rank": 4, "alpha": 3.5, "target_modules": ["all-linear"]},
    "olora": {"init": LoraInit.olora, "rank": 4, "alpha": 4.0, "rslora": True, "dropout": 0.5},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", SETS)
def test_merged_exported_and_loaded_it_is_the_same_model(name: str, variant: str, tmp_path: Path) -> None:
    """The export's own comparison runs too; float32: nothing but the order of additions differs."""
    model = tuned(name, **VARIANTS[variant])
    before = logits(model, name)
    assert not torch.allclose(before, logits(load(name), name), atol=1e-2)
    adapter = written(model, tmp_path / "adapter")
    assert main(["verify", str(adapter)]) == 0
    # PiSSA and OLoRA come out as plain LoRA of twice the rank, whose products are added in another order.
    assert torch.allclose(
        logits(put(name, adapter), name), before, rtol=0, atol=2e-5 if "init" in VARIANTS[variant] else 0
    )
    words = ["merge=true", f"output={tmp_path}/merged", "dtype=fp32"]
    assert main(["export-model", str(adapter), *words]) == 0
    from toolkit.models import load_model

    merged = load_model(tmp_path / "merged")
    assert torch.allclose(logits(merged, name), before, atol=2e-5)
    official = [f"model.path={GOLDEN / name}", f"adapter={adapter}", "merge=true", "format=official"]
    assert main(["export-model", *official, f"output={tmp_path}/official", "forward=no"]) == 0
    assert torch.allclose(logits(load_model(tmp_path / "official", dtype="float32"), name), before, atol=0.3)


@pytest.mark.parametrize("variant", VARIANTS)
def test_peft_itself_loads_what_is_written(variant: str, tmp_path: Path) -> None:
    model = tuned("v3", **VARIANTS[variant])
    adapter = written(model, tmp_path / "adapter")
    theirs = peft.PeftModel.from_pretrained(load("v3"), adapter).eval()
    assert torch.allclose(logits(theirs, "v3"), logits(model, "v3"), atol=2e-5 if "init" in VARIANTS[variant] else 1e-6)


def steps_of(model, rate: float = 1e-2) -> list[float]:
    """Return the losses of eight steps of AdamW in a plain loop."""
    model.train()
    ids = inputs("glm4", "plain")["input_ids"]
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=rate, weight_decay=0.1)
    losses = []
    for _ in range(8):
        output = model(input_ids=ids, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(output.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("init", ["pissa", "olora", "gaussian"])
def test_initial_values_and_trajectory_are_peft_s(init: str) -> None:
    """peft trains beside the residual of each weight, here the weight stays; the first step is the base model's."""
    settings = {"rank": 4, "alpha": 6.0, "target_modules": ["all-linear"]}
    model = load("glm4").eval()
    before = logits(model, "glm4")
    apply_tuning(model, TuningConfig(method=LORA, init=LoraInit(init), **settings), GOLDEN / "glm4", None, seed=1)
    assert torch.equal(logits(model.eval(), "glm4"), before)
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules="all-linear", init_lora_weights=init)
    torch.manual_seed(1)
    theirs = peft.get_peft_model(load("glm4"), config)
    expected = [one for one in theirs.parameters() if one.requires_grad]
    for mine, other in zip((one for one in model.parameters() if one.requires_grad), expected, strict=True):
        assert torch.equal(mine, other)
    losses = steps_of(model)
    assert losses[-1] < 0.3 * losses[0]
    assert losses == pytest.approx(steps_of(theirs), rel=2e-6)


def test_a_fast_decomposition_finds_the_same_directions() -> None:
    """With iterations enough for the flat spectrum of random weights, A0 and B0 have the exact SVD's product."""
    products = []
    for iterations in (0, 200):
        model = load("glm4")
        config = TuningConfig(method=LORA, init=LoraInit.pissa, init_iterations=iterations, rank=4)
        apply_tuning(model, config, GOLDEN / "glm4", None, seed=1)
        layer = model.model.layers[1].self_attn.q_proj
        products.append(layer.initial_B @ layer.initial_A)
    assert torch.allclose(*products, atol=1e-2 * float(products[0].abs().max()))


def test_what_cannot_start_from_weights_is_named() -> None:
    """Embeddings; and a rank above that of a weight."""
    for settings, wrong in (
        (
            {"target_modules": ["embed_tokens"]},
            "tuning.init = pissa is for linear layers without DoRA, and model.embed_",
        ),
        ({"rank": 65}, "tuning.rank = 65 is more than the rank of model.layers.0.self_attn."),
    ):
        with pytest.raises(ConfigError, match=re.escape(wrong)):
            apply_tuning(
                load("glm4"), TuningConfig(method=LORA, init=LoraInit.pissa, **settings), GOLDEN / "glm4", None, seed=1
            )


def test_peft_s_own_pissa_adapter_goes_on_as_plain_lora(tmp_path: Path) -> None:
    """As `tuning.adapter`: the decomposition is made again, as peft makes it when it loads one."""
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj"], init_lora_weights="pissa", task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(load("glm4"), config)
    steps_of(theirs)
    theirs.save_pretrained(tmp_path / "pissa")
    model = load("glm4")
    apply_tuning(model, TuningConfig(method=LORA, adapter=str(tmp_path / "pissa")), GOLDEN / "glm4", None, seed=1)
    assert torch.allclose(logits(model.eval(), "glm4"), logits(theirs.eval(), "glm4"), atol=1e-5)
    adapter = written(model, tmp_path / "plain")
    assert json.loads((adapter / "adapter_config.json").read_text())["r"] == 8
    plain = peft.PeftModel.from_pretrained(load("glm4"), adapter).eval()
    assert torch.allclose(logits(plain, "glm4"), logits(theirs, "glm4"), atol=1e-5)


STRANGERS = {
    "lora": {},
    "gaussian": {"init_lora_weights": "gaussian"},
    "dora": {"use_dora": True},
    "saved": {"modules_to_save": ["lm_head"]},
    "biases": {"bias": "all"},
    "own-biases": {"bias": "lora_only"},
}


@pytest.mark.parametrize("variant", STRANGERS)
def test_a_stranger_s_peft_adapter_goes_on(variant: str, tmp_path: Path) -> None:
    """It is trained further, and merged."""
    options = STRANGERS[variant]
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", **options
    )
    theirs = peft.get_peft_model(load("glm4"), config).eval()
    torch.manual_seed(5)
    for parameter in theirs.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn_like(parameter)
    theirs.save_pretrained(tmp_path / "adapter")
    model = load("glm4")
    apply_tuning(model, TuningConfig(method=LORA, adapter=str(tmp_path / "adapter")), GOLDEN / "glm4", None, seed=1)
    assert torch.allclose(logits(model.eval(), "glm4"), logits(theirs, "glm4"), atol=1e-6)
    assert len(trained_names(model)) == len([one for one in theirs.parameters() if one.requires_grad])
    words = [f"model.path={GOLDEN / 'glm4'}", f"adapter={tmp_path}/adapter", "merge=true", "dtype=fp32"]
    assert main(["export-model", *words, f"output={tmp_path}/merged"]) == 0
    merged = load_weights.load_model(tmp_path / "merged")
    assert torch.allclose(logits(merged, "glm4"), logits(theirs, "glm4"), atol=2e-5)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_matrix_that_is_merged_wrongly_is_named(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By one hundredth of what one adapter of eight adds, which the logits of bf16 would not tell."""
    written(tuned("glm4"), tmp_path / "adapter")
    real, merged = peft.tuners.lora.Linear.get_delta_weight, []

    def short(layer: Any, adapter: str) -> torch.Tensor:
        merged.append(layer)
        return real(layer, adapter) * (0.99 if len(merged) == 3 else 1.0)

    monkeypatch.setattr(peft.tuners.lora.Linear, "get_delta_weight", short)
    words = [str(tmp_path / "adapter"), "merge=true", f"output={tmp_path}/merged", f"dtype={dtype}", "forward=no"]
    assert main(["export-model", *words]) == 74
    told = (
        r"\S+weight: merged, the layer computes something else than with the adapter beside it \(a difference of 0.01 "
    )
    assert re.search(told, capsys.readouterr().err)
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_what_cannot_be_merged_is_named(tmp_path: Path, capsys) -> None:
    """Adapters with an enlarged vocabulary, and with which peft changed the base's weights."""
    enlarged = written(tuned("glm4"), tmp_path / "enlarged")
    file, name = enlarged / "adapter_model.safetensors", "base_model.model.model.embed_tokens.weight"
    save_file(load_file(file) | {name: torch.zeros(70, 64)}, file)
    for start in ("pissa", "olora"):
        config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=start, task_type="CAUSAL_LM")
        peft.get_peft_model(load("glm4"), config).save_pretrained(tmp_path / start)
    for adapter, wrong in (
        ("pissa", "with init_lora_weights = pissa peft also changed the base"),
        ("olora", "path_initial_model_for_weight_conversion"),
        ("enlarged", f"does not fit the model: {name}"),
    ):
        words = [f"model.path={GOLDEN / 'glm4'}", f"adapter={tmp_path / adapter}", "merge=true"]
        assert main(["export-model", *words, f"output={tmp_path}/merged"]) != 0
        assert wrong in capsys.readouterr().err
        assert not (tmp_path / "merged").exists()


def small(folder: Path, kind: type, **settings: object) -> Path:
    """Write a tiny model of transformers."""
    torch.manual_seed(1)
    transformers.AutoModelForCausalLM.from_config(kind(**{**SIZES, **settings})).save_pretrained(folder)
    return folder


def strange(base: Path, folder: Path, **options: object) -> torch.Tensor:
    """Write an adapter of peft's as if it had been trained; return its model's logits."""
    torch.manual_seed(5)
    config = peft.LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **options)
    model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(base), config).eval()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return logits_of(model)


def logits_of(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(40)[None], use_cache=False).logits


TIED = (transformers.Qwen2Config, {"tie_word_embeddings": True})
UNTIED = (transformers.Qwen2Config, {"tie_word_embeddings": False})
PLACES = {
    "saved head": (*TIED, {"modules_to_save": ["lm_head"]}, {"tie_word_embeddings": False}),
    "saved embedding": (*TIED, {"modules_to_save": ["embed_tokens"]}, {"tie_word_embeddings": False}),
    "saved both": (*TIED, {"modules_to_save": ["embed_tokens", "lm_head"]}, {"tie_word_embeddings": False}),
    "saved as one": (*TIED, {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, {}),
    "lora on embedding": (*TIED, {"more": ["embed_tokens"]}, {"tie_word_embeddings": False}),
    "lora on both": (*TIED, {"more": ["embed_tokens", "lm_head"]}, {"tie_word_embeddings": False}),
    "lora as one": (*TIED, {"more": ["embed_tokens"], "ensure_weight_tying": True}, {}),
    "tokens": (*TIED, {"trainable_token_indices": [1, 2]}, {}),
    "tokens of each": (
        *TIED,
        {"trainable_token_indices": {"embed_tokens": [1, 2], "lm_head": [3]}},
        {"tie_word_embeddings": False},
    ),
    "tokens of the head": (*UNTIED, {"trainable_token_indices": {"lm_head": [1, 2]}}, {}),
    "biases on biases": (*UNTIED, {"lora_bias": True}, {}),
    "biases of all": (
        transformers.LlamaConfig,
        {},
        {"more": ["down_proj"], "lora_bias": True},
        {"attention_bias": True, "mlp_bias": True},
    ),
}


@pytest.mark.filterwarnings(
    "ignore::peft.utils.warning.PeftWarning", "ignore:.*tie_word_embeddings", "ignore:Setting `save_embedding_layers`"
)
@pytest.mark.parametrize("name", PLACES)
def test_what_is_trained_of_tied_weights_tokens_and_biases_is_merged(name: str, tmp_path: Path) -> None:
    """Where the base has no weight of its own for it, the merged model has, and its config says so."""
    kind, settings, options, changed = PLACES[name]
    base, adapter, output = small(tmp_path / "base", kind, **settings), tmp_path / "adapter", tmp_path / "merged"
    targets = ["q_proj", *options.get("more", [])]
    options = {key: value for key, value in options.items() if key != "more"}
    wanted = strange(base, adapter, target_modules=targets, **options)
    words = [f"model.path={base}", f"adapter={adapter}", "merge=true", "dtype=fp32"]
    assert main(["export-model", *words, f"output={output}"]) == 0
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (base, output))
    assert {key: after[key] for key in after if after[key] != before.get(key) and key in before} == changed
    merged = transformers.AutoModelForCausalLM.from_pretrained(output)
    assert torch.allclose(logits_of(merged), wanted, atol=1e-6)
    assert torch.allclose(logits_of(load_weights.load_model(output)), wanted, atol=1e-6)


@pytest.mark.filterwarnings("ignore::peft.utils.warning.PeftWarning")
def test_biases_without_a_place_are_named_before_training_as_afterwards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By `check`, and by the export."""
    base, adapter = small(tmp_path / "base", UNTIED[0], **UNTIED[1], vocab_size=1024), tmp_path / "adapter"
    strange(base, adapter, target_modules=["q_proj", "o_proj"], lora_bias=True)
    words = [f"model.path={base}", f"adapter={adapter}", "merge=true", f"output={tmp_path}/merged"]
    assert main(["export-model", *words]) == 2
    message = capsys.readouterr().err.removeprefix("NotMergeable: ").strip()
    assert message.startswith(
        f"{adapter} cannot be merged into its base: it trains model.layers.0.self_attn.o_proj.bias"
    )
    assert "for which Qwen2ForCausalLM has no place" in message
    load_tokenizer(GOLDEN / "tok_v3").save_pretrained(base)
    recipe = ["recipe=quickstart", "model=hf", f"model.path={base}", "tuning=lora", f"tuning.adapter={adapter}"]
    assert main(["check", *recipe, "train.max_steps=40", "batch.global_size=8"]) == 0
    printed = capsys.readouterr()
    assert f"WARNING: {message}" in printed.out + printed.err


def test_an_adapter_that_holds_a_weight_of_its_base_besides(tmp_path: Path) -> None:
    """As peft stores it beside LoRA on a head."""
    model = tuned("glm4", target_modules=["q_proj", "lm_head"])
    adapter = written(model, tmp_path / "adapter")
    file, name = adapter / "adapter_model.safetensors", "base_model.model.lm_head.base_layer.weight"
    save_file(load_file(file) | {name: load("glm4").lm_head.weight.detach()}, file)
    assert torch.equal(logits(put("glm4", adapter), "glm4"), logits(model, "glm4"))


def test_routers_biases_are_merged_in_float32(tmp_path: Path) -> None:
    """They choose experts: in bf16 those near 7.3 would be equal."""
    base = write(tmp_path / "base", "glm4_moe")
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    bias = model.model.layers[1].mlp.gate.e_score_correction_bias
    bias.copy_(7.3 + torch.linspace(0, 0.02, len(bias)))
    model.save_pretrained(base)
    tokenizer_of(KNOWN["glm-4.5"]).save_pretrained(base)
    apply_tuning(model, TuningConfig(method=LORA, target_modules=["q_proj"]), base, tokenizer=range(50), seed=1)
    adapter = written(model, tmp_path / "adapter")
    words = [f"model.path={base}", f"adapter={adapter}", "merge=true", "dtype=bf16", "forward=no"]
    assert main(["export-model", *words, f"output={tmp_path}/merged"]) == 0
    merged = load_file(tmp_path / "merged" / "model.safetensors")["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert merged.dtype is torch.float32 and merged.equal(bias)


def test_prompts_are_pefts(tmp_path: Path) -> None:
    """Its files, its numbers, also where rows are padded and while generating."""
    model = tuned("v2", method=TuningMethod.prompt, num_tokens=5)
    adapter = written(model, tmp_path / "adapter")
    assert {name: tuple(value.shape) for name, value in load_file(adapter / "adapter_model.safetensors").items()} == {
        "prompt_embeddings": (5, model.config.hidden_size)
    }
    theirs = peft.PeftModel.from_pretrained(load("v2"), adapter).eval()
    given = inputs("v2", "right")
    mask = given["attention_mask"]
    with torch.no_grad():
        found = model(input_ids=given["input_ids"], attention_mask=mask, use_cache=False).logits
        wanted = theirs(input_ids=given["input_ids"], attention_mask=mask, use_cache=False).logits[:, 5:]
    assert found.shape[:2] == mask.shape
    assert torch.allclose(found[mask.bool()], wanted[mask.bool()], atol=2e-5)
    given = inputs("v2", "gen")
    ids, mask, options = given["input_ids"], given["attention_mask"], {"max_new_tokens": 6, "do_sample": False}
    together = model.generate(ids, attention_mask=mask, **options)
    for row in range(len(ids)):
        wanted = ids[row][mask[row].bool()][None]
        with torch.no_grad():
            for _ in range(6):
                last = model(wanted, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
                wanted = torch.cat((wanted, last), dim=1)
        assert torch.equal(together[row, -6:], wanted[0, -6:])


def test_a_prompt_begins_with_words(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(GOLDEN / "tok_v3")
    model = load("v3")
    config = TuningConfig(method=TuningMethod.prompt, num_tokens=5, init_text="广告")
    with pytest.raises(ModelError, match="use ptuning_v2"):
        apply_tuning(load("v1"), config, GOLDEN / "v1", tokenizer, seed=1)
    size = model.config.vocab_size
    model.resize_token_embeddings(len(tokenizer))
    apply_tuning(model, config, GOLDEN / "v3", tokenizer, seed=1)
    ids = tokenizer("广告", add_special_tokens=False)["input_ids"]
    wanted = model.get_input_embeddings().weight[torch.tensor((ids * 5)[:5])]
    assert torch.equal(model.soft_prompt.embedding.weight, wanted)
    assert size != len(tokenizer)


PLANNED = [
    {"method": TuningMethod.full},
    {},
    {"dora": True, "rank": 3, "target_modules": ["all-linear"]},
    {"target_modules": ["*.mlp.*", "lm_head"]},
    {"save_modules": ["lm_head", "input_layernorm"]},
    {"init": LoraInit.olora, "rank": 3},
    {"method": TuningMethod.freeze, "last_layers": 1, "patterns": ["lm_head.*"]},
    {"method": TuningMethod.ptuning_v2, "num_tokens": 5},
    {"method": TuningMethod.ptuning_v2, "num_tokens": 5, "projection": True},
    {"method": TuningMethod.prompt, "num_tokens": 5},
]


@pytest.mark.parametrize(
    ("name", "settings"),  # ChatGLM-6B has no prompt tuning
    [(name, one) for name in SETS for one in PLANNED if name != "v1" or one.get("method") is not TuningMethod.prompt],
)
def test_what_is_planned_is_what_is_trained(name: str, settings: dict) -> None:
    """Counted from config.json alone, in either layout."""
    config = TuningConfig(**{"method": LORA, **settings})
    model = tuned(name, **settings)
    counts = count_parameters(model).values()
    buffers = sum(one.numel() for name, one in model.named_buffers() if name.endswith(BUFFERS))
    wanted = sum(one.trained for one in counts), sum(one.total for one in counts) + buffers
    trained = {name: tuple(one.shape) for name, one in model.named_parameters() if one.requires_grad}
    official = json.loads((GOLDEN / name / "config.json").read_text())
    for known in (official, load(name).config.to_dict()):
        found = shapes_of_config(known)
        assert found is not None
        outline = plan(*found, config)
        assert (outline.num_trained, outline.num_parameters) == wanted
        assert {name: outline.shapes[name] for name in outline.trained} == trained


def test_what_is_trained_and_counted() -> None:
    total = sum(parameter.numel() for parameter in load("glm4").parameters())
    model = tuned("glm4")
    config = model.config
    hidden, heads = config.hidden_size, config.head_dim * config.num_attention_heads
    keys = config.head_dim * config.num_key_value_heads
    added = config.num_hidden_layers * 8 * (3 * hidden + heads + 2 * keys)
    counts = count_parameters(model)
    assert (counts["attention"].trained, sum(one.trained for one in counts.values())) == (added, added)
    assert sum(one.total for one in counts.values()) == total + added
    assert {name.split(".")[4] for name in trained_names(model)} == {"q_proj", "k_proj", "v_proj"}
    assert {name.split(".")[4] for name in trained_names(tuned("v1"))} == {"query_key_value"}
    last = config.num_hidden_layers - 1
    frozen = tuned("glm4", method=TuningMethod.freeze, last_layers=1, patterns=["lm_head.*", "*.mlp.down_proj.*"])
    names = trained_names(frozen)
    assert all(name.startswith((f"model.layers.{last}.", "lm_head.")) or "down_proj" in name for name in names), names
    assert f"model.layers.{last}.input_layernorm.weight" in names
    assert "model.layers.0.mlp.down_proj.weight" in names
    assert "model.layers.0.input_layernorm.weight" not in names


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_modules": ["q_prj"]}, r"tuning.target_modules: nothing .* called 'q_prj'.*Did you mean 'q_proj'"),
        ({"target_modules": ["*.mpl.*"]}, r"nothing in this model is called '\*.mpl.\*'.*Known: .*down_proj"),
        ({"save_modules": ["head"]}, r"tuning.save_modules: nothing .* 'head'.*'lm_head'"),
        ({"method": TuningMethod.freeze, "last_layers": 9}, r"tuning.last_layers = 9, but the model has \d layers"),
        ({"method": TuningMethod.freeze, "patterns": ["lm_haed.*"]}, r"tuning.patterns: nothing .*'lm_haed"),
    ],
)
def test_names_that_match_nothing(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tuned("v2", **settings)


def test_patterns_choose_layers() -> None:
    model = tuned("v2", target_modules=["model.layers.0.*.o_proj", "lm_head"])
    assert {name.split(".lora")[0] for name in trained_names(model)} == {"model.layers.0.self_attn.o_proj", "lm_head"}


def named(adapter: Path, base: str) -> Path:
    """Write another base into adapter_config.json."""
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": base}))
    return adapter


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    """ChatGLM2 and ChatGLM3 have the same shapes: only the numbers tell. Rounding and layout do not matter."""
    adapter = written(tuned("v2"), tmp_path / "adapter")
    with pytest.raises(ModelError, match=rf"{adapter} was trained on another model than .*v3: .* differs.*v2; set"):
        put("v3", adapter)
    assert (
        main(
            ["export-model", f"model.path={GOLDEN / 'v3'}", f"adapter={adapter}", "merge=true", f"output={tmp_path}/x"]
        )
        == 2
    )
    assert main(["export-model", str(GOLDEN / "v2"), "dtype=bf16", f"output={tmp_path}/hf", "forward=no"]) == 0
    words = ["merge=true", f"output={tmp_path}/y", "forward=no"]
    assert main(["export-model", f"model.path={tmp_path}/hf", f"adapter={adapter}", *words]) == 0
    (tmp_path / "adapter" / "base.json").write_text(json.dumps({"path": "/gone", "numbers": {}}))
    named(adapter, "/gone")
    assert main(["export-model", str(adapter), "merge=true", f"output={tmp_path}/z"]) == 2


@pytest.mark.parametrize("method", [LORA, TuningMethod.ptuning_v2, TuningMethod.prompt])
def test_a_copy_of_an_adapter_is_one_and_knows_where_its_base_is_now(
    method: TuningMethod, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tuned("v2", method=method, num_tokens=3)
    settings = tuning_state(model).settings | {"base_model_name_or_path": "/gone"}
    record_of(model).tuned = replace(
        tuning_state(model), settings=settings, base=replace(tuning_state(model).base, path="/gone")
    )
    adapter = written(model, tmp_path / "adapter")
    assert main(["verify", str(adapter)]) == 0
    assert "no forward" in capsys.readouterr().out
    copy = tmp_path / "copy"
    assert main(["export-model", str(adapter), f"output={copy}"]) == 2
    assert "was not found: /gone" in capsys.readouterr().err
    assert main(["export-model", str(adapter), f"output={copy}", f"base={tmp_path}"]) == 2
    assert main(["export-model", str(adapter), f"output={copy}", f"base={GOLDEN / 'v3'}"]) == 2
    assert not copy.exists()
    assert main(["export-model", str(adapter), f"output={copy}", f"base={GOLDEN / 'v2'}"]) == 0
    assert "forward: the logits are those of the save" in capsys.readouterr().out
    assert json.loads((copy / "base.json").read_text()) == {
        "path": str(GOLDEN / "v2"),
        "numbers": tuning_state(model).base.numbers,
    }
    assert json.loads((copy / "adapter_config.json").read_text())["base_model_name_or_path"] == str(GOLDEN / "v2")
    assert torch.equal(logits(put("v2", copy), "v2"), logits(model, "v2"))
    assert json.loads((copy / "generation_config.json").read_text())["eos_token_id"] == 2  # for servers
    assert not (copy / "config.json").exists()


def test_one_adapter_is_asked_and_its_base_is_found(tmp_path: Path) -> None:
    adapter, other = (written(tuned("v2"), tmp_path / name) for name in ("adapter", "other"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("")
    written(tuned("v2"), tmp_path / "run" / "export")
    for path in (adapter, tmp_path / "run"):
        with pytest.raises(ConfigError, match=f"is an adapter itself: {other} cannot be added to it"):
            load_any(str(path), adapter=str(other))
    with pytest.raises(ModelError, match=f"{tmp_path} holds no adapter: there is no adapter_config.json"):
        load_any("", adapter=str(tmp_path))
    with pytest.raises(ModelError, match="there is no directory nowhere"):
        load_any("nowhere")
    named(adapter, str(GOLDEN / "v3"))  # by hand, where the base has moved; its numbers are compared as ever
    assert base_of_adapter(adapter) == GOLDEN / "v3"
    with pytest.raises(BaseMissing, match="was not found: /gone"):
        base_of_adapter(named(adapter, "/gone"))
    named(adapter, str(GOLDEN / "v2"))
    (adapter / "base.json").unlink()  # as peft writes it
    assert base_of_adapter(adapter) == GOLDEN / "v2"


def test_damaged_adapters_are_refused(tmp_path: Path) -> None:
    adapter = written(tuned("v2"), tmp_path / "adapter")
    file = adapter / "adapter_model.safetensors"
    values = load_file(file)
    name = next(iter(values))
    save_file({key: value for key, value in values.items() if key != name}, file)
    with pytest.raises(ModelError, match=f"does not fit the model: {name}"):
        put("v2", adapter)
    save_file(values | {name: values[name][:, :3].contiguous()}, file)
    with pytest.raises(ModelError, match="does not fit the model"):
        put("v2", adapter)
    (adapter / "adapter_config.json").write_text('{"peft_type": "IA3"}')
    with pytest.raises(ModelError, match="is of the kind IA3, which is not known here"):
        put("v2", adapter)


def test_what_cannot_be_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter = written(tuned("v2", method=TuningMethod.prompt, num_tokens=3), tmp_path / "adapter")
    words = ["merge=true", f"output={tmp_path}/out"]
    assert main(["export-model", str(adapter), *words]) == 2
    assert "cannot be merged into its base: it stands before the tokens" in capsys.readouterr().err
    assert main(["export-model", str(GOLDEN / "v2"), *words]) == 2
    assert "a whole model already" in capsys.readouterr().err
    assert main(["export-model", str(adapter), "format=official", f"output={tmp_path}/out"]) == 2
    assert "cannot be merged into one: leave them out" in capsys.readouterr().err
    lora = written(tuned("v2"), tmp_path / "lora")
    assert main(["export-model", str(lora), "max_shard_size=1GB", f"output={tmp_path}/out"]) == 2
    assert "are for whole models: add merge=true" in capsys.readouterr().err
    assert main(["export-model", str(adapter), f"output={tmp_path}/adapter"]) == 2
    assert main(["export-model", str(GOLDEN / "v2"), f"output={tmp_path}/out", "max_shard_size=much"]) == 2
    assert "max_shard_size = much is no size such as 500MB or 5GB." in capsys.readouterr().err
    for word in ("dtype=bf16", "max_shard_size=1GB"):
        assert main(["export-model", str(GOLDEN / "v2"), "format=official", word, f"output={tmp_path}/out"]) == 2
        assert "keeps precisions and files" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def prove(model, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prove an adapter's folder as a run does that holds this model; nothing may be loaded, nor the model changed."""

    def gathered(module, only):
        stored = module.state_dict().items()
        return ((name, value.clone()) for name, value in stored if name in only)

    before = {name: value.clone() for name, value in model.state_dict().items()}
    monkeypatch.setattr(export_adapter, "gathered_parameters", gathered)
    with monkeypatch.context() as without_files:
        without_files.delattr(load_weights, "load_model")
        for opener in ("stream_parameters", "open_directory", "load_empty"):
            without_files.delattr(load_module, opener)
        export_adapter.prove_adapter(SimpleNamespace(module=model), folder)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


METHODS = {
    **VARIANTS,
    "ptuning_v2": {"method": TuningMethod.ptuning_v2, "num_tokens": 3},
    "prompt": {"method": TuningMethod.prompt, "num_tokens": 3},
}


@pytest.mark.parametrize("variant", METHODS)
def test_an_adapter_is_proven_against_the_model_in_memory(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tuned("v3", **METHODS[variant])
    folder = written(model, tmp_path / "adapter")
    prove(model, folder, monkeypatch)

    values = load_file(folder / "adapter_model.safetensors")
    name = sorted(values)[0]
    first = values[name].flatten()[0].item()
    values[name].view(-1)[0] = torch.nextafter(torch.tensor(first), torch.tensor(9.0))
    save_file(values, folder / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=f"does not hold what was trained: .*{name}"):
        prove(model, folder, monkeypatch)


def test_other_settings_or_another_base_are_no_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tuned("v3")
    settings = written(model, tmp_path / "settings") / "adapter_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"lora_alpha": 3}))
    with pytest.raises(CheckpointError, match=r"adapter_config\.json"):
        prove(model, settings.parent, monkeypatch)
    base = written(model, tmp_path / "base") / "base.json"
    base.write_text(base.read_text().replace("0.0", "0.1", 1))
    with pytest.raises(CheckpointError, match=r"base\.json"):
        prove(model, base.parent, monkeypatch)
    folder = written(model, tmp_path / "adapter")
    for parameter in model.parameters():  # the frozen weights in memory are no longer those of the base
        if not parameter.requires_grad:
            parameter.data += 0.5
    with pytest.raises(CheckpointError, match=r"differs.*The export is kept as"):
        prove(model, folder, monkeypatch)
    assert not folder.exists()
