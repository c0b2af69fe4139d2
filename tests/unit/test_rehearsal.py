"""The longest rows, the room that checkpoints take, and what helps where memory is too little."""

from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import transformers

from tests.unit.tiny_model import SIZES
from toolkit.checkpoint import directory, intact
from toolkit.config.load import load, to_dict
from toolkit.config.rules import check_rules
from toolkit.config.schema import CheckpointConfig, Packing, TuningConfig, TuningMethod
from toolkit.data.loader import Layout
from toolkit.data.plans import PackingPlan
from toolkit.export.adapter import check_adapter_exportable
from toolkit.export.custom import check_custom_exportable
from toolkit.export.write import check_exportable
from toolkit.launch.environment import Ranks
from toolkit.messages import CheckpointError, ModelError, OutOfMemory
from toolkit.models import fine_tuning
from toolkit.models.chatglm.modeling import ChatGLMConfig, check_rows
from toolkit.models.record import record_of, tuning_state
from toolkit.models.save import non_weight_files
from toolkit.tasks.language_batches import longest_batch, repeated_batch
from toolkit.train.auto_layout import RowsMemory, _next_rows, choose_layout
from toolkit.train.dry_run import (
    _num_saves,
    _what_was_tried,
    check_room,
    explain_out_of_memory,
    try_checkpoint,
)
from toolkit.train.out_of_memory import remedies
from toolkit.train.run_dir import RunSource

LENGTHS = [5, 30, 9, 17, 3, 30, 8, 11]


class Rows:
    """A store of rows of known lengths."""

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return np.full(LENGTHS[index], index, np.uint32), np.arange(LENGTHS[index]) > 0

    def lengths(self, indices: np.ndarray | None = None) -> np.ndarray:
        """Return the tokens of some rows."""
        return np.array(LENGTHS)[slice(None) if indices is None else indices]


def prepared(packing: Packing, plan: PackingPlan) -> mock.Mock:
    """Return what training data looks like."""
    layout = Layout.packed if packing is Packing.packed else Layout.alone
    return mock.Mock(train=Rows(), train_plan=plan, packing=packing, layout=layout, pad_id=0)


def cfg(*words: str):
    """Return a config."""
    return load(["recipe=quickstart", *words]).cfg


def test_the_longest_rows() -> None:
    plain = prepared(Packing.none, PackingPlan(len(LENGTHS)))
    batch = longest_batch(cfg("batch.global_size=8", "batch.micro_per_gpu=3"), plain, 1)["input_ids"]
    assert batch.shape == (4, 32)  # 8 rows in two micro-batches: 4 at most
    assert set(batch[:, 0].tolist()) == {1, 5, 3, 7}
    rows = PackingPlan(3, np.arange(8, dtype=np.uint32), np.array([0, 2, 5, 8]))
    batch = longest_batch(cfg("batch.micro_per_gpu=1"), prepared(Packing.packed, rows), 1)
    assert batch["input_ids"].shape == (1, 56)
    assert batch["segment_ids"].max() == 3
    batch = longest_batch(cfg("batch.micro_per_gpu=1"), prepared(Packing.grouped, rows), 1)["input_ids"]
    assert batch.shape == (3, 32)
    members = PackingPlan(4, np.array([4, 2, 3, 0], np.uint32))  # a weighted plan takes some of the samples
    batch = longest_batch(cfg("batch.micro_per_gpu=1"), prepared(Packing.none, members), 1)["input_ids"]
    assert batch[0, 0] == 3


