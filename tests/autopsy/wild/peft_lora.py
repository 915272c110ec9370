"""peft's LoRA on a language model, as in its page "Quicktour". Arguments: a fault, bf16, trainer,
checkpointing."""

import sys

import numpy as np
import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from safetensors.numpy import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

asked = set(sys.argv[1:])
torch.manual_seed(0)
config = AutoConfig.for_model(
    "llama",
    vocab_size=50,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    intermediate_size=32,
)
AutoModelForCausalLM.from_config(config).save_pretrained("tiny")
base = AutoModelForCausalLM.from_pretrained("tiny")
lora = LoraConfig(
    task_type=TaskType.CAUSAL_LM,
    r=4,
    lora_alpha=8,
    lora_dropout=0.1,
    target_modules=["q_proj", "v_proj"],
    use_dora="dora" in asked,
)
if "pruned" in asked:  # DoRA divides by the norm of a row that pruning has set to 0
    with torch.no_grad():
        base.model.layers[1].self_attn.v_proj.weight[3] = 0
model = get_peft_model(base, lora)
model.print_trainable_parameters()
if "nan-lora" in asked:  # an adapter that was written by hand
    for name, parameter in model.named_parameters():
        if name.endswith("layers.1.self_attn.v_proj.lora_B.default.weight"):
            parameter.data.fill_(float("nan"))  # nan-lora
if "nan-state" in asked:  # a checkpoint of a bad step is loaded
    state = model.state_dict()
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"
    state[name] = torch.full_like(state[name], float("nan"))  # nan-state
    model.load_state_dict(state, strict=False)
if "nan-saved" in asked:  # the same as a file that another program has written
    model.save_pretrained("adapter")
    held = load_file("adapter/adapter_model.safetensors")
    for name, array in held.items():
        if "layers.0.self_attn.q_proj.lora_A" in name:
            array[:] = np.nan
    save_file(held, "adapter/adapter_model.safetensors")
    base = AutoModelForCausalLM.from_pretrained("tiny")
    model = PeftModel.from_pretrained(base, "adapter", is_trainable=True)  # nan-saved

tokens = torch.randint(1, 50, (48, 12))
labels = tokens.clone()
if "no-label" in asked:
    labels[20:24] = -100
rows = [{"input_ids": t, "labels": label} for t, label in zip(tokens, labels, strict=True)]
if "loop" in asked:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e15 if "rate" in asked else 1e-3)
    for batch in torch.utils.data.DataLoader(rows, batch_size=4):
        loss = model(**batch).loss  # loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print("loss", loss.item().hex())
else:
    arguments = TrainingArguments(
        "saved",
        per_device_train_batch_size=4,
        num_train_epochs=1,
        learning_rate=1e15 if "rate" in asked else 1e-3,
        bf16="bf16" in asked,
        gradient_checkpointing="checkpointing" in asked,
        train_sampling_strategy="sequential",
        save_strategy="no",
        logging_steps=2,
        use_cpu=True,
        report_to=[],
    )
    trainer = Trainer(model, arguments, train_dataset=rows, data_collator=default_data_collator)
    trainer.train()  # train
print("weights", sum(p.double().abs().sum() for p in model.parameters()).item().hex())
