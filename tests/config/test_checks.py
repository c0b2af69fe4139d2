"""Cross-field rules: both values, the place, the mend."""

import re
from functools import partial
from pathlib import Path

import pytest

from toolkit.config.load import load, to_yaml
from toolkit.config.mesh import accumulation, largest_divisor, micro_sizes, with_micro_batch
from toolkit.config.rules import check_rules
from toolkit.engine.ds_config import build_ds_config
from toolkit.messages import ConfigError, Problems

CONTIGUOUS = "train.activation_checkpointing.contiguous_memory_optimization"
TRUSTED = "model=hf model.trust_remote_code=true"
# Words after `recipe=zero1 model=glm_tiny` -> message; {tmp} is a writable folder.
REFUSED = {
    "batch.global_size=100 batch.micro_per_gpu=4": (
        "batch.global_size = 100 is not a multiple of batch.micro_per_gpu (4) x 8 ranks = 32. Use 96 or 128."
    ),
    "batch.global_size=2": "batch.global_size = 2 is not a multiple of batch.micro_per_gpu (1) x 8 ranks = 8. Use 8.",
    "batch.global_size=96 batch.micro_per_gpu=4 batch.world_sizes=[1,2,5]": (
        "batch.global_size = 96 cannot be divided on each of batch.world_sizes = [1, 2, 5]: with "
        "batch.micro_per_gpu = 4 it must be a multiple of 40. Use 80 or 120."
    ),
    "batch.global_size=8 batch.micro_per_gpu=auto batch.world_sizes=[16]": (
        "batch.global_size = 8 cannot be divided on each of batch.world_sizes = [16]: with batch.micro_per_gpu = auto "
        "it must be a multiple of 16. Use 16."
    ),
    "batch.world_sizes=[0,2]": "batch.world_sizes = [0, 2] must hold numbers of at least 1.",
    "batch.global_size=24 parallel.tensor=2 batch.world_sizes=[2,3]": (
        "3 ranks cannot be divided into groups of 2 (parallel.tensor 2 x parallel.sequence 1 x parallel.pipeline 1, "
        "parallel.expert 1). Start on a multiple of 2 ranks."
    ),
    "data.curriculum.steps=5 data.curriculum.start_length=2000": (
        "data.curriculum.start_length = 2000 must be less than data.max_length = 1024."
    ),
    "data.sources=[{path:a,weights:[{at:0}]}]": (
        "weights of the only source have no effect: there is nothing to mix it with."
    ),
    "data.curriculum.steps=5 data.sources=[{path:a,weights:[{at:0}]},{path:b}]": (
        "data.curriculum and weights of a source that change both decide which rows come when: keep one of them."
    ),
    "data.sources=[{path:a,weight:2,weights:[{at:0}]},{path:b}]": (
        "data.sources[0]: weight and weights are both given: keep one of them."
    ),
    "data.sources=[{path:b},{path:a,weights:[{at:0.5},{at:0.2}]}]": (
        "data.sources[1].weights: the points [0.5, 0.2] must rise from 0, the beginning of the run, to at most 1, its "
        "end."
    ),
    "data.sources=[{path:b},{path:a,weights:[{at:0,weight:-1}]}]": (
        "data.sources[1]: a weight must be a number of at least 0."
    ),
    "data.sources=[{path:b,weight:-1}]": "data.sources[0].weight = -1.0 must be above 0; remove the source instead.",
    "data.sources=[{path:b,weight:0},{path:a}]": (
        "data.sources[0].weight = 0.0 must be above 0; remove the source instead."
    ),
    "data.sources=[{path:b,weights:[{at:0},{at:0.2,weight:0}]},{path:a,weights:[{at:0},{at:0.5,weight:0}]}]": (
        "no source has a weight above 0 at 0.5, 1.0 of the run."
    ),
    "task=distill": (
        "task=distill has nothing to learn from: give distill.teacher=DIR, or mark the sources whose samples must not "
        "be forgotten: data.sources=[{path: MINE.jsonl}, {path: GENERAL.jsonl, general: true}]."
    ),
    "task=distill tuning=full data.sources=[{path:b},{path:a,general:true}]": (
        "distill.top_k = 0: without distill.teacher the teacher is the model before training, which is gone after the "
        "first step unless an adapter is trained. Store what it says: distill.top_k=64. Or use tuning=lora."
    ),
    "task=distill tuning=lora data.sources=[{path:b},{path:a,general:true}] preference=dpo": (
        "preference.loss = sigmoid and task.kind = distill do not go together: a preference loss trains a language "
        "model. Use preference=none, or task=language."
    ),
    "task=distill distill.teacher=a/b distill.on_policy=1 distill.top_k=8": (
        "distill.on_policy = 1.0 is not supported with this config: stored teacher scores cover the answers of the "
        "data only. Set distill.top_k=0."
    ),
    "task=distill distill.teacher=a/b distill.on_policy=0.5 data.packing=packed": (
        "distill.on_policy = 0.5 is not supported with this config: the student's answers have other lengths than "
        "those that were packed. Use data.packing=none."
    ),
    "task=distill distill.teacher=a/b distill.on_policy=1 parallel=pipeline parallel.pipeline=2 zero=stage1": (
        "distill.on_policy = 1.0 is not supported with this config: the layers that an answer needs are on several "
        "ranks. Set parallel.pipeline=1."
    ),
    "task=distill distill.teacher=a/b distill.on_policy=1 distill.rollouts.url=http://me:pass@host/v1": (
        "distill.rollouts.url must begin with http:// or https:// and hold no user. Put a token into ROLLOUTS_API_KEY."
    ),
    "task=distill distill.teacher=a distill.on_policy=1 distill.rollouts.url=http://h distill.rollouts.timeout_s=1e4": (
        "distill.on_policy = 1.0 is not supported with this config: distill.rollouts.timeout_s = 10000.0 must be below "
        "distributed.timeout_s = 1800, or other ranks would stop waiting."
    ),
    "task=distill distill.teacher=a/b distill.rollouts.top_p=0.5": (
        "distill.rollouts.top_p = 0.5 has no effect: distill.on_policy is 0.0. Remove it, or set "
        "distill.rollouts.top_p=1.0."
    ),
    "data.sources=[{path:b},{path:a,general:true}]": (
        "data.sources[1].general has an effect with task=distill and no distill.teacher only. Remove it."
    ),
    "task=distill distill.teacher=a/b evaluate.keep_best=eval_general_loss": (
        "evaluate.keep_best = eval_general_loss is none of eval_loss, eval_kl."
    ),
    "task=distill tuning=lora data.sources=[{path:b},{path:a,general:true}] evaluate.keep_best=eval_k": (
        "evaluate.keep_best = eval_k is none of eval_loss, eval_kl, eval_general_loss. Did you mean 'eval_kl'?"
    ),
    "task=distill tuning=lora data.sources=[{path:b},{path:a,general:true}] data.validation=[{path:c}] "
    "evaluate.keep_best=eval_kl": "evaluate.keep_best = eval_kl is none of eval_loss. Did you mean 'eval_loss'?",
    "train.neftune_alpha=5 parallel.tensor=2": (
        "train.neftune_alpha cannot be used with parallel.tensor = 2: each rank draws its own noise, and these ranks "
        "share rows. Set train.neftune_alpha=0."
    ),
    "batch.micro_per_gpu=0": "batch.micro_per_gpu = 0 must be at least 1.",
    "batch.micro_per_gpu=auto batch.global_size=12": (
        "batch.global_size = 12 is not a multiple of batch.micro_per_gpu (1) x 8 ranks = 8. Use 8 or 16."
    ),
    "optim.lr=0": "optim.lr = 0.0 must be above 0.",
    "optim.lr=nan": "optim.lr = nan must be above 0.",
    "optim.betas=[0.9]": "optim.betas = [0.9] must be two numbers from 0 to below 1.",
    "optim.betas=[0.9,1.0]": "optim.betas = [0.9, 1.0] must be two numbers from 0 to below 1.",
    "data.validation_fraction=1.5": "data.validation_fraction = 1.5 must be from 0 to below 1.",
    "data.max_length=2": "data.max_length = 2 must be at least 8.",
    "train.gradient_clipping=-1": "train.gradient_clipping = -1.0 must be at least 0.",
    "zero.stage=4": "zero.stage = 4 must be 0, 1, 2 or 3.",
    "zero.offload_param.device=cpu": (
        "zero.offload_param.device = cpu needs zero.stage = 3, but it is 1. Use zero.stage=3, or "
        "zero.offload_param.device=none."
    ),
    "zero=stage0 zero.offload_optimizer.device=cpu": (
        "zero.offload_optimizer.device = cpu needs zero.stage 1, 2 or 3, but it is 0."
    ),
    f"{TRUSTED} model.path=. checkpoint.keep_weights=1": (
        "checkpoint.keep_weights = 1 and model.trust_remote_code = true do not go together: exports of old checkpoints "
        "run no code of a model's own. Set it to 0."
    ),
    f"{TRUSTED} model.path=me/own model.revision=main": (
        "model.trust_remote_code = true and model.path = me/own, which is not a directory here but a name on Hugging "
        "Face, needs the commit that you have read: model.revision=COMMIT, all 40 digits."
    ),
    "checkpoint.keep_weights=-2": "checkpoint.keep_weights = -2 must be at least -1.",
    "zero=stage2 zero.offload_optimizer.device=nvme": (
        "zero.offload_optimizer.device = nvme needs zero.stage = 3, but it is 2. Use cpu."
    ),
    "zero=stage3_offload zero.offload_optimizer.ratio=2": "zero.offload_optimizer.ratio = 2.0 must be from 0 to 1.",
    "precision.optimizer_states=bf16 zero=stage2_offload": (
        "precision.optimizer_states = bf16 cannot be: DeepSpeed's Adam for offloaded states rounds to nearest, and "
        "most updates would be lost. Set zero.offload_optimizer.device=none, or leave the states in fp32."
    ),
    "precision.optimizer_states=bf16 optim=lion": (
        "precision.optimizer_states = bf16 cannot be: optim.name = lion is not rounded stochastically, and small "
        "updates would be lost. Use optim=adamw, or leave the states in fp32."
    ),
    "precision.optimizer_states=bf16 parallel=tensor parallel.tensor=2 batch.global_size=32": (
        "precision.optimizer_states = bf16 cannot be: ranks would round the weights that all of them have differently. "
        "Set parallel.tensor=1."
    ),
    "precision=fp8 tuning=qlora": (
        "tuning.method = qlora and precision.fp8 = tensorwise do not go together: the layers' weights have 4 bits and "
        "are expanded to bf16. Use precision=bf16, or tuning=lora."
    ),
    "precision=fp8 parallel=tensor parallel.tensor=2 batch.global_size=32": (
        "parallel.tensor = 2 and precision.fp8 = tensorwise do not go together: DeepSpeed puts layers of its own in "
        "the place of those that multiply in FP8. Set parallel.tensor=1, or use precision=bf16."
    ),
    "precision=fp8 compile=deepcompile": (
        "compile.deepcompile = true and precision.fp8 = tensorwise do not go together: it is untested. Set "
        "compile.deepcompile=false (compile=inductor), or use precision=bf16."
    ),
    "precision=fp8 profile.flops.enabled=true": (
        "profile.flops.enabled = true and precision.fp8 = tensorwise do not go together: DeepSpeed's profiler does not "
        "see products in FP8. Set it to false."
    ),
    "zero=stage0 compile.enabled=true compile.deepcompile=true": (
        "compile.deepcompile = true needs zero.stage 1, 2 or 3, but it is 0."
    ),
    "compile.enabled=true compile.backend=aot_eager compile.deepcompile=true": (
        "compile.deepcompile = true needs compile.backend = inductor, but it is aot_eager."
    ),
    f"train.activation_checkpointing.enabled=true {CONTIGUOUS}=true": (
        f"{CONTIGUOUS} = true needs partition_activations = true (it is false) and number_checkpoints, the number of "
        "layers (it is 0)."
    ),
    "optim=adafactor": (
        "optim.name = adafactor and zero.stage = 1 do not go together: it factors matrices, and ZeRO hands it flat "
        "pieces of them, from which every stage and number of ranks computes something else. Use zero=stage0, or "
        "optim=adamw_8bit."
    ),
    "optim=adagrad": (
        "optim.name = adagrad and zero.stage = 1 do not go together: DeepSpeed builds it again, and the schedule and "
        "parameter groups are lost. Use zero=stage0, or optim=adamw."
    ),
    "optim=muon train.gradient_clipping=1": (
        "train.gradient_clipping = 1.0 and optim.name = muon do not go together: under most ZeRO stages DeepSpeed "
        "would clip Muon's updates, which all have the same size, to next to nothing. Set train.gradient_clipping=0."
    ),
    "optim=muon tuning=ptuning_v2": (
        "optim.name = muon needs matrices of layers to train, and tuning.method = ptuning_v2 trains none. Use "
        "optim=adamw."
    ),
    "optim=muon train.gradient_clipping=0 zero=stage3_nvme zero.offload_optimizer.nvme_path=/x": (
        "optim.name = muon and offloading to NVMe are untested together. Offload to cpu, or use optim=adamw."
    ),
    "optim=muon train.gradient_clipping=0 parallel.tensor=2": (
        "optim.name = muon and parallel.tensor = 2 do not go together: untested. Leave one of them out."
    ),
    "optim.layer_lr_decay=0.9 parallel.pipeline=2": (
        "optim.layer_lr_decay = 0.9 and parallel.pipeline = 2 do not go together: untested. Leave one of them out."
    ),
    "optim=sgd optim.momentum=1": "optim.momentum = 1.0 must be from 0 to below 1.",
    "optim.layer_lr_decay=0": "optim.layer_lr_decay = 0.0 must be above 0 and at most 1.",
    "optim.layer_lr_decay=0.9 tuning=prompt": (
        "optim.layer_lr_decay = 0.9 needs layers to train, and tuning.method = prompt trains none."
    ),
    "schedule=wsd schedule.warmup_steps=4 schedule.decay_steps=7 train.max_steps=10": (
        "schedule.warmup_steps = 4 and schedule.decay_steps = 7 are more together than train.max_steps = 10."
    ),
    "schedule.warmup_steps=5 schedule.warmup_ratio=0.1": (
        "schedule.warmup_steps = 5 and schedule.warmup_ratio = 0.1 are both given: keep one of them."
    ),
    "schedule.warmup_steps=9 train.max_steps=5": (
        "schedule.warmup_steps = 9 is more than train.max_steps = 5: the run would end while the learning rate "
        "still rises. For so few steps add schedule.warmup_steps=0."
    ),
    "train.max_steps=5 train.epochs=2": "train.max_steps = 5 and train.epochs = 2 are both given: keep one of them.",
    "track=csv track.patience_s=-1": "track.patience_s = -1.0 must be at least 0.",
    'track=wandb track.wandb.project=""': "track.wandb.project must not be empty.",
    "track=mlflow track.mlflow.uri=http://me:secret@host:5000": (
        "track.mlflow.uri holds a user or a password. Take them out and set MLFLOW_TRACKING_USERNAME and "
        "MLFLOW_TRACKING_PASSWORD in the environment."
    ),
    "profile.flops.enabled=true profile.flops.profile_step=5 train.max_steps=5": (
        "profile.flops.profile_step = 5 must be less than train.max_steps = 5."
    ),
    "optim.weight_decay=inf": "optim.weight_decay = inf must be at least 0.",
    "model.shape.hidden_size=126 model.shape.num_heads=6": (
        "model.shape: hidden_size 126 / num_heads 6 = 21 must be a multiple of 4, because half of a head is rotated in "
        "pairs."
    ),
    "tuning=lora tuning.dropout=1": "tuning.dropout = 1.0 must be from 0 to below 1.",
    "tuning=lora tuning.alpha=nan": "tuning.alpha = nan must be above 0.",
    "tuning=lora tuning.adapter=/nowhere": "tuning.adapter = /nowhere is not a directory here.",
    "tuning=freeze tuning.last_layers=0": (
        "tuning.method = freeze trains nothing: set tuning.last_layers or tuning.patterns."
    ),
    "model.shape.num_heads=3": (
        "model.shape: hidden_size 128 must be a multiple of num_heads 3, and that of num_kv_heads 2."
    ),
    "model=hf model.path=/nosuch": (
        "model.path = /nosuch is not a directory here. It must be the directory that holds config.json and the "
        "weights, or owner/name on Hugging Face."
    ),
    "model=hf model.path=README.md": (
        "model.path = README.md is a file. It must be the directory that holds config.json and the weights, or "
        "owner/name on Hugging Face."
    ),
    "model.tokenizer=/nosuch": "model.tokenizer = /nosuch does not exist.",
    "model.shape.num_heads=0": "model.shape.num_heads = 0 must be at least 1.",
    "model.shape.num_kv_heads=0": "model.shape.num_kv_heads = 0 must be at least 1.",
    "optim.eps=nan": "optim.eps = nan must be at least 0.",
    "zero=stage3_nvme zero.offload_optimizer.buffer_count=3": (
        "zero.offload_optimizer.buffer_count = 3 must be at least 4."
    ),
    "language=de": "language = de must be en, zh or empty.",
    "run.name=a/b": "run.name = a/b must be a plain directory name; the directory around it is run.dir.",
    "distributed.hang_after_s=nan": "distributed.hang_after_s = nan must be at least -1.",
    "train.max_loss_ratio=inf": "train.max_loss_ratio = inf must be at least 0.",
    "run.name=-a": "run.name = -a must be a plain directory name; the directory around it is run.dir.",
    "data.sources=[]": ("data.sources is empty: add 'data.sources=[{path: FILE.jsonl}]', or data=examples to try."),
    "data.sources=[{path:''}]": (
        "data.sources[0] needs one of path (a file, directory or pattern) and hub (a name on Hugging Face)."
    ),
    "data.sources=[{path:x,hub:y/z}]": (
        "data.sources[0] needs one of path (a file, directory or pattern) and hub (a name on Hugging Face)."
    ),
    "data.sources=[{path:.,subset:zh}]": "data.sources[0].subset has an effect with hub only. Remove it.",
    "data.sources=[{path:.,split:test}]": (
        "data.sources[0].split = test has an effect with hub and directories of several splits (dataset_dict.json) "
        "only. Remove it; where files are named by their split, give a pattern as path: data/test-*.parquet."
    ),
    "data.sources=[{path:.,columns:{promt:q}}]": (
        "data.sources[0].columns: no format reads 'promt'. Did you mean 'prompt'?"
    ),
    "data.sources=[{path:.,columns:{question:q}}]": (
        "data.sources[0].columns: no format reads 'question'. Did you mean 'prompt'?"
    ),
    "data.sources=[{path:.,columns:{answer:response}}]": (
        "data.sources[0].columns: no format reads 'answer'. Did you mean '{response: answer}'?"
    ),
    "data.sources=[{path:.,columns:{q1:text}}]": (
        "data.sources[0].columns: no format reads 'q1'. Did you mean '{text: q1}'?"
    ),
    "data.sources=[{path:.,format:text,columns:{prompt:q}}]": "data.sources[0].columns: no format reads 'prompt'.",
    "prepare.shard=4/3": "prepare.shard = 4/3 must be i/n, such as 1/4 to 4/4 for four nodes.",
    "prepare.shard=1": "prepare.shard = 1 must be i/n, such as 1/4 to 4/4 for four nodes.",
    "evaluate.keep_best=eval_los": ("evaluate.keep_best = eval_los is none of eval_loss. Did you mean 'eval_loss'?"),
    "evaluate.keep_best=eval_chrf": (
        "evaluate.keep_best = eval_chrf is none of eval_loss. Add it to evaluate.metrics."
    ),
    "evaluate.keep_best=bleu evaluate.metrics=[bleu]": (
        "evaluate.keep_best = bleu is none of eval_loss, eval_bleu. Did you mean 'eval_bleu'?"
    ),
    "evaluate.keep_best=eval_length evaluate.metrics=[length,chrf]": (
        "evaluate.keep_best = eval_length is none of eval_loss, eval_chrf."
    ),
    "evaluate.metrics=[bleu] evaluate.temperature=1 evaluate.top_p=0": (
        "evaluate.top_p = 0.0 must be above 0 and at most 1."
    ),
    "data.sources=[{format:docstrings,columns:{prompt:q}}]": (
        "data.sources[0].columns = {'prompt': 'q'} has no effect with format docstrings. Remove it."
    ),
    "data.sources=[{path:.},{path:.,max_samples:-1}]": (
        "data.sources[1].max_samples = -1 must be at least 0, which uses all rows."
    ),
    "data.validation=[{path:.,weight:2}]": (
        "data.validation[0].weight has no effect: each validation sample is used once. Remove it."
    ),
    "data.validation=[{path:.},{path:.,weights:[{at:0}]}]": (
        "data.validation[1].weights has no effect: each validation sample is used once. Remove it."
    ),
    "data.sources=[{format:docstrings,path:x}]": (
        "data.sources[0].path = x has no effect with format docstrings. Remove it."
    ),
    "zero=stage3_nvme": (
        "zero.offload_optimizer.device = nvme needs zero.offload_optimizer.nvme_path=FOLDER on the NVMe disk."
    ),
    "zero=stage3_nvme zero.offload_optimizer.nvme_path=/nosuch": (
        "zero.offload_optimizer.nvme_path = /nosuch is not a directory that can be written to: No such file or "
        "directory."
    ),
}