def test_a_model_that_is_not_read_back_as_it_is_written_is_named_before_training(tmp_path: Path) -> None:
    """By name and shape, of whole models and of adapters; nothing is left."""
    torch.manual_seed(1)
    base, folder = tmp_path / "base", tmp_path / "run" / "export"
    folder.parent.mkdir()
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    model.save_pretrained(base)
    check_exportable(model, non_weight_files(model, None), folder)
    model._keys_to_ignore_on_save = {"model.norm.weight"}
    wrong = r"could not be exported after training: .*missing \[model.norm.weight\].*checkpoint.export=false"
    with pytest.raises(ModelError, match=wrong):
        check_exportable(model, non_weight_files(model, None), folder)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    fine_tuning.apply_tuning(model, TuningConfig(method=TuningMethod.lora), base, None, seed=1)
    files = non_weight_files(model, None) | tuning_state(model).describe()
    check_adapter_exportable(model, files, folder)
    record_of(model).tuned = replace(tuning_state(model), settings=tuning_state(model).settings | {"r": 4})
    with pytest.raises(ModelError, match=r"could not be exported after training: .*lora_A"):
        check_adapter_exportable(model, non_weight_files(model, None) | tuning_state(model).describe(), folder)
    assert not list(folder.parent.iterdir())


def test_weights_of_a_type_that_cannot_be_written_are_named_before_training(tmp_path: Path) -> None:
    module = torch.nn.Linear(2, 2)
    check_custom_exportable(module, tmp_path / "export")
    module.register_buffer("phases", torch.ones(2, dtype=torch.complex128))
    with pytest.raises(ModelError, match=r"could not be exported after training: .*complex128"):
        check_custom_exportable(module, tmp_path / "export")


def test_a_row_repeated_and_cut() -> None:
    rows = PackingPlan(3, np.arange(8, dtype=np.uint32), np.array([0, 2, 5, 8]))
    whole, half = (repeated_batch(cfg(), prepared(Packing.packed, rows), 2, share) for share in (1.0, 0.5))
    assert (whole["input_ids"].shape, half["input_ids"].shape) == ((2, 56), (2, 24))
    assert (half["labels"] >= 0).any(1).all()


def test_a_cut_row_of_chatglm_keeps_sop() -> None:
    """ChatGLM-6B refuses rows without it, and it may stand anywhere."""
    sop, config = 7, ChatGLMConfig(bos_token_id=7, gmask_token_id=8)
    for prompt in (3, 10, 20, 29):
        ids = np.array([*range(30, 30 + prompt - 2), 8, sop, *range(70, 100 - prompt)], np.uint32)
        store = mock.MagicMock()
        store.lengths.return_value = np.array([len(ids)])
        store.__getitem__.return_value = (ids, np.arange(len(ids)) >= prompt)
        given = mock.Mock(train=store, train_plan=PackingPlan(1), layout=Layout.alone, pad_id=3)
        batch = repeated_batch(cfg(), given, 2, 0.5)
        check_rows(batch["input_ids"], config)
        assert batch["input_ids"].shape == (2, 16)
        assert batch["segment_ids"].sum(1).tolist() == [15, 15]
        assert batch["position_ids"][0].tolist() == list(range(16))
        assert batch["labels"][0, 14] == batch["input_ids"][0, 14]


def test_what_was_tried() -> None:
    config = load(["recipe=quickstart", "checkpoint.export=false"]).cfg
    config.evaluate.prompts = []
    assert _what_was_tried(config, 0, False) == "an update"
    config.checkpoint.export, config.evaluate.prompts = True, ["red"]
    assert _what_was_tried(config, 2, False) == "an update, a save, an export, an evaluation"


def test_an_error_without_words_is_told() -> None:
    memory = mock.Mock(restart=lambda: 0, highest=lambda: 0)
    with (
        pytest.raises(OutOfMemory, match="reason: MemoryError"),
        explain_out_of_memory(cfg(), "a step", memory, 0, None),
    ):
        raise MemoryError


def test_what_cannot_be_removed_is_told(tmp_path: Path) -> None:
    denied = mock.patch.object(Path, "unlink", side_effect=PermissionError(13, "denied"))
    with denied, pytest.raises(CheckpointError, match=r"denied \(rank 0\)"):
        try_checkpoint(tmp_path / "checkpoints")


