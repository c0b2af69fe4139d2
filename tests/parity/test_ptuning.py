"""P-Tuning v2: the original's numbers, its checkpoints, the same prefix in training, generation and recomputation."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from golden import GOLDEN, GRAD_NORM, LOGITS, LOSS, expected, inputs, load, norm
from safetensors.torch import load_file, save_file
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from toolkit.cli import main
from toolkit.config.schema import TuningConfig, TuningMethod
from toolkit.messages import ModelError
from toolkit.models.adapters import attach_adapter, load_adapter, stored_names
from toolkit.models.base_model import base_of
from toolkit.models.fine_tuning import apply_tuning
from toolkit.models.prompt_tuning import prefix_settings

NAMES = pytest.mark.parametrize("name", ["v1", "v2", "v3"])
KINDS = pytest.mark.parametrize("kind", ["ptuning", "ptuning_proj"])


def original(folder: Path, name: str, kind: str) -> Path:
    """Write a prefix as the original's Trainer leaves it: a pickle beside a config with pre_seq_len."""
    folder.mkdir()
    values = load_file(GOLDEN / name / f"{kind}.safetensors")
    torch.save(values | {"lm_head.weight": torch.zeros(2)}, folder / "pytorch_model.bin")
    config = json.loads((GOLDEN / name / "config.json").read_text())
    config |= {"pre_seq_len": 6, "prefix_projection": kind == "ptuning_proj"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def ours(folder: Path, name: str, kind: str) -> Path:
    """Write it as an adapter's folder."""
    folder.mkdir()
    shutil.copy(GOLDEN / name / f"{kind}.safetensors", folder / "adapter_model.safetensors")
    settings = prefix_settings(6, kind == "ptuning_proj", str(GOLDEN / name))
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def prefixed(name: str, folder: Path) -> PreTrainedModel:
    """Return a model with the prefix in a folder."""
    model = load(name)
    load_adapter(model, folder, base_of(model, GOLDEN / name))
    return model


@pytest.mark.parametrize("case", ["plain", "left"])
@KINDS
@NAMES
def test_the_originals_numbers(name: str, kind: str, case: str, tmp_path: Path) -> None:
    model = prefixed(name, (original if kind == "ptuning" else ours)(tmp_path / "prefix", name, kind))
    prefix = list(model.prefix_encoder.parameters())
    assert [parameter for parameter in model.parameters() if parameter.requires_grad] == prefix
    # The original of ChatGLM-6B freezes `transformer` only, its successors everything.
    trained = [*prefix, *(model.lm_head.requires_grad_().parameters() if name == "v1" else [])]
    given, wanted = inputs(name, case), expected(name, f"{kind}.{case}")
    found = model(**given, use_cache=False)
    found.loss.backward()
    valid = expected(name, case)["valid"]
    assert float((found.logits.detach() - wanted["logits"]).abs().amax(-1)[valid].max()) <= LOGITS
    assert abs(float(found.loss.detach()) - float(wanted["loss"])) <= LOSS
    assert norm(prefix) == pytest.approx(float(wanted["grad_norm_prefix_encoder"]), rel=GRAD_NORM)
    assert norm(trained) == pytest.approx(float(wanted["grad_norm"]), rel=GRAD_NORM)


@KINDS
@NAMES
def test_prefixes_have_the_originals_names(name: str, kind: str, tmp_path: Path) -> None:
    model = prefixed(name, ours(tmp_path / "prefix", name, kind))
    wanted = load_file(GOLDEN / name / f"{kind}.safetensors")
    found = {stored: model.get_parameter(own).detach() for own, stored in stored_names(model).items()}
    assert set(found) == set(wanted)
    assert all(torch.equal(found[key], wanted[key].float()) for key in wanted)


@NAMES
def test_it_generates_after_a_prefix(name: str, tmp_path: Path) -> None:
    """A forward pass per token without a cache gives the same, also beside a longer row."""
    model = prefixed(name, ours(tmp_path / "prefix", name, "ptuning"))
    with torch.no_grad():
        model.prefix_encoder.embedding.weight *= 20  # strong enough to change the answer
    given = inputs(name, "gen")
    ids, options = given["input_ids"], {"max_new_tokens": 6, "do_sample": False}
    mask = (ids != 3).long() if name == "v1" else given["attention_mask"]
    together = model.generate(ids, attention_mask=mask, **options)
    assert not torch.equal(together, load(name).generate(ids, attention_mask=mask, **options))
    for row in range(len(ids)):
        alone = ids[row][mask[row].bool()][None]
        wanted = alone
        with torch.no_grad():
            for _ in range(6):
                logits = model(wanted, use_cache=False).logits
                wanted = torch.cat((wanted, logits[:, -1].argmax(-1, keepdim=True)), dim=1)
        assert torch.equal(model.generate(alone, **options), wanted)
        assert torch.equal(together[row, -6:], wanted[0, -6:])


@pytest.mark.parametrize("name", ["v1", "v2"])
def test_recomputed_activations_have_the_prefix_too(name: str, tmp_path: Path) -> None:
    """transformers drops a cache where it recomputes layers; without the prefix its gradient would be zero."""
    given, found = inputs(name, "plain"), []
    for recompute in (False, True):
        model = prefixed(name, ours(tmp_path / f"prefix-{recompute}", name, "ptuning_proj"))
        if recompute:
            model._set_gradient_checkpointing(
                enable=True, gradient_checkpointing_func=partial(checkpoint, use_reentrant=False)
            )
        model.train()
        model(**given, use_cache=False).loss.backward()
        found.append([parameter.grad for parameter in model.prefix_encoder.parameters()])
    assert all(float(gradient.abs().max()) > 0 for gradient in found[0])
    assert all(torch.allclose(one, other, rtol=1e-5, atol=1e-8) for one, other in zip(*found, strict=True))


def test_dropout_is_drawn_for_each_row() -> None:
    model = load("v2")
    attach_adapter(model, prefix_settings(6, False, ""), base_of(model, GOLDEN / "v2"), dropout=0.5)
    encoder = model.prefix_encoder
    [keys, _], *_ = encoder.train().states(2)
    assert not torch.equal(keys[0], keys[1])
    [keys, _], *_ = encoder.eval().states(2)
    assert torch.equal(keys[0], keys[1])


def test_a_prefix_of_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"does not fit the model: .*\(6, 384\) != \(6, 192\)"):
        prefixed("v2", ours(tmp_path / "one", "v1", "ptuning"))
    folder = ours(tmp_path / "two", "v3", "ptuning")
    save_file(load_file(GOLDEN / "v3" / "model.safetensors"), folder / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=r"does not fit the model: transformer.prefix_encoder.embedding.weight"):
        prefixed("v3", folder)
    with pytest.raises(ModelError, match=r"holds no adapter: there is no adapter_config.json"):
        prefixed("v3", GOLDEN / "v3")