def test_a_run_name_is_printable() -> None:
    with pytest.raises(ConfigError, match="must be a plain directory name"):
        check_rules(load(["recipe=zero1", "model=glm_tiny", "run.name='a\nb'"]))
    for name in (" ", "a ", "\u3000"):
        with pytest.raises(ConfigError, match=f"run.name = {name} must be a plain directory name"):
            check_rules(load(["recipe=zero1", "model=glm_tiny", f"run.name='{name}'"]))


@pytest.mark.parametrize("words", REFUSED)
def test_refused(words: str, tmp_path: Path) -> None:
    loaded = load(["recipe=zero1", "model=glm_tiny", f"run.dir={tmp_path}", *words.split()])
    with pytest.raises(ConfigError) as caught:
        check_rules(loaded, world_size=8)
    first, *_ = caught.value.parts or [caught.value]  # files that are not there are reported too, after it
    place, _, sentence = str(first).partition(": ")
    assert place == "command line" or place.startswith("conf/")
    assert sentence == REFUSED[words]


ALL_AT_ONCE = {
    "zero=stage2 zero.offload_param.device=cpu zero.offload_optimizer.device=nvme": (
        "zero.offload_param.device = cpu needs zero.stage = 3",
        "zero.offload_optimizer.device = nvme needs zero.stage = 3",
    ),
    "tuning=lora tuning.dropout=1.5 tuning.alpha=0 tuning.dora=true zero=stage3": (
        "tuning.dropout = 1.5 must be from 0 to below 1",
        "tuning.alpha = 0.0 must be above 0",
        "tuning.dora = true and zero.stage = 3 do not go together",
    ),
    "schedule.warmup_steps=9 schedule.warmup_ratio=0.5 train.max_steps=5": (
        "schedule.warmup_steps = 9 and schedule.warmup_ratio = 0.5 are both given",
        "schedule.warmup_steps = 9 is more than train.max_steps = 5",
    ),
    "language=fr run.name=a/b prepare.shard=2": ("language = fr must be", "run.name = a/b must", "prepare.shard = 2"),
    "zero.zenflow.enabled=true zero.zenflow.topk_ratio=2 zero.zenflow.select_interval=5 "
    "zero.zenflow.update_interval=2": (
        "zero.zenflow.topk_ratio = 2.0 must be above 0",
        "zero.zenflow.enabled = true cannot be with the other settings",
        "zero.zenflow.select_interval = 5 must be a multiple",
    ),
    "optim=muon optim.momentum=2 parallel=pipeline parallel.pipeline=2 tuning=prompt train.gradient_clipping=1": (
        "optim.momentum = 2.0 must be from 0",
        "optim.name = muon and parallel.pipeline = 2",
        "optim.name = muon needs matrices of layers",
        "train.gradient_clipping = 1.0 and optim.name = muon",
        "tuning.method = prompt cannot be together with parallel.pipeline = 2",
    ),
    "parallel=pipeline parallel.pipeline=2 zero=stage3 precision=fp16": (
        "zero.stage = 3 cannot be together with parallel.pipeline",
        "precision.dtype = fp16 cannot be together with parallel.pipeline",
    ),
    "parallel=tensor parallel.tensor=2 optim=adafactor zero=stage3 tuning=lora tuning.dora=true": (
        "tuning.dora = true and zero.stage = 3",
        "optim.name = adafactor and zero.stage = 3",
        "parallel.tensor = 2 cannot be: optim.name = adafactor",
    ),
    "parallel=tensor parallel.tensor=2 zero=stage2 tuning=lora tuning.init=pissa tuning.dora=true": (
        "tuning.init = pissa and tuning.dora = true do not go together",
        "tuning.init = pissa and parallel.tensor = 2 do not go together",
    ),
    "parallel=pipeline parallel.pipeline=2 zero=stage2 tuning=lora tuning.init=olora": (
        "zero.stage = 2 cannot be together with parallel.pipeline",
        "tuning.init = olora and parallel.pipeline = 2 do not go together",
    ),
    "parallel=expert zero=stage3 parallel.tensor=2 parallel.pipeline=2 compile.enabled=true": (
        "parallel.expert = 2 cannot be: zero.stage = 3",
        "parallel.expert = 2 cannot be: a random model has no experts",
        "parallel.expert = 2 cannot be: parallel.tensor = 2",
        "parallel.expert = 2 cannot be: parallel.pipeline = 2",
        "parallel.expert = 2 cannot be: how many tokens",
    ),
    "parallel=expert zero=stage1 zero.contiguous_gradients=false zero.reduce_scatter=false": (
        "parallel.expert = 2 cannot be: zero.contiguous_gradients = false",
        "parallel.expert = 2 cannot be: zero.reduce_scatter = false",
    ),
    "parallel=expert zero=stage0 optim=adafactor": (
        "parallel.expert = 2 cannot be: zero.stage = 0",
        "parallel.expert = 2 cannot be: optim.name = adafactor",
    ),
    "parallel=sequence parallel.sequence=2 parallel.pipeline=2 model.attention=eager": (
        "parallel.sequence = 2 cannot be: the ranks of one model share either",
        "parallel.sequence = 2 cannot be: model.attention = eager",
    ),
    "track.wandb.enabled=true track.wandb.project= track.mlflow.enabled=true track.mlflow.experiment=": (
        "track.wandb.project must not be empty",
        "track.mlflow.experiment must not be empty",
    ),
    "+launch.env.RANK=1 +launch.env.WORLD_SIZE=2": (
        "launch.env.RANK: the launcher",
        "launch.env.WORLD_SIZE: the launcher",
    ),
    "data.sources=[{path:no.jsonl,subset:x,columns:{rompt:a},weight:-1}]": (
        "data.sources[0].path = no.jsonl: there is no such file",
        "data.sources[0].subset has an effect with hub only",
        "data.sources[0].columns: no format reads 'rompt'",
        "data.sources[0].weight = -1.0 must be above 0",
    ),
}
"""Words -> what is wrong with them, each independent of the others."""


