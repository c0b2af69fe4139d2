"""What each optimizer reads, keeps and goes together with; found by running on two CPU ranks (deepspeed 0.19.8)."""

from dataclasses import dataclass

from toolkit.config.schema import OptimConfig, OptimizerName


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerTraits:
    """One of `optim.name`."""

    ds_type: str
    """What DeepSpeed's JSON calls it; "" where it has no name for it."""
    reads: tuple[str, ...]
    """Settings of `optim` that it reads beside those that all do."""
    state_bytes: float
    """Bytes that it keeps per trained parameter, beside float32 weights. Of Muon the most: with ZeRO-1 and 2 the
    momentum of a step is there twice until the step counts."""
    is_adam: bool = False
    """Whether its states are Adam's, which are all that DeepSpeed's universal checkpoints hold."""
    takes_adam: bool = False
    """Whether DeepSpeed has an Adam of its own for it, or PyTorch's with `optim.torch`."""
    is_known: bool = True
    """Whether DeepSpeed's ZeRO takes it unasked, which concerns those that it has tested."""
    needs_whole: bool = False
    """Whether it needs parameters whole: ZeRO hands an optimizer flat pieces of them."""


OPTIMIZERS = {
    OptimizerName.adamw: OptimizerTraits(
        ds_type="AdamW", reads=("betas", "eps"), state_bytes=8, is_adam=True, takes_adam=True
    ),
    OptimizerName.adam: OptimizerTraits(
        ds_type="Adam", reads=("betas", "eps"), state_bytes=8, is_adam=True, takes_adam=True
    ),
    # Two numbers of 8 bits, and for each 256 of them a float32 scale (bitsandbytes 0.50, optim/optimizer.py).
    OptimizerName.adamw_8bit: OptimizerTraits(ds_type="", reads=("betas", "eps"), state_bytes=2.04, is_known=False),
    OptimizerName.muon: OptimizerTraits(
        ds_type="Muon",
        reads=("betas", "eps", "momentum", "adam_lr"),
        state_bytes=8,
        takes_adam=True,
        is_known=False,
    ),
    OptimizerName.lion: OptimizerTraits(ds_type="Lion", reads=("betas",), state_bytes=4),
    # A row and a column for each matrix.
    OptimizerName.adafactor: OptimizerTraits(
        ds_type="Adafactor", reads=(), state_bytes=0.1, is_known=False, needs_whole=True
    ),
    OptimizerName.sgd: OptimizerTraits(ds_type="SGD", reads=("momentum",), state_bytes=4, is_known=False),
    OptimizerName.adagrad: OptimizerTraits(ds_type="Adagrad", reads=("eps",), state_bytes=4, needs_whole=True),
}
SOMETIMES_READ = ("betas", "eps", "momentum", "adam_lr")
"""Settings that not every optimizer reads."""

GROUPING = ("optim.decay", "optim.layer_lr_decay", "optim.adam_lr")
"""Keys that make several groups of parameters."""


def is_client(optim: OptimConfig) -> bool:
    """Whether the optimizer is made here and handed to DeepSpeed, which else makes its own by name."""
    return optim.name is OptimizerName.adamw_8bit or (optim.name is OptimizerName.lion and optim.torch is True)


def is_grouped(optim: OptimConfig) -> bool:
    """Whether parameters differ in learning rate or weight decay."""
    return optim.decay.value != "all" or optim.layer_lr_decay != 1 or bool(optim.adam_lr)


STAGE3_KEYS = (
    "sub_group_size",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_gather_16bit_weights_on_model_save",
    "zero_hpz_partition_size",
    "zero_quantized_weights",
    "zero_quantized_gradients",
)
SUPER_OFFLOAD_KEYS = ("super_offload", "cpuadam_cores_perc")
