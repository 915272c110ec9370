"""The second half of the cases of bench/diagnosis.py: data, state, divergence, lawful that looks
guilty, exotic.
"""

from __future__ import annotations

import functools
from collections import UserDict
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from bench.diagnosis_cases import (
    INF,
    NAN,
    Net,
    Step,
    case,
    cross,
    filled,
    identity,
    labels,
    mean,
    numbers,
    weighted,
)

# --- Bad data: dicts, targets, one micro-batch of several

@case("data", "https://github.com/pytorch/pytorch/issues/70348", verdict="data", samples=None,
      micro_batch=1, fix="count")
def every_label_ignored():
    """The second of three micro-batches has no label but -100: a mean over nothing."""
    batches = [(numbers(4, 6), labels()), (numbers(4, 6), torch.full((4,), -100)),
               (numbers(4, 6), labels())]
    return Step(nn.Linear(6, 3), batches, cross)


@case("data", "https://github.com/prs-eth/Marigold/issues/111", verdict="data", samples=(2,),
      fix="samples")
def nan_pixel_in_a_dict():
    """The batch is one dict, and one picture in it holds a NaN."""
    x = numbers(4, 6)
    x[2, 3] = NAN
    return Step(nn.Linear(6, 3), [({"image": x, "label": labels()},)],
                lambda net, batch: cross(net, batch["image"], batch["label"]))


@case("data", "https://github.com/matterport/Mask_RCNN/issues/159", verdict=("data", "divergence"),
      module="", op="log", samples=(1,), fix=("guard", "samples"))
def ground_truth_box_without_height():
    """The regression target is log(height / anchor), and one box has height 0."""
    def loss(net, anchors, boxes):
        target = torch.log(boxes / anchors)  # <- guilty
        return F.smooth_l1_loss(net(anchors), target)

    boxes = numbers(4, 2, seed=1).abs() + 0.5
    boxes[1, 1] = 0
    return Step(nn.Linear(2, 2), [(numbers(4, 2).abs() + 0.5, boxes)], loss)


@case("data", "https://github.com/milesial/Pytorch-UNet/issues/291", verdict="data", samples=(1,),
      fix="samples")
def grey_value_for_a_label():
    """A mask was stored as grey values: label 192 where there are two classes.

    Run, it raises IndexError.
    """
    y = torch.zeros(4, 5, dtype=torch.long)
    y[1, 2] = 192
    return Step(nn.Conv1d(1, 2, 1), [(numbers(4, 1, 5), y)], cross, num_classes=2)


@case("data", "https://github.com/TencentGameMate/gnn_cross_lingual/issues/5", verdict="data",
      fix="samples")
def label_equal_to_the_number_of_classes():
    """12 classes and a label 12, and nobody tells the tool the number of classes: the step only
    raises.
    """
    return Step(nn.Linear(6, 12), [(numbers(4, 6), torch.tensor([0, 3, 12, 11]))], cross)


@case("data", "https://github.com/EricFillion/happy-transformer/issues/248", verdict="data",
      samples=(0,), micro_batch=1, fix="samples")
def negative_label_in_the_second_dict():
    """Label -1 in a dict with named columns, in the second micro-batch."""
    batches = [({"text": numbers(4, 6), "labels": labels()},),
               ({"text": numbers(4, 6), "labels": labels() - 1},)]
    batches[1][0]["labels"][3] = 2
    return Step(nn.Linear(6, 3), batches,
                lambda net, batch: cross(net, batch["text"], batch["labels"]), num_classes=3)


@case("data", "https://github.com/Nixtla/neuralforecast/issues/186", verdict="data", samples=(3,),
      micro_batch=2, fix="samples")
def missing_target_in_the_third_micro_batch():
    """A missing value in column y is NaN, and nobody masks it."""
    y = numbers(4, 6, seed=3)
    y[3, 0] = NAN
    batches = [(numbers(4, 6), numbers(4, 6)), (numbers(4, 6), numbers(4, 6)), (numbers(4, 6), y)]
    return Step(nn.Linear(6, 6), batches, lambda net, x, y: F.mse_loss(net(x), y))


@case("data", "https://github.com/ypwhs/captcha_break/issues/29", verdict=("data", "divergence"),
      module="", op="ctc", samples=(1,), fix=("ctc", "samples"))
