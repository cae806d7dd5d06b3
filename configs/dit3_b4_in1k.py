# DiT³-B/4 on ImageNet-1k, 256×256 (vit3 Sec. 5.4, Tab. 10): 400k steps, DiT's protocol.
# The paper's result, without guidance: FID 65.25, IS 22.29.
# The paper does not state the number of steps.
_base_ = [
    './_base_/dit3.py',
    './_base_/latents_256_in1k.py',
    './_base_/adamw_dit.py',
]

model = dict(transformer=dict(arch='base', patch_size=4))
