"""transformers' Trainer on a language model, as in its page "Causal language modeling". Arguments:
a fault, bf16, accumulate, checkpointing, an architecture."""

import sys

import numpy as np
import torch
from datasets import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

asked = set(sys.argv[1:])
known = [name for name in ("llama", "qwen2", "opt") if name in asked]
torch.manual_seed(0)
config = AutoConfig.for_model(
    known[0] if known else "gpt2",
    vocab_size=50,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    intermediate_size=32,
    max_position_embeddings=32,
    bos_token_id=0,
    eos_token_id=0,
    pad_token_id=0,
)
AutoModelForCausalLM.from_config(config).save_pretrained("tiny")
model = AutoModelForCausalLM.from_pretrained("tiny")

rng = np.random.default_rng(0)
tokens = rng.integers(1, 50, (48, 12)).tolist()
labels = [list(row) for row in tokens]
if "no-label" in asked:  # a prompt that fills the whole row, and only the answer is learnt
    labels[16:] = [[-100] * 12 for _ in range(32)]
if "label-range" in asked:
    labels[21][5] = 50
data = Dataset.from_dict({"input_ids": tokens, "labels": labels})


class Own(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(input_ids=inputs["input_ids"])
        score, target = outputs.logits[:, :-1], inputs["labels"][:, 1:]
        loss = torch.nn.functional.cross_entropy(score.transpose(1, 2), target)  # own
        if "spread" in asked:  # a bonus for a spread that is 0 where all logits are equal
            loss = loss - torch.sqrt((score * 0).var(-1)).mean()  # spread
        return (loss, outputs) if return_outputs else loss


arguments = TrainingArguments(
    "saved",
    per_device_train_batch_size=4,
    num_train_epochs=1,
    learning_rate=1e12 if "rate" in asked else 1e-3,
    bf16="bf16" in asked,
    gradient_accumulation_steps=2 if "accumulate" in asked else 1,
    gradient_checkpointing="checkpointing" in asked,
    train_sampling_strategy="sequential",
    save_strategy="no",
    logging_steps=2,
    use_cpu=True,
    report_to=[],
)
kind = Own if asked & {"spread", "own-loss"} else Trainer
trainer = kind(model, arguments, train_dataset=data, data_collator=default_data_collator)
trainer.train()  # train
print("weights", sum(p.double().abs().sum() for p in model.parameters()).item().hex())