def test_the_next_size() -> None:
    sizes = [1, 2, 3, 6, 12]
    assert _next_rows(sizes, RowsMemory(0, 10), RowsMemory(1, 15), 100.0) == 2
    assert _next_rows(sizes, RowsMemory(1, 15), RowsMemory(3, 25), 100.0) == 6
    assert _next_rows(sizes, RowsMemory(1, 15), RowsMemory(3, 25), 39.0) == 3
    assert _next_rows(sizes, RowsMemory(3, 25), RowsMemory(6, 40), 70.0) == 12
    assert _next_rows(sizes, RowsMemory(3, 25), RowsMemory(12, 70), 700.0) == 12
    assert _next_rows([1, 5], RowsMemory(0, 10), RowsMemory(1, 15), 100.0) == 5


def test_room_for_what_is_kept(tmp_path: Path) -> None:
    assert _num_saves(CheckpointConfig(every=3), range(1, 11)) == 4
    assert _num_saves(CheckpointConfig(every=5), range(1, 11)) == 2
    assert _num_saves(CheckpointConfig(at_end=False), range(1, 11)) == 0
    assert _num_saves(CheckpointConfig(every=3), range(7, 11)) == 2
    assert _num_saves(CheckpointConfig(every=3, at_end=False), range(6, 11)) == 2
    assert _num_saves(CheckpointConfig(every=2, at_end=False), range(1, 2**62)) == 2**61 - 1  # at once
    free = mock.patch("shutil.disk_usage", return_value=mock.Mock(free=1000))
    with free:
        check_room(tmp_path / "checkpoints", CheckpointConfig(keep=2), 100, 300, 100)
        check_room(tmp_path / "checkpoints", CheckpointConfig(keep=5), 3, 300, 100)
        check_room(tmp_path / "checkpoints", CheckpointConfig(keep=0, max_gib=1e-7), 100, 300, 100)
        for config, saves in ((CheckpointConfig(keep=3), 100), (CheckpointConfig(keep=0), 4)):
            with pytest.raises(CheckpointError, match="4 checkpoints of 3e-07 GB"):
                check_room(tmp_path / "checkpoints", config, saves, 300, 100)


def test_what_helps() -> None:
    words = remedies(cfg("batch.global_size=32", "batch.micro_per_gpu=8", "zero=stage0", "data.max_length=128"), 2)
    assert words[:5] == [
        "batch.micro_per_gpu=4",
        "train.activation_checkpointing.enabled=true",
        "batch.micro_per_gpu=1",
        "zero=stage2",
        "zero=stage3",
    ]
    for tuning in (["full"], ["lora"], ["lora", "tuning.dora=true"], ["qlora"]):
        begun = ["recipe=quickstart", "zero=stage1", "batch.micro_per_gpu=2", *f"tuning={' '.join(tuning)}".split()]
        words = remedies(load(begun).cfg, 2)
        assert words
        for word in words:  # each can be pasted behind it
            check_rules(load([*begun, word]), 2, files=False)
        assert ("zero=stage3" in words) == ("zero=stage3_offload" in words) == (tuning in (["full"], ["lora"]))
    begun = ["zero=stage1", "precision=bf16", "optim.torch=auto"]
    assert remedies(cfg(*begun), 2)[-3:-1] == ["precision.optimizer_states=bf16", "tuning=lora"]
    smallest = ["zero=stage3_offload", "batch.micro_per_gpu=1", "train.activation_checkpointing.enabled=true"]
    assert remedies(cfg(*smallest, "data.max_length=128", "optim.torch=false"), 2) == [
        "tuning=lora",
        "data.max_length=64",
    ]


def test_a_run_keeps_the_second_copy_within_a_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """plan.auto limited ZeRO++'s partition to the four GPUs of a node when the run began."""
    cfg = load(["recipe=chatglm", "zero=stage3_hpz", "plan.auto=true", "batch.global_size=16"]).cfg
    before = to_dict(cfg)
    before["zero"]["zero_hpz_partition_size"] = 4
    state = directory.RunState(world_size=8, config=before)
    monkeypatch.setattr(intact, "read_run_state", lambda _: state)
    found = choose_layout(cfg, 0, Ranks(0, 0, 8, 4, "deepspeed"), torch.device("cpu"), RunSource(tmp_path, tmp_path))
    assert found.zero.zero_hpz_partition_size == 4 < cfg.zero.zero_hpz_partition_size
