# Evaluates and saves the moving average of the weights, as the authors of H-ViT³: a decay of 0.9996
# for a step of 4096 images, 0.9996^(b/4096) for one of b.
custom_hooks = [dict(type='mmvttt.EMAHook')]
