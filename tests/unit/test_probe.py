"""What is written beside weights. The probe: the same ids, the same logits, and nothing else touched."""

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from transformers import GlmConfig

from tests.architectures import CONFIGS
from tests.probes import compare
from toolkit.distributed import accelerator
from toolkit.export import verify
from toolkit.export.verify import verify_export, verify_logits
from toolkit.messages import CheckpointError, ModelError, ProofDiffers
from toolkit.models import probe
from toolkit.models.chatglm.modeling import ChatGLMConfig
from toolkit.models.save import non_weight_files, save_model


@pytest.fixture
def model() -> transformers.GlmForCausalLM:
    """A tiny model in training mode, with dropout."""
    config = GlmConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        attention_dropout=0.5,
        pad_token_id=None,
        eos_token_id=1,
    )
    torch.manual_seed(1)
    return transformers.GlmForCausalLM(config).train()


def test_rows_are_the_beginning_of_two_samples(model: transformers.GlmForCausalLM) -> None:
    ids = probe.probe_ids([range(50), range(40, 60), range(9)], model.config)
    assert ids.tolist() == [[*range(8)], [*range(40, 48)]]
    assert probe.probe_ids([range(50)], model.config).tolist() == [[*range(8)]]
    spread = probe.spread_ids(model.config)
    assert spread.shape == (2, 8)
    assert 0 <= int(spread.min()) < int(spread.max()) < 64
    old = ChatGLMConfig(gmask_token_id=7, bos_token_id=8)
    assert probe.probe_ids([range(50), range(5)], old).tolist() == [[0, 1, 2, 7, 8]] * 2


def test_nothing_else_is_touched(model: transformers.GlmForCausalLM, tmp_path: Path) -> None:
    ids = probe.probe_ids([range(50), range(40, 60)], model.config)
    before = torch.get_rng_state()
    taken = probe.capture(model, ids)
    assert torch.equal(before, torch.get_rng_state())
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert taken.logits.shape == (2, 64)
    file = probe.write(taken, tmp_path)
    assert file.parent.name == "probe", "vLLM takes every *.safetensors beside config.json for weights"
    again = probe.read(tmp_path)
    assert again is not None
    assert torch.equal(again.ids, ids)
    assert torch.equal(again.logits, taken.logits)
    assert again.dtype == "float32"
    assert compare(model, again) == (0.0, 1e-4)


def test_other_weights_give_other_logits(model: transformers.GlmForCausalLM, tmp_path: Path) -> None:
    taken = probe.capture(model, probe.spread_ids(model.config))
    half = model.bfloat16()
    difference, tolerance = compare(half, taken)
    assert 0 < difference < tolerance == probe.TOLERANCES["bfloat16"], "the coarser precision of the two decides"
    with torch.no_grad():
        half.lm_head.weight[3] *= -9  # one row of one tensor
    assert compare(half, taken)[0] > tolerance
    with torch.no_grad():
        half.lm_head.weight[3] *= float("nan")
    assert not compare(half, taken)[0] <= tolerance
    assert probe.read(tmp_path) is None
    probe.write(taken, tmp_path).write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match=r"Cannot read .*probe\.safetensors"):
        probe.read(tmp_path)


def test_weights_of_4_bits_are_told_again_by_whole_ones(model: transformers.GlmForCausalLM) -> None:
    """A run of QLoRA computes with rounded weights; its adapter is loaded on those that were not rounded."""
    ids = probe.spread_ids(model.config)
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    for layer in model.model.layers.modules():
        if isinstance(layer, torch.nn.Linear):  # 16 even steps from -max to max
            step = layer.weight.data.abs().max() / 7.5
            layer.weight.data = (layer.weight.data / step).round() * step
    model.is_loaded_in_4bit = True
    taken = probe.capture(model, ids)
    model.is_loaded_in_4bit = False
    model.load_state_dict(whole)
    difference, tolerance = compare(model, taken)
    assert probe.TOLERANCES["float32"] < difference <= tolerance
    model.lm_head.weight.data = torch.randn_like(model.lm_head.weight)
    assert compare(model, taken)[0] > tolerance


