"""trl's SFTTrainer and DPOTrainer, as in their pages. Arguments: sft (else dpo), a fault, bf16,
lora."""

import sys

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

asked = set(sys.argv[1:])
torch.manual_seed(0)
text = "what is the sky blue green a good bad answer yes no"
words = ["<pad>", "<unk>", "<eos>", *text.split()]
vocabulary = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<unk>"))
vocabulary.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
PreTrainedTokenizerFast(
    tokenizer_object=vocabulary, pad_token="<pad>", unk_token="<unk>", eos_token="<eos>"
).save_pretrained("tiny")
config = AutoConfig.for_model(
    "qwen2",
    vocab_size=len(words),
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    intermediate_size=32,
    eos_token_id=2,
    pad_token_id=0,
    bos_token_id=None,
)
AutoModelForCausalLM.from_config(config).save_pretrained("tiny")
model = AutoModelForCausalLM.from_pretrained("tiny", dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained("tiny")
if "nan-weight" in asked:  # as a bad step before the checkpoint leaves it
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 3] = torch.inf  # nan-weight

common = dict(
    output_dir="saved",
    per_device_train_batch_size=4,
    num_train_epochs=1,
    learning_rate=1e15 if "rate" in asked else 1e-3,
    bf16="bf16" in asked,
    gradient_checkpointing="checkpointing" in asked,
    gradient_accumulation_steps=2 if "accumulate" in asked else 1,
    save_strategy="no",
    logging_steps=2,
    use_cpu=True,
    report_to=[],
)
lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"]) if "lora" in asked else None
rng = torch.Generator().manual_seed(0)


def sentence(n):
    return " ".join(words[i] for i in torch.randint(3, len(words), (n,), generator=rng))


if "sft" in asked:
    if "no-label" in asked:  # tokens that were made beforehand, and a mask that covers all
        rows = [{"input_ids": tokenizer(sentence(9))["input_ids"]} for _ in range(32)]
        rows = [row | {"labels": [-100] * len(row["input_ids"])} for row in rows]
        more = dict(max_length=None, dataset_kwargs={"skip_prepare_dataset": True})
    else:
        rows = [{"prompt": sentence(4), "completion": " " + sentence(6)} for _ in range(32)]
        more = {}
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(**common, **more),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=lora,
    )
else:
    rows = [
        {"prompt": sentence(4), "chosen": " " + sentence(4), "rejected": " " + sentence(3)}
        for _ in range(32)
    ]
    trainer = DPOTrainer(
        model=model,
        args=DPOConfig(**common, beta=float("nan") if "nan-beta" in asked else 0.1),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=lora,
    )
trainer.train()  # train
print("weights", sum(p.double().abs().sum() for p in model.parameters()).item().hex())
