# The softmax twin of dit3_digits.py: DiT itself, the source of dit5_digits.py.
_base_ = './dit3_digits.py'

model = dict(
    transformer=dict(
        mixer=dict(type='mmvttt.TTTMixer', inner=dict(type='SoftmaxAttention')), cpe=False
    )
)
