"""A program that knows nothing of the toolkit trains, saves as DeepSpeed does, and trains on; arguments: a directory.

For each case of `CASES` there is a checkpoint of three steps in it afterwards, what the engine then held of every
parameter (held.safetensors), and the losses of the steps before and after (losses.json). All ranks together have all
samples in each step, in whatever order, so that who resumes from the checkpoint meets the same global batches.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

SAMPLES, BEFORE, STEPS = 8, 3, 6
LR, EPS, DECAY = 0.01, 1e-6, 0.1
# Weight decay of matrices alone, as transformers' Trainer has it; parameters as peft names them; ZeRO stage.
CASES: dict[str, tuple[int, bool, bool]] = {
    "zero0": (0, True, False),
    "zero1": (1, False, True),
    "zero2": (2, True, False),
    "zero3": (3, False, False),
}


class Samples:
    """What every step sees."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not 0 <= row < SAMPLES:
            raise IndexError(row)
        inputs = torch.randn(5, generator=torch.Generator().manual_seed(row))
        return inputs, inputs[:2].sum()


class Net(nn.Module):
    """Odd sizes, a weight that is there twice, a stored buffer, and something that is not trained."""

    def __init__(self, frozen: bool = True) -> None:
        super().__init__()
        self.first, self.norm, self.back = nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 5)
        self.again, self.last = nn.Linear(5, 7, bias=False), nn.Linear(7, 1)
        self.again.weight = self.first.weight
        self.register_buffer("scale", torch.tensor([0.5, 2.0, 1.5]))
        self.base = nn.Linear(1, 3)
        self.base.requires_grad_(not frozen)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.back(torch.tanh(self.norm(self.first(inputs))))
        return (self.base(self.last(torch.tanh(self.again(hidden)))) * self.scale).sum(1)


def squares(model: Any, batch: Any) -> torch.Tensor:
    """Return the squared errors."""
    return functional.mse_loss(model(batch[0]), batch[1], reduction="none")


def net_of(name: str) -> Net:
    """Return the model of a case: without ZeRO a checkpoint does not tell what was trained."""
    torch.manual_seed(3)
    return Net(frozen=name != "zero0")


class Wrapped(nn.Module):
    """Names as peft's: base_model.model.first.weight."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = nn.ModuleDict({"model": model})

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.base_model["model"](inputs)
        return found


def value_of(engine: Any, parameter: nn.Parameter, state: str) -> torch.Tensor:
    """Return what an engine has of a parameter. A collective under ZeRO-3."""
    if engine.zero_optimization_stage() == 0:
        return parameter.detach() if state == "weight" else engine.basic_optimizer.state[parameter][state]
    found: torch.Tensor = (
        safe_get_full_fp32_param(parameter) if state == "weight" else safe_get_full_optimizer_state(parameter, state)
    )
    return found


def train(name: str, folder: Path) -> None:
    """Train one case."""
    stage, grouped, wrapped = CASES[name]
    model: nn.Module = Wrapped(net_of(name)) if wrapped else net_of(name)
    trained = [one for one in model.parameters() if one.requires_grad]
    groups: Any = [
        {"params": [one for one in trained if one.dim() > 1], "weight_decay": DECAY},
        {"params": [one for one in trained if one.dim() < 2], "weight_decay": 0.0},
    ]
    ranks = torch.distributed.get_world_size()
    adam = {"lr": LR, "betas": [0.9, 0.95], "eps": EPS, "weight_decay": DECAY, "torch_adam": True}
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES // ranks,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": adam},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "sub_group_size": 60},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups if grouped else trained, config=config)
    rows = range(torch.distributed.get_rank(), SAMPLES, ranks)
    inputs, wanted = (torch.stack(part) for part in zip(*(Samples()[row] for row in rows), strict=True))
    losses = []
    for step in range(STEPS):
        if step == BEFORE:
            engine.save_checkpoint(str(folder / name), tag=f"global_step{step}")
            names = {one: key.removeprefix("base_model.model.") for key, one in model.named_parameters()}
            if stage in (1, 2):  # DeepSpeed 0.19.8 links them after the first group's first step, before the others'
                engine.optimizer._hp_optimizer_states_linked = False
                engine.optimizer._lazy_init_hp_params_optimizer_state()
            held = {
                f"{state}:{names[one]}": value_of(engine, one, state).clone().contiguous()
                for state in ("weight", "exp_avg", "exp_avg_sq")
                for one in trained
            }
            if torch.distributed.get_rank() == 0:
                save_file(held, folder / f"{name}.safetensors")
        loss = squares(engine, (inputs, wanted)).mean()
        engine.backward(loss)
        engine.step()
        mean = loss.detach() / ranks
        torch.distributed.all_reduce(mean)
        losses.append(mean.item())
    if torch.distributed.get_rank() == 0:
        (folder / f"{name}.json").write_text(json.dumps(losses))


def main() -> None:
    """Train all cases."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or it is compiled for minutes
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    for name in CASES:
        train(name, Path(sys.argv[-1]))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main()
