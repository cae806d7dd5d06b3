# T⁵⁺-T on ImageNet-1k: T⁵ and neighbourhood attention of 5×5, half and half (Eq. 15).
# Tab. 4, from the DeiT of t5_t_in1k_30e.py.
# The paper's result: Top-1 72.06.
_base_ = './t5_t_in1k_30e.py'

model = dict(backbone=dict(mixer=dict(neighborhood=5)))
