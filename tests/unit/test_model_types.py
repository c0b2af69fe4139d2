"""What transformers calls causal: computed as transformers itself does, or refused by name before anything is read."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from peft import PromptTuningConfig, get_peft_model
from torch.nn import functional

from toolkit.config.schema import Attention, TaskKind, TuningConfig, TuningMethod
from toolkit.evaluate.generate import Sampling, generate
from toolkit.messages import ModelError
from toolkit.models import load_model, lora
from toolkit.models.attention import choose_attention
from toolkit.models.fine_tuning import freeze_untrained, new_settings
from toolkit.models.isolation import check_isolation
from toolkit.models.load import stream_parameters
from toolkit.models.load_weights import assign_state
from toolkit.models.loss import token_loss_sum
from toolkit.models.prompt_tuning import SoftPrompt, attach_prefix, attach_prompt
from toolkit.models.save import save_model
from toolkit.models.structure import decoder_layers_name, tower_prefixes
from toolkit.models.trainable import check_trains, check_vocabulary, frozen_parts
from toolkit.plan.outline import flop_sizes

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
HEADS = {**SIZES, "num_key_value_heads": 1, "head_dim": 16}
XLM = {"vocab_size": 64, "emb_dim": 32, "n_layers": 1, "n_heads": 2}


def built(kind: str, **values: Any) -> Any:
    """Return a random model of a `model_type`."""
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **values)).eval()


def gemma3() -> Any:
    """Return Gemma 3 of text and images, with as many layers for one as for the other."""
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    return built("gemma3", text_config=HEADS, vision_config=vision, mm_tokens_per_image=4)


def roberta(tmp_path: Path) -> Any:
    """Return a RoBERTa as it is loaded for training, whose positions begin after that of padding, 3."""
    built("roberta", **SIZES, is_decoder=True, pad_token_id=3).save_pretrained(tmp_path / "roberta")
    return load_model(tmp_path / "roberta")


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        ("bert", SIZES, 'is_decoder = false: each token would see those after it.*Set "is_decoder": true there'),
        ("xlm", XLM, 'causal = false: .* Set "causal": true there'),
        ("gemma3_text", {**HEADS, "use_bidirectional_attention": True}, '_attention = true: .* "use_.*": false there'),
        ("xlnet", {"vocab_size": 64, "d_model": 32, "n_layer": 1, "n_head": 2}, "model_type = xlnet, which cannot"),
        ("bert", {**SIZES, "is_decoder": True}, ""),
        ("xlm", {**XLM, "causal": True}, ""),
        ("gpt_neox", SIZES, ""),  # its config has is_decoder = false, and nobody heeds it
        ("bart", {"vocab_size": 64, "d_model": 32, "decoder_layers": 1, "encoder_layers": 1}, ""),
    ],
)
def test_tokens_that_see_those_after_them(kind: str, values: dict[str, Any], message: str) -> None:
    with torch.device("meta"):
        model = built(kind, **values)
    folder = Path("folder")
    if not message:
        check_trains(model, folder, TaskKind.language)
        return
    with pytest.raises(ModelError, match=rf"folder/config\.json has .*{message}") as refused:
        check_trains(model, folder, TaskKind.language)
    assert len(str(refused.value)) < 200
    if kind != "xlnet":  # what is not predicted may be seen
        check_trains(model, folder, TaskKind.embed)


@pytest.mark.parametrize("packed", [False, True])
def test_positions_begin_after_that_of_padding(packed: bool, tmp_path: Path) -> None:
    """RoBERTa, which numbers them itself where it gets none: one sample after another, as here together."""
    model = roberta(tmp_path)
    first, second = torch.arange(10, 22), torch.arange(30, 38)
    plain = torch.zeros(())
    for ids in (first, second):
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
        plain = plain + functional.cross_entropy(logits[:-1], ids[1:], reduction="sum")
    if packed:
        batch = {"input_ids": torch.cat((first, second))[None]}
        batch["segment_ids"] = torch.tensor([[1] * 12 + [2] * 8])
        batch["position_ids"] = torch.cat((torch.arange(12), torch.arange(8)))[None]
        batch["cu_seq_lens"] = torch.tensor([0, 12, 20], dtype=torch.int32)
        labels = batch["input_ids"].clone()
        labels[0, 12] = -100
    else:
        batch = {"input_ids": torch.stack((first, functional.pad(second, (0, 4), value=3)))}
        batch["segment_ids"] = (batch["input_ids"] != 3).long()
        batch["position_ids"] = torch.arange(12).repeat(2, 1)
        labels = batch["input_ids"].masked_fill(batch["segment_ids"] == 0, -100)
    choose_attention(model, Attention.auto, packed, torch.float32)
    torch.testing.assert_close(token_loss_sum(model, {**batch, "labels": labels}), plain)


def test_answers_are_what_the_forward_pass_gives(tmp_path: Path) -> None:
    """transformers' generate (5.23) alone would number RoBERTa's positions from 0."""
    model = roberta(tmp_path)
    for parameter in model.parameters():  # or every answer is the token that it ends with
        parameter.data.mul_(8)
    encoder: Any = SimpleNamespace(tokenizer=SimpleNamespace(pad_token_id=3, eos_token_id=2), stop_ids=[2])
    prompts = [[10, 11, 12, 13], [20, 21]]
    answers = generate(model, encoder, prompts, Sampling(max_new_tokens=6), torch.device("cpu"))
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = list(prompt)
        for token in answer:
            assert token == int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
            ids.append(token)
    assert len(set(map(tuple, answers))) == 2


def test_a_learned_prompt_has_the_first_positions(tmp_path: Path) -> None:
    """As peft has them: the prompt and the row are numbered together, by transformers itself."""
    model, ids = roberta(tmp_path), torch.arange(10, 18)[None]
    prompt = torch.randn(3, 32, generator=torch.Generator().manual_seed(1))
    embedded = torch.cat((prompt[None], model.get_input_embeddings()(ids)), dim=1)
    expected = model(inputs_embeds=embedded, use_cache=False).logits[:, 3:]
    attach_prompt(model, SoftPrompt(prompt))
    torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, expected)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("mamba", {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}),  # without heads
        (
            "opt",
            {
                "vocab_size": 64,
                "hidden_size": 32,
                "word_embed_proj_dim": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
            },
        ),
    ],
)
def test_a_learned_prompt_is_what_a_plain_loop_and_peft_compute(kind: str, values: dict[str, Any]) -> None:
    model, plain = built(kind, **values), built(kind, **values)
    settings = new_settings(model, TuningConfig(method=TuningMethod.prompt, num_tokens=3), "base")
    learned = torch.randn(3, settings["token_dim"], generator=torch.Generator().manual_seed(1))
    attach_prompt(model, SoftPrompt(learned.clone()))
    rows = [torch.arange(5, 25), torch.arange(40, 52)]
    ids, segments = (torch.zeros(2, 20, dtype=torch.long) for _ in range(2))
    for row, values_of_row in enumerate(rows):
        ids[row, : len(values_of_row)], segments[row, : len(values_of_row)] = values_of_row, 1
    labels, positions = ids.masked_fill(segments == 0, -100), torch.arange(20).repeat(2, 1)
    loss = token_loss_sum(
        model, {"input_ids": ids, "labels": labels, "segment_ids": segments, "position_ids": positions}
    )
    loss.backward()
    tuned = get_peft_model(
        plain,
        PromptTuningConfig.from_peft_type(**settings | {"inference_mode": False, "base_model_name_or_path": None}),
    )
    weight = tuned.prompt_encoder["default"].embedding.weight
    weight.data.copy_(learned)
    expected = 0.0
    for row in rows:
        logits = tuned(input_ids=row[None], use_cache=False).logits[0, 3:-1]
        one = functional.cross_entropy(logits, row[1:], reduction="sum")
        one.backward()
        expected += float(one.detach())
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(model.soft_prompt.embedding.weight.grad, weight.grad, rtol=1e-5, atol=1e-6)


def test_a_learned_prompt_has_no_ids_to_look_up() -> None:
    model = built("gemma4_text", **HEADS, vocab_size_per_layer_input=64, hidden_size_per_layer_input=8)
    with pytest.raises(ModelError, match=r"Gemma4ForCausalLM: its layers look up the ids of tokens"):
        attach_prompt(model, SoftPrompt(torch.zeros(3, 32)))
    model = built("llama", **SIZES)
    model.resize_token_embeddings(72)
    model.config.vocab_size = 64
    with pytest.raises(ModelError, match="its embedding has 72 rows, and peft looks for vocab_size = 64"):
        attach_prompt(model, SoftPrompt(torch.zeros(3, 32)))


def test_what_only_images_go_through_stays_as_it_is(tmp_path: Path) -> None:
    model = gemma3()
    tokenizer: Any = range(64)
    check_vocabulary(model, tokenizer)
    with pytest.raises(ModelError, match="the tokenizer has 65 tokens, the model only 64"):
        check_vocabulary(model, range(65))  # type: ignore[arg-type]
    assert decoder_layers_name(model) == "model.language_model.layers"
    targets, _ = lora.choose_targets(model, TuningConfig(method=TuningMethod.lora))
    assert len(targets) == 6
    assert all(name.startswith("model.language_model.layers.") for name in targets)
    model.save_pretrained(tmp_path / "model")
    freeze_untrained(model, tmp_path / "model")
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if "language_model" in name}
    ids = torch.arange(5, 15)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for name, parameter in model.named_parameters() if name in trained)


TEXT = SIZES | {"num_key_value_heads": 2}
IMAGE = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
IMAGE |= {"patch_size": 14}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}


@pytest.mark.parametrize(
    ("kind", "values", "parts"),
    [
        ("git", SIZES | {"vision_config": IMAGE}, ["git.image_encoder", "git.visual_projection"]),
        (
            "bart",
            {"vocab_size": 64, "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 48},
            ["model.decoder.layers.*.encoder_attn", "model.decoder.layers.*.encoder_attn_layer_norm"],
        ),
        (
            "deepseek_v32",
            TEXT | LATENT | {"first_k_dense_replace": 2, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 8},
            ["model.layers.*.self_attn.indexer"],
        ),
    ],
)
def test_what_the_loss_gives_no_gradient_stays_as_it_is(
    kind: str, values: dict[str, Any], parts: list[str], tmp_path: Path
) -> None:
    """Weight decay would shrink it, step by step."""
    model = built(kind, **values).train()
    model.save_pretrained(tmp_path / "model")
    assert frozen_parts(model)[0] == parts
    freeze_untrained(model, tmp_path / "model")
    ids = torch.arange(5, 45).reshape(2, 20)
    model(input_ids=ids, use_cache=False).logits.logsumexp(-1).sum().backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_a_model_of_text_has_nothing_beside_it() -> None:
    with torch.device("meta"):
        models = [built("gpt_neox", **SIZES), built("bart", vocab_size=64, d_model=32, decoder_layers=1)]
    assert [tower_prefixes(model) for model in models] == [(), ()]


def test_the_embedding_of_padding_is_exported_and_read_back(tmp_path: Path) -> None:
    """Youtu's class sets it to 0 whenever it is loaded, also where it is a trained row of the output layer."""
    model = built("youtu", **SIZES, **LATENT, num_key_value_heads=2, pad_token_id=0)
    torch.nn.init.ones_(model.get_input_embeddings().weight)
    save_model(model, tmp_path / "export")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert torch.equal(again.get_input_embeddings().weight, model.get_input_embeddings().weight)


