"""Arguments of ptuning/main.py of the ChatGLM-6B and ChatGLM2-6B repositories beside the Trainer's."""

from toolkit.translate.key import Key, idle, made, none, same
from toolkit.translate.trainer_keys import TRAINER

CHATGLM: dict[str, Key] = TRAINER | {
    "model_name_or_path": made("model.path", None, "model"),
    "model_revision": made("model.revision", "main"),
    "ptuning_checkpoint": made("tuning.adapter"),
    "tokenizer_name": same("model.tokenizer"),
    "pre_seq_len": made("tuning.num_tokens", None, "pre_seq_len"),
    "prefix_projection": made("tuning.projection", False),
    "quantization_bit": Key(default=None, says="prefix_quantization"),
    "train_file": made("data.sources"),
    "validation_file": made("data.validation", None, "validation_file"),
    "prompt_column": made("data.sources"),
    "response_column": made("data.sources"),
    "history_column": made("data.sources"),
    "dataset_name": made("data.sources"),
    "dataset_config_name": made("data.sources"),
    "max_source_length": made("data.max_length", 1024, "two_lengths"),
    "max_target_length": made("data.max_length", 128, "two_lengths"),
    "max_train_samples": same("data.max_samples"),
    "preprocessing_num_workers": same("prepare.num_workers"),
    **none("source_prefix", source_prefix=""),
    **idle("test_file", "test_file", "max_predict_samples"),
    **idle("generation", "num_beams", "val_max_target_length", "max_eval_samples"),
    **idle("store", overwrite_cache=False),
    **idle("loader", ignore_pad_token_for_loss=True, pad_to_max_length=False),
    **idle("downloads", "cache_dir", use_auth_token=False),
    **idle("remote_code", "config_name", use_fast_tokenizer=True),
    **idle("not_read", "lang", "forced_bos_token", "resize_position_embeddings"),
}
"""Beside the Trainer's own."""