def ctc_target_longer_than_the_input():
    """Time first. Five equal letters need nine frames, there are six: no path, the loss is inf."""
    def loss(net, x, target):
        log_p = net(x).log_softmax(-1)  # T, N, C
        lengths = torch.tensor([2, 5, 2, 3])
        return F.ctc_loss(log_p, target, torch.full((4,), 6), lengths)  # <- guilty

    target = torch.tensor([[1, 2, 0, 0, 0], [3, 3, 3, 3, 3], [2, 1, 0, 0, 0], [1, 2, 3, 0, 0]])
    return Step(nn.Linear(5, 4), [(numbers(6, 4, 5), target)], loss)


@case("data", "https://github.com/pytorch/pytorch/issues/50224", verdict="data", samples=(),
      micro_batch=1, fix="count")
def empty_micro_batch():
    """No positive box in the whole micro-batch: the mean over no sample is NaN."""
    batches = [(numbers(4, 6), labels()), (numbers(0, 6), labels(0))]
    return Step(nn.Linear(6, 3), batches, cross)


@case("data", "https://github.com/csteinmetz1/auraloss/issues/25", verdict=("data", "divergence"),
      module="", op="div", samples=(2,), fix=("guard", "samples"))
def si_sdr_of_a_silent_target():
    """The target of one clip is silence: the projection on it divides by its energy, 0."""
    def loss(net, x, target):
        out = net(x)
        energy = target.pow(2).sum(-1, keepdim=True)
        alpha = (out * target).sum(-1, keepdim=True) / energy  # <- guilty
        noise = out - alpha * target
        ratio = (alpha * target).pow(2).sum(-1) / (noise.pow(2).sum(-1) + 1e-8)
        return -10 * torch.log10(ratio + 1e-8).mean()

    target = numbers(4, 6, seed=1)
    target[2] = 0
    return Step(nn.Linear(6, 6), [(numbers(4, 6), target)], loss)


@dataclass
class Imputed:
    intact: Tensor
    target: Tensor


@case("data", "https://github.com/WenjieDu/PyPOTS/issues/232", verdict="data", samples=(1,),
      fix="samples")
def missing_value_in_a_dataclass():
    """The batch is a dataclass, and the series that should be intact has a gap."""
    x = numbers(4, 6)
    x[1, 4] = NAN
    return Step(nn.Linear(6, 6), [(Imputed(x, numbers(4, 6, seed=1)),)],
                lambda net, batch: F.mse_loss(net(batch.intact), batch.target))


@case("data", "https://github.com/ratschlab/DeepSpot/issues/9", verdict="data", samples=(0,),
      micro_batch=1, fix="samples")
def empty_spot_in_a_mapping():
    """An encoding is a UserDict, no dict.

    An empty spot has features NaN, in the second micro-batch.
    """
    x = numbers(4, 6)
    x[0] = NAN
    batches = [(UserDict(features=h, counts=numbers(4, 6, seed=1)),) for h in (numbers(4, 6), x)]
    return Step(nn.Linear(6, 6), batches,
                lambda net, batch: F.mse_loss(net(batch["features"]), batch["counts"]))


# --- Bad state: weights, buffers of BatchNorm, optimizer


@case("state", "https://github.com/gordicaleksa/pytorch-GAT/issues/11", verdict="weights",
      names="scoring", fix="state")
def parameter_never_initialised():
    """nn.Parameter(torch.Tensor(...)) holds what was in memory: here a NaN."""
    net = Net(lambda net, x: net.fc(x) * net.scoring, fc=nn.Linear(6, 3))
    net.scoring = nn.Parameter(torch.tensor([1.0, NAN, 1.0]))
    return Step(net, [(numbers(4, 6), labels())], cross)


@case("state", "https://github.com/openai/CLIP/issues/15", verdict="weights",
      names="text_projection", fix="state")
def projection_never_initialised():
    """torch.empty again; what was in memory reads as 2.7e38, finite and hopeless."""
    net = Net(lambda net, x: net.fc(x) @ net.text_projection, fc=identity(6))
    net.text_projection = nn.Parameter(
        numbers(6, 3).index_put((torch.tensor([2]), torch.tensor([1])), torch.tensor([2.7e38]))
    )
    return Step(net, [(numbers(4, 6), labels())], cross)


@case("state", "https://github.com/sauradip/STALE/issues/16", verdict="weights",
      names="bg_embeddings", fix="state")
