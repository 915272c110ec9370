"""fp16 and bf16: overflow, underflow, and a loss scale that is too large."""

import torch
import torch.nn.functional as F
from torch import nn

from bench.diagnosis.step import Net, Step, case, cross, filled, identity, labels, numbers, weighted


@case(
    "half",
    "https://github.com/huggingface/transformers/issues/5651",
    "precision",
    module="ff.wo",
    op="mm|linear",
    samples=(2,),
    fix="island:ff.wo|island:ff",
)
def t5_feed_forward():
    """T5's second projection makes 66246 (here 102400) out of ordinary hidden values: inf in fp16,
    fine in fp32.
    """

    def feed_forward(net, x):
        h = net.wi(x).relu()
        return x + net.wo(h)  # <- guilty

    x = numbers(4, 8).abs()
    x[2] = 200
    ff = Net(feed_forward, wi=filled(8, 64, 1.0), wo=filled(64, 8, 1.0))
    net = Net(
        lambda net, x: net.head(net.norm(net.ff(x))),
        ff=ff,
        norm=nn.LayerNorm(8),
        head=nn.Linear(8, 3),
    )
    return Step(net, [(x, labels())], cross, torch.float16)


@case(
    "half",
    "https://github.com/ultralytics/ultralytics/pull/24990",
    "precision",
    module="attn",
    op="mm|matmul",
    samples=(1,),
    fix="island:attn",
)
def attention_scaled_too_late():
    """q @ k passes 65504 before the scale makes it small; softmax of inf is NaN."""

    def attention(net, x):
        q, k = net.q(x), net.k(x)
        scores = q @ k.transpose(1, 2)  # <- guilty
        return (scores * 64**-0.5).softmax(-1) @ x.to(scores.dtype)

    x = numbers(4, 3, 64)
    x[1] = 40
    attn = Net(attention, q=identity(64), k=identity(64))
    return Step(Net(lambda net, x: net.attn(x), attn=attn), [(x,)], weighted, torch.float16)


@case(
    "half",
    "https://github.com/qubvel-org/segmentation_models.pytorch/issues/463",
    "precision",
    module="",
    op="sum",
    samples=(),
    fix="fp32",
)
def dice_over_a_large_image():
    """The intersection counts pixels: 90000 of them do not fit into fp16. The loss is inf / inf."""

    def loss(net, x, y):
        p = net(x).sigmoid()
        y = y.to(p.dtype)
        overlap = torch.sum(p * y)  # <- guilty
        return 1 - 2 * overlap / (p.float().sum() + y.float().sum())

    conv = nn.Conv2d(1, 1, 1)
    conv.weight.data.fill_(20)
    ones = torch.ones(4, 1, 150, 150)
    return Step(conv, [(ones, ones.clone())], loss, torch.float16)


@case(
    "half",
    "https://github.com/pytorch/pytorch/issues/32137",
    "precision",
    module="",
    op="div|normalize",
    samples=(0,),
    fix="guard|fp32",
)
def normalize_with_an_eps_that_is_zero():
    """F.normalize's eps of 1e-12 is 0 in fp16: a zero vector is divided by 0."""

    def forward(net, x):
        return F.normalize(net.fc(x), dim=-1)  # <- guilty

    x = numbers(4, 6)
    x[0] = 0
    return Step(Net(forward, fc=identity(6)), [(x,)], weighted, torch.float16)


@case(
    "half",
    "https://github.com/pytorch/pytorch/issues/88474",
    "precision",
    module="conv",
    op="conv",
    samples=(3,),
    fix="island:conv",
)
def overflow_that_soils_batch_norm():
    """The convolution overflows; the batch norm after it writes NaN into its running statistics in
    the same step.
    """

    def forward(net, x):
        h = net.conv(x)  # <- guilty
        return net.bn(h.relu())

    conv = nn.Conv1d(3, 16, 3, padding=1, bias=False)
    conv.weight.data.fill_(1.0)
    x = numbers(4, 3, 10)
    x[3] = 20000
    return Step(Net(forward, conv=conv, bn=nn.BatchNorm1d(16)), [(x,)], weighted, torch.float16)


