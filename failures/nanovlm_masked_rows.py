"""
nanoVLM: three NaNs that look like one

Reported    huggingface/nanoVLM issue 50 (loss NaN, 360M model, DocVQA), 165 (NaN with torch 2.4.1,
            fine from 2.6 on; in bf16, the default), 187 (NaN from step 0 on a 3090). The usual
            answers: "use bf16", "raise max_length".
First bad   (a) The softmax of a padding row, in step 1. (b) The loss of a batch of long samples.
            (c) No number is bad: the gradients are 0.
Why         (a) The mask is (1 - mask) * finfo(float32).min, made after a rotary embedding in fp32.
                Autocast casts the mask to half, where -3.4e38 is -inf. In bf16 too: it rounds up
                past bf16's largest number, 3.39e38. Prompts are padded on the left and attention is
                causal, so a padding row sees padding only. Softmax over nothing but -inf is 0/0.
                The loss ignores these rows, but 0 * NaN in the next layer is NaN.
            (b) A sample longer than max_length has all its labels set to -100. In a batch of such
                samples the loss is a mean over no token: 0/0, in any precision. The gradients are 0
                and finite: the weights live, and the epoch's mean loss is NaN.
            (c) fp16 autocast without a GradScaler. (p - y) / tokens falls below 6e-8, the smallest
                number of fp16: no NaN, no error, and gradients that are exactly 0.
Cure        (a) A bool mask, and each row may see at least itself. (b) Divide by max(count, 1). (c)
            A scaler, or bf16.
Tried, no   bf16 cures (c) only. A smaller model, a lower learning rate and clipping cure none of
            the three. A newer torch hides (a): its attention returns 0 for an empty row, but the
            mask stays wrong. A larger max_length makes (b) rare.
Evidence    Upstream's mask, collator and loop around a two-layer causal model (captions of
            synthetic images, padded on the left). (a) runs the plain softmax that torch 2.4 fell
            back to. Nobody knows which of the three the reporter of issue 50 met.
Margin      (a), (b) None is needed: -3.4e38 is -inf in half precision, and 0/0 is NaN, on every
            machine. (c) 57 % of the gradients are 0 where 20 % are claimed, and with a loss scale 0
            % where 2 % are allowed.
Run         python failures/nanovlm_masked_rows.py
"""

import copy
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from data.synthetic import CLASSES
from failures.loops import (
    BF16,
    F16,
    F32,
    NAMES,
    Case,
    around,
    autocast,
    bare,
    guarded,
    images,
    show,
)
from rescue.probes import Probes

WORDS = ["<pad>", "<image>", "a", "photo", "of", *dict.fromkeys(" ".join(CLASSES).split())]
IGNORE = -100


def collate(
    x: Tensor, y: Tensor, prompts: list[str], max_length: int, length: int = 10
) -> tuple[Tensor, ...]:
    """Inputs and labels, as VLM takes them, of "<image> PROMPT a striped disc", padded on the left
    to `length`.
    """
    rows = []
    for i, label in enumerate(y.tolist()):
        words = f"<image> {prompts[i % len(prompts)]} a {CLASSES[label]}".split()
        ids = torch.tensor([0] * (length - len(words)) + [WORDS.index(word) for word in words])
        labels = ids.roll(-1)
        labels[-1] = labels[: length - len(words)] = IGNORE
        # as in data/collators.py: the sample stays, its labels are ignored
        if len(words) > max_length:
            labels[:] = IGNORE
        rows.append((ids, labels))
    ids, labels = (torch.stack(column) for column in zip(*rows, strict=True))
    return pack(x, ids), labels


def pack(images: Tensor, ids: Tensor) -> Tensor:
    """The step takes one tensor of inputs: the pixels of each image, then its token ids. fp32
    counts to 2^24.
    """
    return torch.cat([images.flatten(1), ids.float()], 1)  # B, 3 * 32 * 32 + T


class Attention(nn.Module):
    def __init__(self, dim: int, mask_fixed: bool):
        super().__init__()
        self.fixed = mask_fixed
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        _, T, D = x.shape
        q, k, v = self.qkv(x).chunk(3, -1)
        causal = torch.ones(T, T, dtype=torch.bool).tril()
        logits = q @ k.transpose(1, 2) * D**-0.5
        if self.fixed:
            see = causal & mask[:, None] | torch.eye(T, dtype=torch.bool)
            logits = logits.masked_fill(~see, float("-inf"))
        else:
            # q is fp32: rotary
            padding = (1.0 - mask.float())[:, None] * torch.finfo(torch.float32).min
            logits = (logits + padding.to(logits.dtype)).masked_fill(~causal, float("-inf"))
        return self.proj(logits.softmax(-1) @ v)