def background_embedding_never_initialised():
    """A parameter that is compared by cosine, left as torch.empty: inf in it, NaN after the
    normalisation.
    """
    net = Net(lambda net, x: net.fc(x) @ F.normalize(net.bg_embeddings, dim=-1).T, fc=identity(6))
    net.bg_embeddings = nn.Parameter(numbers(3, 6))
    net.bg_embeddings.data[0, 0] = INF
    return Step(net, [(numbers(4, 6), labels())], cross)


@case("state", "https://github.com/pytorch/pytorch/issues/96798", verdict="weights",
      names="running_mean", fix="state")
def frozen_batch_norm_with_bad_statistics():
    """An overflow of an earlier step left NaN in the running mean; it shows when the layer is used
    in eval mode.
    """
    net = Net(lambda net, x: net.head(net.bn(net.fc(x))), fc=identity(6), bn=nn.BatchNorm1d(6),
              head=nn.Linear(6, 3))
    net.bn.running_mean[4] = NAN
    return Step(net.eval(), [(numbers(4, 6), labels())], cross)


@case("state", "https://github.com/VectorInstitute/FL4Health/pull/39",
      verdict=("weights", "divergence"), module="bn", op="batch_norm", fix=("state", "statistics"))
def negative_running_variance():
    """Averaged like a weight, with momentum, a running variance became negative; its root is NaN.
    """
    def forward(net, x):
        h = net.bn(net.fc(x))  # <- guilty
        return net.head(h)

    net = Net(forward, fc=identity(6), bn=nn.BatchNorm1d(6), head=nn.Linear(6, 3))
    net.bn.running_var[1] = -0.5
    return Step(net.eval(), [(numbers(4, 6), labels())], cross)


@case("state", "https://github.com/NVIDIA-NeMo/RL/issues/3544", verdict="weights", names="exp_avg",
      fix="state")
def optimizer_restored_with_nan():
    """Loss and gradients are finite, the restored moments are not: the update would be NaN."""
    net = nn.Linear(6, 3)
    optimizer = torch.optim.AdamW(net.parameters())
    cross(net, numbers(4, 6), labels()).backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.state[net.weight]["exp_avg"][1, 1] = NAN
    return Step(net, [(numbers(4, 6), labels())], cross, state=optimizer.state_dict())


@case("state", "https://github.com/ageron/handson-ml2/issues/32", verdict="weights", names="hidden",
      fix="state")
def hidden_state_carried_over():
    """A stateful RNN keeps the hidden state of the batch before, which had gone to NaN."""
    def forward(net, x):
        out, hidden = net.rnn(x, net.hidden)
        net.hidden = hidden.detach()
        return net.head(out[:, -1])

    net = Net(forward, rnn=nn.GRU(6, 5, batch_first=True), head=nn.Linear(5, 3))
    net.register_buffer("hidden", torch.zeros(1, 4, 5))
    net.hidden[0, 2] = NAN
    return Step(net, [(numbers(4, 7, 6), labels())], cross)


# --- True divergence: bad in fp32 too

@case("divergence", "https://github.com/vanderschaarlab/synthcity/issues/331", verdict="divergence",
      module="", op="exp", samples=(2,), fix="guard")
def vae_log_variance():
    """An unbounded log variance of 95: exp is inf, and so is the KL term."""
    def loss(net, x):
        mu, logvar = net(x).chunk(2, -1)
        kl = 1 + logvar - mu.pow(2) - logvar.exp()  # <- guilty
        return -0.5 * kl.sum(-1).mean()

    x = numbers(4, 6)
    x[2, 4] = 95
    return Step(identity(6), [(x,)], loss)


@case("divergence", "https://github.com/VincentStimper/normalizing-flows/issues/47",
      verdict="divergence", module="flow.coupling", op="exp", samples=(0,), fix="guard")
def affine_coupling():
    """RealNVP scales by exp of what a network says: 90 is too much."""
    def couple(net, z):
        z1, z2 = z.chunk(2, -1)
        return torch.cat([z1, z2 * torch.exp(net.scale(z1))], -1)  # <- guilty

    flow = Net(lambda net, z: net.coupling(z), coupling=Net(couple, scale=identity(3)))
    z = numbers(4, 6)
    z[0, 1] = 90
    return Step(Net(lambda net, z: net.flow(net.fc(z)), flow=flow, fc=identity(6)), [(z,)],
                lambda net, z: net(z).pow(2).mean())


