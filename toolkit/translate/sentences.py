"""What is said about keys: why there is no counterpart, what does the job here, or what the same word means here."""

from toolkit.messages import tr


def sentence(name: str) -> str:
    """Return a sentence by its name in the tables; "" for none."""
    return (_differs() | _lost() | _elsewhere())[name] if name else ""


def _differs() -> dict[str, str]:
    """Keys that have a counterpart which is not quite the same."""
    return {
        "batch": tr(
            "rows per rank x accumulation x ranks = batch.global_size, which stays when the number of ranks changes; "
            "the loss is the mean over all trained tokens of the global batch, not of micro-batch means"
        ),
        "epochs": tr("whole epochs only: a fraction is rounded up; train.max_steps ends a run earlier"),
        "warmup": tr("begins a step later for DeepSpeed's three; below 1 it is a fraction of all steps"),
        "schedule_kwargs": tr("of cosine_with_min_lr, polynomial, inverse_sqrt and warmup_stable_decay"),
        "deepspeed": tr("the JSON is read and translated, and what it says stands in the recipe"),
        "evaluation": tr(
            "steps only; where there is validation data, it is evaluated at the beginning and the end in any case"
        ),
        "saving": tr("steps only; a checkpoint is saved at the end in any case (checkpoint.at_end)"),
        "keep": tr("the Trainer keeps all without it: 0 here"),
        "best": tr("the best checkpoint is kept as well; what is exported is the last"),
        "report_to": tr("one or several; all and other names have no counterpart; metrics.jsonl is always written"),
        "model": tr(
            "a folder, or owner/name on Hugging Face (docs/models.md). Code in it is not run, and official ChatGLM "
            "folders load as they are"
        ),
        "adapters": tr("one adapter, in a folder; merge several before (toolkit export-model PATH merge=true)"),
        "swanlab_mode": tr("cloud is online; local is offline: files in the run folder, for `swanlab sync`"),
        "stage": tr("sft and pt (texts, format text); a file for another stage is refused"),
        "lora_target": tr(
            "all is all-linear; a list stays one. ChatGLM2 and later: the names of transformers' GLM (query_key_value "
            "is q_proj, k_proj and v_proj)"
        ),
        "quantization": tr("4 with LoRA is tuning=qlora; other numbers of bits have no counterpart"),
        "freeze_modules": tr("all, which is whole layers; single modules of the last layers cannot be named"),
        "pure_bf16": tr("bf16 with float32 master weights in the optimizer"),
        "flash_attn": tr("sdpa; else model.attention=auto, which takes PyTorch's kernels (varlen for packed rows)"),
        "dataset": tr(
            "looked up in dataset_info.json; columns named history, system and tools are read even where it does not "
            "name them"
        ),
        "template": tr(
            "the model's own format or chat template writes conversations; model.chat_template=FILE replaces it. A "
            "template with a system message of its own writes another text"
        ),
        "cutoff_len": tr(
            "a longer conversation is left out and counted, not cut in the middle of an answer; data.too_long says "
            "otherwise"
        ),
        "max_samples": tr("the first rows of all sources together; taken over where there is one data set"),
        "val_size": tr("a fraction; a number of rows has no counterpart"),
        "packing": tr("packed samples never see each other, as with neat_packing, and their positions begin at 0"),
        "pre_seq_len": tr(
            "P-Tuning v2 with the original's dropout of 0.1; the weights are float16 there, with the prefix in "
            "float32. precision=bf16 is safer: a rate of 2e-2 in float16 is known to diverge"
        ),
        "validation_file": tr("evaluated at the beginning and the end; the original reads it with --do_eval only"),
        "two_lengths": tr(
            "data.max_length is the sum: the original cuts prompt and answer each to its length, here a longer sample "
            "is left out whole and counted. toolkit prepare tells how many; raise data.max_length to keep them"
        ),
    }


