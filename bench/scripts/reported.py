"""Scripts distilled from public reports: how a training loop meets a bad number, apart from the
operation that made it.

It raises, it passes over the batch, its optimizer makes the NaN, its weights never move. We
committed the right answers before the first run: the exit code, words of the report, and the line
marked "here".
"""

import re

from bench.scripts import Case

HEAD = """
import torch, sys
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
def loop(net, loss_of, steps=8, optimizer=None):
    optimizer = optimizer or torch.optim.AdamW(net.parameters(), 1e-3)
    for step in range(steps):
        loss = loss_of(step)
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        print(step, loss.item())
class Net(nn.Module):
    def __init__(self, body, *layers):
        super().__init__()
        self.body, self.layers = body, nn.ModuleList(layers)
    def forward(self, *x):
        return self.body(self.layers, *x)
def data(step, n=6, seed=0):
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(100 * seed + step))
"""

# name: (report, exit code, words of the answer, script)
SCRIPTS = {
    "policy_that_raises": (
        "https://github.com/IDSIA/hhmarl_2D/issues/15",
        3,
        "-> divergence",
        """
def body(layers, x):
    h = layers[0](x)
    return h / h.detach().abs().amax(1, keepdim=True).sub(bad)  # here
net = Net(body, nn.Linear(4, 3))
def loss_of(step):
    global bad
    x = data(step)
    with torch.no_grad():
        bad = net.layers[0](x).abs().max() if step == 4 else 100.0
    policy = torch.distributions.Categorical(logits=net(x))
    return -policy.log_prob(torch.zeros(6, dtype=torch.long)).mean()
loop(net, loss_of)
""",
    ),
    "simplex_of_nothing": (
        "https://github.com/thu-ml/tianshou/issues/823",
        3,
        "-> divergence",
        """
def body(layers, x):
    h = layers[0](x).relu()
    return h / h.sum(1, keepdim=True)  # here
net = Net(body, nn.Linear(4, 3))
def loss_of(step):
    x = data(step) if step != 3 else data(step) * 0
    net.layers[0].bias.data.fill_(0.5 if step != 3 else -1)
    policy = torch.distributions.Categorical(net(x))
    return -policy.entropy().mean()
loop(net, loss_of)
""",
    ),
    "mask_too_large_for_half": (
        "https://github.com/NVIDIA/apex/issues/1052",
        3,
        "-> precision",
        """
def body(layers, x):
    scores = layers[0](x)
    return scores.masked_fill(x > 2, -1e9).softmax(1)  # here
net = Net(body, nn.Linear(4, 4))
def loss_of(step):
    with torch.autocast("cpu", torch.float16, enabled=step >= 2):
        out = net(data(step))
    return out.float().square().mean()
loop(net, loss_of)
""",
    ),
    "score_assigned_in_half": (
        "https://github.com/QwenLM/Qwen/issues/32",
        3,
        "-> precision",
        """
def body(layers, x):
    scores = layers[0](x)
    if len(x) == 5:
        scores[:, 1] = float(2**30)  # here
    return scores
net = Net(body, nn.Linear(4, 4))
def loss_of(step):
    with torch.autocast("cpu", torch.float16):
        out = net(data(step, 5 if step == 3 else 6))
    return out.float().square().mean()
loop(net, loss_of)
""",
    ),
    "angle_at_the_origin": (
        "https://github.com/pytorch/pytorch/issues/98276",
        3,
        "angle at 0",
        """
def body(layers, x):
    h = layers[0](x)
    return torch.view_as_complex(h).angle()  # here
net = Net(body, nn.Linear(4, 2, bias=False))
def loss_of(step):
    x = data(step)
    x[2] = 1e-30 if step == 5 else 1
    return net(x).square().mean()
loop(net, loss_of)
""",
    ),
    "node_without_neighbours": (
        "https://github.com/pyg-team/pytorch_geometric/issues/1129",
        3,
        "no mask",
        """
def body(layers, x, to):
    index = to[:, None].expand(-1, 4)
    most = torch.full((6, 4), -torch.inf)  # here
    most = most.scatter_reduce(0, index, layers[0](x), "amax")
    return layers[1](most)
net = Net(body, nn.Linear(4, 4), nn.Linear(4, 3))
def loss_of(step):
    to = torch.arange(6)
    if step == 4:
        to[3] = 2
    return net(data(step), to).square().mean()
loop(net, loss_of)
""",
    ),
    "number_of_neighbours_is_0": (
        "https://github.com/biomed-AI/Hist2ST/pull/7",
        3,
        "samples 5",
        """
def body(layers, x, adjacent):
    h = layers[0](x)
    return adjacent @ h / adjacent.sum(1, keepdim=True)  # here
net = Net(body, nn.Linear(4, 3))
def loss_of(step):
    adjacent = torch.ones(6, 6)
    if step == 4:
        adjacent[5] = 0
    return net(data(step), adjacent).square().mean()
loop(net, loss_of)
""",
    ),
    "batches_passed_over": (
        "https://github.com/automl/TFM-Playground/pull/20",
        3,
        "-> data",
        """
net = nn.Linear(4, 1); optimizer = torch.optim.AdamW(net.parameters())
for step in range(30):
    y = data(step, seed=1)[:, :1]
    y[3] = torch.nan if step % 7 == 3 else 0  # the label that is missing
    loss = F.mse_loss(net(data(step)), y)  # here
    if torch.isnan(loss):
        continue
    optimizer.zero_grad(); loss.backward(); optimizer.step()
""",
    ),
    "step_skipped_if_nan": (
        "https://github.com/karpathy/nanoGPT/pull/227",
        3,
        "-> divergence",
        """
def body(layers, x):
    h = layers[0](x)
    return h / x.sum(1, keepdim=True)  # here
net = Net(body, nn.Linear(4, 1)); optimizer = torch.optim.AdamW(net.parameters())
for step in range(9):
    x = data(step)
    if step == 4:
        x[1] = 0
    loss = net(x).square().mean()
    if not loss.isfinite():
        print("skipped"); continue
    optimizer.zero_grad(); loss.backward(); optimizer.step()
""",
    ),
    "exit_at_a_nan": (
        "https://github.com/mlfoundations/open_lm/pull/7",
        3,
        "-> divergence",
        """
def body(layers, x):
    return (layers[0](x) * x.abs().sum(1, keepdim=True)).log()  # here
net = Net(body, nn.Linear(4, 1)); optimizer = torch.optim.AdamW(net.parameters())
net.layers[0].weight.data.zero_(); net.layers[0].bias.data.fill_(3)
for step in range(9):
    loss = net(data(step) * (step != 6)).mean()
    if loss.item() != loss.item() or abs(loss.item()) == float("inf"):
        sys.exit("Loss is not finite")
    optimizer.zero_grad(); loss.backward(); optimizer.step()
""",
    ),
    "every_label_masked": (
        "https://github.com/londonaicentre/FLIP/pull/766",
        3,
        "division by zero|max\\(1|-> data",
        """
net = nn.Linear(4, 3)
def loss_of(step):
    labels = torch.ones(6, 3) if step not in (3, 4) else -torch.ones(6, 3)
    known = labels >= 0
    loss = F.binary_cross_entropy_with_logits(net(data(step)), labels.clamp(min=0),
                                              reduction="none")
    return (loss * known).sum() / known.sum()  # here
loop(net, loss_of)
""",
    ),
    "validation_of_nothing": (
        "https://github.com/rasbt/LLMs-from-scratch/pull/124",
        3,
        "read nan at script.py",
        """
net = nn.Linear(4, 1)
loop(net, lambda step: net(data(step)).square().mean())
with torch.no_grad():
    losses = [net(x).mean() for x in data(0)[6:].split(2)]
    print("validation", float(torch.stack([net(data(0))[6:].mean()]).mean()))  # here
""",
    ),
    "norm_weights_of_one_in_bf16": (
        "https://github.com/vllm-project/speculators/pull/765",
        0,
        "1 bfloat16 tensors? had gradients .* never changed",
        """
net = nn.Sequential(nn.Linear(4, 8, bias=False), nn.RMSNorm(8)).to(torch.bfloat16)
optimizer = torch.optim.AdamW(net.parameters(), 1e-3, weight_decay=0.0)
loop(net, lambda step: net(data(step).bfloat16()).float().square().mean(), 20, optimizer)
""",
    ),
    "no_master_weights": (
        "https://github.com/workofart/ml-by-hand/pull/85",
        0,
        "2 bfloat16 tensors had gradients .* never changed",
        """
net = nn.Linear(4, 3).to(torch.bfloat16)
nn.init.ones_(net.weight); nn.init.ones_(net.bias)
optimizer = torch.optim.AdamW(net.parameters(), 6e-4, weight_decay=0.0)
loop(net, lambda step: net(data(step).bfloat16()).float().square().mean(), 20, optimizer)
""",
    ),
    "muon_of_a_zero_gradient": (
        "https://github.com/microsoft/dion/pull/24",
        3,
        "-> optimizer",
        """
class NorMuon(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 1e-2})
    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            u = p.grad
            ratio = u.norm() / u.square().mean(1, keepdim=True).sqrt().norm()  # here
            p.add_(u * ratio, alpha=-1e-2)
net = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 2, bias=False))
net[1].weight.data.zero_()
loop(net, lambda step: (net(data(step)) - 1).square().mean(), 8, NorMuon(net.parameters()))
""",
    ),
    "neuron_norm_of_an_optimizer": (
        "https://github.com/kozistr/pytorch_optimizer/issues/120",
        3,
        "-> optimizer",
        """
class Nero(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 1e-2})
    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=1e-2)
            p.div_(p.norm(dim=1, keepdim=True))  # here
net = nn.Linear(4, 3, bias=False)
net.weight.data[1] = 0
target = torch.tensor([1.0, 0, 1])
loop(net, lambda step: (net(data(step)) - target).square()[:, ::2].mean(), 8,
     Nero(net.parameters()))
""",
    ),
    "loss_weighted_by_its_spread": (
        "https://github.com/rickgroen/cov-weighting/issues/3",
        3,
        "-> divergence",
        """
net = nn.Linear(4, 2)
history = []
def loss_of(step):
    losses = (net(data(step)) * (0 if step >= 4 else 1)).square().mean(0)
    history.append(losses.detach())
    weights = losses.detach() / history[-1]  # here
    return (weights * losses).sum()
loop(net, loss_of)
""",
    ),
    "a_scale_of_zero": (
        "https://github.com/huzi96/Coarse2Fine-PyTorch/issues/16",
        3,
        "-> divergence",
        """
def body(layers, x):
    mean, scale = layers[0](x).chunk(2, 1)
    return (x[:, :2] - mean) / scale.relu()  # here
net = Net(body, nn.Linear(4, 4))
net.layers[0].bias.data.fill_(5)
def loss_of(step):
    if step == 5:
        net.layers[0].bias.data[3] = -50
    return net(data(step)).tanh().square().mean()
loop(net, loss_of)
""",
    ),
    "attention_mask_in_fp16": (
        "https://github.com/facebookresearch/fairseq/issues/3575",
        3,
        "-> precision",
        """
def body(layers, x):
    scores = layers[0](x) @ layers[1](x).T
    hidden = torch.eye(len(x), dtype=torch.bool)
    return scores.masked_fill(hidden, -1e8).softmax(-1) @ x.to(scores.dtype)  # here
net = Net(body, nn.Linear(4, 4), nn.Linear(4, 4))
def loss_of(step):
    with torch.autocast("cpu", torch.float16):
        return net(data(step)).float().square().mean()
loop(net, loss_of)
""",
    ),
    # --- From here on: committed before the work on version 3.0.0 began.
    "no_onset_in_the_sample": (
        "https://github.com/york135/CTC_CE_for_AST/issues/3",
        3,
        "-> divergence(.|\n)*division by zero",
        """
net = nn.Linear(4, 1)
def loss_of(step):
    weight = torch.ones(6) * (step != 4)
    each = F.binary_cross_entropy_with_logits(net(data(step)).flatten(), torch.ones(6),
                                              reduction="none")
    return torch.dot(each, weight) / torch.sum(weight)  # here
loop(net, loss_of)
""",
    ),
    "side_of_a_flat_triangle": (
        "https://github.com/akanazawa/cmr/issues/11",
        3,
        "-> divergence(.|\n)*sqrt\\(x.clamp",
        """
net = nn.Linear(4, 2)
def loss_of(step):
    x = data(step)
    if step == 5:
        x[1] = x[0]
    corner = net(x)
    side = (corner[0] - corner[1]).square().sum().sqrt()  # here
    return corner.square().mean() + side
loop(net, loss_of)
""",
    ),
    "gradient_penalty_of_a_dead_critic": (
        "https://github.com/keras-team/keras-io/issues/910",
        3,
        "-> divergence(.|\n)*sqrt",
        """
critic = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 1))
def loss_of(step):
    if step == 3:
        critic[0].bias.data.fill_(-90)
    x = data(step).requires_grad_()
    score = critic(x)
    slope, = torch.autograd.grad(score.sum(), x, create_graph=True)
    norm = slope.square().sum(1).sqrt()  # here
    return score.mean() + 10 * (norm - 1).square().mean()
loop(critic, loss_of)
""",
    ),
    "ratio_of_an_old_policy": (
        "https://github.com/THUDM/slime/pull/2198",
        3,
        "-> divergence(.|\n)*exp",
        """
policy = nn.Linear(4, 3)
def loss_of(step):
    x = data(step)
    logp = policy(x).log_softmax(1)[:, 0]
    old = logp.detach().clone()
    advantage = torch.linspace(-1, 1, 6)
    if step == 2:
        old[3], advantage[3] = -200, 0
    ratio = (logp - old).exp()  # here
    return -(ratio * advantage).mean()
loop(policy, loss_of)
""",
    ),
    "teacher_padded_with_minus_infinity": (
        "https://github.com/huggingface/trl/pull/5594",
        3,
        "-> (divergence|data)",
        """
student = nn.Linear(4, 3)
def loss_of(step):
    teacher = data(step, seed=1)[:, :3].log_softmax(1)
    if step == 3:
        teacher[5] = -torch.inf  # a shorter answer is padded
    log_p = student(data(step)).log_softmax(1)
    terms = log_p.exp() * (log_p - teacher)  # here
    return terms.nan_to_num(posinf=0).sum(1).mean()
loop(student, loss_of)
""",
    ),
    "weight_of_a_class_that_is_absent": (
        "https://github.com/webis-de/small-text/issues/39",
        3,
        "NumPy",
        """
import numpy
numpy.seterr(all="ignore")
net = nn.Linear(4, 3)
def loss_of(step):
    labels = torch.tensor([0, 1, 2, 0, 1, 2 if step != 4 else 1])
    if step == 4:
        labels[2] = 0
    count = numpy.bincount(labels.numpy(), minlength=3).astype("float32")
    weight = torch.from_numpy(6 / (3 * count))
    target = F.one_hot(labels, 3).float()
    return F.binary_cross_entropy_with_logits(net(data(step)), target, weight * target)  # here
loop(net, loss_of)
""",
    ),
    "embedding_that_nobody_initialised": (
        "https://github.com/sauradip/STALE/issues/16",
        3,
        "bg_embeddings(.|\n)*-> weights|-> weights(.|\n)*bg_emb",
        """
class Stale(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.bg_embeddings = nn.Parameter(torch.empty(1, 4))
        self.bg_embeddings.data.view(torch.int32).fill_(2143289344)  # what the memory held
    def forward(self, x):
        text = F.normalize(self.bg_embeddings, dim=1)  # here
        return self.fc(x) @ text.T
net = Stale()
loop(net, lambda step: net(data(step)).square().mean())
""",
    ),
    "picture_of_one_grey": (
        "https://github.com/vanvalenlab/deepcell-toolbox/issues/71",
        3,
        "division by zero|0 / 0",
        """
net = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
def loss_of(step):
    image = torch.randn(6, 1, 4, 4, generator=torch.Generator().manual_seed(step))
    if step == 5:
        image[2] = 0.5
    mean, std = image.mean((2, 3), keepdim=True), image.std((2, 3), keepdim=True)
    image = (image - mean) / std  # here
    return net(image).square().mean()
loop(net, loss_of)
""",
    ),
    "file_with_a_gap": (
        "https://github.com/CielAl/torch-staintools/issues/23",
        3,
        "-> data(.|\n)*samples 2 ",
        """
import numpy
table = numpy.random.RandomState(0).randn(32, 5).astype("float32")
table[18, 2] = numpy.nan
class Rows(torch.utils.data.Dataset):
    def __len__(self): return 32
    def __getitem__(self, i): return {"x": torch.from_numpy(table[i, :4]), "y": table[i, 4]}
net = nn.Linear(4, 1); optimizer = torch.optim.Adam(net.parameters())
for batch in torch.utils.data.DataLoader(Rows(), batch_size=4):
    loss = F.mse_loss(net(batch["x"]).flatten(), batch["y"])
    optimizer.zero_grad(); loss.backward(); optimizer.step()
""",
    ),
    "focal_loss_of_a_sure_answer": (
        "https://github.com/gnn-tracking/gnn_tracking/issues/104",
        3,
        "-> divergence(.|\n)*(log of 0|log\\(x.clamp)",
        """
net = nn.Linear(4, 1)
def focal(p, target, gamma=2.0):
    good = -(1 - p).pow(gamma) * target * p.log()
    bad = -p.pow(gamma) * (1 - target) * (1 - p).log()  # here
    return (good + bad).mean()
def loss_of(step):
    x = data(step)
    if step == 4:
        x[1] = 1e3 * net.weight.detach().sign()
    return focal(net(x).sigmoid(), torch.ones(6, 1))
loop(net, loss_of)
""",
    ),
    "gradients_summed_in_half": (
        "https://github.com/andreped/GradientAccumulator/issues/35",
        3,
        "-> precision",
        """
net = nn.Linear(4, 1, bias=False).half()
optimizer = torch.optim.SGD(net.parameters(), 1e-6)
for step in range(6):
    optimizer.zero_grad()
    for micro_batch in range(8):
        out = net(torch.ones(6, 4).half())
        loss = out.float().sum() * (2500 if step == 3 else 1)
        loss.backward()
    optimizer.step()
""",
    ),
    # --- The ten of another batch: they were run for the first time when all was mended.
    "box_without_a_width": (
        "https://github.com/amdegroot/ssd.pytorch/issues/73",
        3,
        "log of 0",
        """
net = nn.Linear(4, 2)
def loss_of(step):
    size = data(step, seed=2)[:, :2].abs() + 0.1
    if step == 6:
        size[4, 0] = 0
    with torch.no_grad():
        target = torch.log(size / 0.5)  # here
    return F.smooth_l1_loss(net(data(step)), target)
loop(net, loss_of)
""",
    ),
    "learning_rate_without_warm_up": (
        "https://github.com/mlcommons/hpc/pull/27",
        3,
        "lr=nan(.|\n)*-> optimizer|-> optimizer(.|\n)*lr=nan",
        """
net = nn.Linear(4, 2); optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
warm_up = 0.0
rate = lambda step: float(torch.tensor(step / 1.0) / warm_up) if step < 1 else 1.0
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
for step in range(6):
    loss = net(data(step)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step(); schedule.step()
""",
    ),
    "advantage_of_a_batch_of_one": (
        "https://github.com/araffin/sbx/pull/57",
        3,
        "spread of one number",
        """
policy = nn.Linear(4, 3)
def loss_of(step):
    x = data(step, 1 if step == 5 else 6)
    reward = x.sum(1)
    advantage = (reward - reward.mean()) / (reward.std() + 1e-8)  # here
    return -(policy(x).log_softmax(1)[:, 0] * advantage).mean()
loop(policy, loss_of)
""",
    ),
    "answer_cut_off_by_the_tokenizer": (
        "https://github.com/microsoft/LMOps/issues/38",
        3,
        "division by zero|max\\(1",
        """
student, teacher = nn.Linear(4, 5), nn.Linear(4, 5)
def loss_of(step):
    x, label = data(step), torch.randint(5, (6,))
    if step == 4:
        label[:] = -100
    with torch.no_grad():
        probability = teacher(x).softmax(1)
    each = (probability * student(x).log_softmax(1)).sum(1)
    mask = (label != -100).int()
    return -torch.sum(each * mask) / torch.sum(mask)  # here
loop(student, loss_of)
""",
    ),
    "centre_of_no_instance": (
        "https://github.com/pqhieu/jsis3d/issues/26",
        3,
        "mean over nothing",
        """
net = nn.Linear(4, 3)
def centres(embedded, label, n):
    return torch.stack([embedded[label == k].mean(0) for k in range(n)])  # here
def loss_of(step):
    label = torch.arange(6) % 3
    if step == 5:
        label[label == 2] = 1
    return torch.norm(centres(net(data(step)), label, 3), 2, dim=1).mean()
loop(net, loss_of)
""",
    ),
    "clamp_in_half": (
        "https://github.com/NVIDIA/apex/issues/358",
        3,
        "-> precision",
        """
net = nn.Linear(4, 1)
def loss_of(step):
    with torch.autocast("cpu", torch.float16):
        x = data(step)
        if step == 3:
            x[2] = 12 * net.weight.detach() / net.weight.detach().square().sum()
        p = net(x).sigmoid()
        p = torch.clamp(p, 1e-8, 1 - 1e-8)
        y = torch.ones(6, 1, dtype=torch.float16)
        return -(y * torch.log(p) + (1 - y) * torch.log(1 - p)).float().mean()  # here
loop(net, loss_of)
""",
    ),
    "log_of_one_minus_softmax": (
        "https://github.com/thuml/MDD/issues/4",
        3,
        "log of 0",
        """
net, adversary = nn.Linear(4, 4), nn.Linear(4, 3)
optimizer = torch.optim.SGD([*net.parameters(), *adversary.parameters()], 0.01)
def loss_of(step):
    features = net(data(step))
    if step == 6:
        features = features * 1e4
    out = adversary(features)
    target = out.argmax(1)
    return F.nll_loss(torch.log(1 - F.softmax(out, dim=1)), target)  # here
loop(net, loss_of, optimizer=optimizer)
""",
    ),
    "features_divided_by_zero_before": (
        "https://github.com/liujch1998/SoftLabelCCRF/issues/1",
        3,
        "-> data(.|\n)*samples 1 ",
        """
import numpy
numpy.seterr(all="ignore")
pixels = numpy.random.RandomState(1).rand(24, 4).astype("float32")
pixels[9] = 0
features = torch.from_numpy(pixels / pixels.sum(1, keepdims=True))
labels = torch.randint(3, (24,))
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(features, labels), 4)
net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3))
optimizer = torch.optim.AdamW(net.parameters())
for x, y in loader:
    loss = F.cross_entropy(net(x), y)
    optimizer.zero_grad(); loss.backward(); optimizer.step()
""",
    ),
    "adam_of_half_weights": (
        "https://github.com/afiaka87/glide-finetune/pull/6",
        3,
        "eps=1e-08 is exactly 0(.|\n)*",
        """
net = nn.Linear(4, 3).half()
optimizer = torch.optim.Adam(net.parameters(), 1e-3)
def loss_of(step):
    x = data(step).half()
    x[:, 0] = 0
    return net(x).float().square().mean()
loop(net, loss_of, optimizer=optimizer)
""",
    ),
    "old_probability_underflows": (
        "https://github.com/MorvanZhou/Reinforcement-learning-with-tensorflow/issues/163",
        3,
        "division by zero",
        """
policy = nn.Linear(4, 3)
old_policy = nn.Linear(4, 3)
def loss_of(step):
    x = data(step)
    if step == 5:
        x = x * 0 + 1
        old_policy.bias.data.copy_(torch.tensor([-500.0, 0, 0]))
    p = policy(x).softmax(1)[:, 0]
    with torch.no_grad():
        old = old_policy(x).softmax(1)[:, 0]
    ratio = p / old  # here
    return -ratio.clamp(0.8, 1.2).mean()
loop(policy, loss_of)
""",
    ),
}

CASES = [
    Case(name, HEAD + script, code, (re.compile(words),), source=report)
    for name, (report, code, words, script) in SCRIPTS.items()
]