@case("divergence", "https://github.com/jorge-pessoa/pytorch-msssim/issues/2", verdict="divergence",
      module="", op="pow", samples=(), fix="guard")
def ms_ssim_of_unlike_pictures():
    """A contrast term may be negative, and a negative number has no power of 0.3."""
    def loss(net, x, y):
        out = net(x)
        cs = torch.stack([(F.avg_pool1d(out, k) * F.avg_pool1d(y, k)).mean() for k in (1, 2, 4)])
        return 1 - (cs ** torch.tensor([0.3, 0.4, 0.3])).prod()  # <- guilty

    x = numbers(4, 1, 8)
    return Step(identity(8), [(x, -x)], loss)


@case("divergence", "https://github.com/cvignac/SMP/issues/3", verdict="divergence",
      module=("layers.3", "layers.7"), op=("mm", "linear"), fix="rate")
def deep_network_without_normalisation():
    """Weights grown under too large a rate: every one of eight layers makes its input 1e5 times as
    large.
    """
    def forward(net, x):
        h = net.layers(x)  # <- guilty
        return net.head(h)

    return Step(Net(forward, layers=nn.Sequential(*(identity(6, 1e5) for _ in range(8))),
                    head=nn.Linear(6, 3)),
                [(numbers(4, 6), labels())], cross)


@case("divergence", "https://github.com/pytorch/pytorch/issues/41508", verdict="divergence",
      module="attn", op="softmax", samples=(2,), fix="mask")
def every_key_is_padding():
    """A sample without a key: softmax over nothing but -inf."""
    def forward(net, x, padding):
        h, _ = net.attn(x, x, x, key_padding_mask=padding, need_weights=True)  # <- guilty
        return h

    padding = torch.zeros(4, 3, dtype=torch.bool)
    padding[2] = True
    net = Net(forward, attn=nn.MultiheadAttention(8, 2, batch_first=True))
    return Step(net, [(numbers(4, 3, 8), padding)], weighted)


@case("divergence", "https://github.com/huggingface/trl/pull/7252", verdict="divergence", module="",
      op="mul", samples=(1,), fix="guard")
def entropy_of_a_masked_token():
    """A forbidden token has logit -inf, probability 0 and log probability -inf: 0 * -inf is NaN."""
    def loss(net, x, forbidden):
        log_p = net(x).masked_fill(forbidden, -INF).log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)  # <- guilty
        return entropy.mean()

    forbidden = torch.zeros(4, 6, dtype=torch.bool)
    forbidden[1, 2] = True
    return Step(identity(6), [(numbers(4, 6), forbidden)], loss)


@case("divergence", "https://github.com/emadeldeen24/TS-TCC/issues/25", verdict="divergence",
      module="", op="log", samples=(0,), fix="guard")
def contrastive_loss_of_a_long_vector():
    """All similarities but a sample's own fall 225 below the maximum, exp of them is 0, and so is
    their sum.
    """
    def loss(net, x):
        h = net(x)
        logits = h @ h.T
        logits = logits - logits.max(1, keepdim=True).values.detach()
        others = (logits.exp() * (1 - torch.eye(4))).sum(1, keepdim=True)
        return -(logits - torch.log(others)).mean()  # <- guilty

    x = F.normalize(numbers(4, 6), dim=-1)
    x[:, 0] = 0
    x[0] = torch.tensor([15.0, 0, 0, 0, 0, 0])
    return Step(identity(6), [(x,)], loss)


@case("divergence", "https://github.com/DLR-RM/stable-baselines3/issues/325",
      verdict=("divergence", "data"), module="", op=("std", "var"), micro_batch=1, fix="spread")
def advantage_of_a_single_observation():
    """The last micro-batch of PPO has one sample: the standard deviation of one number is 0 / 0,
    eps or not.
    """
    def loss(net, x):
        advantage = net(x).squeeze(-1)
        spread = advantage.std()  # <- guilty
        return ((advantage - advantage.mean()) / (spread + 1e-8)).pow(2).mean()

    return Step(nn.Linear(6, 1), [(numbers(4, 6),), (numbers(1, 6),)], loss)