def test_the_tolerance_follows_what_the_device_computes(model: transformers.GlmForCausalLM) -> None:
    matmul, before = torch.backends.cuda.matmul, torch.backends.cuda.matmul.allow_tf32
    try:
        for allowed, name in ((False, "float32"), (True, "tf32")):
            accelerator.set_tf32(allowed)
            assert matmul.allow_tf32 is torch.backends.cudnn.allow_tf32 is allowed
            assert probe.precision_of(model, torch.device("cuda", 0)) == name
            assert probe.precision_of(model, "cpu") == "float32", "processors have no TF32"
            assert probe.precision_of(model.bfloat16(), "cuda") == "bfloat16"
            model.float()
    finally:
        accelerator.set_tf32(before)
    taken = probe.capture(model, probe.spread_ids(model.config))
    off = probe.Probe(taken.ids, taken.logits + 5e-3 * taken.logits.std(), "tf32")
    difference, tolerance = compare(model, off)
    assert 1e-3 < difference < tolerance == 0.05


def test_an_export_that_is_merely_outside_the_tolerance_is_kept(
    model: transformers.GlmForCausalLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(model, tmp_path / "export")
    taken = probe.capture(model, probe.spread_ids(model.config))
    for difference, said in (
        (0.0, ""),
        (2e-4, "WARNING: the export does not give the run's logits exactly: the logits"),
    ):
        shutil.rmtree(tmp_path / "export" / "probe", ignore_errors=True)
        probe.write(
            probe.Probe(taken.ids, taken.logits + difference * taken.logits.std(), "float32"), tmp_path / "export"
        )
        verify_export(tmp_path / "export")
        assert capsys.readouterr().out.startswith(said)
    with pytest.raises(ProofDiffers, match=r"differ from those of the save by 0\.0002 of their spread"):
        verify_logits(tmp_path / "export")  # `toolkit verify` says so with an error
    for number, wrong in enumerate((taken.logits.flip(1), taken.logits + 2e-3 * taken.logits.std())):
        shutil.rmtree(tmp_path / "export" / "probe")
        probe.write(probe.Probe(taken.ids, wrong, "float32"), tmp_path / "export")
        with pytest.raises(CheckpointError, match=r"other weights than were saved.* is kept as .*export.*\.wrong"):
            verify_export(tmp_path / "export")
        aside = tmp_path / ("export.wrong", "export-2.wrong")[number]
        assert not (tmp_path / "export").exists()
        shutil.copytree(aside, tmp_path / "export")


DAMAGED = {
    "zero": ("self_attn.v_proj", torch.zeros_like),
    "transposed": ("self_attn.o_proj", torch.t),
    "turned": ("mlp.down_proj", lambda value: value.flip(0)),
}


def deep_model(layers: int) -> transformers.PreTrainedModel:
    config = GlmConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        pad_token_id=None,
        eos_token_id=1,
        initializer_range=0.1,
    )
    torch.manual_seed(1)
    return transformers.GlmForCausalLM(config).eval()