class VLM(nn.Module):
    """An image as the prefix token, two causal attentions, a head over the vocabulary.

    Its inputs come from pack(). The label of a token (B, T) is the id of the next token.
    """

    def __init__(
        self, mask_fixed: bool, loss_fixed: bool, vocabulary: int = len(WORDS), dim: int = 32
    ):
        super().__init__()
        self.fixed = loss_fixed
        self.vision = nn.Linear(3 * 8 * 8, dim)
        self.embed = nn.Embedding(vocabulary, dim)
        self.attn = nn.ModuleList(Attention(dim, mask_fixed) for _ in range(2))
        self.norm = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, dict]:
        images = inputs[:, : -labels.shape[1]].view(-1, 3, 32, 32)
        ids = inputs[:, -labels.shape[1] :].long()  # B, T
        mask = ids != WORDS.index("<pad>")
        patch = self.vision(F.avg_pool2d(images, 4).flatten(1)).float()
        x = torch.where((ids == WORDS.index("<image>"))[..., None], patch[:, None], self.embed(ids))
        for attn in self.attn:
            x = x + attn(F.layer_norm(x.float(), x.shape[-1:]), mask)
        logits = self.lm_head(self.norm(x)).float().flatten(0, 1)
        if self.fixed:
            total = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, reduction="sum")
            return total / (labels != IGNORE).sum().clamp(min=1), {}
        return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE), {}


def zero_share(dtype: torch.dtype, scale: float = 1.0) -> tuple[float, list[str]]:
    """(c) The share of the attention's gradients that are exactly 0, and what the probes say.

    Upstream accumulates 32 batches of 16384 tokens. 1024 tokens are computed here; the divisor
    counts all of them.
    """
    torch.manual_seed(0)
    net = VLM(True, True, vocabulary=1024)
    net.lm_head.weight.data.normal_(std=0.02)  # upstream's initialisation
    ids = torch.randint(5, 1024, (8, 128))
    probes = Probes(net)
    with probes, autocast(dtype):
        loss, _ = net(pack(torch.randn(8, 3, 32, 32), ids), ids.roll(-1, 1))
        (loss / (32 * 16) * scale).backward()
    grads = torch.cat([p.grad.flatten() for p in net.attn.parameters()])
    return (grads == 0).float().mean().item(), [
        s for s in probes.warnings(scale) if "smallest normal" in s
    ]


def case(steps: int = 12) -> list[Case]:
    x, y = images(48)
    chunks = [(x[i : i + 16], y[i : i + 16]) for i in (0, 16, 32)]
    usual = around(
        [collate(*chunk, ["", "a photo of"], max_length=9) for chunk in chunks[:2]], steps
    )
    long = around([collate(*chunk, [""], max_length=5) for chunk in chunks[:2]], steps)
    # by chance one batch holds long samples only
    long[3] = collate(*chunks[2], ["a photo of"], max_length=5)
    mask, labels, zeros = (
        Case(f"nanoVLM {n}") for n in ("(a) masked rows", "(b) no label left", "(c) no scaler")
    )
    torch.manual_seed(0)
    start = VLM(mask_fixed=False, loss_fixed=False)
    half_fixed = copy.deepcopy(start)
    fixed = VLM(mask_fixed=True, loss_fixed=True)
    for attn in half_fixed.attn:  # (b) keeps only the published loss: each table shows one cause
        attn.fixed = True
    fixed.load_state_dict(start.state_dict())

    for dtype in (BF16, F16, F32):
        name = NAMES[dtype]
        published, run = (loop(start, usual, dtype, 3e-3) for loop in (bare, guarded))
        mask.row(name, published, run, guarded(fixed, usual, dtype, 3e-3))
        if dtype is F32:
            mask.claim(
                "fp32 holds the mask: finite as published", not published.first and not run.first
            )
        else:
            mask.claim(
                f"{name} breaks in step 1, and the guard names the softmax",
                published.first == 1 and run.blames("precision", "softmax", "attn.0"),
            )

        published, run = (loop(half_fixed, long, dtype, 3e-3) for loop in (bare, guarded))
        labels.row(name, published, run, guarded(fixed, long, dtype, 3e-3))
        labels.claim(
            f"{name}: NaN loss, healthy weights as published",
            (published.first, published.what) == (4, "loss nan") and not published.sick,
        )
        labels.claim(
            f"{name}: the guard names the empty mean",
            run.blames("data", "nll_loss", "") and "every label is ignored" in str(run.report),
        )

        lost, told = zero_share(dtype)
        kept, _ = zero_share(dtype, 65536.0 if dtype is F16 else 1.0)
        named = told[0].split(";")[0] if told else "-"
        zeros.row(name, f"{lost:.0%} of the gradients are exactly 0", named, f"{kept:.0%}")
        zeros.claim(f"{name}: cured, hardly any gradient is 0", kept < 0.02)
        if dtype is F16:
            zeros.rows.insert(0, zeros.rows.pop())  # the reported one first
            zeros.claim("fp16 without a scaler loses gradients in silence", lost > 0.2)
            zeros.claim("the probes say where", "smallest normal at loss scale 1" in named)
        else:
            zeros.claim(f"{name} needs no scaler", lost < 0.02)
    return [mask, labels, zeros]


if __name__ == "__main__":
    sys.exit(show(*case()))
