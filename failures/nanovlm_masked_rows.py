"""
nanoVLM: three NaNs that look like one

Reported    huggingface/nanoVLM issue 50 (loss NaN, 360M model, DocVQA), 165 (NaN with torch 2.4.1, fine from 2.6: in
            bf16, the default!), 187 (NaN from step 0 on a 3090). The usual answers: "use bf16", "raise max_length".
First bad   (a) softmax of a padding row, step 1; (b) the loss of a batch of long samples; (c) none: they are 0.
Why         (a) The mask is (1 - mask) * finfo(float32).min, made after a rotary embedding in fp32. Autocast casts it to
                half, where -3.4e38 is -inf, in bf16 as well (it rounds up past its largest, 3.39e38). Prompts are
                padded on the left and attention is causal, so a padding row sees padding only: softmax over nothing
                but -inf is 0/0. The loss ignores these rows; 0 * NaN in the next layer does not.
            (b) A sample longer than max_length got all its labels set to -100. A batch of those: a mean over no token,
                0/0, in any precision. The gradients are 0 and finite: the weights live, the epoch's mean is NaN.
            (c) fp16 autocast without a GradScaler. (p - y) / tokens falls below 6e-8, the smallest number of fp16:
                no NaN, no error, gradients that are exactly 0.
Cure        (a) A bool mask, and each row may at least see itself. (b) Divide by max(count, 1). (c) A scaler, or bf16.
Tried, no   bf16 cures (c) only. A smaller model or rate, clipping: none of the three. A newer torch hides (a): its
            attention returns 0 for an empty row; the mask stays wrong. A larger max_length makes (b) rare.
Evidence    Upstream's mask, collator and loop distilled around a two-layer causal model (captions of synthetic images,
            left-padded). (a) runs the plain softmax that torch 2.4's fallback was. Which of the three hit the reporter
            of 50 is not known.
Run         python failures/nanovlm_masked_rows.py
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from amp_policy import LossScaler
from data.synthetic import CLASSES
from failures.loops import BF16, F16, F32, NAMES, Case, around, bare, guarded, images, show
from guards import Probes
from optim import ClippedAdamW

WORDS = ["<pad>", "<image>", "a", "photo", "of", *dict.fromkeys(" ".join(CLASSES).split())]
IGNORE = -100


def collate(x: Tensor, y: Tensor, prompts: list[str], max_length: int, length: int = 10) -> tuple[Tensor, ...]:
    """(images, ids, mask, labels) of "<image> PROMPT a striped disc", padded on the left to `length`."""
    rows = []
    for i, label in enumerate(y.tolist()):
        words = f"<image> {prompts[i % len(prompts)]} a {CLASSES[label]}".split()
        ids = torch.tensor([0] * (length - len(words)) + [WORDS.index(word) for word in words])
        labels = ids.roll(-1)
        labels[-1] = labels[: length - len(words)] = IGNORE
        if len(words) > max_length:  # data/collators.py: the sample stays, its labels go
            labels[:] = IGNORE
        rows.append((ids, ids != 0, labels))
    return x, *(torch.stack(column) for column in zip(*rows, strict=True))


class Attention(nn.Module):
    def __init__(self, dim: int, fixed: bool):
        super().__init__()
        self.fixed, self.qkv, self.proj = fixed, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        _, T, D = q.shape
        causal = torch.ones(T, T, dtype=torch.bool).tril()
        logits = q @ k.transpose(1, 2) * D**-0.5
        if self.fixed:
            see = causal & mask[:, None] | torch.eye(T, dtype=torch.bool)
            logits = logits.masked_fill(~see, float("-inf"))
        else:
            padding = (1.0 - mask.float())[:, None] * torch.finfo(torch.float32).min  # q was fp32, after the rotary
            logits = (logits + padding.to(logits.dtype)).masked_fill(~causal, float("-inf"))
        return self.proj(logits.softmax(-1) @ v)


class VLM(nn.Module):
    """An image as the prefix token, two causal attentions, a head over the vocabulary."""

    def __init__(self, dim: int = 32, fixed: bool = False, vocabulary: int = len(WORDS)):
        super().__init__()
        self.fixed, self.vision = fixed, nn.Linear(3 * 8 * 8, dim)
        self.embed, self.attn = nn.Embedding(vocabulary, dim), nn.ModuleList(Attention(dim, fixed) for _ in range(2))
        self.norm, self.lm_head = nn.LayerNorm(dim), nn.Linear(dim, vocabulary, bias=False)

    def forward(self, images: Tensor, ids: Tensor, mask: Tensor, labels: Tensor) -> tuple[Tensor, dict]:
        patch = self.vision(F.avg_pool2d(images, 4).flatten(1)).float()
        x = self.embed(ids)
        x = torch.where((ids == WORDS.index("<image>"))[..., None], patch[:, None], x)
        for attn in self.attn:
            x = x + attn(F.layer_norm(x.float(), x.shape[-1:]), mask)
        logits = self.lm_head(self.norm(x)).float().flatten(0, 1)
        if self.fixed:
            total = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, reduction="sum")
            return total / (labels != IGNORE).sum().clamp(min=1), {}
        return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE), {}


def silent_zeros(dtype: torch.dtype, scale: float) -> tuple[float, list[str]]:
    """(c) Share of the attention's gradients that are exactly 0, and the warnings. 32 accumulated batches of
    16384 tokens, as upstream trains; 1024 of them are computed, the rest is in the divisor."""
    torch.manual_seed(0)
    net = VLM(fixed=True, vocabulary=1024)
    net.lm_head.weight.data.normal_(std=0.02)  # upstream's initialisation
    ids = torch.randint(5, 1024, (8, 128))
    probes = Probes(net)
    with probes, torch.autocast("cpu", dtype, enabled=dtype is not F32):
        loss, _ = net(torch.randn(8, 3, 32, 32), ids, ids > 0, ids.roll(-1, 1))
        (loss / (32 * 16) * scale).backward()
    grads = torch.cat([p.grad.flatten() for p in net.attn.parameters()])
    return (grads == 0).float().mean().item(), probes.warnings(scale)


def case(steps: int = 12) -> list[Case]:
    x, y = images(64)
    torch.manual_seed(0)
    start, fixed = VLM(), VLM(fixed=True)
    fixed.load_state_dict(start.state_dict())
    chunks = [(x[i:i + 16], y[i:i + 16]) for i in range(0, 64, 16)]
    usual = around([collate(*chunk, ["", "a photo of"], max_length=9) for chunk in chunks[:2]], steps)
    long = around([collate(*chunk, [""], max_length=5) for chunk in chunks[:2]], steps)
    long[3] = collate(*chunks[2], ["a photo of"], max_length=5)  # chance brings together a batch of long samples
    cases = [Case("nanoVLM (a) masked rows"), Case("nanoVLM (b) no label left"), Case("nanoVLM (c) no scaler")]

    for dtype in (BF16, F16, F32):
        for out, batches in zip(cases, (usual, long), strict=False):
            # (b) is shown on the mended mask's model with the published loss, so that each row has one cause
            begin = start if out is cases[0] else copy.deepcopy(fixed)
            begin.fixed = False
            net = copy.deepcopy(begin)
            published = bare(net, batches, dtype, torch.optim.AdamW(net.parameters(), 3e-3))
            net = copy.deepcopy(begin)
            run = guarded(net, batches, dtype, ClippedAdamW(net.parameters(), 3e-3))
            net = copy.deepcopy(fixed)
            cured = guarded(net, batches, dtype, ClippedAdamW(net.parameters(), 3e-3))
            cured_loss = [loss for loss in cured.losses if loss]  # a batch without labels has loss 0
            out.rows.append((NAMES[dtype], published, run, cured))
            out.claim(f"{NAMES[dtype]}: the cure trains", not cured.first and cured_loss[-1] < cured_loss[0])
            if out is cases[0] and dtype is F32:
                out.claim("fp32 holds the mask: finite as published", not published.first and not run.first)
            elif out is cases[0]:
                out.claim(f"{NAMES[dtype]} breaks in step 1; the guard names the softmax, the weights stay finite",
                          published.first == 1 and run.blames("precision", "softmax", "attn.0") and not run.sick)
            else:
                out.claim(f"{NAMES[dtype]}: NaN loss, healthy weights as published", published.first == 4
                          and published.what == "loss nan" and not published.sick)
                out.claim(f"{NAMES[dtype]}: the guard names the empty mean and keeps the weights", not run.sick
                          and run.blames("data", "nll_loss", "") and "every label is ignored" in str(run.report))

    out, zeros = cases[2], {}
    for dtype, scale in ((F16, 1.0), (F16, LossScaler("cpu").get_scale()), (BF16, 1.0), (F32, 1.0)):
        zeros[dtype, scale], warned = silent_zeros(dtype, scale)
        if (dtype, scale) == (F16, 1.0):
            named = next((line for line in warned if "smallest normal" in line), "")
    for dtype in (F16, BF16, F32):
        best = zeros[dtype, 65536.0 if dtype is F16 else 1.0]
        out.rows.append((NAMES[dtype], f"{zeros[dtype, 1.0]:.0%} of the gradients are exactly 0",
                         named.split(";")[0] if dtype is F16 else "-", f"{best:.0%}"))
    out.claim("fp16 without a scaler loses gradients in silence", zeros[F16, 1.0] > 0.2)
    out.claim("the probes say where", "smallest normal at loss scale 1" in named)
    out.claim("the scaler and bf16 bring them back", zeros[F16, 65536.0] < 0.02 and zeros[BF16, 1.0] < 0.02)
    return cases


if __name__ == "__main__":
    sys.exit(show(*case()))