def jittered(model: transformers.PreTrainedModel, relative: float, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits of a model whose every module's output is off by up to so much."""
    generator = torch.Generator().manual_seed(2)

    def shake(module: torch.nn.Module, inputs: object, out: torch.Tensor) -> torch.Tensor:
        if isinstance(out, tuple):  # the rotary angles
            return out
        return (out * (1 + relative * (2 * torch.rand(out.shape, generator=generator) - 1))).to(out.dtype)

    hooks = [one.register_forward_hook(shake) for one in model.modules() if not list(one.children())]
    logits = probe.capture(model, ids).logits
    for hook in hooks:
        hook.remove()
    return logits


@pytest.mark.parametrize("layers", [12, 28])
@pytest.mark.parametrize(
    ("dtype", "ran", "step"),
    [
        ("float32", "float32", 2.0**-23),
        ("float32", "tf32", 2.0**-11),
        ("float16", "float16", 2.0**-11),
        ("bfloat16", "bfloat16", 2.0**-8),
        ("float32", "bfloat16", 2.0**-8),
    ],
    ids=["float32", "tf32", "float16", "bfloat16", "float32 of bfloat16"],
)
def test_rounding_is_proven_and_damage_is_an_error(
    layers: int, dtype: str, ran: str, step: float, tmp_path: Path
) -> None:
    """What is rounded as far as the run's precision rounds passes; one wrong matrix of 12 or 28 layers does not.

    Measured here, in units of the logits' spread: rounding 2e-6 (float32), 0.005 (TF32), 0.008 (float16) and 0.07
    (bfloat16) where 0.012 to 0.18 pass; damage 0.5 to 1.5 where 3e-4 (float32) to 0.35 (bfloat16) is an error.
    """
    model = deep_model(layers).to(getattr(torch, dtype))
    save_model(model, tmp_path / "export")
    ids = probe.spread_ids(model.config)
    probe.write(probe.Probe(ids, jittered(model, step, ids), ran), tmp_path / "export")
    assert "the logits are those of the save" in verify_logits(tmp_path / "export")
    for name, damage in DAMAGED.values():
        weight = model.model.layers[layers // 2].get_submodule(name).weight
        whole = weight.data
        weight.data = damage(whole).contiguous()
        save_model(model, tmp_path / "damaged")
        shutil.copytree(tmp_path / "export" / "probe", tmp_path / "damaged" / "probe", dirs_exist_ok=True)
        with pytest.raises(CheckpointError, match="other weights than were saved") as error:
            verify_logits(tmp_path / "damaged")
        assert not isinstance(error.value, ProofDiffers)
        weight.data = whole
        shutil.rmtree(tmp_path / "damaged")


def test_a_model_that_rounds_far_in_float32_has_bounds_of_its_own(tmp_path: Path) -> None:
    """Sharp attention enlarges rounding, beyond what other weights of a usual model change."""
    model = deep_model(12)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight *= 32
            layer.self_attn.k_proj.weight *= 32
    save_model(model, tmp_path / "export")
    ids = probe.spread_ids(model.config)
    found, exact = probe.capture(model, ids), probe.capture(copy.deepcopy(model).double(), ids)
    far = 20 * probe.difference_of(exact, found)
    assert far > probe.WRONG["float32"]
    logits = found.logits.clone()
    logits[0, 0] += far * logits.std()
    saved = probe.Probe(ids, logits, "float32")
    probe.write(saved, tmp_path / "export")
    assert "the logits are those of the save" in verify_logits(tmp_path / "export")
    assert verify._difference_bounds(copy.deepcopy(model), None, found, saved, far)[0] > far, "of a checkpoint"
    model.config.id2label = {0: "expert"}
    assert verify._difference_bounds(copy.deepcopy(model), None, found, saved, far)[0] > far, "a label is no expert"
    for name in ("mixtral", "gpt_oss"):
        mixture = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]())
        assert verify._difference_bounds(mixture, None, found, saved, far)[0] == probe.TOLERANCES["float32"]
    model.model.layers[6].self_attn.v_proj.weight.data.zero_()
    save_model(model, tmp_path / "damaged")
    probe.write(saved, tmp_path / "damaged")
    with pytest.raises(CheckpointError, match="other weights than were saved"):
        verify_logits(tmp_path / "damaged")


def test_what_could_not_be_exported_at_the_end_is_told_at_the_start(model: transformers.GlmForCausalLM) -> None:
    assert set(non_weight_files(model, None)) == {"config.json", "generation_config.json"}
    model.generation_config.temperature = 0.6  # as in some published folders: without do_sample
    with pytest.raises(ModelError, match=r"generation_config\.json of the model contradicts itself.*temperature"):
        non_weight_files(model, None)


def test_an_export_keeps_keys_and_values_where_training_did_not(model: transformers.GlmForCausalLM) -> None:
    model.config.use_cache = False
    assert json.loads(non_weight_files(model, None)["config.json"]).get("use_cache", True)
    assert not model.config.use_cache, "training goes on without"
