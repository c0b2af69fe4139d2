"""A key that nothing reads is an error: each row of READ_WHEN, by words that it is about."""

from toolkit.config.dotted_keys import get_value
from toolkit.config.load import as_typed, load
from toolkit.config.rule_tables import READ_WHEN, expand
from toolkit.config.rules import check_rules
from toolkit.config.schema import RunConfig
from toolkit.messages import Problems

STREAM = "data.streaming=true train.max_steps=9 data.validation=[{path:c}] model.tokenizer=DIR"
UNREAD = {
    "precision.loss_scale=128": "precision.dtype is bf16, not fp16",
    "precision=fp16 precision.loss_scale=128 precision.hysteresis=3": "precision.loss_scale = 128.0 is fixed",
    "precision=fp32 precision.fp8=rowwise": "precision.dtype is fp32, not bf16",
    "precision=fp16 precision.optimizer_states=bf16": "precision.dtype is fp16, not bf16",
    "precision.optimizer_states=bf16 optim.torch=false": "an Adam of the toolkit keeps its states in bf16",
    "precision=bf16 precision.tf32=true": "precision.dtype is bf16, not fp32",
    "zero.stage3_prefetch_bucket_size=7": "zero.stage is 1",
    "zero=stage3 zero.allgather_bucket_size=7": "zero.stage is 3",
    "zero=stage0 zero.overlap_comm=true": "zero.stage is 0",
    "zero.offload_optimizer.pin_memory=false": "zero.offload_optimizer.device is none",
    "zero=stage3_offload zero.offload_optimizer.buffer_count=7": "zero.offload_optimizer.device is cpu",
    "zero=stage3 zero.offload_param.pin_memory=false": "zero.offload_param.device is none",
    "zero=stage3_offload zero.offload_param.buffer_count=7": "zero.offload_param.device is cpu",
    "zero=stage2_offload zero.offload_optimizer.ratio=0.5": "zero.stage is 2",
    "zero=stage3_offload zero.offload_optimizer.cpuadam_cores_perc=0.5": (
        "zero.offload_optimizer.super_offload is false"
    ),
    "zero=stage2_offload zero.zenflow.topk_ratio=0.2": "zero.zenflow.enabled is false",
    "zero=stage2_offload zero.overlap_comm=true optim.torch=false batch.micro_per_gpu=1 train.rehearse=false "
    "train.on_bad_step=stop train.max_grad_norm_ratio=0 zero.zenflow.enabled=true "
    "zero.zenflow.pt_reserved_cores_perc=0.2": ("zero.zenflow.overlap_step is false"),
    "zero.aio.queue_depth=16": "nothing is offloaded to nvme",
    "train.activation_checkpointing.profile=true": "train.activation_checkpointing.enabled is false",
    "train.activation_checkpointing.enabled=true train.activation_checkpointing.partition_activations=true": (
        "no ranks share a hidden state"
    ),
    "launch.max_nodes=2": "launch.min_nodes is 0",
    "compile.mode=max-autotune": "compile.enabled is false",
    "compile.enabled=true compile.backend=eager compile.mode=max-autotune": "compile.backend is eager, not inductor",
    "optim.decay=hidden": "optim.weight_decay is 0",
    "schedule=linear schedule.min_lr_ratio=0.1": "schedule.name is linear",
    "schedule=wsd schedule.warmup_type=log": "schedule.name is wsd",
    "schedule=wsd schedule.power=2": "schedule.name is wsd",
    "schedule.timescale=9": "schedule.name is cosine",
    "schedule.decay_type=sqrt": "schedule.name is cosine",
    "schedule=wsd schedule.decay_steps=5 schedule.decay_ratio=0.2": "schedule.decay_steps is given",
    "schedule.warmup_ratio=0 schedule.warmup_type=log": "there is no warm-up",
    "preference.beta=0.5": "preference.loss is none",
    "preference=kto preference.label_smoothing=0.1": "preference.loss is kto",
    "preference=dpo data=examples_pairs preference.gamma=0.5": "preference.loss is sigmoid",
    "preference=kto preference.sft_weight=1": "preference.loss is kto",
    "preference=dpo preference.desirable_weight=2": "preference.loss is sigmoid",
    "preference=dpo evaluate.ngram_baselines=true": "preference.loss is sigmoid",
    "distill.weight=0.7": "task.kind is language",
    "task=distill distill.teacher=a/b distill.beta=0.3": "distill.loss is forward_kl",
    "task=distill distill.teacher=a/b distill.dir=/x": "distill.top_k is 0",
    "task=distill distill.teacher=a/b distill.rollouts.top_p=0.9": "distill.on_policy is 0.0",
    "task=distill distill.teacher=a/b distill.on_policy=1 distill.rollouts.tries=5": "distill.rollouts.url is empty",
    "task=distill distill.teacher=a/b distill.on_policy=1 distill.rollouts.url=http://a "
    "distill.rollouts.batch_size=3": "the server answers",
    "task=distill distill.teacher=a/b distill.general_share=0.5": "distill.teacher is given",
    "task=reward kernels.loss=full": "task.kind is reward",
    "classify.labels=[a,b]": "task.kind is language",
    "embed.pooling=mean": "task.kind is language",
    "task.center=0.1": "task.kind is language",
    "task=classify data.train_thinking=false": "task.kind is classify",
    "data.max_bad_fraction=0.5": "data.on_bad_row is error, not skip",
    "data.packing_window=10": "data.packing is none, not packed",
    "data.share_prefixes=false": "data.packing is none, not packed, and there are no pairs of answers",
    "data.packing=packed task=distill tuning=lora data.sources=[{path:b},{path:a,general:true}] "
    "data.share_prefixes=false": ("what the teacher says is known for each sample by itself"),
    "data.shuffle_buffer=9": "data.streaming is false",
    f"{STREAM} data.packing=packed data.share_prefixes=false": "a stream computes each sample by itself",
    f"{STREAM} prepare.shard=1/2": "there is no tokenized cache of a stream",
    "data.curriculum.levels=3": "data.curriculum.steps is 0",
    "data.curriculum.steps=5 data.curriculum.levels=3": "data.curriculum.shape is linear, not discrete",
    "data.validation=[{path:c}] data.validation_fraction=0.2": "data.validation is given",
    "data.validation_rows=5 data.validation_fraction=0.2": "data.validation_rows is given",
    "tuning.rank=4": "tuning.method is full",
    "tuning=lora tuning.init_iterations=4": "tuning.init is default, not pissa",
    "tuning=lora tuning.num_tokens=9": "tuning.method is lora",
    "tuning=prompt tuning.projection=true": "tuning.method is prompt",
    "tuning=ptuning_v2 tuning.init_text=Hello": "tuning.method is ptuning_v2",
    "tuning.adapter=/x": "tuning.method is full",
    "tuning=prompt tuning.dropout=0.1": "tuning.method is prompt",
    "tuning=lora tuning.last_layers=1": "tuning.method is lora",
    "tuning=lora tuning.adapter=/x tuning.rank=4": "tuning.adapter decides it",
    "tuning=lora tuning.adapter=/x tuning.dropout=0.1": "tuning.adapter decides it",
    "data.validation_fraction=0 evaluate.keep_best=eval_loss": "there is no validation data",
    "data.validation_fraction=0 evaluate.metrics=[bleu]": "there is no validation data",
    "data.validation_fraction=0 evaluate.every=5": "there is no validation data",
    "checkpoint.keep=0 evaluate.keep_best=eval_loss": "all checkpoints are kept",
    "evaluate.batch_size=2": "evaluate.metrics is empty",
    "evaluate.max_new_tokens=9": "evaluate.metrics and evaluate.prompts are empty",
    "evaluate.metrics=[bleu] evaluate.seed=2": "evaluate.temperature is 0, so nothing is drawn",
    "checkpoint.keep=0 checkpoint.keep_weights=3": "all checkpoints are kept",
    "zero=stage3 zero.offload_optimizer.device=nvme zero.offload_optimizer.nvme_path=. checkpoint.asynchronous=true": (
        "zero.offload_optimizer.device is nvme"
    ),
    "checkpoint.export=false checkpoint.verify_export=false": "checkpoint.export is false",
    "tuning=lora export.require_serving=true": (
        "an adapter alone is exported. Merge it, and verify that: toolkit export-model, toolkit verify-serving"
    ),
    "report.enabled=false report.every=5": "report.enabled is false",
    "profile.flops.detailed=false": "profile.flops.enabled is false",
    "profile.comms.verbose=true": "profile.comms.enabled is false",
    "profile.comms.enabled=true profile.comms.prof_ops=[all_reduce]": "profile.comms.prof_all is true",
    "model.path=/x": "model.init is random",
    "model.family=chatglm3": "model.tokenizer is empty, and one is trained on the data",
    "model=hf model.path=. tuning=lora model.router_bias_rate=0.1": (
        "an adapter alone is exported, and the biases are in the model. Set it to 0"
    ),
    "model=hf model.shape.num_layers=9": "model.init is pretrained",
    "zero.allgather_partitions=false": "DeepSpeed 0.19.8 does not read it",
    "optim=sgd optim.betas=[0.8,0.9]": "optim.name is sgd",
    "optim=lion optim.eps=0.1": "optim.name is lion",
    "optim.momentum=0.5": "optim.name is adamw",
    "optim.adam_lr=0.1": "optim.name is adamw",
    "track.patience_s=5": "no tracker is enabled",
    "track.tensorboard.dir=/x": "track.tensorboard.enabled is false",
    "track.wandb.project=x": "track.wandb.enabled is false",
    "track.mlflow.uri=/x": "track.mlflow.enabled is false",
    "track.swanlab.workspace=x": "track.swanlab.enabled is false",
    "track.trackio.space=a/b": "track.trackio.enabled is false",
    "model=hf model.path=. model.revision=main": "model.path is a directory",
    "task=distill distill.teacher=. distill.teacher_revision=main": "distill.teacher is no name on Hugging Face",
}
"""Words after `recipe=zero1 model=glm_tiny`, the last of which has no effect -> why."""


def test_each_row_has_an_error_of_its_own() -> None:
    missing = list(READ_WHEN)
    for words, reason in UNREAD.items():
        problems = Problems()
        loaded = load(["recipe=zero1", "model=glm_tiny", *words.split()], problems=problems)
        check_rules(loaded, files=False, problems=problems)
        key = words.split()[-1].partition("=")[0]
        value, default = (as_typed(get_value(cfg, key)) for cfg in (loaded.cfg, RunConfig()))
        assert [str(error) for error in problems.errors] == [
            f"command line: {key} = {value} has no effect: {reason}. Remove it, or set {key}={default}."
        ]
        broken = next(row for row in READ_WHEN if key in expand(row.keys) and not row.is_read(loaded.cfg))
        missing = [row for row in missing if row is not broken]
    assert not missing
