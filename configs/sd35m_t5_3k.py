# SD3.5-T⁵: sd35m_softmax_3k.py with 18 of its 37 attentions linear, from the same weights
# (t5 Sec. 5.3, Tab. 7, App. B).
# The paper's result: DPG-Bench 84.43, GenEval 0.69.
_base_ = './sd35m_softmax_3k.py'

model = dict(
    transformer=dict(
        _delete_=True,
        type='mmvttt.LinearTransformer',
        source={{_base_.model.transformer}},
        where='sd3.5-t5',
    ),
)
