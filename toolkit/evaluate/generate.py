"""Greedy answers to a few questions."""

import torch
from transformers import PreTrainedModel

from toolkit.models.chat import AnyChatEncoder


def answer(
    model: PreTrainedModel,
    encoder: AnyChatEncoder,
    question: str,
    max_new_tokens: int,
    device: torch.device,
) -> str:
    """Return the model's greedy answer to one question.

    Under ZeRO-3 a collective: every rank asks the same question, so all take the same number of forward passes.

    Args:
        model: the model, `engine.module` included.
        encoder: turns the question into the prompt, and knows where answers end.
        question: what the user says.
        max_new_tokens: longest answer in tokens.
        device: where the model lives.
    """
    tokenizer = encoder.tokenizer
    ids = torch.tensor([encoder.prompt([{"role": "user", "content": question}])], device=device)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            use_cache=True,
            eos_token_id=encoder.stop_ids,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        )
    model.train(was_training)
    return str(tokenizer.decode(output[0, ids.size(1) :], skip_special_tokens=True)).strip()
