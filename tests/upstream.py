"""
The originals beside our models: the same weights, the same input, and the largest difference of the outputs.

    python tests/upstream.py FOLDER        FOLDER holds clones of VMamba, DiT, nanoVLM and TRELLIS at the COMMITS below

`CASES` builds our small nets with weights from a formula, so that nothing has to be stored. Run as a script, this file
copies these weights into the originals, runs both on the CPU in fp32, and prints what tests/test_upstream.py holds: a
few outputs of the ORIGINAL. The tests then need neither the originals nor their packages (einops, timm, fvcore).

Their CUDA kernels are replaced by their own reference (VMamba's selective_scan_torch) or by plain attention (TRELLIS's
flash_attn, in one line below). Nothing of their code is in this repository.
"""

import contextlib
import importlib
import itertools
import sys
import types
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
from models import dit, slat_vae, vlm, vmamba  # noqa: E402

COMMITS = {
    "VMamba": "2ed52ead062a51a64521ed3871d52914bf532876",
    "DiT": "ed81ce2229091fd4ecc9a223645f95cf379d582b",
    "nanoVLM": "4e0c0961846135c2217f95e54cb4c2d66eb55e42",
    "TRELLIS": "6b0d64751ad54d9c32d7b05fec482eb29178f56f",
}


def chirp(*shape, start=0):
    """Numbers in [-1, 1] from a formula: sin(0.37 i^2 + i), i counted from `start`. In fp64 no machine differs."""
    i = torch.arange(start, start + torch.Size(shape).numel(), dtype=torch.float64)
    return torch.sin(0.37 * i * i + i).view(shape).float()


@torch.no_grad()
def filled(net):
    """The net in eval mode with weights by formula: matrices of gain about 1, scales around 1, biases around 0."""
    for k, (name, p) in enumerate(net.named_parameters()):
        if p.dim() > 1:
            p.copy_(chirp(*p.shape, start=1000 * k) * 1.5 * (p.numel() / len(p)) ** -0.5)
        else:
            p.copy_(0.2 * chirp(*p.shape, start=1000 * k) + name.endswith("weight"))
    return net.eval()


def vmamba_case(**options):
    net = vmamba.VMamba(num_classes=5, stem=2, dims=(16, 32), depths=(1, 2), **options)
    return filled(net), (chirp(2, 3, 32, 32, start=7),)


def dit_case():
    net = dit.DiT(num_classes=5, image_size=16, patch_size=4, dim=64, depth=2, heads=4, fused=())
    t, labels, left_out = torch.tensor([3, 500, 999]), torch.tensor([0, 4, 2]), torch.tensor([False, False, True])
    return filled(net), (chirp(3, 3, 16, 16, start=7), t, labels, left_out)


def vlm_case():
    net = vlm.VLM(class_names=["cat", "dog"], image_size=16, patch_size=4, vit_dim=32, vit_depth=2, vit_heads=2,
                  vit_mlp=64, lm_dim=32, lm_depth=2, lm_heads=4, lm_kv_heads=2, lm_mlp=48)  # fmt: skip
    rows = [[*net.prompt("What? "), *b"cat"], [vlm.PAD, vlm.PAD, *net.prompt("Is it"), *b"no"]]
    return filled(net), (chirp(2, 3, 16, 16, start=7), torch.tensor(rows))


def slat_vae_case():
    net = slat_vae.SLatVAE(num_classes=1, image_size=32, patch_size=4, dim=64, depth=2, heads=4, latent=4)
    coords = torch.tensor([[[0, 0], [1, 7], [2, 3], [5, 4], [7, 7]], [[0, 3], [3, 0], [4, 4], [6, 1], [7, 2]]])
    return filled(net), (chirp(2, 5, 48, start=7), coords)


CASES = {
    "VMamba": lambda: vmamba_case(**vmamba.BLOCK),
    "VMamba, gated": lambda: vmamba_case(d_state=4, gate=True, mlp_ratio=0.0),
    "DiT": dit_case,
    "nanoVLM": vlm_case,
    "TRELLIS": slat_vae_case,
}


@torch.no_grad()
def ours(name, fault=lambda net: None):
    """What our net of this case returns, (images, numbers): logits, noise, logits of the last 3 tokens, moments."""
    net, inputs = CASES[name]()
    fault(net)
    if name == "DiT":
        return net.predict(*inputs).flatten(1)
    if name == "nanoVLM":
        images, ids = inputs
        return net.decoder(ids, net.image_tokens(images), 3).flatten(1)
    if name == "TRELLIS":
        return net.encoder(*inputs).flatten(1)
    return net(*inputs)