@case("divergence", "https://github.com/vanvalenlab/deepcell-tf/issues/445", verdict="divergence",
      module="normalize", op="div", samples=(3,), fix="guard")
def picture_of_one_colour():
    """Each picture is divided by its standard deviation, which is 0 for a blank one."""
    def normalize(net, x):
        return (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True)  # <- guilty

    x = numbers(4, 6)
    x[3] = 2
    net = Net(lambda net, x: net.fc(net.normalize(x)), fc=nn.Linear(6, 3), normalize=Net(normalize))
    return Step(net, [(x, labels())], cross)


@case("divergence", "https://github.com/HKUDS/SSLRec/issues/26", verdict="divergence", module="",
      op="log", samples=(0,), fix="guard")
def gumbel_noise_of_zero():
    """-log(-log(u)) with u = 0, which torch.rand may draw (here it is made to)."""
    def loss(net, x):
        scores = net(x)
        u = torch.rand(scores.shape)
        u[0, 0] = 0
        gumbel = -torch.log(-torch.log(u))  # <- guilty
        return -(scores + gumbel).mean()

    return Step(identity(6), [(numbers(4, 6),)], loss)


# --- Something lawful looks guilty

@case("lawful", "https://github.com/huggingface/transformers/pull/26421", verdict="precision",
      module="wo", op=("mm", "linear"), samples=(2,), fix="island:wo")
def additive_mask_in_the_batch():
    """The loader adds a mask of -inf to the batch, as it should.

    Guilty is an overflow after the attention.
    """
    def forward(net, x, mask):
        unit = F.normalize(x, dim=-1)
        h = (unit @ unit.transpose(1, 2) + mask).softmax(-1) @ x
        h = net.wo(h)  # <- guilty
        return net.norm(h)

    mask = torch.full((4, 3, 3), -INF).triu(1)
    x = numbers(4, 3, 8)
    x[2] = 9000 + 0.1 * x[2]
    return Step(Net(forward, wo=filled(8, 8, 1.0), norm=nn.LayerNorm(8)), [(x, mask)], weighted,
                torch.float16)


@case("lawful", "https://github.com/chemprop/chemprop/issues/960", verdict="divergence", module="",
      op="sqrt", samples=(), fix="guard")
def missing_targets_masked_rightly():
    """NaN targets are replaced before the subtraction.

    Guilty is the root of a mean squared error of exactly 0.
    """
    def loss(net, x, y):
        known = y.isfinite()
        error = known * (net(x) - torch.where(known, y, 0.0))
        return (error.pow(2).sum() / known.sum()).sqrt()  # <- guilty

    x = numbers(4, 6)
    y = x.clone()
    y[1, 0] = y[3, 2] = NAN
    return Step(identity(6), [(x, y)], loss)


@case("lawful", "https://github.com/macrocosm-os/mainframe/pull/185", verdict="divergence",
      module="", op="log", samples=(1,), fix="guard")
def best_loss_starts_at_inf():
    """A buffer holds the best loss so far, inf at first. Guilty is a log of 0."""
    def forward(net, x):
        p = net.fc(x).relu()
        return torch.log(p)  # <- guilty

    x = numbers(4, 6).abs() + 0.1
    x[1, 3] = 0
    net = Net(forward, fc=identity(6))
    net.register_buffer("best_loss", torch.tensor(INF))
    return Step(net, [(x,)], mean)


@case("lawful", "https://github.com/pytorch/vision/issues/1176", verdict="divergence", module="",
      op="exp", samples=(1,), fix="guard")
def image_id_is_no_label():
    """Detection targets carry integer columns beside the labels: image_id 139 with three classes is
    no fault.
    """
    def loss(net, images, targets):
        out = net(images)
        size = out[:, :3].exp()  # <- guilty
        boxes = F.smooth_l1_loss(size, torch.ones(4, 3))
        return cross(nn.Identity(), out, targets["labels"]) + boxes

    x = numbers(4, 6)
    x[1, 0] = 100
    targets = {"image_id": torch.tensor([139, 285, 632, 724]), "labels": labels()}
    return Step(identity(6), [(x, targets)], loss, num_classes=6)


@case("lawful", "https://github.com/pytorch/pytorch/issues/15508", verdict="precision", module="fc",
      op=("mm", "linear"), samples=(0,), fix="island:fc")