def _lost() -> dict[str, str]:
    """Keys that change what is trained, and that nothing here does."""
    return {
        "no_such_loss": tr("the loss is plain cross-entropy"),
        "optimizers": tr("docs/optimizers.md says which there are"),
        "sampling": tr("the order is random, made from run.seed; data.packing=grouped puts like lengths together"),
        "auto_batch": tr("batch.micro_per_gpu=auto finds the largest micro-batch and leaves the global batch as it is"),
        "one_seed": tr("run.seed is the seed of the data too"),
        "fsdp": tr("DeepSpeed's ZeRO splits the model: zero=stage3 is like full_shard, zero=stage2 like shard_grad_op"),
        "resume": tr(
            "a run with run.name goes on by itself, from its own checkpoints; those of other programs cannot be read. "
            "A saved model can be model.path, an adapter tuning.adapter"
        ),
        "recompute": tr("each decoder layer is recomputed; train.activation_checkpointing says more"),
        "liger_parts": tr("kernels.liger takes all layers that it knows"),
        "amp": tr("precision=fp16 or bf16 keeps the model in that precision, with float32 master weights"),
        "train_on_prompt": tr("prompts are never trained; format text trains all of a text"),
        "mixing": tr("weight of a source says how often each of its samples comes per epoch"),
        "thinking": tr("the model's chat template decides; system messages stand in the rows"),
        "tokenized_path": tr("toolkit prepare tokenises into prepare.dir, from the rows"),
        "media": tr("texts only"),
        "lora_kinds": tr("LoRA, rsLoRA, DoRA and QLoRA are what there is: docs/tuning.md"),
        "preferences": tr("there is supervised training only"),
        "vocabulary": tr("the vocabulary stays as it is"),
        "model_changes": tr("the model is trained as its folder says"),
        "quantization_ways": tr("tuning=qlora takes 4-bit NormalFloat with double quantisation"),
        "other_engines": tr("DeepSpeed trains; compile and kernels say what computes the layers"),
        "early_stopping": tr("a run ends after train.epochs or train.max_steps; evaluate.keep_best keeps the best"),
        "prefix_quantization": tr(
            "the weights under a prefix stay in 16 bits, 13.4 GB for ChatGLM-6B; 4 bits go with tuning=qlora"
        ),
        "source_prefix": tr("prompts are trained as they are; write the prefix into the rows"),
        "per_gpu": tr("long gone from the Trainer; it is per_device_train_batch_size"),
    }


def _elsewhere() -> dict[str, str]:
    """Keys that change nothing of what is trained."""
    return {
        "generation": tr("evaluate.metrics scores answers, evaluate.max_new_tokens and evaluate.temperature say how"),
        "loss": tr("always so here: the loss counts the tokens of all ranks and micro-batches"),
        "timeout": tr("distributed.timeout_s; tokenising needs no patience, ranks do not wait for it in a collective"),
        "run_folder": tr("each run has a folder of its own below run.dir, named by run.name"),
        "do": tr("toolkit train trains and evaluates; toolkit eval and toolkit generate do not train"),
        "trackers": tr("track.trackio.space and track.trackio.project say where Trackio keeps a run"),
        "hub": tr("nothing is uploaded; export/ holds what can be"),
        "logging": tr("metrics.jsonl and logs/ of the run folder; train.log_every"),
        "eval_batch": tr("the validation loss is exact whatever the batch; evaluate.batch_size is for answers"),
        "saving_ways": tr("checkpoints hold all that resuming needs, exports safetensors; checkpoint.keep_weights"),
        "loader": tr("data.num_workers; every row is read, padding is never trained, the last step is never dropped"),
        "processes": tr("the launcher and DeepSpeed decide it"),
        "tf32": tr("precision.tf32, which only precision=fp32 on GPUs reads"),
        "arithmetic": tr("left to PyTorch; resuming on the same number of ranks is bit for bit"),
        "streams": tr("files are always read as streams, and tokenised once per machine"),
        "store": tr("tokenised data is found again by what it is made of; prepare.num_workers says how many processes"),
        "remote_code": tr(
            "code of a model folder is not run unless model.trust_remote_code=true, and the family's own tokenizer is "
            "taken"
        ),
        "downloads": tr("models come through the cache of huggingface_hub, which HF_HOME and its other variables set"),
        "plots": tr("metrics.jsonl has the numbers, evaluate.metrics adds scores"),
        "swanlab": tr(
            "the key comes from SWANLAB_API_KEY or `swanlab login`, the run is called as run.name says; what SwanLab "
            "writes lies in the run folder, and it sends no messages"
        ),
        "ray": tr("toolkit launch or any other launcher starts the ranks"),
        "asking": tr("arguments of toolkit generate, chat and serve; evaluate.* for the validation data"),
        "exporting": tr("toolkit export-model makes what export/ does not hold already"),
        "test_file": tr("toolkit eval and toolkit generate answer a file of questions"),
        "not_read": tr("the original does not read it either"),
    }
