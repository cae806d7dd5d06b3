# DiT⁵-S/2 on ImageNet-1k, 256×256, 50k steps from a DiT-S/2 of 400k steps (t5 Sec. 5.4, Tab. 10).
# The paper's result, without guidance: FID 68.52, IS 20.65.
# Tab. 10's partial inheritance, without attention (FID 89.71) or the MLPs (93.18): another
# load_from, which docs/generation.md makes.
_base_ = ['./_base_/dit5.py', './_base_/latents_256_in1k.py', './_base_/adamw_dit5.py']

model = dict(transformer=dict(arch='small', patch_size=2))
train_cfg = dict(max_iters=50_000)
load_from = 'mmvttt://dit_s2_in1k'