def another_ignore_index():
    """Label 255 means: ignore. Guilty is an overflow in the layer before."""
    def forward(net, x):
        h = net.fc(x)  # <- guilty
        return net.head(net.norm(h))

    x = numbers(4, 6)
    x[0] = 20000 + x[0]
    y = torch.tensor([1, 255, 0, 2])
    return Step(Net(forward, fc=filled(6, 6, 1.0), norm=nn.LayerNorm(6), head=nn.Linear(6, 3)),
                [(x, y)], lambda net, x, y: F.cross_entropy(net(x).float(), y, ignore_index=255),
                torch.float16, num_classes=3)


@case("lawful", "https://github.com/pytorch/pytorch/pull/43789", verdict="divergence", module="",
      op="div", samples=(2,), fix="guard")
def observer_starts_at_inf():
    """A quantisation observer starts with min_val = inf and max_val = -inf.

    Guilty is a division by a range of 0.
    """
    def forward(net, x):
        h = net.observer(net.fc(x))
        low, high = h.amin(-1, keepdim=True), h.amax(-1, keepdim=True)
        return (h - low) / (high - low)  # <- guilty

    x = numbers(4, 6)
    x[2] = 3
    observer = Net(lambda net, x: x)
    observer.register_buffer("min_val", torch.tensor(INF))
    observer.register_buffer("max_val", torch.tensor(-INF))
    return Step(Net(forward, fc=identity(6), observer=observer), [(x,)], weighted)


@case("lawful", "https://github.com/pytorch/pytorch/pull/21244", verdict="not reproducible",
      samples=(), fix="hardware")
def nan_that_comes_once():
    """A kernel returns NaN now and then.

    Run again, all is finite, the causal mask of -inf included.
    """
    def forward(net, x):
        net.calls += 1
        h = net.fc(x)
        h = (h @ h.transpose(1, 2) + net.mask).softmax(-1) @ h
        return h * (NAN if net.calls == 1 else 1.0)

    net = Net(forward, fc=nn.Linear(6, 6))
    net.calls = 0
    net.register_buffer("mask", torch.full((3, 3), -INF).triu(1))
    return Step(net, [(numbers(4, 3, 6),)], weighted)


@case("lawful", "https://github.com/THUDM/slime/pull/2198", verdict="divergence", module="",
      op="exp", samples=(2,), fix="guard")
def ratio_beside_a_mask_of_actions():
    """The batch forbids actions by -inf, rightly. Guilty is exp of a log ratio of 100."""
    def loss(net, x, allowed, old):
        log_p = (net(x) + allowed).log_softmax(-1)[:, 0]
        ratio = torch.exp(log_p - old)  # <- guilty
        return -ratio.mean()

    allowed = torch.zeros(4, 6)
    allowed[1, 3] = allowed[2, 5] = -INF
    return Step(identity(6), [(numbers(4, 6), allowed, torch.tensor([-1.0, -2, -100, -1]))], loss)


# --- The exotic

@case("exotic", "https://github.com/pytorch/audio/issues/993", verdict="divergence", module="spec",
      op="sqrt", samples=(1,), fix="guard")
def complex_spectrum_of_silence():
    """z times its conjugate, whose conjugation is only a bit on the tensor; then the root of 0."""
    def spectrum(net, x):
        z = torch.fft.rfft(x)
        power = (z * z.conj()).real
        return power.sqrt()  # <- guilty

    x = numbers(4, 6)
    x[1] = 0
    return Step(Net(lambda net, x: net.spec(net.fc(x)), fc=identity(6), spec=Net(spectrum)), [(x,)],
                mean)


@case("exotic", "https://github.com/chenxie95/deeplearning_course_sjtu/issues/31",
      verdict="divergence", module="rnn", op=("mm", "linear", "rnn", "add"), fix="rate")
def relu_rnn_over_a_long_sequence():
    """An RNN with relu multiplies its state by 4 at each of 80 steps.

    Time first: the batch is the second dimension.
    """
    def forward(net, x):
        out, _ = net.rnn(x)  # <- guilty
        return net.head(out[-1])

    net = Net(forward, rnn=nn.RNN(6, 6, nonlinearity="relu", bias=False), head=nn.Linear(6, 3))
    net.rnn.weight_hh_l0.data = 4 * torch.eye(6)
    net.rnn.weight_ih_l0.data = torch.eye(6)
    return Step(net, [(numbers(80, 4, 6).abs(), labels())], cross)


