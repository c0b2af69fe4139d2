"""Parts of rows: together they are the rows, and each trained token's loss is one rank's."""

import pytest
import torch
import transformers

from tests.unit.tiny_model import SIZES
from toolkit.config.load import load
from toolkit.data.plans import pad_multiple
from toolkit.layouts.sequence import local_part, split_sequences
from toolkit.messages import ModelError
from toolkit.models.packable import reason_not_to_pack
from toolkit.plan.lookup import outline_of
from toolkit.plan.machine import Machine
from toolkit.plan.memory import longest_rows, plan_rank
from toolkit.plan.speed import Rates, step_time
from toolkit.sample_types import with_targets


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_parts_together_are_the_rows(parts: int) -> None:
    rows, size = 3, pad_multiple(parts)
    draw = torch.Generator().manual_seed(parts)
    ids = torch.randint(100, (rows, size), generator=draw)
    labels = ids.masked_fill(torch.rand(rows, size, generator=draw) < 0.4, -100)
    sources = torch.arange(rows).repeat_interleave(size).view(rows, size)
    batch = {
        "input_ids": ids,
        "labels": labels,
        "position_ids": torch.arange(size).repeat(rows, 1),
        "segment_ids": torch.ones_like(ids),
        "seen_until": 1 + ids % 3,
        "cu_seq_lens": torch.tensor([0, rows * size], dtype=torch.int32),
    }
    whole = with_targets(batch)
    whole["sources"] = sources.flatten()[whole["target_indices"]]
    cut = [local_part(whole, part, parts) for part in range(parts)]
    for name in ("input_ids", "position_ids", "segment_ids", "seen_until"):
        assert torch.equal(torch.cat([one[name] for one in cut], dim=1), batch[name])
    assert sum(len(one["target_indices"]) for one in cut) == len(whole["target_indices"])
    found = torch.full((rows, parts, size // parts), -100)
    for part, one in enumerate(cut):
        assert one["part"].tolist() == [part, parts]
        assert torch.equal(one["row_ids"], ids)
        assert torch.equal(one["cu_seq_lens"], batch["cu_seq_lens"])
        before = one["target_indices"] - 1
        row, column = before // (size // parts), before % (size // parts)
        assert torch.equal(one["sources"], row)
        found[row, part, column] = one["targets"]
    # What stands before a token predicts it; before the first of a row nothing stands.
    assert torch.equal(found.view(rows, size)[:, :-1], labels[:, 1:])
    assert local_part(batch, 0, 1) is batch


def test_models_that_cannot_be_divided(tmp_path) -> None:
    config = transformers.GlmConfig(**SIZES)
    with pytest.raises(ModelError, match="its 4 attention heads cannot be divided by 3"):
        split_sequences(transformers.GlmForCausalLM(config), 3)
    model = transformers.GlmForCausalLM(config)
    model.set_attn_implementation("eager")
    with pytest.raises(ModelError, match="its attention is more than PyTorch's"):
        split_sequences(model, 2)
    sliding = transformers.MistralConfig(**SIZES, sliding_window=16)
    transformers.MistralForCausalLM(sliding).save_pretrained(tmp_path)
    model_config = load(["recipe=quickstart", "model=hf", f"model.path={tmp_path}"]).cfg.model
    assert "reaches back 16 tokens only" in reason_not_to_pack(model_config, 32)
    assert reason_not_to_pack(model_config, 16) == ""


def test_plan_divides_activations_and_counts_the_exchange() -> None:
    words = ["recipe=quickstart", "data.max_length=4096", "model.shape.max_positions=4096"]
    machine = Machine(ranks=4, memory_bytes=2**40, card=None, on_cpu=True, context_bytes=0)
    rates = Rates(flops=1e12, link=1e9, latency_s=0.0, memory=1e11, host=1e11, pcie=1e10, micro_s=0.0)
    found = {}
    for parts in (1, 2, 4):
        cfg = load([*words, f"parallel.sequence={parts}", f"batch.micro_per_gpu={parts}"]).cfg
        outline = outline_of(cfg, 4096)
        rows = longest_rows(outline, cfg)
        time = step_time(outline, cfg, machine, rates)
        step = plan_rank(outline, cfg, 4, on_cpu=False).device["step"]
        found[parts] = rows.tokens, step["attention"], time.tokens, time.communication, time.compute
    tokens, attention, in_step, communication, compute = zip(*found.values(), strict=True)
    assert len(set(tokens)) == len(set(in_step)) == 1
    assert attention[0] == attention[1] < attention[2]  # four ranks for two heads of keys: each is there twice
    assert communication[0] < communication[1] < communication[2]
    assert compute[0] == pytest.approx(compute[1], rel=0.01)
