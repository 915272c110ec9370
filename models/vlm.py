"""
VLM: nanoVLM in miniature. It looks at an image, reads a question, and writes the answer byte by byte.

A ViT makes patch tokens, a pixel shuffle folds 2x2 of them into one, a Llama-style decoder (RoPE, RMSNorm, SwiGLU,
grouped-query attention, tied embeddings) reads

    <pad> <pad> <bos> <image> ... <image> What is it? frog <eos>       padded on the left, so that answers end together

and learns the bytes of the answer. The model is that of huggingface/nanoVLM (Apache-2.0), written anew; its issues 50,
165 and 187 (loss NaN) are why the first two lines below exist. Where half precision breaks text models:

    masks       A padding row sees padding only. The published mask adds finfo(float32).min = -3.4028e38, which rounds
                to -inf in fp16 and in bf16 too (largest 3.3895e38); a softmax over nothing but -inf is 0/0 = NaN. The
                loss ignores that row, the next layer's 0 * NaN does not. Here: bool masks (True = attend), and every
                row may see itself. finfo(half).min is no cure: two such masks add up to -inf.
    counting    A mean over no answer token is 0/0. Here an image's loss is its summed token losses / max(tokens, 1),
                and the batch's the mean over images, however they are cut into micro-batches and ranks.
    positions   bf16 counts exactly to 256, fp16 to 2048: position 257 is 256. Frequencies rounded to bf16 turn position
                1000 of a head of 64 wrong by up to 0.44 radians. Here angles are fp32 from int64 positions, and nothing
                of RoPE is a buffer that O3 could cast.
    norms       x * x overflows fp16 from |x| = 256 on. RMSNorm is an fp32 island; so is the cross entropy.

Exact match is judged in one pass, with the true answer as the input ("teacher forced"). Greedy generation scores the
same: where every argmax is right it writes that very answer, where one is wrong it leaves it.

Copy this file alone: it needs torch and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PAD, BOS, IMAGE, EOS = range(256, 260)  # after the 256 bytes; text needs no other tokenizer
VOCABULARY = 260
FOLD = 2  # patches a side that become one token of the decoder
IGNORE = -100  # cross_entropy's mark for "this token does not count": loss and gradient are exactly 0

QUESTIONS = ("What is it? ", "Name the object in this picture: ", "Look closely and say what this shows: ")
ASK = "Is this a {}? "  # the true class half the time, else any of them

PRESETS = {
    "vlm-test": dict(grid=4, vit_dim=32, vit_depth=1, vit_heads=2, vit_mlp=64, lm_dim=32, lm_depth=2, lm_heads=4,
                     lm_kv_heads=2, lm_mlp=64),  # 46 thousand parameters
    "vlm": dict(grid=8, vit_dim=96, vit_depth=3, vit_heads=2, vit_mlp=256, lm_dim=64, lm_depth=2, lm_heads=2,
                lm_kv_heads=1, lm_mlp=128),  # 0.4 million
    # SigLIP-B/16 and SmolLM2-135M, as nanoVLM-222M: 28 million fewer, since bytes need no table of 49,152 words
    "nanovlm": dict(patch_size=16, vit_dim=768, vit_depth=12, vit_heads=12, vit_mlp=3072, lm_dim=576,
                    lm_depth=30, lm_heads=9, lm_kv_heads=3, lm_mlp=1536, rope_base=100_000.0),
}  # fmt: skip


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """softmax(q k^T / sqrt(d)) v: (B, heads, T, d) each, bool mask (B, 1, T, T) or None; returns (B, T, heads * d).

    On a CPU in fp32, where it is faster: (128, 4, 72, 32) forward and backward takes 18 ms, bf16 60 (torch 2.15, 2
    cores). On CUDA in the dtype given; the fused kernels keep scores and sums in fp32.
    """
    dtype = torch.float32 if q.device.type == "cpu" else v.dtype
    with torch.autocast(q.device.type, enabled=False):
        out = F.scaled_dot_product_attention(q.to(dtype), k.to(dtype), v.to(dtype), attn_mask=mask)
    return out.to(v.dtype).transpose(1, 2).flatten(2)


def attention_mask(real: Tensor) -> Tensor:
    """real, bool (B, T): False where there is padding. Returns bool (B, 1, T, T), True = row may attend to column."""
    T = real.shape[1]
    causal = torch.ones(T, T, dtype=torch.bool, device=real.device).tril()
    itself = torch.eye(T, dtype=torch.bool, device=real.device)  # the guard: no row is empty
    return (causal & real[:, None] | itself)[:, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE (arXiv 2104.09864) on (B, heads, T, d): i and i + d/2 turn together. Half x gives fp32, as cos is."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class RotaryAngles(nn.Module):
    """int64 positions (B, T) to cos and sin, fp32 (B, 1, T, head_dim / 2). No buffers: O3 would cast them to half."""

    def __init__(self, head_dim: int, base: float = 10_000.0):
        super().__init__()
        if head_dim % 2:
            raise ValueError(f"RoPE turns pairs of dimensions: a head of {head_dim} has an odd number of them")
        self.head_dim, self.base = head_dim, base

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(positions.device.type, enabled=False):
            exponents = torch.arange(0, self.head_dim, 2, device=positions.device).float() / self.head_dim
            angles = positions.float()[:, None, :, None] * self.base**-exponents  # fp32 counts exactly to 2^24
            return angles.cos(), angles.sin()


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension (arXiv 1910.07467), in fp32; returns the input's dtype."""

    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            y = x.float()
            y = y * (y.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * self.weight.float()
        return y.to(x.dtype)


class GroupedQueryAttention(nn.Module):
    """Causal attention in which `heads / kv_heads` query heads share a key and value head (arXiv 2305.13245)."""

    def __init__(self, dim: int, heads: int, kv_heads: int):
        super().__init__()
        if dim % heads or heads % kv_heads:
            raise ValueError(f"{dim} dimensions, {heads} heads, {kv_heads} key heads: each must divide the one before")
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.qkv = nn.Linear(dim, (heads + 2 * kv_heads) * self.head_dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, mask: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # B, heads + 2 kv_heads, T, head_dim
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], 1)
        qk = rotate(qkv[:, : self.heads + self.kv_heads], cos, sin).to(v.dtype)
        q, k = qk.split([self.heads, self.kv_heads], 1)
        # Repeated by hand: enable_gqa=True with a mask would leave CUDA only its plain kernel
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (k, v))
        return self.proj(attend(q, k, v, mask))