@case("exotic", "https://github.com/pytorch/pytorch/issues/19126", verdict="divergence",
      module=("fc", "fc.parametrizations.weight", "fc.parametrizations.weight.0"),
      op=("weight_norm", "norm", "div", "mul"), samples=(), fix=("guard", "state"))
def weight_norm_of_a_zero_row():
    """weight_norm divides a row of the weight by its length; a row set to zero has none."""
    def forward(net, x):
        return net.fc(x)  # <- guilty

    fc = parametrizations.weight_norm(nn.Linear(6, 3))
    fc.parametrizations.weight.original1.data[1] = 0
    return Step(Net(forward, fc=fc), [(numbers(4, 6), labels())], cross)


@case("exotic", "https://github.com/pytorch/pytorch/issues/20192", verdict="divergence",
      module=("fc", "fc.parametrizations.weight", "fc.parametrizations.weight.0"), op="div",
      samples=(), fix=("guard", "state"))
def spectral_norm_of_a_zero_weight():
    """The largest singular value of a zero weight is 0; the eps of spectral_norm is for its
    vectors, not for this.
    """
    def forward(net, x):
        return net.fc(x)  # <- guilty

    fc = parametrizations.spectral_norm(nn.Linear(6, 3))
    fc.parametrizations.weight.original.data.zero_()
    return Step(Net(forward, fc=fc), [(numbers(4, 6), labels())], cross)


@case("exotic", "https://github.com/adambielski/siamese-triplet/issues/18", verdict="divergence",
      module="", op="sqrt", samples=(3,), fix="guard")
def siamese_network_on_an_equal_pair():
    """One network used twice; a pair of two equal pictures has distance 0, and sqrt no slope there.
    """
    def loss(net, a, b):
        square = (net(a) - net(b)).pow(2).sum(-1)
        distance = square.sqrt()  # <- guilty
        return (1 - distance).clamp(min=0).pow(2).mean()

    a, b = numbers(4, 6), numbers(4, 6, seed=1)
    b[3] = a[3]
    return Step(nn.Linear(6, 5), [(a, b)], loss)


@case("exotic", "https://github.com/Peterande/D-FINE/issues/199", verdict="precision",
      module="head", op=("mm", "linear"), samples=(1,), fix="island:head")
def shared_head_in_its_second_call():
    """The decoder uses one head twice. The first call is harmless, the second passes 65504."""
    def forward(net, x):
        first = net.head(x)
        second = net.head(first)  # <- guilty
        return net.norm(second)

    x = numbers(4, 8).abs()
    x[1] = 100
    return Step(Net(forward, head=filled(8, 8, 10.0), norm=nn.LayerNorm(8)), [(x,)], weighted,
                torch.float16)


@case("exotic", "https://github.com/keras-team/keras/issues/9269", verdict="divergence", module="",
      op="sqrt", samples=(2,), fix="guard")
def sparse_gradient_of_an_embedding():
    """The distance of a word to itself: the loss is finite, the gradient of the embedding sparse
    and NaN.
    """
    def loss(net, i, j):
        distance = (net(i) - net(j)).pow(2).sum(-1).sqrt()  # <- guilty
        return distance.mean()

    return Step(nn.Embedding(10, 4, sparse=True),
                [(torch.tensor([1, 2, 3, 4]), torch.tensor([5, 6, 3, 7]))], loss)


@case("exotic", "https://github.com/pyg-team/pytorch_geometric/issues/61", verdict="divergence",
      module="gcn", op="pow", fix="guard")
def sparse_adjacency_with_a_negative_degree():
    """A weighted degree may be negative, and then its power of -0.5 is NaN.

    The batch holds a sparse tensor.
    """
    def convolve(net, x, adjacency):
        degree = torch.sparse.sum(adjacency, 1).to_dense()
        scale = degree.pow(-0.5)  # <- guilty
        return scale[:, None] * (adjacency @ (scale[:, None] * net.fc(x)))

    index = torch.tensor([[0, 1, 2, 3, 0], [1, 0, 3, 2, 2]])
    adjacency = torch.sparse_coo_tensor(index, torch.tensor([1.0, 1.0, -0.5, 1.0, 1.0]),
                                        (4, 4)).coalesce()
    net = Net(lambda net, *batch: net.gcn(*batch), gcn=Net(convolve, fc=identity(6)))
    return Step(net, [(numbers(4, 6), adjacency)], weighted)