def test_a_new_prefix_has_the_originals_sizes() -> None:
    for name, kind in (("v1", "ptuning_proj"), ("v2", "ptuning_proj"), ("v3", "ptuning")):
        model = load(name)
        config = TuningConfig(method=TuningMethod.ptuning_v2, num_tokens=6, projection=kind == "ptuning_proj")
        apply_tuning(model, config, GOLDEN / name, tokenizer=None, seed=1)
        wanted = {key: value.shape for key, value in load_file(GOLDEN / name / f"{kind}.safetensors").items()}
        assert {stored: model.get_parameter(own).shape for own, stored in stored_names(model).items()} == wanted


@NAMES
def test_back_to_the_originals_layout(name: str, tmp_path: Path) -> None:
    folder = ours(tmp_path / "prefix", name, "ptuning_proj")
    out = tmp_path / "out"
    assert main(["export-model", str(folder), "format=official", f"output={out}"]) == 0
    wanted = load_file(folder / "adapter_model.safetensors")
    found = torch.load(out / "pytorch_model.bin", weights_only=True)
    assert set(found) == set(wanted)
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    with torch.no_grad():
        one, other = (prefixed(name, path)(**inputs(name, "plain"), use_cache=False).logits for path in (folder, out))
    assert torch.equal(one, other)


def test_an_originals_prefix_is_exported_without_its_head(tmp_path: Path) -> None:
    """ChatGLM-6B's own training saves lm_head too; the command compares the logits of what it wrote."""
    folder, out = original(tmp_path / "prefix", "v1", "ptuning"), tmp_path / "out"
    assert main(["export-model", str(folder), f"base={GOLDEN / 'v1'}", f"output={out}"]) == 0
    wanted = load_file(GOLDEN / "v1" / "ptuning.safetensors")
    assert set(load_file(out / "adapter_model.safetensors")) == set(wanted)