def five(out):
    """Five numbers of each image, spread over the whole output."""
    return out[:, :: max(1, out.shape[1] // 5)][:, :5]


# --- the originals ---------------------------------------------------------------------------------------------------


def entering(folder):
    """Import from `folder` first. Their packages are named `models` and `data` like ours: ours leave the table."""
    for name in [name for name in sys.modules if name.split(".")[0] in ("models", "data")]:
        del sys.modules[name]
    sys.path.insert(0, str(folder))
    return importlib.import_module


def load(theirs, state):
    """Every parameter of the original must get a weight: a name left over on either side is an error."""
    theirs.load_state_dict(state, strict=True)
    return theirs.eval()


def original_vmamba(folder, case):
    VSSM = entering(folder / "classification/models")("vmamba").VSSM
    torch.cuda.device = contextlib.nullcontext  # their scan enters the device of its input, and here that is the CPU
    net, (images,) = CASES[case]()
    gated = case != "VMamba"
    theirs = VSSM(depths=[1, 2], dims=[16, 32], num_classes=5, ssm_d_state=4 if gated else 1, ssm_ratio=1.0,
                  ssm_conv_bias=gated, forward_type="v05" if gated else "v05_noz", mlp_ratio=0.0 if gated else 4.0,
                  norm_layer="ln2d", downsample_version="v3", patchembed_version="v2", drop_path_rate=0.0)  # fmt: skip
    stem = {"0.conv": "0", "0.norm": "2", "2.conv": "5", "2.norm": "7"}
    state = {}
    for name, p in net.state_dict().items():
        parts = name.split(".")
        if parts[0] == "patch_embed":
            name = f"patch_embed.{stem['.'.join(parts[1:3])]}.{parts[3]}"
        elif parts[0] == "downsamples":
            name = f"layers.{parts[1]}.downsample.{ {'conv': 1, 'norm': 3}[parts[2]] }.{parts[3]}"
        elif parts[0] in ("norm", "head"):
            name = f"classifier.{name}"
        else:
            rest = ".".join(parts[3:]).replace("op.core.", "op.")
            rest = rest.replace("mlp.0", "mlp.fc1").replace("mlp.2", "mlp.fc2")
            if rest.endswith(("x_proj", "dt_projs")):
                rest, p = f"{rest}_weight", p.transpose(1, 2)
            if rest.endswith(("A_logs", "Ds")):
                p = p.flatten(0, 1)
            name = f"layers.{parts[1]}.blocks.{parts[2]}.{rest}"
        state[name] = p
    return load(theirs, state)(images)


def original_dit(folder, case):
    DiT = entering(folder)("models").DiT
    net, (noisy, t, labels, left_out) = CASES[case]()
    theirs = DiT(input_size=16, patch_size=4, in_channels=3, hidden_size=64, depth=2, num_heads=4, num_classes=5,
                 learn_sigma=False)  # fmt: skip
    state = {"pos_embed": theirs.pos_embed}  # their own positions: the formula is compared too
    names = {"time.": "t_embedder.", "final.": "final_layer.", ".adaln": ".adaLN_modulation.1"}
    for name, p in net.named_parameters():
        if name.startswith("label."):
            continue
        if name.startswith("patch."):
            name = name.replace("patch.", "x_embedder.proj.")
            if p.dim() > 1:
                p = p.view(64, 4, 4, 3).permute(0, 3, 1, 2)
        elif name.startswith("blocks."):
            name = name.replace("mlp.0", "mlp.fc1").replace("mlp.2", "mlp.fc2").replace(".adaln", ".adaLN_modulation.1")
        else:
            for old, new in names.items():
                name = name.replace(old, new)
        state[name] = p
    state["y_embedder.embedding_table.weight"] = torch.cat([net.label.classes.weight, net.label.null.weight])
    return load(theirs, state)(noisy, t, torch.where(left_out, 5, labels)).flatten(1)


def original_vlm(folder, case):
    net, (images, ids) = CASES[case]()
    enter = entering(folder)
    tokenizer = types.ModuleType("data.processors")
    tokenizer.get_tokenizer = lambda *_: types.SimpleNamespace(image_token_id=vlm.IMAGE)
    sys.modules["data"], sys.modules["data.processors"] = types.ModuleType("data"), tokenizer
    config = enter("models.config").VLMConfig(
        vit_hidden_dim=32, vit_inter_dim=64, vit_patch_size=4, vit_img_size=16, vit_n_heads=2, vit_n_blocks=2,
        lm_hidden_dim=32, lm_inter_dim=48, lm_re_base=10_000, lm_vocab_size=vlm.VOCABULARY, lm_n_heads=4,
        lm_n_kv_heads=2, lm_n_blocks=2, mp_pixel_shuffle_factor=2,
    )  # fmt: skip
    theirs = enter("models.vision_language_model").VisionLanguageModel(config, load_backbone=False)
    state = {}
    for name, p in net.state_dict().items():
        vision = name.startswith("vision")
        for old, new in {"vision.": "vision_encoder.", "projector.": "MP.", "embed.": "token_embedding.",
                         "vision_encoder.patch.": "vision_encoder.patch_embedding.conv.",
                         "encoder.position": "encoder.patch_embedding.position_embedding",
                         "vision_encoder.norm.": "vision_encoder.layer_norm."}.items():  # fmt: skip
            name = name.replace(old, new)
        if vision:
            name = name.replace("norm1", "ln1").replace("norm2", "ln2").replace("qkv", "qkv_proj")
            name = name.replace("mlp.0", "mlp.fc1").replace("mlp.2", "mlp.fc2")
        name = name.replace("attn.proj", "attn.out_proj").replace("mlp.down", "mlp.down_proj")
        if name.endswith("conv.weight"):
            p = p.view(32, 3, 4, 4)
        if "attn.qkv.weight" in name:
            state |= dict(zip((name.replace("qkv", f"{x}_proj") for x in "qkv"), p.split([32, 16, 16]), strict=True))
        elif "gate_up" in name:
            state |= dict(zip((name.replace("gate_up", x) for x in ("gate_proj", "up_proj")), p.chunk(2), strict=True))
        else:
            state[name] = p
    for name, buffer in theirs.state_dict().items():
        if "inv_freq" in name:
            state[name] = buffer
    load(theirs, state)
    for block in theirs.decoder.blocks:
        block.attn.sdpa = False  # their own plain path: with padding the other one sets is_causal beside a mask
    mask = (ids != vlm.PAD).float()
    return theirs(ids, images, attention_mask=mask, targets=ids)[0][:, -3:].flatten(1)


def original_slat_vae(folder, case):
    class SparseConvTensor:  # what their SparseTensor needs of spconv: a record whose features can be exchanged
        features = property(lambda self: self._features)

        def __init__(self, features, indices, spatial_shape, batch_size, *_):
            self._features, self.indices, self.spatial_shape, self.batch_size = (
                features, indices, spatial_shape, batch_size)  # fmt: skip

        def __getattr__(self, name):
            return None

    def attention(qkv, ends, _):  # (T, 3, heads, D): every image by itself
        parts = [qkv[a:b].transpose(0, 2) for a, b in itertools.pairwise(ends)]  # heads, 3, n, D
        outs = [((p[:, 0] @ p[:, 1].mT) / p.shape[-1] ** 0.5).softmax(-1) @ p[:, 2] for p in parts]
        return torch.cat(outs, 1).transpose(0, 1)

    spconv, flash = types.ModuleType("spconv.pytorch"), types.ModuleType("flash_attn")
    spconv.SparseConvTensor, flash.flash_attn_varlen_qkvpacked_func = SparseConvTensor, attention
    sys.modules |= {"spconv": types.ModuleType("spconv"), "spconv.pytorch": spconv, "flash_attn": flash}
    for name in ("trellis", "trellis.modules", "trellis.models", "trellis.models.structured_latent_vae"):
        sys.modules[name] = types.ModuleType(name)  # without their __init__, which import renderers
        sys.modules[name].__path__ = [str(folder / name.replace(".", "/"))]
    mixin = types.ModuleType("trellis.models.sparse_elastic_mixin")
    mixin.SparseTransformerElasticMixin = type("Mixin", (), {})
    sys.modules[mixin.__name__] = mixin
    encoder = entering(folder)("trellis.models.structured_latent_vae.encoder")
    net, (tokens, coords) = CASES[case]()
    theirs = encoder.SLatEncoder(8, 48, 64, 4, 2, num_heads=4, attn_mode="full")
    theirs.pos_embedder.__init__(64, 2)  # rows and columns: no third axis
    state = {}
    for name, p in net.encoder.state_dict().items():
        state[name.replace("mlp.", "mlp.mlp.")] = p
    load(theirs, state)
    rows = torch.cat([torch.tensor([[0]] * 5 + [[1]] * 5), coords.flatten(0, 1)], 1).int()
    tensor = encoder.sp.SparseTensor(tokens.flatten(0, 1), rows)
    _, mean, logvar = theirs(tensor, sample_posterior=False, return_raw=True)
    return torch.cat([mean, logvar], 1).view(2, -1)


ORIGINALS = {"VMamba": original_vmamba, "VMamba, gated": original_vmamba, "DiT": original_dit, "nanoVLM": original_vlm,
             "TRELLIS": original_slat_vae}  # fmt: skip


def main(folder):
    mine = {name: ours(name) for name in CASES}
    for name, original in ORIGINALS.items():
        with torch.no_grad():
            out = original(Path(folder) / name.split(",")[0], name)
        off = (out - mine[name]).abs().max() / out.abs().max()
        rows = [[round(value, 6) for value in row] for row in five(out).tolist()]
        print(f"{name}: {tuple(out.shape)}, largest {out.abs().max():.3f}, largest difference / it {off:.1e}\n  {rows}")


if __name__ == "__main__":
    main(sys.argv[1])
