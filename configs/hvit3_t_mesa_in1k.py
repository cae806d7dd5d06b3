# H-ViT³-T with MESA on ImageNet-1k, 224×224, 300 epochs (vit3 Sec. 5.1, Tab. 5).
# The paper's result: Top-1 84.0, of the teacher, which is what the authors publish:
#   python tools/publish_checkpoint.py CHECKPOINT hvit3_t_mesa.pth --prefix teacher.
_base_ = './hvit3_t_in1k.py'

# Student and teacher are both evaluated.
model = dict(type='mmvttt.MESAClassifier', mesa_weight=1.0, evaluate_teacher=True)
val_evaluator = [
    dict(type='Accuracy', topk=(1, 5)),
    dict(type='mmvttt.TeacherAccuracy', topk=(1, 5), prefix='teacher'),
]
test_evaluator = val_evaluator

# The teacher is the moving average; it teaches from a quarter of the epochs on.
custom_hooks = [dict(type='mmvttt.MESAHook'), dict(type='mmvttt.BroadcastBuffersHook')]
default_hooks = dict(checkpoint=dict(save_best='teacher/top1', rule='greater'))