@case(
    "half",
    "https://github.com/pytorch/pytorch/issues/40497",
    "precision",
    module="",
    op="log",
    samples=(2,),
    fix="guard|fp32",
)
def focal_loss_of_a_vanished_probability():
    """sigmoid(-20) is 2e-9, 0 in fp16, and log(0) follows."""

    def loss(net, x, y):
        p = torch.sigmoid(net(x))
        log_p = torch.log(p)  # <- guilty
        return -(y * (1 - p) ** 2 * log_p).mean()

    x = numbers(4, 6)
    x[2, 5] = -20
    return Step(identity(6), [(x, torch.ones(4, 6))], loss, torch.float16)


@case(
    "half",
    "https://github.com/zylo117/Yet-Another-EfficientDet-Pytorch/issues/502",
    "precision",
    module="",
    op="log",
    samples=(1,),
    fix="guard|fp32",
)
def clamp_that_rounds_to_one():
    """1 - 1e-4 is 1 in fp16, so the clamp lets a probability of 1 pass to log(1 - p)."""

    def loss(net, x):
        p = torch.clamp(net(x).sigmoid(), 1e-4, 1.0 - 1e-4)
        return -torch.log(1.0 - p).mean()  # <- guilty

    x = numbers(4, 6)
    x[1, 1] = 12
    return Step(identity(6), [(x,)], loss, torch.float16)


@case(
    "half",
    "https://github.com/huggingface/transformers/pull/17306",
    "precision",
    module="attn",
    op="add|softmax",
    samples=(0,),
    fix="island:attn|guard|fp32",
)
def smallest_number_plus_a_score():
    """finfo(fp16).min - 40 is -inf. A padding row sees padding only: softmax over nothing but -inf
    is 0 / 0.
    """

    def attention(net, x, see):
        scores = net.q(x) @ net.k(x).transpose(1, 2)
        mask = (1 - see.to(scores.dtype)) * torch.finfo(scores.dtype).min
        scores = scores + mask  # <- guilty
        return scores.softmax(-1) @ x.to(scores.dtype)  # <- guilty

    see = torch.ones(4, 3, 3)
    see[0] = torch.ones(3, 3).tril()
    see[0, :, 0] = 0  # causal, and padded on the left: the first row of sample 0 sees nothing
    x = 3 + 0.1 * numbers(4, 3, 8)
    attn = Net(attention, q=identity(8), k=identity(8, -1.0))
    return Step(
        Net(lambda net, *batch: net.attn(*batch), attn=attn), [(x, see)], weighted, torch.float16
    )


@case(
    "half",
    "https://github.com/mit-han-lab/efficientvit/issues/110",
    "precision",
    module="att",
    op="mm|matmul",
    samples=(1,),
    fix="island:att",
)
def linear_attention_sums_the_tokens():
    """k^T v adds up over 100 tokens before anything divides by their number."""

    def attention(net, x):
        q, k, v = (net.qkv(x).relu() for _ in range(3))
        kv = k.transpose(1, 2) @ v  # <- guilty
        return (q @ kv) / ((q @ k.transpose(1, 2)).sum(-1, keepdim=True) + 1e-4)

    x = numbers(4, 100, 4)
    x[1] = 30
    return Step(
        Net(lambda net, x: net.att(x), att=Net(attention, qkv=identity(4))),
        [(x,)],
        weighted,
        torch.float16,
    )


@case(
    "half",
    "https://github.com/open-mmlab/mmdetection/issues/1606",
    "precision",
    module="head",
    op="exp",
    samples=(0,),
    fix="island:head|fp32|guard",
)
def box_decoded_by_exp():
    """FCOS: the distance to a side is exp of the regression; exp(12) = 162755 is inf in fp16."""

    def head(net, x):
        return net.reg(x).exp()  # <- guilty

    x = numbers(4, 4)
    x[0, 3] = 12
    net = Net(lambda net, x: net.head(x), head=Net(head, reg=identity(4)))
    return Step(
        net,
        [(x, torch.ones(4, 4))],
        lambda net, x, y: F.smooth_l1_loss(net(x).float(), y),
        torch.float16,
    )


