# Evaluates and saves the moving average of the weights: add this file to the `_base_` of a config.
# A momentum of 4e-5 is DeiT's decay of 0.99996 a step, at 1024 images a step.
custom_hooks = [dict(type='EMAHook', momentum=4e-5, priority='ABOVE_NORMAL')]