class SwiGLU(nn.Module):
    """down(silu(gate) * up), arXiv 2002.05202: a product of two activations, in fp16 the first thing to overflow."""

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.gate_up, self.down = nn.Linear(dim, 2 * hidden, bias=False), nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """Pre-norm, of the decoder and of the vision transformer: x + attn(norm1(x), ...), then x + mlp(norm2(x))."""

    def __init__(self, norm: type[nn.Module], dim: int, attn: nn.Module, mlp: nn.Module):
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = norm(dim), attn, norm(dim), mlp

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), *context)
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    """Token ids (B, T) and image tokens (B, n, dim) to logits (B, last, VOCABULARY) of the last positions.

    The i-th <image> of a row is replaced by its i-th image token. Padding may stand anywhere; it is never attended to,
    and positions count real tokens only, so it changes nothing.
    """

    def __init__(self, dim: int, depth: int, heads: int, kv_heads: int, hidden: int, rope_base: float):
        super().__init__()
        self.embed, self.angles = nn.Embedding(VOCABULARY, dim), RotaryAngles(dim // heads, rope_base)
        self.blocks = nn.ModuleList(
            Block(RMSNorm, dim, GroupedQueryAttention(dim, heads, kv_heads), SwiGLU(dim, hidden)) for _ in range(depth)
        )
        self.norm, self.head = RMSNorm(dim), nn.Linear(dim, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight  # tied

    def forward(self, ids: Tensor, image_tokens: Tensor, last: int) -> Tensor:
        x, here, real = self.embed(ids), ids == IMAGE, ids != PAD
        nth = (here.cumsum(1) - 1).clamp(min=0)[..., None].expand_as(x)
        images = image_tokens.gather(1, nth).to(x.dtype)  # masked_scatter's backward would wait for the device
        x = torch.where(here[..., None], images, x)
        mask = attention_mask(real)
        cos, sin = self.angles((real.cumsum(1) - 1).clamp(min=0))
        for block in self.blocks:
            x = block(x, mask, cos, sin)
        return self.head(self.norm(x[:, -last:]))


class VisionAttention(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        if dim % heads:
            raise ValueError(f"{dim} dimensions do not split into {heads} heads")
        self.heads, self.qkv, self.proj = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(attend(q, k, v))


class VisionTransformer(nn.Module):
    """Images (B, 3, H, W) to patch tokens (B, (H / patch_size)^2, dim), row by row; pre-norm, no class token."""

    def __init__(self, image_size: int, patch_size: int, dim: int, depth: int, heads: int, hidden: int):
        super().__init__()
        if image_size % patch_size:
            raise ValueError(f"{image_size} pixels do not split into patches of {patch_size}")
        self.patch_size, self.grid = patch_size, image_size // patch_size
        self.patch = nn.Linear(3 * patch_size**2, dim)
        self.position = nn.Parameter(torch.randn(1, self.grid**2, dim) * 0.02)
        self.blocks = nn.Sequential()
        for _ in range(depth):
            attn = VisionAttention(dim, heads)
            mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))
            self.blocks.append(Block(nn.LayerNorm, dim, attn, mlp))
        self.norm = nn.LayerNorm(dim)

    def no_weight_decay(self) -> set[str]:
        return {"position"}

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(F.pixel_unshuffle(images, self.patch_size).flatten(2).transpose(1, 2))  # B, grid^2, dim
        return self.norm(self.blocks(x + self.position.to(x.dtype)))


class ModalityProjector(nn.Module):
    """Pixel shuffle (as in Idefics3, arXiv 2408.12637): FOLD x FOLD neighbours become one decoder token."""

    def __init__(self, dim: int, out_dim: int, grid: int):
        super().__init__()
        if grid % FOLD:
            raise ValueError(f"a grid of {grid} patches a side does not fold by {FOLD}")
        self.grid = grid
        self.proj = nn.Linear(dim * FOLD**2, out_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2).unflatten(2, (self.grid, self.grid))  # B, dim, grid, grid
        return self.proj(F.pixel_unshuffle(x, FOLD).flatten(2).transpose(1, 2))


class VLM(nn.Module):
    """Images (B, 3, image_size, image_size) and int64 labels (B,) to (loss, metrics); see the head of the file.

    In training each image is asked a question drawn from torch's global generator on the images' device; in eval
    always the first of QUESTIONS, so that exact match is classification by writing the name.

    Args:
        class_names: what the answers are made of; UTF-8, short ones are cheaper.
        vit_mlp, lm_mlp: hidden widths, of GELU and SwiGLU.
        max_length: tokens of a sequence, image included. A longer one loses its end, up to the whole answer: then no
            token counts and its loss is 0. ValueError if the plain question and the longest name do not fit.
    """

    judged_by = "exact_match"

    def __init__(
        self, *, class_names: Sequence[str], image_size: int = 32, patch_size: int = 4, vit_dim: int = 96,
        vit_depth: int = 3, vit_heads: int = 2, vit_mlp: int = 256, lm_dim: int = 64, lm_depth: int = 2,
        lm_heads: int = 2, lm_kv_heads: int = 1, lm_mlp: int = 128, rope_base: float = 10_000.0, max_length: int = 128,
    ):  # fmt: skip
        super().__init__()
        self.class_names, self.max_length = list(class_names), max_length
        self.vision = VisionTransformer(image_size, patch_size, vit_dim, vit_depth, vit_heads, vit_mlp)
        self.projector = ModalityProjector(vit_dim, lm_dim, self.vision.grid)
        self.decoder = Decoder(lm_dim, lm_depth, lm_heads, lm_kv_heads, lm_mlp, rope_base)
        self.image_length = (self.vision.grid // FOLD) ** 2
        self.write_sequences()
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear) and module is not self.decoder.head:
                depth = vit_depth if name.startswith("vision") else lm_depth
                out = name.endswith(("attn.proj", "mlp.2", "mlp.down"))  # 2 a block write into the residual stream
                nn.init.normal_(module.weight, std=(module.in_features * (2 * depth if out else 1)) ** -0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        nn.init.normal_(self.decoder.embed.weight, std=lm_dim**-0.5)  # normed states times this: logits of order 1

    def prompt(self, question: str) -> list[int]:
        """The tokens before the answer."""
        return [BOS, *[IMAGE] * self.image_length, *question.encode()]

    def write_sequences(self) -> None:
        """Every (question, answer) once, as integer buffers that are not saved: a batch is a gather of rows.

        With C classes and K questions: row k * C + c is question k about class c; rows K * C + 2 * c and the next are
        ASK about class c, answered no and yes.
        """
        pairs = [(question, name) for question in QUESTIONS for name in self.class_names]
        pairs += [(ASK.format(name), answer) for name in self.class_names for answer in ("no", "yes")]
        rows, counts = [], []
        for question, answer in pairs:
            prompt = self.prompt(question)
            rows.append([*prompt, *answer.encode(), EOS][: self.max_length])
            counts.append(max(0, len(rows[-1]) - len(prompt)))
        longest = len(self.prompt(QUESTIONS[0])) + max(len(name.encode()) for name in self.class_names) + 1
        if longest > self.max_length:
            raise ValueError(f"{QUESTIONS[0]!r} and its longest answer take {longest} tokens: raise max_length to that")
        self.width, self.eval_width, self.answer_length = max(map(len, rows)), longest, max(counts)
        padded = torch.tensor([[PAD] * (self.width - len(row)) + row for row in rows])
        self.register_buffer("sequences", padded, persistent=False)  # int64 (rows, width)
        self.register_buffer("counts", torch.tensor(counts), persistent=False)  # answer tokens, <eos> included

    def choose(self, labels: Tensor) -> Tensor:
        """A row of the table for each label: a random one in training, the plain question in eval."""
        if not self.training:
            return labels
        C, K = len(self.class_names), len(QUESTIONS)
        kind = torch.randint(K + 1, labels.shape, device=labels.device)
        other = torch.randint(C, labels.shape, device=labels.device)
        asked = torch.where(torch.rand(labels.shape, device=labels.device) < 0.5, labels, other)
        return torch.where(kind < K, kind * C + labels, K * C + 2 * asked + (asked == labels))

    def image_tokens(self, images: Tensor) -> Tensor:
        return self.projector(self.vision(images))

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        rows = self.choose(labels)
        ids = self.sequences[rows, -(self.width if self.training else self.eval_width) :]  # padding is on the left
        logits = self.decoder(ids[:, :-1], self.image_tokens(images), self.answer_length)
        losses, exact = score(logits, ids[:, -self.answer_length :], self.counts[rows])
        return losses.mean(), {"loss": losses.detach(), "exact_match": exact}

    @torch.no_grad()
    def generate(self, images: Tensor, question: str = QUESTIONS[0]) -> list[str]:
        """Greedy answers, one text per image; without a cache, each byte costs a whole pass of the decoder."""
        ids = torch.tensor(self.prompt(question), device=images.device).expand(len(images), -1)
        prompt, image_tokens = ids.shape[1], self.image_tokens(images)
        if prompt >= self.max_length:
            raise ValueError(f"the question takes {prompt} of max_length={self.max_length} tokens: no room to answer")
        for _ in range(min(self.answer_length, self.max_length - prompt)):
            ids = torch.cat([ids, self.decoder(ids, image_tokens, 1).argmax(-1)], 1)
        rows = [row[: row.index(EOS)] if EOS in row else row for row in ids[:, prompt:].tolist()]
        return [bytes(token for token in row if token < 256).decode(errors="replace") for row in rows]

    @torch.no_grad()
    def show(self, images: Tensor, labels: Tensor) -> list[str]:
        """One line per image: the plain question, what the model wrote, the truth."""
        answers = zip(self.generate(images), labels.tolist(), strict=True)
        return [f"Q: {QUESTIONS[0].strip()} A: {said} (true: {self.class_names[label]})" for said, label in answers]


def score(logits: Tensor, targets: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Logits (B, A, V) and targets (B, A), of which the last counts[i] are the answer: (losses, exact), fp32 (B,).

    losses[i] = summed cross entropy of the answer's tokens / how many; 0 if there is none. exact[i] = 100 if there is
    one and all argmaxes are right, else 0.
    """
    A = targets.shape[1]
    answer = torch.arange(A, device=targets.device) >= A - counts[:, None]
    with torch.autocast(logits.device.type, enabled=False):
        ignored = targets.masked_fill(~answer, IGNORE)
        losses = F.cross_entropy(logits.float().transpose(1, 2), ignored, ignore_index=IGNORE, reduction="none")
        losses = losses.sum(1) / counts.clamp(min=1)
    right = ((logits.argmax(-1) == targets) | ~answer).all(1) & (counts > 0)
    return losses, right.float() * 100
