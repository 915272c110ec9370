# SPDX-License-Identifier: MIT (finite 4.0.0, 2026-11-28)
"""
VLM: nanoVLM in miniature. It reads an image and a question, and writes the answer byte by byte.

A ViT makes patch tokens. A pixel shuffle folds 2x2 of them into one. A Llama-style decoder (RoPE,
RMSNorm, SwiGLU, grouped-query attention, tied embeddings) reads

    <pad> <pad> <bos> <image> ... <image> What is it? frog <eos>       padded on the left, so that
    answers end together

and learns the bytes of the answer. The model is that of huggingface/nanoVLM (Apache-2.0), written
anew. Its issues 50, 165 and 187 (loss NaN) are the reason for the first two points. Half precision
breaks text models in these places:

    masks       A padding row sees padding only. The published mask adds finfo(float32).min =
                -3.4028e38, which rounds to -inf in fp16 and in bf16 (largest 3.3895e38). A softmax
                over -inf alone is 0/0 = NaN. The loss ignores this row, but the next layer computes
                0 * NaN. Here masks are bool (True = attend), and every row may see itself.
                finfo(half).min is no cure: two such masks add up to -inf.
    counting    A mean over no answer token is 0/0. Here an image's loss is its summed token losses
                / max(tokens, 1). The batch's loss is the mean over images, for any split into
                micro-batches and ranks.
    positions   bf16 counts exactly to 256, fp16 to 2048: in bf16 position 257 is 256. Frequencies
                rounded to bf16 turn position 1000 of a head of 64 by up to 0.44 radians too far.
                Here angles are fp32, from int64 positions.
    norms       x * x overflows fp16 from |x| = 256 on. RMSNorm is an fp32 island, and so is the
                cross entropy.

Exact match is judged in one pass, with the true answer as the input ("teacher forced"). Greedy
generation gives the same score: if every argmax is right it writes the true answer, and if one is
wrong it writes another.

Differences from nanoVLM: bytes, not its tokenizer and chat template; one image of one size, not
tiles; both backbones from scratch (init by fan-in, one rate), not SigLIP and SmolLM2 (three rates);
q, k, v in one matrix, and gate, up too; positions that skip padding; the mask; the counting; no
dropout; no cache. The stream is fp32, as there under autocast.

Copy this file alone: it needs torch and nothing else.

Paste::

    import torch
    from vlm import PRESETS, VLM

    options = dict(PRESETS["vlm-test"])
    grid = options.pop("grid")  # patches a side
    model = VLM(class_names=["cat", "dog"], image_size=32, patch_size=32 // grid, **options)
    images = torch.randn(8, 3, 32, 32)
    labels = torch.zeros(8).long()
    loss, metrics = model(images, labels)
    loss.backward()
    print(model.show(images[:2], labels[:2]))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PAD, BOS, IMAGE, EOS = range(256, 260)  # after the 256 bytes; text needs no other tokenizer
VOCABULARY = 260
FOLD = 2  # patches a side that become one token of the decoder
# cross_entropy's mark for a token that does not count: loss and gradient are exactly 0
IGNORE = -100

QUESTIONS = (
    "What is it? ",
    "Name the object in this picture: ",
    "Look closely and say what this shows: ",
)
ASK = "Is this a {}? "  # half the time with the true class, else with a random class

PRESETS = {
    "vlm-test": dict(  # 46 thousand parameters
        grid=4, vit_dim=32, vit_depth=1, vit_heads=2, vit_mlp=64,
        lm_dim=32, lm_depth=2, lm_heads=4, lm_kv_heads=2, lm_mlp=64,
    ),
    "vlm": dict(  # 0.4 million
        grid=8, vit_dim=96, vit_depth=3, vit_heads=2, vit_mlp=256,
        lm_dim=64, lm_depth=2, lm_heads=2, lm_kv_heads=1, lm_mlp=128,
    ),
    # SigLIP-B/16 and SmolLM2-135M, as nanoVLM-222M. Bytes need no table of 49,152 words: 28 million
    # parameters fewer.
    "nanovlm": dict(
        patch_size=16, vit_dim=768, vit_depth=12, vit_heads=12, vit_mlp=3072,
        lm_dim=576, lm_depth=30, lm_heads=9, lm_kv_heads=3, lm_mlp=1536, rope_base=100_000.0,
    ),
}  # fmt: skip


class TooLong(ValueError):
    """Image, question and answer take more than max_length tokens."""


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """softmax(q k^T / sqrt(d)) v: each (B, heads, T, d), bool mask (B, 1, T, T) or None. Returns
    (B, T, heads * d).

    A CPU computes it in fp32, three times as fast as in bf16. CUDA's fused kernels keep scores and
    sums in fp32.
    """
    dtype = torch.float32 if q.device.type == "cpu" else v.dtype
    with torch.autocast(q.device.type, enabled=False):
        out = F.scaled_dot_product_attention(q.to(dtype), k.to(dtype), v.to(dtype), attn_mask=mask)
    return out.to(v.dtype).transpose(1, 2).flatten(2)  # B, T, heads * d


def attention_mask(real: Tensor) -> Tensor:
    """real, bool (B, T): False at padding.

    Returns bool (B, 1, T, T): True where the row may attend to the column.
    """
    T = real.shape[1]
    causal = torch.ones(T, T, dtype=torch.bool, device=real.device).tril()
    itself = torch.eye(T, dtype=torch.bool, device=real.device)  # the guard: no row is empty
    return (causal & real[:, None] | itself)[:, None]  # B, 1, T, T


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE (arXiv 2104.09864) on (B, heads, T, d): i and i + d/2 are a pair.

    A half x gives fp32, cos's dtype.
    """
    a, b = x.chunk(2, -1)  # each B, heads, T, d / 2
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class RotaryAngles(nn.Module):
    """int64 positions (B, T) -> cos and sin, fp32 (B, 1, T, head_dim / 2).

    No buffers: O3 would cast them to half.
    """

    def __init__(self, head_dim: int, base: float = 10_000.0):
        super().__init__()
        if head_dim % 2:
            raise ValueError(
                f"RoPE turns pairs of dimensions: a head of {head_dim} has an odd number of them"
            )
        self.head_dim = head_dim
        self.base = base

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(positions.device.type, enabled=False):
            exponents = (
                torch.arange(0, self.head_dim, 2, device=positions.device).float() / self.head_dim
            )
            # fp32 counts exactly to 2^24
            angles = positions.float()[:, None, :, None] * self.base**-exponents
            return angles.cos(), angles.sin()


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension (arXiv 1910.07467), in fp32.

    The result has the input's dtype.
    """

    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            y = x.float()
            y = y * (y.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * self.weight.float()
        return y.to(x.dtype)


class GroupedQueryAttention(nn.Module):
    """Causal attention.

    `heads / kv_heads` query heads share one key and value head (arXiv 2305.13245).
    """

    def __init__(self, dim: int, heads: int, kv_heads: int):
        super().__init__()
        if dim % heads or heads % kv_heads:
            sizes = f"{dim} dimensions, {heads} heads, {kv_heads} key heads"
            raise ValueError(f"{sizes}: each must divide the one before")
        self.heads = heads
        self.kv_heads = kv_heads
        self.head_dim = dim // heads
        self.qkv = nn.Linear(dim, (heads + 2 * kv_heads) * self.head_dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, mask: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # B, heads + 2 kv_heads, T, head_dim
        qkv = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        # each B, its heads, T, head_dim
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], 1)
        qk = rotate(qkv[:, : self.heads + self.kv_heads], cos, sin).to(v.dtype)
        q, k = qk.split([self.heads, self.kv_heads], 1)
        # Repeated by hand: with enable_gqa=True and a mask, CUDA has only its plain kernel.
        # each B, heads, T, head_dim
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (k, v))
        return self.proj(attend(q, k, v, mask))


class SwiGLU(nn.Module):
    """down(silu(gate) * up), arXiv 2002.05202.

    This product of two activations is the first to overflow in fp16.
    """

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.gate_up = nn.Linear(dim, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)  # each B, T, hidden
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """Pre-norm: x + attn(norm1(x), ...), then x + mlp(norm2(x)). x is fp32 (B, T, dim); a branch
    may be half.
    """

    def __init__(self, norm: Callable[[int], nn.Module], dim: int, attn: nn.Module, mlp: nn.Module):
        super().__init__()
        self.norm1 = norm(dim)
        self.attn = attn
        self.norm2 = norm(dim)
        self.mlp = mlp

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), *context).float()
        return x + self.mlp(self.norm2(x)).float()


class Decoder(nn.Module):
    """Token ids (B, T) and image tokens (B, n, dim) -> logits (B, last, VOCABULARY) of the last
    positions.

    The i-th <image> of a row becomes its i-th image token. Padding may stand anywhere: nothing sees
    or counts it.
    """

    def __init__(
        self, dim: int, depth: int, heads: int, kv_heads: int, hidden: int, rope_base: float
    ):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, dim)
        self.angles = RotaryAngles(dim // heads, rope_base)
        self.blocks = nn.ModuleList(
            Block(RMSNorm, dim, GroupedQueryAttention(dim, heads, kv_heads), SwiGLU(dim, hidden))
            for _ in range(depth)
        )
        self.norm = RMSNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight  # tied

    def forward(self, ids: Tensor, image_tokens: Tensor, last: int) -> Tensor:
        # B, T, dim; bool B, T; bool B, T
        x = self.embed(ids).float()
        here = ids == IMAGE
        real = ids != PAD
        # which image token each position takes
        nth = (here.cumsum(1) - 1).clamp(min=0)[..., None].expand_as(x)
        # masked_scatter's backward makes the host wait
        images = image_tokens.gather(1, nth).to(x.dtype)
        x = torch.where(here[..., None], images, x)
        mask = attention_mask(real)
        cos, sin = self.angles((real.cumsum(1) - 1).clamp(min=0))
        for block in self.blocks:
            x = block(x, mask, cos, sin)
        return self.head(self.norm(x[:, -last:]))  # B, last, VOCABULARY


class VisionAttention(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        if dim % heads:
            raise ValueError(f"{dim} dimensions do not split into {heads} heads")
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        # each B, heads, T, head_dim
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(attend(q, k, v))


class VisionTransformer(nn.Module):
    """Images (B, C, H, W) -> patch tokens (B, (H / patch_size)^2, dim), row by row.

    Pre-norm, no class token.
    """

    def __init__(
        self,
        image_size: int,
        patch_size: int,
        channels: int,
        dim: int,
        depth: int,
        heads: int,
        hidden: int,
    ):
        super().__init__()
        if image_size % patch_size:
            raise ValueError(f"{image_size} pixels do not split into patches of {patch_size}")
        self.patch_size = patch_size
        self.grid = image_size // patch_size
        self.patch = nn.Linear(channels * patch_size**2, dim)
        self.position = nn.Parameter(torch.randn(1, self.grid**2, dim) * 0.02)
        self.blocks = nn.Sequential()
        for _ in range(depth):
            attn = VisionAttention(dim, heads)
            mlp = nn.Sequential(
                nn.Linear(dim, hidden), nn.GELU(approximate="tanh"), nn.Linear(hidden, dim)
            )
            self.blocks.append(Block(partial(nn.LayerNorm, eps=1e-6), dim, attn, mlp))
        self.norm = nn.LayerNorm(dim, eps=1e-6)

    def no_weight_decay(self) -> set[str]:
        return {"position"}

    def forward(self, images: Tensor) -> Tensor:
        # B, grid^2, dim
        x = self.patch(F.pixel_unshuffle(images, self.patch_size).flatten(2).transpose(1, 2))
        return self.norm(self.blocks(x.float() + self.position.float()))


class ModalityProjector(nn.Module):
    """Pixel shuffle (Idefics3, arXiv 2408.12637): (B, grid^2, dim) -> decoder tokens (B, (grid /
    FOLD)^2, out_dim).
    """

    def __init__(self, dim: int, out_dim: int, grid: int):
        super().__init__()
        if grid % FOLD:
            raise ValueError(f"a grid of {grid} patches a side does not fold by {FOLD}")
        self.grid = grid
        self.proj = nn.Linear(dim * FOLD**2, out_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # B, g, g, 2, 2, dim
        x = x.unflatten(1, (self.grid // FOLD, FOLD, self.grid // FOLD, FOLD)).transpose(2, 3)
        # B, g^2, 4 dim (row, column, channel) -> B, g^2, out_dim
        return self.proj(x.flatten(3).flatten(1, 2))


class VLM(nn.Module):
    """Images (B, 3, image_size, image_size) and int64 labels (B,) -> (loss, metrics).

    In training, each image gets a random question, from torch's global generator on the images'
    device. In eval it gets the first of QUESTIONS, so that exact match is classification by writing
    the name.

    Args:
        class_names: the answers, in UTF-8. Short names cost less.
        vit_mlp, lm_mlp: hidden widths of the ViT's MLP and of the decoder's SwiGLU.
        max_length: tokens of a sequence, image included. A longer one is cut at its end; without an
            answer its loss is 0. TooLong if the plain question and the longest name do not fit.
    """

    judged_by = "exact_match"
    needs_classes = True

    def __init__(
        self,
        *,
        class_names: Sequence[str],
        image_size: int = 32,
        patch_size: int = 4,
        channels: int = 3,
        vit_dim: int = 96,
        vit_depth: int = 3,
        vit_heads: int = 2,
        vit_mlp: int = 256,
        lm_dim: int = 64,
        lm_depth: int = 2,
        lm_heads: int = 2,
        lm_kv_heads: int = 1,
        lm_mlp: int = 128,
        rope_base: float = 10_000.0,
        max_length: int = 128,
    ):
        super().__init__()
        self.class_names = list(class_names)
        self.max_length = max_length
        self.vision = VisionTransformer(
            image_size, patch_size, channels, vit_dim, vit_depth, vit_heads, vit_mlp
        )
        self.projector = ModalityProjector(vit_dim, lm_dim, self.vision.grid)
        self.decoder = Decoder(lm_dim, lm_depth, lm_heads, lm_kv_heads, lm_mlp, rope_base)
        self.image_length = (self.vision.grid // FOLD) ** 2
        self.write_sequences()
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear) and module is not self.decoder.head:
                depth = vit_depth if name.startswith("vision") else lm_depth
                # the 2 a block that add to the stream
                out = name.endswith(("attn.proj", "mlp.2", "mlp.down"))
                nn.init.normal_(
                    module.weight, std=(module.in_features * (2 * depth if out else 1)) ** -0.5
                )
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        # the head is tied to it: logits of order 1
        nn.init.normal_(self.decoder.embed.weight, std=lm_dim**-0.5)

    def prompt(self, question: str) -> list[int]:
        """The tokens before the answer."""
        return [BOS, *[IMAGE] * self.image_length, *question.encode()]

    def write_sequences(self) -> None:
        """Write every (question, answer) into integer buffers, which are not saved. A batch is a
        gather of their rows.

        With C classes and K questions, row k * C + c asks question k about class c, and row K * C +
        2 * c + i asks ASK about class c, with the answer no (i = 0) or yes (i = 1).
        """
        pairs = [(question, name) for question in QUESTIONS for name in self.class_names]
        pairs += [
            (ASK.format(name), answer) for name in self.class_names for answer in ("no", "yes")
        ]
        rows = []
        counts = []
        for question, answer in pairs:
            prompt = self.prompt(question)
            rows.append([*prompt, *answer.encode(), EOS][: self.max_length])
            counts.append(max(0, len(rows[-1]) - len(prompt)))
        longest = (
            len(self.prompt(QUESTIONS[0]))
            + max(len(name.encode()) for name in self.class_names)
            + 1
        )
        if longest > self.max_length:
            sentence = f"image, {QUESTIONS[0]!r} and its longest answer take {longest} tokens"
            raise TooLong(f"{sentence}, and max_length is {self.max_length}")
        self.width = max(map(len, rows))
        self.eval_width = longest
        self.answer_length = max(counts)
        padded = torch.tensor([[PAD] * (self.width - len(row)) + row for row in rows])
        self.register_buffer("sequences", padded, persistent=False)  # int64 (rows, width)
        # answer tokens, <eos> included
        self.register_buffer("counts", torch.tensor(counts), persistent=False)

    def choose(self, labels: Tensor) -> Tensor:
        """int64 (B,): a row of `sequences` for each label, random in training, the plain question
        in eval.
        """
        if not self.training:
            return labels
        C = len(self.class_names)
        K = len(QUESTIONS)
        kind = torch.randint(K + 1, labels.shape, device=labels.device)
        other = torch.randint(C, labels.shape, device=labels.device)
        asked = torch.where(torch.rand(labels.shape, device=labels.device) < 0.5, labels, other)
        return torch.where(kind < K, kind * C + labels, K * C + 2 * asked + (asked == labels))

    def image_tokens(self, images: Tensor) -> Tensor:
        return self.projector(self.vision(images))  # B, image_length, lm_dim

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        rows = self.choose(labels)
        # padding is on the left
        ids = self.sequences[rows, -(self.width if self.training else self.eval_width) :]
        # B, answer_length, V
        logits = self.decoder(ids[:, :-1], self.image_tokens(images), self.answer_length)
        losses, exact = score(logits, ids[:, -self.answer_length :], self.counts[rows])
        return losses.mean(), {"loss": losses.detach(), "exact_match": exact}

    @torch.no_grad()
    def generate(self, images: Tensor, question: str = QUESTIONS[0]) -> list[str]:
        """Greedy answers, one text per image.

        There is no cache: each byte costs a whole pass of the decoder.
        """
        ids = torch.tensor(self.prompt(question), device=images.device).expand(len(images), -1)
        prompt = ids.shape[1]
        image_tokens = self.image_tokens(images)
        if prompt >= self.max_length:
            sentence = f"the question takes {prompt} of max_length={self.max_length} tokens"
            raise ValueError(f"{sentence}: no room to answer")
        for _ in range(min(self.answer_length, self.max_length - prompt)):
            logits = self.decoder(ids, image_tokens, 1)  # B, 1, VOCABULARY
            logits[..., IMAGE] = -torch.inf  # an answer holds no image
            ids = torch.cat([ids, logits.argmax(-1)], 1)
        rows = [row[: row.index(EOS)] if EOS in row else row for row in ids[:, prompt:].tolist()]
        return [
            bytes(token for token in row if token < 256).decode(errors="replace") for row in rows
        ]

    @torch.no_grad()
    def show(self, images: Tensor, labels: Tensor) -> list[str]:
        """One line per image: the plain question, what the model wrote, the truth."""
        answers = zip(self.generate(images), labels.tolist(), strict=True)
        return [
            f"Q: {QUESTIONS[0].strip()} A: {said} (true: {self.class_names[label]})"
            for said, label in answers
        ]


def score(logits: Tensor, targets: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Logits (B, A, V) and targets (B, A) -> (losses, exact), each fp32 (B,).

    The last counts[i] targets of row i are the answer. losses[i] is the mean cross entropy of the
    answer's tokens, and 0 if there are none. exact[i] is 100 if there are tokens and all argmaxes
    are right, else 0.
    """
    A = targets.shape[1]
    answer = torch.arange(A, device=targets.device) >= A - counts[:, None]
    with torch.autocast(logits.device.type, enabled=False):
        ignored = targets.masked_fill(~answer, IGNORE)
        losses = F.cross_entropy(
            logits.float().transpose(1, 2), ignored, ignore_index=IGNORE, reduction="none"
        )
        losses = losses.sum(1) / counts.clamp(min=1)
    right = ((logits.argmax(-1) == targets) | ~answer).all(1) & (counts > 0)
    return losses, right.float() * 100