@pytest.mark.parametrize("words", ALL_AT_ONCE)
def test_independent_errors_are_reported_together(words: str, tmp_path: Path) -> None:
    problems = Problems()
    loaded = load(["recipe=zero1", "model=glm_tiny", f"run.dir={tmp_path}", *words.split()], problems=problems)
    check_rules(loaded, world_size=8, problems=problems)
    found = "\n".join(map(str, problems.errors))
    for sentence in ALL_AT_ONCE[words]:
        assert found.count(sentence) == 1, found


def test_one_error_that_two_checks_find_is_reported_once() -> None:
    problems = Problems()
    for text in ("r.yaml:5: size = 12", "size = 13", "size = 12", "r.yaml:6: size = 13", "r.yaml:7: size = 12"):
        problems.add(ConfigError("{text}", text=text))
    assert list(map(str, problems.errors)) == ["r.yaml:5: size = 12", "r.yaml:6: size = 13", "r.yaml:7: size = 12"]


def test_the_place_is_file_and_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text("defaults:\n  - zero1\n  - _self_\nbatch:\n  global_size: 12\n")
    with pytest.raises(ConfigError, match=r"^r\.yaml:5: batch\.global_size = 12 is not .* Use 8 or 16\.$"):
        check_rules(load(["recipe=r.yaml", "model=glm_tiny"]), world_size=8)


