# DiT⁵-XL/2 on ImageNet-1k, 256×256, 80k steps of 128 images from a DiT-XL/2 (t5 Sec. 5.2, Tab. 6).
# The paper's result, with guidance: FID 2.48, IS 267.9.
#   python tools/train.py configs/dit5_xl2_in1k_80k.py --cfg-options load_from=DiT-XL-2-256x256.pt
_base_ = ['./_base_/dit5.py', './_base_/latents_256_in1k.py', './_base_/adamw_dit5.py']

model = dict(transformer=dict(arch='xlarge', patch_size=2))
# On each of 8 GPUs.
train_dataloader = dict(batch_size=16)
train_cfg = dict(max_iters=80_000)
auto_scale_lr = dict(base_batch_size=128)
