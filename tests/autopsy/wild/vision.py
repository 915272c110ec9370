"""transformers' Trainer on images, as in its page "Image classification". Arguments: a fault, bf16,
an architecture."""

import sys

import torch
from transformers import AutoConfig, AutoModelForImageClassification, Trainer, TrainingArguments

asked = set(sys.argv[1:])
torch.manual_seed(0)
small = dict(image_size=16, num_labels=3)
if "resnet" in asked:
    small |= dict(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
else:
    small |= dict(patch_size=4, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
    small |= dict(intermediate_size=32)
config = AutoConfig.for_model("resnet" if "resnet" in asked else "vit", **small)
AutoModelForImageClassification.from_config(config).save_pretrained("tiny")
model = AutoModelForImageClassification.from_pretrained("tiny")


class Images(torch.utils.data.Dataset):
    def __init__(self):
        self.pixels = torch.randn(48, 3, 16, 16)
        if "nan-data" in asked:
            self.pixels[22, 1, 5, 5] = float("nan")  # a broken file

    def __len__(self):
        return 48

    def __getitem__(self, i):
        pixels = self.pixels[i]
        if "flat-image" in asked and i == 22:  # normalised by its own spread, and the image is flat
            pixels = torch.zeros(3, 16, 16)
            pixels = (pixels - pixels.mean()) / pixels.std()  # flat-image
        return {"pixel_values": pixels, "labels": i % 3}


def collate(examples):
    pixels = torch.stack([example["pixel_values"] for example in examples])
    labels = torch.tensor([example["labels"] for example in examples])
    return {"pixel_values": pixels, "labels": labels}


arguments = TrainingArguments(
    "saved",
    per_device_train_batch_size=4,
    num_train_epochs=1,
    learning_rate=1e15 if "rate" in asked else 1e-3,
    bf16="bf16" in asked,
    remove_unused_columns=False,
    train_sampling_strategy="sequential",
    save_strategy="no",
    logging_steps=2,
    use_cpu=True,
    report_to=[],
)
trainer = Trainer(model=model, args=arguments, data_collator=collate, train_dataset=Images())
trainer.train()  # train
print("weights", sum(p.double().abs().sum() for p in model.parameters()).item().hex())
