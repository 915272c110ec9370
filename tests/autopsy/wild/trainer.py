"""transformers' Trainer on texts, as in its page "Fine-tuning": a checkpoint is loaded, a collator
pads, the metrics are computed. Arguments: a fault, bf16, accumulate, checkpointing, compile, an
architecture."""

import sys

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

asked = set(sys.argv[1:])
known = [name for name in ("roberta", "distilbert", "gpt2", "electra") if name in asked]
torch.manual_seed(0)

# In place of a download: a small checkpoint in the folder "tiny".
text = "the film is good bad very not and plot actors"
words = ["[PAD]", "[UNK]", *text.split()]
vocabulary = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "[UNK]"))
vocabulary.pre_tokenizer = pre_tokenizers.Whitespace()
PreTrainedTokenizerFast(
    tokenizer_object=vocabulary, pad_token="[PAD]", unk_token="[UNK]"
).save_pretrained("tiny")
config = AutoConfig.for_model(
    known[0] if known else "bert",
    vocab_size=len(words),
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=40,
    pad_token_id=0,
    num_labels=1 if "nan-label" in asked else 2,
)
AutoModelForSequenceClassification.from_config(config).save_pretrained("tiny")

tokenizer = AutoTokenizer.from_pretrained("tiny")
model = AutoModelForSequenceClassification.from_pretrained("tiny")
rng = np.random.default_rng(0)
texts = [" ".join(rng.choice(words[2:], rng.integers(3, 9))) for _ in range(48)]
labels = [int("good" in text) for text in texts]
if "nan-label" in asked:
    labels = [float(label) for label in labels]
    labels[21] = float("nan")
data = Dataset.from_dict({"text": texts, "label": labels})
data = data.map(lambda rows: tokenizer(rows["text"], truncation=True), batched=True)


def own_loss(outputs, labels, num_items_in_batch=None):
    chances = (outputs.logits * (1e4 if "log0" in asked else 1.0)).softmax(-1)
    picked = chances.gather(1, labels[:, None])
    return -torch.log(picked).mean()  # log0


def metrics(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


arguments = TrainingArguments(
    "saved",
    per_device_train_batch_size=4,
    num_train_epochs=1,
    learning_rate=1e12 if "rate" in asked else 1e-3,
    bf16="bf16" in asked,
    gradient_accumulation_steps=2 if "accumulate" in asked else 1,
    gradient_checkpointing="checkpointing" in asked,
    torch_compile="compile" in asked,
    eval_strategy="epoch",
    save_strategy="no" if "compile" in asked else "epoch",
    logging_steps=2,
    use_cpu=True,
    report_to=[],
)
trainer = Trainer(
    model=model,
    args=arguments,
    train_dataset=data,
    eval_dataset=data.select(range(8)),
    processing_class=tokenizer,
    data_collator=DataCollatorWithPadding(tokenizer),
    compute_metrics=None if "nan-label" in asked else metrics,
    compute_loss_func=own_loss if asked & {"log0", "own-loss"} else None,
)
trainer.train()  # train
if "resume" in asked:  # a run goes on from a checkpoint whose optimizer is bad
    path = "saved/checkpoint-12/optimizer.pt"
    state = torch.load(path)
    if "bad-moment" in asked:
        state["state"][3]["exp_avg"][0] = torch.nan
    torch.save(state, path)
    arguments.num_train_epochs = 2
    trainer.train(resume_from_checkpoint="saved/checkpoint-12")  # resume
print("weights", sum(p.double().abs().sum() for p in model.parameters()).item().hex())