@case(
    "half",
    "https://github.com/google-ai-edge/LiteRT/issues/9249",
    "precision",
    module="se",
    op="sum",
    samples=(2,),
    fix="island:se",
)
def squeeze_and_excite_by_a_sum():
    """The sum over 256 positions passes 65504 before the division by 256."""

    def excite(net, x):
        pooled = x.sum((2, 3)) / 256  # <- guilty
        return x * net.fc(pooled).sigmoid()[..., None, None]

    x = numbers(4, 3, 16, 16)
    x[2] = 300
    fc = nn.Linear(3, 3)
    fc.weight.data = torch.tensor([[1.0, -1, 1], [1, 1, -1], [-1, 1, 1]])
    conv = nn.Conv2d(3, 3, 1, bias=False)
    conv.weight.data = torch.eye(3)[..., None, None]
    net = Net(lambda net, x: net.se(net.conv(x)), conv=conv, se=Net(excite, fc=fc))
    return Step(net, [(x,)], weighted, torch.float16)


@case(
    "half",
    "https://github.com/cumulo-autumn/StreamDiffusion/issues/114",
    "precision",
    module="decoder.up",
    op="conv",
    samples=(1,),
    fix="island:decoder|fp32",
)
def vae_with_half_weights():
    """The whole decoder in fp16, weights too: its activations grow beyond 65504 and the picture is
    black.
    """

    def decoder(net, x):
        h = net.inp(x)
        h = net.up(h)  # <- guilty
        return net.out(net.norm(h))

    up = nn.Conv1d(8, 8, 3, padding=1)
    up.weight.data.fill_(30)
    inp = nn.Conv1d(4, 8, 1)
    inp.weight.data.fill_(1)
    parts = dict(inp=inp, up=up, norm=nn.GroupNorm(2, 8), out=nn.Conv1d(8, 3, 1))
    x = numbers(4, 4, 6).abs().half()
    x[1] = 100
    return Step(
        Net(lambda net, x: net.decoder(x), decoder=Net(decoder, **parts)).half(),
        [(x,)],
        weighted,
        torch.float16,
        pure=True,
    )


@case(
    "half",
    "https://github.com/fastino-ai/GLiNER2/pull/155",
    "precision",
    module="",
    op="log1p",
    samples=(2,),
    fix="guard|fp32",
)
def survival_in_bf16():
    """1 - 1e-6 is 1 in bf16. log1p(-1) = -inf is swallowed by exp, so the loss is finite and the
    backward 0 * inf.
    """

    def loss(net, x):
        p = net(x).sigmoid()
        # the clamp of the report; clamp itself has slope 0 at its limit
        p = torch.minimum(p, p.new_tensor(1.0 - 1e-6))
        log_survival = torch.log1p(-p)  # <- guilty
        return (1 - log_survival.sum(-1).exp()).mean()

    x = numbers(4, 6) - 2
    x[2, 0] = 12
    return Step(identity(6), [(x,)], loss, torch.bfloat16)


@case(
    "half",
    "https://github.com/Lightning-AI/torchmetrics/issues/1380",
    "precision",
    module="",
    op="sum",
    samples=(3,),
    fix="fp32",
)
def manhattan_distance_of_long_vectors():
    """The sum of 1024 absolute differences of 100 does not fit into fp16."""

    def loss(net, x):
        a, b = net(x).flatten(1), net(-x).flatten(1)
        return (a - b).abs().sum(-1).mean()  # <- guilty

    x = numbers(4, 128, 8)
    x[3] = 50
    return Step(identity(8), [(x,)], loss, torch.float16)


@case("half", "https://github.com/NVIDIA/apex/issues/318", "calibration", fix="nothing")
def loss_scale_too_large():
    """Nothing is wrong: at a scale of 2**20 the gradient of the logits passes 65504, at scale 1 it
    does not.
    """
    return Step(nn.Linear(6, 3), [(numbers(4, 6), labels())], cross, torch.float16, scale=2.0**20)


@case(
    "half",
    "https://github.com/deepspeedai/DeepSpeed/issues/931",
    "calibration",
    micro_batch=1,
    fix="nothing",
)
def loss_scale_too_large_for_one_micro_batch():
    """The first steps of a run at the usual 65536: inputs of 100 make the scaled gradient of the
    weight overflow.
    """
    batches = [(numbers(4, 6), labels()), (100 * numbers(4, 6, seed=1).abs(), labels())]
    return Step(
        nn.Linear(6, 3),
        batches,
        lambda net, x, y: 4 * cross(net, x, y),
        torch.float16,
        scale=2.0**16,
    )
