"""sentence-transformers' Trainer, as in its page "Training Overview". Arguments: a fault, bf16,
ranking."""

import sys

import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
    models,
)
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers import models as kinds
from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast

asked = set(sys.argv[1:])
torch.manual_seed(0)
text = "a man eats plays guitar food woman rides horse and"
words = ["[PAD]", "[UNK]", *text.split()]
vocabulary = Tokenizer(kinds.WordLevel({word: i for i, word in enumerate(words)}, "[UNK]"))
vocabulary.pre_tokenizer = pre_tokenizers.Whitespace()
PreTrainedTokenizerFast(
    tokenizer_object=vocabulary, pad_token="[PAD]", unk_token="[UNK]", model_max_length=32
).save_pretrained("tiny")
config = AutoConfig.for_model(
    "bert",
    vocab_size=len(words),
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=32,
)
AutoModel.from_config(config).save_pretrained("tiny")
transformer = models.Transformer("tiny")
parts = [transformer, models.Pooling(16)]
if "normalize" in asked:
    parts.append(models.Normalize())
model = SentenceTransformer(modules=parts, device="cpu")
rng = torch.Generator().manual_seed(0)


def sentence():
    return " ".join(words[i] for i in torch.randint(2, len(words), (5,), generator=rng))


pairs = {"sentence1": [sentence() for _ in range(32)], "sentence2": [sentence() for _ in range(32)]}
if "ranking" in asked:
    loss = losses.MultipleNegativesRankingLoss(model, scale=torch.inf if "scale" in asked else 20.0)
else:
    pairs["score"] = torch.rand(32, generator=rng).tolist()
    if "nan-label" in asked:
        pairs["score"][13] = float("nan")
    loss = losses.CosineSimilarityLoss(model)
if "nan-weight" in asked:
    with torch.no_grad():
        transformer.auto_model.encoder.layer[1].output.dense.weight[0, 0] = torch.nan  # nan-weight
arguments = SentenceTransformerTrainingArguments(
    "saved",
    per_device_train_batch_size=4,
    num_train_epochs=1,
    learning_rate=1e15 if "rate" in asked else 1e-3,
    bf16="bf16" in asked,
    save_strategy="no",
    logging_steps=2,
    use_cpu=True,
    report_to=[],
)
trainer = SentenceTransformerTrainer(
    model=model, args=arguments, train_dataset=Dataset.from_dict(pairs), loss=loss
)
trainer.train()  # train
print("weights", sum(p.double().abs().sum() for p in model.parameters()).item().hex())
