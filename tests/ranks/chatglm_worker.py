"""Run on every rank: official folders and newer GLMs under ZeRO-3, against the ordinary load in one process.

Arguments: model folders. Each finding is asserted here, on every rank; a failing assertion fails the launch.
"""

import sys
from pathlib import Path

import torch
from engine_worker import DS_CONFIG, no_schedule

from toolkit.config.schema import ActivationCheckpointingConfig, DistributedConfig
from toolkit.distributed import process_group
from toolkit.engine.build import initialize_engine
from toolkit.engine.parameters import gathered_parameters
from toolkit.launch import environment
from toolkit.models import load_model, save_model
from toolkit.models.record import record_of


def check(folder: Path) -> None:
    """The same bits, frequencies in float32 also after `deepspeed.initialize`, the same logits, and back out."""
    model = load_model(folder, dtype=torch.bfloat16, ds_config=DS_CONFIG)
    assert all(parameter.numel() == 0 for parameter in model.parameters()), "not partitioned"
    expected = load_model(folder, dtype=torch.bfloat16)
    for parameter in expected.parameters():  # routers that transformers (5.24) keeps in float32, DeepSpeed rounds
        parameter.data = parameter.data.bfloat16()
    wanted, state = expected.state_dict(), {}
    for name, value in gathered_parameters(model):
        if torch.distributed.get_rank() == 0:
            assert value.dtype is wanted[name].dtype
            assert torch.equal(value, wanted[name]), name
            state[name] = value
    buffers = dict(expected.named_buffers())
    assert set(buffers) == {name for name, _ in model.named_buffers()}
    engine = initialize_engine(model, DS_CONFIG, ActivationCheckpointingConfig(), no_schedule)
    for name, buffer in engine.module.named_buffers():
        assert torch.equal(buffer, buffers[name]), name
        assert buffer.dtype is torch.float32, name
    ids = torch.tensor([[9, 17, 5, 33, 8, 20, 41, 7, 50, 3]])
    if expected.config.model_type == "chatglm":
        ids[0, 4:6] = torch.tensor([expected.config.gmask_token_id, expected.config.bos_token_id])
    with torch.no_grad():
        assert torch.equal(engine(ids).logits, expected(ids).logits)
    if torch.distributed.get_rank() == 0:
        assert set(state) == set(wanted)
        if record_of(model).origin:
            save_model(engine.module, folder.with_name(f"{folder.name}-back"), "official", state=state)
    torch.distributed.barrier()


def main() -> None:
    """Check every folder."""
    folders = environment.strip_launcher_arguments(sys.argv[1:])
    process_group.start(DistributedConfig())
    for folder in folders:
        check(Path(folder))
    print("ALL CHECKED", flush=True)
    process_group.stop()


if __name__ == "__main__":
    main()