@case("exotic", "https://github.com/philtabor/Actor-Critic-Methods-Paper-To-Code/issues/7",
      verdict="divergence", module="actor", op="log", samples=(0,), fix="guard")
def log_of_a_negative_number_in_a_checkpoint():
    """A checkpointed block runs its forward twice.

    The action is scaled by 2 before log(1 - a**2).
    """
    def actor(net, x):
        action = 2 * net.fc(x).tanh()
        log_p = torch.log(1 - action.pow(2) + 1e-6)  # <- guilty
        return log_p

    x = 0.1 * numbers(4, 6)
    x[0, 2] = 2
    return Step(Net(lambda net, x: checkpoint(net.actor, x, use_reentrant=False),
                    actor=Net(actor, fc=identity(6))),
                [(x,)], mean)


@case("exotic", "https://github.com/speechbrain/speechbrain/issues/181", verdict="divergence",
      module="magnitude", op=("pow", "sqrt"), samples=(1,), fix="guard")
def checkpoint_with_a_bad_backward():
    """Spectral magnitude with power 0.5 in a checkpointed block: a silent frame has no slope, the
    loss is finite.
    """
    def magnitude(net, x):
        h = net.fc(x)
        return h.pow(2).sum(-1).pow(0.5)  # <- guilty

    x = numbers(4, 5, 6)
    x[1, 2] = 0
    net = Net(lambda net, x: checkpoint(net.magnitude, net.inp(x), use_reentrant=False),
              inp=identity(6), magnitude=Net(magnitude, fc=identity(6)))
    return Step(net, [(x,)], mean)


@case("exotic", "https://github.com/AlexeyAB/darknet/issues/3994", verdict="divergence",
      module="act", op=("Mish", "exp", "div"), samples=(1,), fix="guard")
def custom_function_with_a_bad_backward():
    """x * tanh(softplus(x)) with the backward of the first published kernels: inf / inf from x = 30
    on.
    """
    class Mish(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * F.softplus(x).tanh()

        @staticmethod
        def backward(ctx, grad):
            x, = ctx.saved_tensors
            omega = 4 * (x + 1) + 4 * (2 * x).exp() + (3 * x).exp()  # <- guilty
            omega = omega + (4 * x + 6) * x.exp()  # <- guilty
            delta = 2 * x.exp() + (2 * x).exp() + 2  # <- guilty
            return grad * x.exp() * omega / delta**2  # <- guilty

    def activate(net, x):
        return Mish.apply(x)  # <- guilty

    x = numbers(4, 6)
    x[1, 1] = 60
    return Step(Net(lambda net, x: net.act(net.fc(x)), fc=identity(6), act=Net(activate)), [(x,)],
                weighted)


def broken_backend(graph: torch.fx.GraphModule, inputs: list) -> object:
    """A compiler whose kernel for relu is wrong: NaN where eager mode has none."""
    @functools.wraps(graph.forward)
    def run(*args):
        return tuple(out + NAN for out in graph(*args))
    return run


@case("exotic", "https://github.com/pytorch/pytorch/issues/99840", verdict="compiler", samples=(),
      fix="eager")
def compiled_code_returns_nan():
    """Finite in eager mode, NaN compiled: hunting in eager mode finds nothing."""
    net = Net(lambda net, x: net.fc(x).relu(), fc=nn.Linear(6, 3))
    compiled = torch.compile(net, backend=broken_backend)
    return Step(net, [(numbers(4, 6), labels())], lambda net, x, y: F.cross_entropy(compiled(x), y))


@case("exotic", "https://github.com/pytorch/pytorch/issues/114109", verdict="divergence", module="",
      op="div", samples=(2,), fix="guard")
def compiled_code_is_innocent():
    """The step is compiled, the compiler was accused, and eager mode divides by 0 all the same."""
    def forward(net, x):
        h = net.fc(x)
        return h / h.sum(-1, keepdim=True)  # <- guilty

    x = numbers(4, 6)
    x[2] = 0
    net = Net(forward, fc=identity(6))
    compiled = torch.compile(net, backend="eager")
    return Step(net, [(x,)], lambda net, x: (compiled(x) * numbers(4, 6, seed=9)).mean())