def test_a_micro_batch_that_is_found_by_training() -> None:
    loaded = load(["recipe=quickstart", "batch.micro_per_gpu=auto"])
    check_rules(loaded, 4)
    assert with_micro_batch(loaded.cfg).batch.micro_per_gpu == 1
    assert with_micro_batch(with_micro_batch(loaded.cfg, 2), 4).batch.micro_per_gpu == 2
    for needs_it in (partial(accumulation, loaded.cfg, 4), partial(build_ds_config, loaded.cfg, 4)):
        with pytest.raises(ConfigError, match=r"Here give one: batch\.micro_per_gpu=1\."):
            needs_it()


def test_accumulation_is_derived() -> None:
    assert accumulation(load(["recipe=zero1", "batch.global_size=32"]).cfg, 8) == 4


@pytest.mark.parametrize("method", ["lora", "ptuning_v2", "prompt"])
def test_every_method_goes_on_from_an_adapter(method: str, tmp_path: Path) -> None:
    """Nothing that its group sets stands against what the adapter decides."""
    check_rules(load(["recipe=zero1", "model=glm_tiny", f"tuning={method}", f"tuning.adapter={tmp_path}"]))


def test_unknown_world_size_and_absent_files_can_be_left_out() -> None:
    loaded = load(["recipe=chatglm", "model.path="])
    check_rules(loaded, files=False)
    with pytest.raises(ConfigError, match=r"model\.path is empty"):
        check_rules(loaded)


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"is an adapter, not a whole model.* with tuning\.adapter=.* merge=true"):
        check_rules(load(["recipe=lora", f"model.path={tmp_path}", "data=examples"]))


