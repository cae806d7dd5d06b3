# The softmax twin of maskrcnn_vittt_nano_pennfudan.py, from the trained ViT of cifar10_vit_nano.py.
_base_ = './maskrcnn_vittt_nano_pennfudan.py'

model = dict(
    backbone=dict(
        backbone=dict(
            _delete_=True,
            type='mmvttt.TimmViT',
            model='vit_tiny_patch16_224',
            model_options=dict(embed_dim=96, depth=6, num_heads=3, class_token=False),
            img_size=_base_.image_size[::-1],
            init_cfg=dict(
                type='Pretrained', checkpoint='mmvttt://cifar10_vit_nano', prefix='backbone.'
            ),
        )
    )
)
