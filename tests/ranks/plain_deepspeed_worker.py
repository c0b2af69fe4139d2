"""Run on every rank: a plain DeepSpeed program, which knows nothing of the toolkit, with an exported ds_config.json."""

import sys

import deepspeed
import torch
import transformers

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or it is compiled for minutes
deepspeed.init_distributed(dist_backend="gloo", verbose=False)
[path] = [word for word in sys.argv[1:] if word.endswith(".json")]
torch.manual_seed(0)
config = transformers.GlmConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    pad_token_id=None,
    eos_token_id=1,
)
model = transformers.GlmForCausalLM(config)
engine, _, _, scheduler = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=path)
ids = torch.arange(32).reshape(1, 32) + torch.distributed.get_rank()
rates, losses = [], []
for _ in range(6):
    for _ in range(engine.gradient_accumulation_steps()):
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        rates.append(engine.get_lr()[0])
        engine.step()
    losses.append(float(loss.detach()))
if torch.distributed.get_rank() == 0:
    print(
        "TRAINED",
        losses[0],
        losses[-1],
        type(scheduler).__name__,
        rates[:: engine.gradient_accumulation_steps()],
        flush=True,
    )
# Without this, gloo's threads are now and then still there when the interpreter ends, and abort it.
torch.distributed.barrier()
torch.distributed.destroy_process_group()