def test_the_embedding_of_padding_is_read_as_transformers_loads_it(tmp_path: Path) -> None:
    """Tensor by tensor, as under ZeRO-3, and whole."""
    model = built("youtu", **SIZES, **LATENT, num_key_value_heads=2, pad_token_id=3)
    torch.nn.init.ones_(model.get_input_embeddings().weight)
    model.save_pretrained(tmp_path / "youtu")
    streamed, values = stream_parameters(tmp_path / "youtu")
    assign_state(streamed, dict(values))
    table = load_model(tmp_path / "youtu").get_input_embeddings().weight
    assert torch.equal(streamed.get_input_embeddings().weight, table) and not table[3].any() and table[2].all()


def test_flops_of_odd_configs_are_unknown_and_end_nothing() -> None:
    """Heads that differ by layer, which transformers refuses to read as one number; values that are no numbers."""
    config = transformers.Gemma4TextConfig(**HEADS, layer_types=["sliding_attention", "full_attention"])
    with pytest.raises(RuntimeError, match="per-layer attribute"):
        _ = config.head_dim
    assert flop_sizes(lambda name: getattr(config, name, None)) == {}
    llama = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32}
    assert flop_sizes(llama.get) == {"layers": 2, "heads": 2, "head_size": 16}
    for odd in ([4, 2], "2", 2.0):
        assert flop_sizes({**llama, "num_attention_heads": odd}.get) == {}
    assert flop_sizes({**llama, "model_type": "mixtral"}.get) == {}


def test_packed_rows_that_a_model_asserts_against() -> None:
    """XLM wants a mask of rows, and says so without a word."""
    model = built("xlm", **XLM, causal=True)
    with pytest.raises(ModelError, match=r"xlm cannot be trained on packed rows: .*\(AssertionError\).*grouped"):
        check_isolation(model, 64, torch.device("cpu"), "xlm")


def test_a_prefix_needs_keys_of_one_size() -> None:
    config = {**HEADS, "layer_types": ["sliding_attention", "full_attention"]}
    for model in (built("gemma4_text", **config), built("mamba", vocab_size=64, hidden_size=32, num_hidden_layers=1)):
        with pytest.raises(ModelError, match=r"ptuning_v2 cannot be with .* keys and values of one size\. Use"):
            attach_prefix(model, 4, False, 0.0)