def test_a_recipes_own_steps_can_be_overridden_by_epochs_of_the_command_line(tmp_path: Path) -> None:
    """max_steps from one place and epochs from another is an override, not a contradiction."""
    (tmp_path / "r.yaml").write_text("defaults:\n  - zero1\n  - _self_\ntrain:\n  epochs: 3\n")
    check_rules(load([f"recipe={tmp_path}/r.yaml", "model=glm_tiny", "train.max_steps=5", f"run.dir={tmp_path}"]), 8)


def test_check_shows_the_batch_for_every_number_of_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    from toolkit.cli.check import run

    words = ["recipe=quickstart", "batch.global_size=24", "batch.micro_per_gpu=2", "batch.world_sizes=[4,1,2]"]
    run([*words, "world_size=3"])
    lines = [line for line in capsys.readouterr().out.splitlines() if "sequences per step" in line]
    sums = [line.partition(" (")[0] for line in lines]
    shares = ((12, 1), (6, 2), (4, 3), (3, 4))
    assert sums == [f"24 sequences per step = 2 x {times} x {ranks}" for times, ranks in shares]


def test_keys_that_a_higher_layer_switched_off_are_noticed(tmp_path: Path) -> None:
    """An error stays what one layer says against itself, or what is typed without effect."""
    loaded = load(["recipe=fp16", "model=glm_tiny", "precision=bf16", f"run.dir={tmp_path}"])
    check_rules(loaded)
    [notice] = loaded.notices
    assert re.fullmatch(
        r"recipes/fp16\.yaml:\d+: precision\.initial_scale_power = 12 has no effect here: precision\.dtype is bf16, "
        r"not fp16\.",
        notice,
    )
    with pytest.raises(ConfigError, match=r"^command line: precision\.hysteresis = 3 has no effect: "):
        check_rules(load(["recipe=fp16", "model=glm_tiny", "precision=bf16", "precision.hysteresis=3"]))
    recipe = tmp_path / "r.yaml"
    recipe.write_text("defaults:\n  - override /model: glm_tiny\n  - _self_\nprecision:\n  hysteresis: 3\n")
    with pytest.raises(ConfigError, match=r"r\.yaml:5: precision\.hysteresis = 3 has no effect: "):
        check_rules(load([f"recipe={recipe}", "data=docstrings"]))


def test_questions_about_a_recipe_s_data_are_dropped_with_these(tmp_path: Path) -> None:
    """Those of the user stay, and so do those of a recipe whose data stay."""
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("defaults:\n  - smollm2_135m\n  - _self_\ndata: mine.jsonl\nevaluate:\n  prompts: [Mine?]\n")
    for words in ([], ["data=other.jsonl"]):
        loaded = load([f"recipe={recipe}", *words])
        assert (loaded.cfg.evaluate.prompts, loaded.notices) == (["Mine?"], [])
    assert len(load(["recipe=smollm2_135m", "data.max_samples=40"]).cfg.evaluate.prompts) == 3
    assert load(["recipe=smollm2_135m", "data=mine.jsonl", "evaluate.prompts=['Mine?']"]).cfg.evaluate.prompts == [
        "Mine?"
    ]
    loaded = load(["recipe=smollm2_135m", "data=mine.jsonl"])
    [notice] = loaded.notices
    assert loaded.cfg.evaluate.prompts == []
    assert re.match(r"recipes/smollm2_135m\.yaml:\d+: evaluate\.prompts is dropped: ", notice)


def test_a_recipe_switches_off_what_it_builds_on(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("defaults:\n  - fp16\n  - override /model: glm_tiny\n  - override /precision: bf16\n  - _self_\n")
    loaded = load([f"recipe={recipe}"])
    check_rules(loaded)
    assert len(loaded.notices) == 1


def test_a_run_s_config_is_a_recipe_whatever_was_switched_off(tmp_path: Path) -> None:
    """It says of every key what it was; what is typed with it is judged as ever."""
    words = ["recipe=fp16", "model=glm_tiny", "precision=bf16", "train.max_steps=5", "train.epochs=1"]
    recipe = tmp_path / "config.yaml"
    cfg = load(words).cfg
    cfg.train.epochs = 3
    recipe.write_text(to_yaml(cfg))
    loaded = load([f"recipe={recipe}"])
    check_rules(loaded)
    [notice] = loaded.notices
    assert "precision.initial_scale_power = 12 has no effect here: precision.dtype is bf16, not fp16." in notice
    with pytest.raises(ConfigError, match=r"^command line: precision\.hysteresis = 3 has no effect: "):
        check_rules(load([f"recipe={recipe}", "precision.hysteresis=3"]))


@pytest.mark.parametrize("words", ["zero.stage=x zero.stage=x", "data.max_length=[1] data.max_length=[1]"])
def test_a_wrong_value_that_is_given_twice_is_not_taken(words: str) -> None:
    problems = Problems()
    cfg = load(["recipe=zero1", *words.split()], problems=problems).cfg
    assert len(problems.errors) == 1
    assert (cfg.zero.stage, cfg.data.max_length) == (1, load(["recipe=zero1"]).cfg.data.max_length)


def test_wrong_values_spare_what_follows_from_them() -> None:
    loaded = load(["recipe=zero1", "model=glm_tiny", "batch.micro_per_gpu=0", "zero.stage=7", "optim.lr=0"])
    with pytest.raises(ConfigError) as caught:
        check_rules(loaded, world_size=8)
    assert [str(part).split(" = ")[0] for part in caught.value.parts] == [
        *("command line: batch.micro_per_gpu", "command line: optim.lr", "command line: zero.stage")
    ]


@pytest.mark.timeout(60)
def test_numbers_of_any_size_are_divided_at_once() -> None:
    """They were counted up to, one by one."""
    cfg = load(["recipe=quickstart", "batch.global_size=1000000000"]).cfg
    sizes = micro_sizes(cfg, 8)
    assert sizes[:5] == [1, 2, 4, 5, 8] and sizes[-1] == 125_000_000 and len(sizes) == 70
    assert [micro_sizes(load(["recipe=quickstart", f"batch.global_size={n}"]).cfg, 2) for n in (2, 12, 13)] == [
        [1],
        [1, 2, 3, 6],
        [],
    ]
    assert largest_divisor(8, 2**63 - 1) == 8


def test_the_shape_of_a_random_model_is_checked_without_its_files() -> None:
    """`toolkit plan` divided by zero."""
    with pytest.raises(ConfigError, match="hidden_size 192 must be a multiple of num_heads 1000"):
        check_rules(load(["recipe=quickstart", "model.shape.num_heads=1000"]), 1, files=False)
    with pytest.raises(ConfigError, match=r"model\.shape\.num_layers = 1000000000 must be from 1 to 4096\."):
        check_rules(load(["recipe=quickstart", "model.shape.num_layers=1000000000"]), 1, files=False)
